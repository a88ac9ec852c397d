"""Parameters of the train-classifiers stage: where labels come from, how much is read, and the gates."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True)
class QualityLabels:
    """Documents of `source` are good from `high_from` on and bad below `low_below`; others are not trained on.

    It is one of `download.labels` or of the corpus. The label is the number `meta_key` of a document's meta.
    """

    source: str
    meta_key: str
    high_from: float = param(min=-1e9, max=1e9)
    low_below: float = param(min=-1e9, max=1e9)

    def __post_init__(self) -> None:
        if self.low_below > self.high_from:
            raise ParamsError(f"is above high_from ({self.high_from})", where="low_below", fix="lower it")


@dataclass(frozen=True)
class ToxicityLabels:
    """Texts are toxic from `toxic_from` on and clean below `clean_below`.

    They are rows of local files (`globs`: JSON lines or Parquet), or those of `source`, one of `download.labels`, whose
    `meta_columns` hold the label.
    """

    label_column: str
    toxic_from: float = param(min=-1e9, max=1e9)
    clean_below: float = param(min=-1e9, max=1e9)
    globs: tuple[str, ...] = ()
    text_column: str = "text"
    source: str | None = None

    def __post_init__(self) -> None:
        if bool(self.globs) == bool(self.source):
            raise ParamsError("set exactly one of globs and source", where="globs", fix="name the files, or a source")
        if self.clean_below > self.toxic_from:
            raise ParamsError(f"is above toxic_from ({self.toxic_from})", where="clean_below", fix="lower it")


@dataclass(frozen=True)
class ClassifiersParams:
    """Section `classifiers`. Without labels a classifier is trained on weak ones, which are made and not given.

    With too few documents for that, or with `weak_labels: false`, it steps aside: every document has the quality 1
    and the toxicity 0, and the card says so.
    `sample_bytes` of documents are read, the same for each source. `inverse_l2`
    is the inverse strength of the L2 penalty (C of logistic regression).
    """

    seed: int = param(min=0, max=2**32 - 1)
    sample_bytes: int = param(min=10_000, max=4_000_000_000)
    quality_labels: QualityLabels | None = None
    toxicity_labels: ToxicityLabels | None = None
    weak_labels: bool = True  # where words are not set apart by spaces nothing can be learned from them
    inverse_l2: float = param(min=1e-4, max=1e6, default=1.0)
    min_auroc: float = param(min=0.5, max=1.0, default=0.8)  # gate, on documents held out
    max_length_correlation: float = param(
        min=0.05, max=1.0, default=0.5
    )  # gate, of the score with the logarithm of the length

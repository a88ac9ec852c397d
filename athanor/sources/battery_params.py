"""Parameters of the battery: the held-out questions every model is scored on."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param
from athanor.sources.addresses import check_revision


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A public benchmark on the hub whose items are searched for in what is trained on, and not asked.

    `question` are the columns of the question; `answers` those of its answer or choices.
    """

    name: str
    hub_id: str
    hub_config: str | None = None
    hub_split: str = "test"
    revision: str | None
    question: tuple[str, ...]
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_revision(self.hub_id, self.revision)


@dataclass(frozen=True)
class BatteryParams:
    """Section `battery`.

    `held_out_fraction` of all exercise keys never appears in training; the
    items are drawn from them. Changing it or `seed` changes the training
    exercises too, since both sides come from one split. `development_fraction`
    of each category is what one may tune on; reported is the rest.
    """

    seed: int = param(min=0, max=2**32 - 1)
    held_out_fraction: float = param(min=0.01, max=0.5)
    development_fraction: float = param(min=0.0, max=0.9)
    written: str | None  # a file of items written by hand, in the folder battery/
    categories: dict[str, int]  # items per generated category
    benchmarks: tuple[Benchmark, ...] = ()  # searched for, too

    def __post_init__(self) -> None:
        if not self.categories:
            raise ParamsError(
                "the battery has no categories", where="categories", fix="copy them from presets/default.yaml"
            )
        if self.written is not None and (not self.written.startswith("battery/") or ".." in self.written):
            raise ParamsError(f"'{self.written}' is not in the folder battery/", where="written", fix="move it there")
        for name, count in self.categories.items():
            if count < 1:
                raise ParamsError(f"{count} is out of range", where=f"categories.{name}", fix="use a value ≥ 1")

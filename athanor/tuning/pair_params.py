"""The `dpo_data` section of params.yaml: where pairs of a better and a worse answer come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from athanor.base.strict import check_file_names, param, share
from athanor.sources.instruct_params import MessagesSource


@dataclass(frozen=True, kw_only=True)
class DpoDataParams:
    """Pairs of answers for preference optimisation. How battery items are searched for is in `sft_data`."""

    context_tokens: int = param(min=16)  # a pair with a longer conversation is left out, in the base's own tokens
    val_fraction: float = param(min=0.0, max=0.5)  # of the prompts, by hash: pairs of one prompt stay on one side
    min_pairs: int = param(min=1, max=1_000_000_000, default=20)  # gate, of both sides together
    sources: tuple[PairsSource, ...]

    def __post_init__(self) -> None:
        check_file_names([source.name for source in self.sources], "sources")


@dataclass(frozen=True, kw_only=True)
class PairsSource:
    """Two answers to a prompt on each row: local JSONL or Parquet files, or a data set of the hub.

    Exactly one of `files` (a glob) and `hub_id` is set; a hub data set needs
    a pinned `revision` (`python -m athanor pin` fills in null). What the
    columns hold is seen from each row:

    - prompt: a text, or a list of {role, content} that ends with the user
    - chosen and rejected: a text, or a list of {role, content}: the answer alone, or the whole conversation

    `prompt` null stands for a data set without such a column: chosen and
    rejected are whole conversations then, alike up to their last answers.
    Malformed rows are counted; more than `max_malformed_fraction` of all is an
    error.
    """

    type: Literal["pairs"]
    name: str
    files: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    revision: str | None = None
    hub_split: str = "train"
    prompt: str | None = "prompt"  # a column, as the next two
    chosen: str = "chosen"  # the better answer
    rejected: str = "rejected"
    max_malformed_fraction: float = share(0.001)
    max_rows: int | None = param(min=1, max=1_000_000_000, default=None)  # null: all of them
    license: str = "unknown"

    def __post_init__(self) -> None:
        self.as_messages(self.chosen, self.rejected)  # checks files, hub_id and revision

    def as_messages(self, *columns: str) -> MessagesSource:
        """The same place as a source of conversations in some columns, for the readers of those."""
        return MessagesSource(
            type="messages",
            name=self.name,
            files=self.files,
            hub_id=self.hub_id,
            hub_config=self.hub_config,
            revision=self.revision,
            hub_split=self.hub_split,
            shape="messages" if len(columns) == 1 else "prompt",
            columns=columns,
            max_malformed_fraction=self.max_malformed_fraction,
            max_rows=self.max_rows,
            license=self.license,
        )

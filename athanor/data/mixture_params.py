"""The `mixture` section of params.yaml: which sources make the pretraining stream, and in what proportion."""

from __future__ import annotations

import re
from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True)
class SourceShare:
    """One source's part. Shares are relative: each is divided by their sum."""

    share: float = param(min=0)  # 0 leaves the source out
    max_epochs: float = param(min=0.01, max=1000)  # how often its tokens may be repeated at most


@dataclass(frozen=True)
class CooldownMixture:
    """What the cooldown of a wsd schedule trains on instead. It leaves out the sources that it does not name."""

    sources: dict[str, SourceShare]

    def __post_init__(self) -> None:
        _check_shares(self.sources)


@dataclass(frozen=True)
class MixtureParams:
    seed: int = param(min=0)  # document order within a source
    sources: dict[str, SourceShare]
    cooldown: CooldownMixture | None = None  # null: the cooldown goes on with the same stream

    def __post_init__(self) -> None:
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ParamsError(
                    f"'{name}' cannot name a folder", where="sources", fix="use letters, digits, dot, dash, underscore"
                )
        _check_shares(self.sources)
        for name in self.cooldown.sources if self.cooldown else ():
            if name not in self.sources:
                raise ParamsError(
                    "not a source of the mixture",
                    where=f"cooldown.sources.{name}",
                    fix=f"add '{name}' to mixture.sources, with share 0 to use it in the cooldown only",
                )
        if len(self.sources) > 256:
            raise ParamsError(f"{len(self.sources)} sources, at most 256 fit", where="sources", fix="merge some")


def _check_shares(sources: dict[str, SourceShare]) -> None:
    if not any(source.share > 0 for source in sources.values()):
        raise ParamsError("no source has a share above 0", where="sources", fix="give at least one source a share")

"""Whether a training replaces the data of a checkout right now: then nothing is wrong with what is missing there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from athanor.base.errors import AthanorError, InputError
from athanor.runtime.journal import Record, alive


def at_work(root: Path) -> list[str]:
    """Names of the stages that run in a checkout, without those of experiments in directories of their own."""
    stages = set()
    for path in (root / ".athanor" / "runs").glob("*/meta.json"):
        with suppress(AthanorError):
            if alive(path.parent) and not (meta := Record(path)).get("elsewhere"):
                stages.add(str(meta["stage"]))
    return sorted(stages)


def not_here(what: str, where: str, fix: str, stages: Sequence[str]) -> InputError:
    """The error for data that is missing, or another than wanted; while `stages` run, they are the reason.

    DVC removes what a stage makes before it runs the stage again, and `dvc checkout` would write where it works.
    """
    if stages:
        what = f"a training is running here ({', '.join(stages)}), and it replaces the data that answers are traced in"
        fix = "ask again when it has ended"
    return InputError(what, where=where, fix=fix)

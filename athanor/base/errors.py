"""Errors a user can act on: what happened, where, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def suggest(name: object, known: Iterable[object], otherwise: str = "", cutoff: float = 0.0, prefix: str = "") -> str:
    """The fix for a name that does not exist: the known one that is most like it, else `otherwise`."""
    matches = difflib.get_close_matches(str(name), [str(each) for each in known], n=1, cutoff=cutoff)
    return f"did you mean '{prefix}{matches[0]}'?" if matches else otherwise


class AthanorError(Exception):
    """A problem with input, parameters or the machine, described in one line.

    Stages print the message without a traceback and exit with status 1, so
    the message has to stand on its own: name the file, row or parameter in
    `where`, and the next thing to do in `fix`.
    """

    def __init__(self, what: str, *, where: object = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, str(where), fix
        text = f"{where}: {what}" if self.where else what
        super().__init__(f"{text}. Fix: {fix}" if fix else text)

    def __reduce__(self) -> tuple[Callable[..., AthanorError], tuple[object, ...]]:
        return _rebuild_error, (type(self), self.args, vars(self))


def _rebuild_error(kind: type[AthanorError], args: tuple[object, ...], state: dict[str, object]) -> AthanorError:
    """Rebuild an error that another process pickled, without `__init__`: its message is composed already."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


class ParamsError(AthanorError):
    """params.yaml (or a preset) says something the schema does not allow."""


class InputError(AthanorError):
    """A source, file or artifact is missing, empty, unreadable or inconsistent."""


class GateError(AthanorError):
    """A stage's own check on its real output failed; nothing was published."""

    def __init__(self, gate: str, what: str, *, where: object = "", fix: str = "") -> None:
        self.gate = gate
        super().__init__(f"gate '{gate}' failed: {what}", where=where, fix=fix)


class Interrupted(AthanorError):
    """The work was asked to stop and saved its state; the stage exits with status 75."""

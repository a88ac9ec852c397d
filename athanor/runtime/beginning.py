"""What a stage began with, so that an edit while it runs is noticed.

DVC hashes code and parameters after the command. It would record the edited
ones as what made the outputs, and call them up to date for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import sha256_file
from athanor.base.errors import InputError
from athanor.runtime.closure import file_digests
from athanor.runtime.facts import flatten


@dataclass(frozen=True)
class Beginning:
    """`files`: path to SHA-256 of the code. `code`: to the digest of its syntax tree, for which comments do not count."""

    root: Path
    module: str
    files: Mapping[str, str]
    code: Mapping[str, str]

    @classmethod
    def now(cls, root: Path, module: str) -> Beginning:
        code = file_digests(root, module)
        return cls(root, module, {name: sha256_file(root / name) for name in code}, code)

    def check(self, before: Mapping[str, Any], after: Mapping[str, Any], sections: Iterable[str]) -> None:
        """InputError naming the file, or the parameter of `sections`, that is another now."""
        files = [name for name, known in self.files.items() if _sha256(self.root / name) != known]
        if files and file_digests(self.root, self.module) != self.code:
            raise _edited(", ".join(files))
        for section in sections:
            old, new = (dict(flatten({section: values.get(section)})) for values in (before, after))
            for name in [name for name in {**old, **new} if old.get(name) != new.get(name)]:
                raise _edited(f"{name} ({old.get(name)} -> {new.get(name)})")


def _sha256(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


def _edited(what: str) -> InputError:
    return InputError(
        "edited while the stage ran, so DVC would record it as what made these results",
        where=what,
        fix="run dvc repro again; a finished training is only written out with the edit undone, or with `athanor slots adopt`",
    )

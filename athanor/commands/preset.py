"""What complete params files there are, and making one of them params.yaml.

    python -m athanor preset list | use NAME [--force]

`use` refuses to overwrite edits of params.yaml that are neither committed nor a preset; --force does it.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from athanor.artifacts import write_bytes
from athanor.errors import ParamsError
from athanor.pipeline.facts import git
from athanor.pipeline.schema import check_file


def presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path("presets").glob("*.yaml"))}


def _edited(path: Path, known: dict[str, Path]) -> bool:
    """Whether the file holds what neither Git's last commit nor a preset has."""
    if not path.is_file() or path.read_bytes() in [preset.read_bytes() for preset in known.values()]:
        return False
    return not git(Path.cwd(), "rev-parse", "-q", "--verify", "HEAD") or bool(
        git(Path.cwd(), "status", "--porcelain", "--", path.as_posix())
    )


def main() -> int:
    """List the presets, or copy one over params.yaml after checking it whole."""
    words, found = sys.argv[1:], presets()
    if words == ["list"] or not words:
        for name, path in found.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<14} {first.removeprefix('# ')}")
        return 0
    force = "--force" in words
    words = [word for word in words if word != "--force"]
    if len(words) != 2 or words[0] != "use":
        raise ParamsError("unknown preset command", fix="python -m athanor preset list, or preset use NAME")
    if words[1] not in found:
        near = difflib.get_close_matches(words[1], found, n=1, cutoff=0.0)
        raise ParamsError(f"no preset '{words[1]}'", fix=f"did you mean '{near[0]}'?" if near else "")
    check_file(found[words[1]])
    if not force and _edited(Path("params.yaml"), found):
        fix = f"commit it, or throw them away: athanor preset use {words[1]} --force"
        raise ParamsError("it has edits that are not committed", where="params.yaml", fix=fix)
    write_bytes("params.yaml", found[words[1]].read_bytes())
    print(f"params.yaml is now presets/{words[1]}.yaml; git diff shows what changed, dvc repro builds it")
    return 0

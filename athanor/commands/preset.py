"""What complete params files there are, and making one of them params.yaml.

    python -m athanor preset list | use NAME
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from athanor.artifacts import write_bytes
from athanor.errors import ParamsError
from athanor.pipeline.schema import check_file


def presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path("presets").glob("*.yaml"))}


def main() -> int:
    """List the presets, or copy one over params.yaml after checking it whole."""
    words, found = sys.argv[1:], presets()
    if words == ["list"] or not words:
        for name, path in found.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<14} {first.removeprefix('# ')}")
        return 0
    if len(words) != 2 or words[0] != "use":
        raise ParamsError("unknown preset command", fix="python -m athanor preset list, or preset use NAME")
    if words[1] not in found:
        near = difflib.get_close_matches(words[1], found, n=1, cutoff=0.0)
        raise ParamsError(f"no preset '{words[1]}'", fix=f"did you mean '{near[0]}'?" if near else "")
    check_file(found[words[1]])
    write_bytes("params.yaml", found[words[1]].read_bytes())
    print(f"params.yaml is now presets/{words[1]}.yaml; git diff shows what changed, dvc repro builds it")
    return 0

"""The command line: python -m athanor COMMAND.

    preset list | use NAME    what complete params files there are; make one params.yaml
    summary                   what the pipeline made
    deps [--fix]              check the code dependencies in dvc.yaml
    ship [--wait SECONDS]     deliver journals to MLflow
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from athanor.artifacts import write_bytes
from athanor.errors import AthanorError, ParamsError
from athanor.pipeline import closure, ship, summary
from athanor.pipeline.schema import check_file


def presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path("presets").glob("*.yaml"))}


def preset(words: list[str]) -> int:
    """List the presets, or copy one over params.yaml after checking it whole."""
    found = presets()
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


def main() -> int:
    command, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    sys.argv = [f"athanor {command}", *words]
    try:
        if command == "preset":
            return preset(words)
        if command == "summary":
            return summary.main()
        if command == "deps":
            return closure.main()
        if command == "ship":
            return ship.main()
    except AthanorError as error:
        print(error, file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr if command else sys.stdout)
    return 2 if command not in ("", "help", "--help", "-h") else 0

"""What complete params files there are, and making one of them params.yaml.

    python -m athanor preset list | use NAME [--force]

`use` refuses to overwrite edits of params.yaml that are neither committed nor a preset; --force does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from athanor.artifacts import write_bytes
from athanor.errors import ParamsError, suggest
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


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="list | use")
    commands.add_parser("list", help="the presets, each with its first line")
    use = commands.add_parser("use", help="copy one over params.yaml after checking it whole")
    use.add_argument("preset", metavar="NAME")
    use.add_argument("--force", action="store_true", help="although params.yaml has edits that are not committed")


def run(args: argparse.Namespace) -> int:
    known = presets()
    if args.command != "use":
        for name, path in known.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<14} {first.removeprefix('# ')}")
        return 0
    name = args.preset
    if name not in known:
        raise ParamsError(f"no preset '{name}'", fix=suggest(name, known))
    check_file(known[name])
    if not args.force and _edited(Path("params.yaml"), known):
        fix = f"commit it, or throw them away: athanor preset use {name} --force"
        raise ParamsError("it has edits that are not committed", where="params.yaml", fix=fix)
    write_bytes("params.yaml", known[name].read_bytes())
    print(f"params.yaml is now presets/{name}.yaml; git diff shows what changed, dvc repro builds it")
    return 0

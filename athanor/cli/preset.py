"""What params files there are, and making one of them params.yaml.

A preset is a short file that names what differs from presets/default.yaml, or
from another preset. `show` prints the complete file, `use` writes it to
params.yaml, where Git shows what changed. `use` refuses to overwrite edits of
params.yaml that are neither committed nor a preset; --force does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import ParamsError, suggest
from athanor.base.strict import read_yaml
from athanor.runtime import presets
from athanor.runtime.facts import git
from athanor.runtime.schema import check_values

FOLDER, PARAMS = Path("presets"), Path("params.yaml")


def _has_unsaved_edits(known: list[str]) -> bool:
    """Whether params.yaml holds what neither Git's last commit nor a preset has."""
    if not PARAMS.is_file():
        return False
    head = git(Path.cwd(), "rev-parse", "-q", "--verify", "HEAD")
    if head and not git(Path.cwd(), "status", "--porcelain", "--", PARAMS.as_posix()):
        return False
    try:
        values = read_yaml(PARAMS)
    except ParamsError:
        return True
    return all(values != presets.values(FOLDER / f"{name}.yaml") for name in known)


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="list | show | use")
    commands.add_parser("list", help="the presets, each with its first line")
    show = commands.add_parser("show", help="print one as a complete params file")
    use = commands.add_parser("use", help="make one params.yaml after checking it whole")
    for command in (show, use):
        command.add_argument("preset", metavar="NAME")
    use.add_argument("--force", action="store_true", help="although params.yaml has edits that are not committed")


def run(args: argparse.Namespace) -> int:
    known = presets.names(FOLDER)
    if args.command not in ("show", "use"):
        for name in known:
            first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<14} {first.removeprefix('# ')}")
        return 0
    name = args.preset
    if name not in known:
        raise ParamsError(f"no preset '{name}'", fix=suggest(name, known))
    path = FOLDER / f"{name}.yaml"
    if args.command == "show":
        print(presets.complete(path), end="")
        return 0
    check_values(presets.values(path))
    if not args.force and _has_unsaved_edits(known):
        committed = git(Path.cwd(), "rev-parse", "-q", "--verify", "HEAD")
        keep = "commit it" if committed else "keep it as a preset: cp params.yaml presets/mine.yaml"
        fix = f"{keep}; or throw them away: athanor preset use {name} --force"
        raise ParamsError("it has edits that no commit and no preset has", where="params.yaml", fix=fix)
    write_text(PARAMS, presets.complete(path))
    print(f"params.yaml is now the preset {name}; git diff shows what changed, dvc repro builds it")
    return 0

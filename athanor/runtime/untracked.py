"""Files that lie in the checkout alone, because neither Git nor DVC tracks them.

An experiment with --temp or --queue runs in a checkout of its own below `.dvc/tmp`, and does without them, as a clone does.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from athanor.base.errors import AthanorError, InputError
from athanor.runtime.facts import Graph, git

MANY_FILES = 3  # that a command names one by one
CODE = ("stages", "athanor")


def untracked(root: Path, deps: Iterable[str], kind: str = "-o", lacking: Path | None = None) -> list[str]:
    """Such files among these dependencies of stages, and all of the code; with `-c` those that Git tracks.

    With `lacking` only files that this other checkout does not have.
    """
    wanted = {dep.rstrip("/") for dep in deps}
    listed = git(root, "ls-files", kind, "-z", "--", *CODE, *sorted(wanted))
    found = []
    for name in filter(None, listed.split("\0")):
        if lacking and ((lacking / name).exists() or not (root / name).exists()):
            continue
        path = Path(name)
        code = path.suffix == ".py" and path.parts[0] in CODE
        is_dependency = name in wanted or any(str(parent) in wanted for parent in path.parents)
        in_dvc = any((root / f"{each}.dvc").is_file() for each in (path, *path.parents))
        if (code or is_dependency) and "__pycache__" not in path.parts and not in_dvc:
            found.append(name)
    return found


def inputs(graph: Graph, stages: Iterable[str]) -> set[str]:
    """Dependencies of these stages that no stage makes, and the files that say what the stages are."""
    deps = {dep for stage in stages for dep in graph.dependencies(stage) if not graph.maker(Path(dep))}
    return deps | {"params.yaml", "dvc.yaml"}


def by_folder(names: Iterable[str]) -> dict[Path, list[str]]:
    """The names by the first two folders that hold them."""
    folders: dict[Path, list[str]] = {}
    for name in names:
        folders.setdefault(Path(*Path(name).parent.parts[:2]), []).append(name)
    return folders


def command(folder: Path, names: Sequence[str], tool: str = "git") -> str:
    """What makes Git, or DVC, track these files of a folder."""
    return f"{tool} add {shlex.join(names) if len(names) <= MANY_FILES else shlex.quote(str(folder))}"


def choice(folder: Path, names: Sequence[str]) -> str:
    """The command for Git, and the one for DVC where the files may be private or large."""
    text = folder.parts and folder.parts[0] not in CODE and not all(name.endswith(".dvc") for name in names)
    dvc = f" (or {command(folder, names, 'dvc')}, if private or large)" if text else ""
    return command(folder, names) + dvc


def missed(root: Path, main: Path, stage: str) -> list[str]:
    """Files of the main checkout that this stage reads there and not here; none in the main checkout itself.

    Also those that Git tracks there by now: the experiment may have been queued before. But for code, which is to be as it was.
    """
    if root.resolve() == main.resolve():
        return []
    deps = inputs(Graph(root), (stage,))
    return [
        name
        for kind in ("-o", "-c")
        for name in untracked(main, deps, kind, root)
        if kind == "-o" or Path(name).parts[0] not in CODE
    ]


def said(names: Sequence[str]) -> str:
    """One line about files that are missed in this checkout, "" for none."""
    if not names:
        return ""
    folders = by_folder(names)
    few = ", ".join(f"{folder}/ ({len(files)})" if len(files) > 1 else files[0] for folder, files in folders.items())
    return f"this experiment does without {few}, which neither Git nor DVC tracked when it began or was queued. {fix(names)}"


def fix(names: Sequence[str]) -> str:
    commands = " && ".join(choice(folder, files) for folder, files in by_folder(names).items())
    return f"Fix: in the main checkout {commands}, unless that was done since, then run or queue the experiment again"


def explained(error: AthanorError, names: Sequence[str]) -> AthanorError:
    """The error, with another fix where what it looked for is among the files missed here."""
    pattern = str(error.where or "").replace("**/", "")
    looked_for = [
        name
        for name in names
        if fnmatchcase(name, pattern)
        or fnmatchcase(name, f"{pattern.rstrip('/')}/*")
        or fnmatchcase(pattern, f"{name.removesuffix('.dvc')}/*")
    ]
    if not pattern or not looked_for:
        return error
    return InputError(
        f"{error.what} in this experiment's own checkout", where=error.where, fix=fix(looked_for).removeprefix("Fix: ")
    )


def reminder(folder: Path) -> str:
    """A line for who has just named this folder as a source; "" where all of it is tracked, or Git has no repository."""
    root = Path.cwd()
    if not git(root, "rev-parse", "--git-dir") or not (names := untracked(root, [folder.as_posix()])):
        return ""
    names = [name for name in names if Path(name).parts[0] not in CODE]
    return f"Experiments with --queue or --temp, and clones, have only what Git or DVC tracks. Before one: {choice(folder, names)}"

"""What folders instead of files as code dependencies cost: the project's history, replayed.

    python -m tools.replay_deps [--commits N]

For each commit that changed code and for each stage: does a file change that the stage imports (it has to run), or only
another file of a folder that its entry in dvc.yaml lists (a superfluous run)? Files are followed through renames; files
that are gone do not count. History stands for what people will change next, which is a guess.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

from athanor.base.strict import read_yaml
from athanor.runtime.closure import closure, graphs, stage_module


def changes(root: Path, commits: int) -> Iterator[set[str]]:
    """Files of today whose text each commit changed, newest commit first."""
    words = [
        "git",
        "-C",
        str(root),
        "log",
        "--no-merges",
        "-M",
        "--name-status",
        "--format=%x00",
        f"-n{commits}",
        "--",
        "athanor",
        "stages",
    ]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    today: dict[str, str] = {}  # a path of the past -> of now
    for commit in text.split("\0")[1:]:
        changed = set()
        for line in filter(None, commit.splitlines()):
            status, old, *new = line.split("\t")
            path = today.get(new[0] if new else old, new[0] if new else old)
            if new:
                today[old] = path
            if status != "R100":
                changed.add(path)
        yield {path for path in changed if (root / path).is_file() and path.endswith(".py")}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay_deps", description="the cost of folders as dependencies"
    )
    parser.add_argument("--commits", type=int, default=100_000, help="the newest so many only")
    root, commits = Path.cwd(), parser.parse_args().commits
    stages = {name: stage for path in graphs(root) for name, stage in read_yaml(path)["stages"].items()}
    imported = {name: set(closure(root, stage_module(stage["cmd"]))) for name, stage in stages.items()}
    listed = {
        name: tuple(f"{dep}/" if (root / dep).is_dir() else dep for dep in stage["deps"])
        for name, stage in stages.items()
    }
    needed, superfluous = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    history = list(changes(root, commits))
    for changed in history:
        for name in stages:
            if changed & imported[name]:
                needed[name] += 1
            elif any(path.startswith(listed[name]) for path in changed):
                superfluous[name] += 1
    print(f"{len(history)} commits that changed code\n{'stage':20} {'runs':>6} {'superfluous':>12}")
    for name in stages:
        print(f"{name:20} {needed[name]:6} {superfluous[name]:12}")
    print(f"{'all':20} {sum(needed.values()):6} {sum(superfluous.values()):12}")


if __name__ == "__main__":
    main()

"""What a failure means, and what to type.

    python -m athanor explain              the last run of this checkout that failed
    python -m athanor explain LOG          a log, `-` for standard input: dmesg | athanor explain -
    python -m athanor explain --bundle     a file about the last failure, to attach to an issue

The text is searched for the messages of docs/troubles.md. Exit status: 0 if something is known about it, 1 if not.
A bundle holds versions, the driver, parameters, changes of the code, the last lines of journal and log. Tokens,
passwords, home folders, and the names of user and host are taken out; read it before you send it.
"""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.cli.live import LOG
from athanor.runtime import facts, lifetime
from athanor.runtime.journal import Record, alive
from athanor.runtime.machine import anchor
from athanor.runtime.redact import redact_params
from athanor.troubles.trouble import Hit, search
from athanor.troubles.world import World, here

TAIL_CHARS = 4 * 2**20
SHOWN = 3
BUNDLE = Path(".athanor/bundle.txt")
LINES, DIFF_CHARS = 200, 200_000
BOOT = re.compile(r"iommu|amdgpu|nvidia|ttm\.|pci|huge|numa")
NOTIFIED = re.compile(
    r"(?m)^(\s*(?:ATHANOR_NOTIFY=|notify:)).*(?:\n[ \t]+.*)*"
)  # such an address is a secret as a whole
STEERING = re.compile(r"ATHANOR_|CUDA|NVIDIA|NCCL|GLOO|HIP|HSA|ROC|TORCH|PYTORCH|OMP_|MKL_|HF_|MLFLOW_|DVC_|SLURM_|LD_")


def tail(path: Path) -> str:
    """The end of a log, which may be large; "" if there is none."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_CHARS))
        return file.read().decode(errors="replace").replace("\r", "\n")


def since(root: Path, moment: float) -> bool:
    """Whether the log of the last run on a terminal was written after a moment; an older one is another run's."""
    return (root / LOG).is_file() and (root / LOG).stat().st_mtime >= moment


def last_failure(root: Path) -> tuple[str, Path | None]:
    """What is written about the last run that did not finish, and its folder."""
    runs = sorted((root / ".athanor" / "runs").glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    for folder in (path.parent for path in reversed(runs)):
        if (folder / "end.json").is_file():
            end = Record(folder / "end.json")
            if end["status"] != "FINISHED":
                return str(end.get("error", "")), folder
        elif not alive(folder):
            stage = Record(folder / "meta.json")["stage"]
            return lifetime.KILLED.format(stage=stage), folder
    return "", None


def lines(hit: Hit, where: str) -> str:
    """A trouble in four lines at most."""
    trouble = hit.trouble
    more = f"docs/troubles.md#{trouble.name}"
    seen = f"line {hit.line} of {where}: {hit.text[:160]}" if where else hit.text[:160]
    return f"{trouble.title}\nCause  {trouble.cause}\nFix    {trouble.fix}\nSeen   {seen} ({more})"


def addition(root: Path, since_ms: int, said: str) -> str:
    """What `athanor repro` adds to a failure since then: the likeliest trouble, unless the failure names its own fix."""
    fresh = since(root, since_ms / 1000)
    hits = [] if "Fix:" in said else search(f"{tail(root / LOG) if fresh else ''}\n{said}", here({}, root))
    return lines(hits[0], str(LOG) if fresh else "") if hits else ""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", nargs="?", help="a log file, or - for standard input")
    parser.add_argument("--bundle", action="store_true", help=f"write all about it that may be told: {BUNDLE}")


def run(args: argparse.Namespace) -> int:
    root = anchor()
    if args.log == "-":
        text, where, folder = sys.stdin.read(), "standard input", None
    elif args.log:
        if not Path(args.log).is_file():
            raise InputError("no such file", where=args.log, fix="name a log, or nothing for the last failure here")
        text, where, folder = tail(Path(args.log)), args.log, None
    else:
        said, folder = last_failure(root)
        fresh = since(root, (folder / "meta.json").stat().st_mtime if folder else 0.0)
        text, where = f"{tail(root / LOG) if fresh else ''}\n{said}", str(LOG) if fresh else ""
    if args.bundle:
        (root / BUNDLE.parent).mkdir(exist_ok=True)
        write_text(root / BUNDLE, bundle(root, text, folder))
        print(f"{BUNDLE} is written. Read it, then attach it to an issue")
        return 0
    hits = search(text, None if args.log else here({}, root))  # a log may be of another machine
    print("\n\n".join(lines(hit, where) for hit in hits[:SHOWN]) if hits else unknown(text))
    return 0 if hits else 1


def unknown(text: str) -> str:
    if not text.strip():
        return "No run failed here. Name a log: athanor explain LOG"
    if " Fix: " in text:
        return 'The message says itself what to do, after "Fix:"; nothing more is known about it'
    return f"Nothing is known about this failure. For an issue: athanor explain --bundle writes {BUNDLE}"


# -- a bundle ---------------------------------------------------------------------------------------------------------


def bundle(root: Path, text: str, folder: Path | None) -> str:
    """Everything about a failure that may be told to others."""
    parts = [f"== {title} ==\n{body.strip()}\n" for title, body in sections(root, text, folder) if body.strip()]
    return anonymous("\n".join(parts), root)


def sections(root: Path, text: str, folder: Path | None) -> Iterator[tuple[str, str]]:
    yield "machine", json.dumps({key: value for key, value in facts.hardware().items() if key != "host"}, indent=2)
    yield "driver", "\n".join(driver())
    steering = {name: value for name, value in sorted(os.environ.items()) if STEERING.match(name)}
    yield "environment", "\n".join(f"{name}={value}" for name, value in steering.items())
    packages = {f"{found.name}=={found.version}" for found in importlib.metadata.distributions()}
    yield "packages", "\n".join(sorted(packages, key=str.lower))
    for name in ("params.yaml", "machine.yaml"):
        yield name, re.sub(r"(?m)(?:^|\s)#.*$", "", tail(root / name))  # a comment may hold anything
    yield "commit", facts.git(root, "log", "-1", "--format=%H %cd")
    yield "changes", facts.git(root, "diff", "HEAD", "--", "*.py", "*.c", "*.yaml", "*.toml")[:DIFF_CHARS]
    if folder is not None:
        for name in ("meta.json", "end.json", "journal.jsonl"):
            yield f"{folder.name}/{name}", last_lines(tail(folder / name))
    yield "log", last_lines(text)


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


def driver() -> Iterator[str]:
    world = World()
    yield platform.version()
    for pattern in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/proc/cmdline"):
        for value in world.values("file", pattern) or ():
            words = value.split()  # of the kernel's command line, what is about cards and memory
            words = [word for word in words if BOOT.search(word)] if pattern.endswith("cmdline") else words[:12]
            yield f"{pattern}: {' '.join(words)}"
    try:
        yield subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return


def anonymous(text: str, root: Path) -> str:
    """The text without secrets, and without who and where this is."""
    text = NOTIFIED.sub(r"\1 ***", redact_params({"": text})[""]).replace(str(root), ".").replace(str(Path.home()), "~")
    text = re.sub(r"/(?:home|Users)/[^/\s\"':]+", "~", text)
    for name, stands in ((platform.node(), "HOST"), (getpass.getuser(), "USER")):
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stands, text)
    return text

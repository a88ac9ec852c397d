"""Work on shards for the tests of executors: real Parquet in and out, and ways to hold, fail and die on demand.

As a program it is the coordinator that tests kill:

    python -m tests.runtime.toy_work RAW OUT CONTROL --kind processes --workers 2
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.errors import AthanorError, GateError
from athanor.runtime.executor import Executor
from athanor.text.documents import Document, DocumentWriter, read_documents, write_shards

SHARDS = 8


@dataclass(frozen=True)
class Task:
    """`control` is a folder; an empty file there makes a shard wait (`hold-<shard>`), fail, or its worker die."""

    shard: Path
    control: Path
    weights: tuple[float, ...] = (0.5, -0.25, 1.0)


def make_raw(folder: Path) -> Path:
    """SHARDS shards of documents that are all different."""
    rng = random.Random(5)
    words = [f"w{number}" for number in range(500)]
    write_shards(
        folder / "toy",
        (
            Document(f"{n} " + " ".join(rng.choices(words, k=60)), "toy", "prose", "CC0-1.0", "train")
            for n in range(SHARDS * 20)
        ),
        shard_bytes=5700,
    )
    return folder


def make_tasks(raw: Path, control: Path) -> dict[str, Task]:
    return {f"toy/{path.stem}": Task(path, control) for path in sorted(raw.glob("toy/*.parquet"))}


def score(task: Task, out: Path) -> dict[str, Any]:
    """Documents with a score from a matrix product; says in `control` who began it, and obeys what stands there."""
    name = task.shard.stem
    count = size = 0
    with DocumentWriter(out / "documents.parquet") as writer:
        _obey(task, name)
        for document in read_documents(task.shard):
            digest = np.frombuffer(hashlib.sha256(document.text.encode()).digest() * 8, np.uint8).astype(np.float32)
            matrix = np.outer(digest, digest)
            quality = float(np.dot(matrix @ digest, digest)) * task.weights[0] * 1e-9
            writer.add(replace(document, meta={"quality": quality}))
            count, size = count + 1, size + len(document.text.encode())
    return {"documents": count, "bytes": size}


class NumbersOfNames(Mapping[str, int]):
    """A task, and a size, for each name, made when it is asked for."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.made = names, 0

    def __getitem__(self, name: str) -> int:
        self.made += 1
        return int(name.split("/")[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _obey(task: Task, name: str) -> None:
    with open(task.control / f"began-{name}", "a") as file:
        file.write(f"{os.getpid()}\n")
    while (task.control / f"hold-{name}").exists():
        time.sleep(0.02)
    if (task.control / f"die-{name}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (task.control / f"fail-{name}").exists():
        raise GateError("toy", f"shard {name} is bad", where=str(task.shard), fix="mend it")


def where_am_i(task: Any, out: Path) -> dict[str, Any]:
    import athanor

    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    threads = [os.environ.get(name) for name in names]
    return {"code": athanor.__file__, "cwd": os.getcwd(), "pid": os.getpid(), "threads": threads}


def began(control: Path) -> dict[str, list[int]]:
    """Shard to the processes that began it; one that has made the file and not yet written into it has not begun."""
    told = {path.name.removeprefix("began-"): path.read_text().split() for path in sorted(control.glob("began-*"))}
    return {shard: [int(word) for word in words] for shard, words in told.items() if words}


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, to the hash of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("raw", "out", "control"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--kind", default="processes")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    executor = Executor(args.workers, stop=lambda: stopped, kind=args.kind)
    try:
        executor(score, make_tasks(args.raw, args.control), args.out, desc="toy")
    except AthanorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 75 if stopped else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

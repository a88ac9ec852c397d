"""What the data path needs, from the bytes of text alone: files, disk, memory and time of each stage.

The factors were measured by `python -m tools.bench_data.scale` (6 and 532 shards of 32 MB; docs/benchmarks.md, "Size")
but for those that name another place.
"""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import InputError
from athanor.base.host import free_memory_bytes
from athanor.sources import ready
from athanor.sources.params import CorpusSource, DownloadParams, FilesSource, names_of
from athanor.text import globs
from athanor.text.documents import SHARD_BYTES

# Bytes on the disk of a byte of text: Parquet of raw and of clean text (0.37; English prose 0.36).
PARQUET_RATIO = 0.4
DOCUMENT_BYTES = 3000  # of text, in the mean: 2,880 here, 3,430 in docs/benchmarks.md
TEXT_OF_TOKEN = 4.2  # bytes
# Bytes on the disk of a document: signatures (504) and measures; the work of clean, removed at its end
# (612); offset and content hash in the spool; offset and source in the shards.
MEASURED, WORK, SPOOLED, SHARDED = 660, 620, 24, 9
# Bytes of memory: coordinators with their libraries, and of a document; workers with a full shard.
BASE = 300e6
# `clean` holds 18 kB a shard and one row group of text, so 2 bytes for each of the 11,000 documents of a shard.
DOCUMENT_MEMORY = {"clean": 2, "train-tokenizer": 40, "shard": 60}
WORKER_MEMORY = {"download": 300e6, "clean": 500e6, "shard": 160e6}
SAMPLE_MEMORY = {"train-classifiers": 32, "train-tokenizer": 16}  # of a byte of the sample (docs/decisions.md)
# MB of text for each CPU-second, of real text (docs/benchmarks.md): by the workers, and of what one process does.
PARALLEL = {"download": 28.0, "clean": 2.86, "shard": 5.3}
SERIAL = {"train-classifiers": 200.0, "train-tokenizer": 340.0, "shard": 80.0}
CLASSIFIER_SECONDS = 0.4e-6  # of a byte of the sample
OPEN_FILES, FILES_OF_WORKER = 60, 4  # 22 with two workers
MAPPINGS = 4000  # 1,532
TEMPORARY_BYTES = {"processes": 10e6, "ray": 1e9}  # below /tmp: Ray's session; no stage writes text there
GB = 1e9


@dataclass(frozen=True)
class Need:
    """What one stage needs.

    `files` and bytes on `disk` stay, `work_disk` goes at its end. `memory` is
    its own, `worker_memory` that of each process of `tasks`. Seconds are of
    one CPU, by all processes and by its own.
    """

    stage: str
    files: int
    disk: float
    work_disk: float
    memory: float
    worker_memory: float
    tasks: int
    parallel_seconds: float
    serial_seconds: float

    @property
    def cpu_seconds(self) -> float:
        return self.parallel_seconds + self.serial_seconds

    def seconds(self, workers: int) -> float:
        return self.parallel_seconds / max(1, min(workers, self.tasks)) + self.serial_seconds


@dataclass(frozen=True)
class Limit:
    """Something that a stage needs of this machine, in `unit`, and what there is."""

    name: str
    stage: str
    needed: float
    available: float
    unit: str
    fix: str

    @property
    def share(self) -> float:
        return self.needed / max(self.available, 1e-9)

    def __str__(self) -> str:
        scale, digits = (GB, ".1f") if self.unit == "GB" else (1, ".0f")
        needed, available = (f"{value / scale:,{digits}} {self.unit}" for value in (self.needed, self.available))
        return f"{self.stage} needs {needed} ({self.name}), {available} are free"


@dataclass(frozen=True)
class Host:
    """What is free on this machine; `mappings` None where the system has no such limit."""

    workers: int
    executor: str
    disk: float
    memory: float
    open_files: float
    mappings: int | None
    temporary: float

    @classmethod
    def here(cls, root: Path, workers: int, executor: str) -> Host:
        files, maps = resource.getrlimit(resource.RLIMIT_NOFILE)[0], Path("/proc/sys/vm/max_map_count")
        return cls(
            workers,
            executor,
            shutil.disk_usage(root).free,
            free_memory_bytes(),
            math.inf if files == resource.RLIM_INFINITY else files,
            int(maps.read_text()) if maps.is_file() else None,
            shutil.disk_usage(tempfile.gettempdir()).free,
        )


def text_of(download: DownloadParams) -> dict[str, float]:
    """Bytes of text of each source, by its budget, its files or its minimum."""
    text = {}
    for source in download.sources:
        size = getattr(source, "max_bytes", None) or 0
        with contextlib.suppress(InputError):  # no such file: the stage says so
            if isinstance(source, CorpusSource):
                size = ready.TEXT_FACTOR * sum(path.stat().st_size for _, path in ready.find(source))
            elif isinstance(source, FilesSource):
                size = sum(path.stat().st_size for _, path in globs.find(source.globs))
        names = names_of(source)
        text |= dict.fromkeys(names, max(size / len(names), source.min_bytes))
    return text


def raw_disk(download: DownloadParams, text: Mapping[str, float]) -> float:
    """Bytes of data/raw with so many bytes of text by source. A ready corpus has an index there."""
    index = ready.INDEX_RATIO / ready.TEXT_FACTOR
    ratios = {
        name: index if isinstance(s, CorpusSource) else PARQUET_RATIO for s in download.sources for name in names_of(s)
    }
    return sum(ratios[name] * size for name, size in text.items())


def needs(
    text: Mapping[str, float],
    *,
    download_disk: float = 0.0,
    samples: Mapping[str, int] | None = None,
    tokens: float | None = None,
    shard_tokens: float = 1e8,
    id_bytes: int = 2,
    copies: int = 1,
) -> list[Need]:
    """What each stage needs for so many bytes of text by source.

    `download_disk`: what is to come of data/raw. `samples`: bytes that a
    stage learns from. `tokens` of all streams, None for each token once. `copies`: 2 where DVC's cache copies outputs.
    """
    total = sum(text.values())
    documents, shards = total / DOCUMENT_BYTES, sum(math.ceil(size / SHARD_BYTES) for size in text.values())
    tokens_once = total / TEXT_OF_TOKEN
    tokens = tokens_once if tokens is None else tokens
    raw, spool = PARQUET_RATIO * total, id_bytes * tokens_once + SPOOLED * documents
    sharded = id_bytes * tokens + SHARDED * documents * tokens / max(tokens_once, 1)
    disk = {  # stays, goes
        "download": (copies * download_disk, 0.0),
        "train-classifiers": (0.0, 0.0),
        "clean": (raw + MEASURED * documents + copies * raw, raw + WORK * documents),
        "train-tokenizer": (0.0, 0.0),
        "shard": (spool + copies * sharded, 0.0),
    }
    files = {"download": shards, "clean": 8 * shards, "shard": 4 * shards + 3 * math.ceil(tokens / shard_tokens)}
    samples = {stage: min(size, total) for stage, size in (samples or {}).items()}
    training = {"train-classifiers": CLASSIFIER_SECONDS * samples.get("train-classifiers", 0)}
    return [
        Need(
            stage,
            files.get(stage, 0),
            *disk[stage],
            BASE + DOCUMENT_MEMORY.get(stage, 0) * documents + SAMPLE_MEMORY.get(stage, 0) * samples.get(stage, 0),
            WORKER_MEMORY.get(stage, 0.0) * min(1.0, total / SHARD_BYTES),
            shards if stage in WORKER_MEMORY else 0,
            total / 1e6 / PARALLEL.get(stage, math.inf),
            total / 1e6 / SERIAL.get(stage, math.inf) + training.get(stage, 0.0),
        )
        for stage in disk
    ]


def limits(path: Sequence[Need], host: Host) -> Iterator[Limit]:
    """All limits, in the order in which the stages come to them."""
    first, files = path[0].stage, OPEN_FILES + FILES_OF_WORKER * host.workers
    yield Limit("ulimit -n", first, files, host.open_files, "open files", f"ulimit -n {max(1024, 2 * files)}")
    if host.mappings is not None:
        fix = "sysctl -w vm.max_map_count=65530"
        yield Limit("vm.max_map_count", first, MAPPINGS, host.mappings, "mappings", fix)
    temporary = tempfile.gettempdir()
    fix = "export TMPDIR=DIR with a folder of a disk that has room"
    yield Limit(temporary, first, TEMPORARY_BYTES[host.executor], host.temporary, "GB", fix)
    kept = 0.0
    for need in path:
        workers = min(host.workers, need.tasks) if host.executor == "processes" else 0  # Ray asks its machines itself
        fits = int((host.memory - need.memory) // need.worker_memory) if workers else 0
        fix = f"workers: {fits} in machine.yaml" if fits > 0 else "free some memory"
        if need.stage in SAMPLE_MEMORY:
            fix = f"lower sample_bytes of {need.stage.removeprefix('train-')}, or free some memory"
        yield Limit("memory", need.stage, need.memory + workers * need.worker_memory, host.memory, "GB", fix)
        fix = "free some space, or lower max_bytes of download.sources"
        yield Limit("disk", need.stage, kept + need.disk + need.work_disk, host.disk, "GB", fix)
        kept += need.disk


def first_limit(path: Sequence[Need], host: Host) -> Limit:
    """The limit that is met first; where none is, the one that is nearest."""
    found = list(limits(path, host))
    return next((limit for limit in found if limit.share > 1), max(found, key=lambda limit: limit.share))


def after_download(download: DownloadParams, to_come: float) -> list[Need]:
    """What the stages need when `to_come` bytes of data/raw are still to be written."""
    text = text_of(download)
    return needs({**text, "": max(to_come - sum(text.values()), 0.0)}, download_disk=to_come)  # "": without a budget

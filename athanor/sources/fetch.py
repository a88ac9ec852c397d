"""Fetch any source of documents into its shards, count them, and check the source's minimum.

The stage passes in what it provides: progress bars and folders for saved progress.

Before the first source is fetched, `check_sources` opens all of them, so that
a mistake in the ninth is reported now and not after hours: a data set is opened
and its first rows are read as they will be, a server is asked for the size of
its files, globs are matched, and the disk space that all of it will take is
compared with what is free. All problems are one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from athanor.base.artifacts import digest
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.base.work import Facts, MapShards, Tick, ignore, never
from athanor.sources import docstrings, holdout, http, huggingface, messages, packages, python_documents, select, stdlib
from athanor.sources.battery_params import BatteryParams
from athanor.sources.datapath import PARQUET_RATIO
from athanor.sources.huggingface import UNREACHABLE
from athanor.sources.instruct_params import InstructParams, MessagesSource
from athanor.sources.params import (
    DocumentSource,
    DownloadParams,
    FilesSource,
    HttpSource,
    HuggingFaceSource,
    PackagesSource,
    PythonSource,
    is_local,
    names_of,
    without_query,
)
from athanor.text import rows
from athanor.text.documents import Document, ShardWriter
from athanor.text.rows import Files

HTTP_SLOT = "web"  # not the module's name: a slot under another name would fetch everything again
# What may change without what was fetched becoming another: gates, and how often progress is saved.
GATES = frozenset(("min_documents", "min_bytes", "checkpoint_documents", "max_malformed_fraction"))


class ProgressFolder(Protocol):
    """A folder for progress, locked while it is entered."""

    path: Path

    def __enter__(self) -> ProgressFolder: ...

    def __exit__(self, *_: object) -> None: ...

    def mark_done(self) -> None: ...


class Bar(Protocol):
    def update(self, amount: float) -> None: ...

    def expect(self, amount: float) -> None: ...


@dataclass(frozen=True)
class Fetcher:
    """`progress(total, what, unit)` shows a bar; `progress_folder(name, module, inputs)` is a folder
    that outlives the process.

    The folder belongs to the name and the inputs, and asks when the code of `module` is
    another: progress is kept under any change of other sources and of the stage.
    `fact` writes down what may differ between runs that give the same. `map_shards` runs work on the executor.
    """

    raw: Path
    val_fraction: float
    progress: Callable[[float | None, str, str], AbstractContextManager[Bar]]
    stop: Callable[[], bool]
    progress_folder: Callable[[str, str, Facts], ProgressFolder]
    fact: Callable[..., None]
    map_shards: MapShards

    def fetch(self, source: DocumentSource, pairs: list[docstrings.Pair] | None) -> dict[str, tuple[Tally, Facts]]:
        """Write the source's documents; returns tally and provenance of each name it feeds.

        `pairs`, if given, is filled by a scan of the standard library.
        """
        if isinstance(source, PythonSource):
            return self.python(source, pairs)
        if isinstance(source, PackagesSource):
            return self._packages(source)
        if isinstance(source, FilesSource):
            return {source.name: self._files(source)}
        if isinstance(source, HttpSource):
            return {source.name: self._http(source)}
        return {source.name: self._hub(source)}

    def probe(self, source: DocumentSource) -> float:
        """Open a source without fetching it; returns the bytes that it will take on the disk from now on."""
        if isinstance(source, HuggingFaceSource):
            folder = self.progress_folder("huggingface", huggingface.__name__, self._hub_inputs(source))
            text, on_disk = huggingface.probe(source, folder.path)
            return PARQUET_RATIO * (2 * text - on_disk)  # the parts it comes in, and the shards made of them
        if isinstance(source, HttpSource):
            folder = self.progress_folder(HTTP_SLOT, http.__name__, _http_inputs(source))
            return (1 + PARQUET_RATIO) * http.probe(source, folder.path)
        if isinstance(source, FilesSource):
            return PARQUET_RATIO * sum(path.stat().st_size for _, path in rows.find(source.globs))
        return 0.0

    def python(
        self, source: PythonSource | None, pairs: list[docstrings.Pair] | None
    ) -> dict[str, tuple[Tally, Facts]]:
        base = stdlib.root()
        total = sum(path.stat().st_size for path in stdlib.source_files(base))
        with self.progress(total, "standard library", "B") as bar:
            visit = docstrings.collector(pairs)
            documents = python_documents.read(source, self.val_fraction, base, bar.update, visit)
            tallies = self._write(names_of(source) if source else (), source, documents)
        if pairs is not None:
            pairs.extend(docstrings.topic_pairs(stdlib.topics(base)))
        provenance = stdlib.provenance(stdlib.source_files(base), base)
        return {name: (tally, provenance) for name, tally in tallies.items()}

    def _packages(self, source: PackagesSource) -> dict[str, tuple[Tally, Facts]]:
        facts: Facts = {}
        with self.progress(None, "installed packages", "B") as bar:
            base = packages.root()
            documents = packages.read(source, self.val_fraction, base, facts, bar.update, bar.expect)
            tallies = self._write(names_of(source), source, documents)
        return {name: (tally, facts) for name, tally in tallies.items()}

    def _write(
        self, names: Iterable[str], source: PythonSource | PackagesSource | None, documents: Iterable[Document]
    ) -> dict[str, Tally]:
        """Write the documents of several names, each to the folder of its name."""
        with ExitStack() as stack:
            writers = {name: stack.enter_context(SourceWriter(self.raw, name, source)) for name in names}
            for document in documents:
                self._check_stop()
                writers[document.source].add(document)
        return {name: writer.tally for name, writer in writers.items()}

    def _files(self, source: FilesSource) -> tuple[Tally, Facts]:
        files = rows.find(source.globs)
        facts = {"files": len(files), "files_sha256": rows.digest_of(files), "license": source.license}
        unreadable = select.Unreadable()
        with self.progress(sum(path.stat().st_size for _, path in files), source.name, "B") as bar:
            tally = self._write_files(source, files, bar, unreadable)
        facts |= {"unreadable": unreadable.counts} if unreadable.errors else {}
        return tally, facts | self._hold_out(source.name, tally)

    def _http(self, source: HttpSource) -> tuple[Tally, Facts]:
        with self._locked_folder(HTTP_SLOT, http.__name__, _http_inputs(source)) as folder:
            with self.progress(None, source.name, "B") as bar:
                files = http.fetch(source, folder, tick=bar.update, expect=bar.expect, stop=self.stop)
            with self.progress(sum(path.stat().st_size for _, path in files), f"{source.name}, reading", "B") as bar:
                tally = self._write_files(source, files, bar)
            if redirects := http.final_addresses(files):  # mirrors come and go: no part of the result
                self.fact(**{f"{source.name}_redirected_to": redirects})
            return tally, http.facts(source, files) | self._hold_out(source.name, tally)

    def _write_files(
        self,
        source: FilesSource | HttpSource,
        files: Files,
        bar: Bar,
        unreadable: select.Unreadable | None = None,
    ) -> Tally:
        with SourceWriter(self.raw, source.name, source) as writer:
            callbacks = (bar.update, writer.tally.leave_out, unreadable)
            for document in select.documents(source, files, self.val_fraction, *callbacks):
                self._check_stop()
                writer.add(document)
        return writer.tally

    def _hold_out(self, name: str, tally: Tally) -> Facts:
        """Where chance held nothing out, hold out what is nearest; returns how many documents that are."""
        if not self.val_fraction or tally.val["documents"]:
            return {}
        moved = holdout.hold_one_out(self.raw / name)
        for document in moved:
            tally.count(document, tally.train, -1)
            tally.count(document, tally.val, 1)
        return {"moved_to_validation": len(moved)} if moved else {}

    def _hub_inputs(self, source: HuggingFaceSource) -> Facts:
        inputs = {key: value for key, value in asdict(source).items() if key not in GATES}
        drawn = {"in_pieces": True} if huggingface.in_pieces(source) else {}
        return inputs | drawn | {"val_fraction": self.val_fraction, "local": huggingface.local_digest(source.dataset)}

    def _hub(self, source: HuggingFaceSource) -> tuple[Tally, Facts]:
        inputs = self._hub_inputs(source)
        local = inputs["local"]
        with self._locked_folder("huggingface", huggingface.__name__, inputs) as folder:
            with self.progress(source.max_bytes, source.name, "B") as bar:
                counts = huggingface.fetch(source, folder, self.val_fraction, tick=bar.update, stop=self.stop)
            with SourceWriter(self.raw, source.name, source) as writer:
                writer.tally.left_out.update(counts["left_out"])
                for document in huggingface.documents(folder):
                    writer.add(document)
        origin = {"local_sha256": local} if local else {"dataset": source.dataset, "revision": source.revision}
        return writer.tally, {**origin, "license": source.license, "rows_read": counts["rows"]}

    @contextmanager
    def _locked_folder(self, name: str, module: str, inputs: Facts) -> Iterator[Path]:
        with self.progress_folder(name, module, inputs) as locked_folder:
            yield locked_folder.path
            locked_folder.mark_done()

    def _check_stop(self) -> None:
        if self.stop():
            raise Interrupted("stopped; what was downloaded is kept, run again to continue")


def _http_inputs(source: HttpSource) -> Facts:
    urls = [file.url for file in source.urls]
    return {"type": source.type, "urls": [without_query(url) for url in urls], "digest": digest(urls)}


def check_pinned(download: DownloadParams, instruct: InstructParams, battery: BatteryParams) -> None:
    """ParamsError for the first hub data set without a pinned commit, raised before any work is done."""
    for where, dataset, revision in hub_revisions(download, instruct, battery):
        if revision is None:
            fix = "run `python -m athanor pin`"
            raise ParamsError(f"the hub data set {dataset} is not pinned", where=f"{where}.revision", fix=fix)


def hub_revisions(
    download: DownloadParams, instruct: InstructParams, battery: BatteryParams
) -> Iterator[tuple[str, str, str | None]]:
    """(place in params.yaml, data set, revision) of every source that is fetched from the hub."""
    for key in ("sources", "labels"):
        for number, source in enumerate(getattr(download, key)):
            if isinstance(source, HuggingFaceSource) and not is_local(source.dataset):
                yield f"download.{key}[{number}]", source.dataset, source.revision
    for number, chats in enumerate(instruct.sources):
        if isinstance(chats, MessagesSource) and chats.hub_id is not None:
            yield f"instruct.sources[{number}]", chats.hub_id, chats.revision
    for number, benchmark in enumerate(battery.benchmarks):
        yield f"battery.benchmarks[{number}]", benchmark.hub_id, benchmark.revision


@dataclass
class Tally:
    """Counts of one source. `left_out` counts rows and documents that were read and not taken, by reason."""

    documents: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})
    val: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})

    def add(self, document: Document) -> None:
        self.documents += 1
        self.bytes += len(document.text.encode())
        self.count(document, self.val if document.split == "val" else self.train, 1)

    @staticmethod
    def count(document: Document, side: dict[str, int], sign: int) -> None:
        side["documents"] += sign
        side["bytes"] += sign * len(document.text.encode())

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


class SourceWriter:
    """Writes the shards of one name below `raw`; leaving the block without an error checks its source's minimum."""

    def __init__(self, raw: Path, name: str, source: DocumentSource) -> None:
        self.name, self.min_chars = name, source.min_chars
        self.minimum = {"documents": source.min_documents, "bytes": source.min_bytes}
        self.tally = Tally()
        self._shards = ShardWriter(raw / name)

    def add(self, document: Document) -> None:
        if len(document.text) < self.min_chars or not document.text.strip():
            self.tally.leave_out("short")
        else:
            self.tally.add(document)
            self._shards.add(document)

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._shards.close()
        if kind is None:
            self._check()

    def _check(self) -> None:
        for unit, minimum in self.minimum.items():
            if (actual := getattr(self.tally, unit)) < minimum:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.tally.left_out.items()))
                raise GateError(
                    "source size",
                    f"source '{self.name}' gave {actual:,} {unit}, its minimum is {minimum:,}"
                    + (f" (left out: {reasons})" if reasons else ""),
                    where=f"download.sources ({self.name})",
                    fix=f"find out why the source shrank, or lower its min_{unit} in params.yaml",
                )


def check_sources(
    download: DownloadParams,
    instruct: InstructParams,
    probe: Callable[[DocumentSource], float],
    free_bytes: int,
    *,
    tick: Tick = ignore,
    stop: Callable[[], bool] = never,
) -> float:
    """Open every source; returns the bytes that they will take on the disk. InputError with all that is wrong.

    `probe` opens a source of documents and returns its bytes.
    """
    checks: list[tuple[str, Callable[[Any], float], Any]] = [
        (f"download.{key}[{number}] ({names_of(source)[0]})", probe, source)
        for key in ("sources", "labels")
        for number, source in enumerate(getattr(download, key))
    ] + [
        (f"instruct.sources[{number}] ({chats.name})", messages.probe, chats)
        for number, chats in enumerate(instruct.sources)
        if isinstance(chats, MessagesSource)
    ]
    needed, problems = 0.0, []
    for where, probe_source, source in checks:
        if stop():
            raise Interrupted("stopped while the sources were being opened; nothing was fetched")
        try:
            needed += probe_source(source)
        except InputError as error:
            if error.what.startswith(UNREACHABLE):
                raise  # of the others too
            problems.append((where, error))
        tick(1)
    if needed > free_bytes:
        what = f"the sources will take about {needed / 1e9:,.1f} GB on the disk, which has room for {free_bytes / 1e9:,.1f} GB"
        problems.append(
            ("", InputError(what, where="download.sources", fix="free some space, or lower their max_bytes"))
        )
    if len(problems) == 1:
        where, error = problems[0]
        raise InputError(error.what, where=": ".join(piece for piece in (where, error.where) if piece), fix=error.fix)
    if problems:
        details = "; ".join(f"{where}: {error}" if where else str(error) for where, error in problems)
        raise InputError(f"{len(problems)} things are wrong with the sources; nothing was fetched: {details}")
    return needed

"""Fetch any source of documents into its shards, count them, and check the source's minimum.

The stage passes in what it provides: progress bars and folders for saved progress.

Before the first source is fetched, `check_sources` opens all of them, so that
a mistake in the ninth is reported now and not after hours: a data set is opened
and its first rows are read as they will be, a server is asked for the size of
its files, globs are matched, and what the whole data path will take of disk,
memory and open files is compared with what there is. All problems are one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from athanor.base.artifacts import digest
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.base.work import Facts, MapShards, Tick, ignore, never, stopping
from athanor.sources import (
    datapath,
    docstrings,
    file_tasks,
    holdout,
    http,
    hub_tasks,
    huggingface,
    messages,
    packages,
    python_documents,
    ready,
    remote,
    select,
    stdlib,
)
from athanor.sources.addresses import is_local, without_query
from athanor.sources.battery_params import BatteryParams
from athanor.sources.datapath import PARQUET_RATIO
from athanor.sources.huggingface import UNREACHABLE
from athanor.sources.instruct_params import InstructParams, MessagesSource
from athanor.sources.params import (
    CorpusSource,
    DocumentSource,
    DownloadParams,
    FilesSource,
    HttpSource,
    HuggingFaceSource,
    PackagesSource,
    PythonSource,
    RemoteSource,
    names_of,
)
from athanor.sources.raw_shards import RawWriter, Tally, check_size
from athanor.text import globs
from athanor.text.documents import Document
from athanor.text.globs import Files

HUB_SLOT = "hub"
HTTP_SLOT = "web"  # not the module's name: a slot under another name would fetch everything again
# What may change without what was fetched becoming another.
GATES = frozenset(("min_documents", "min_bytes", "max_malformed_fraction"))


class ProgressFolder(Protocol):
    """A folder for progress, locked while it is entered."""

    path: Path

    def __enter__(self) -> ProgressFolder: ...

    def __exit__(self, *_: object) -> None: ...

    def mark_done(self) -> None: ...


class Bar(Protocol):
    def update(self, amount: float) -> None: ...

    def expect(self, amount: float) -> None: ...


class Expected(NamedTuple):
    """Bytes that a source will take on the disk from now on; its files, their bytes, and where they lie."""

    disk: float
    files: int = 0
    bytes: int = 0
    place: str = ""


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
        if isinstance(source, CorpusSource):
            return {source.name: self._corpus(source)}
        if isinstance(source, HttpSource):
            return {source.name: self._http(source)}
        if isinstance(source, RemoteSource):
            return {source.name: self._remote(source)}
        return {source.name: self._hub(source)}

    def probe(self, source: DocumentSource) -> Expected:
        """Open a source without fetching it."""
        if isinstance(source, HuggingFaceSource):
            folder = self.progress_folder(HUB_SLOT, hub_tasks.__name__, self._hub_inputs(source))
            here, is_all = hub_tasks.fetched(folder.path)
            if is_all:
                return Expected(0.0)
            found = huggingface.probe(source)
            place = source.dataset if is_local(source.dataset) else f"{source.dataset} at {source.revision}"
            return Expected(PARQUET_RATIO * max(found.text - here, 0), found.files, found.bytes, place)
        if isinstance(source, HttpSource):
            folder = self.progress_folder(HTTP_SLOT, http.__name__, _http_inputs(source))
            size = http.probe(source, folder.path)
            return Expected((1 + PARQUET_RATIO) * size, len(source.urls), size, "the web")
        if isinstance(source, RemoteSource):
            missing = remote.probe(source, self.progress_folder(*remote.slot(source)).path)
            size, more = sum(item.bytes for item in missing), ", …" if source.urls[1:] else ""
            return Expected((1 + PARQUET_RATIO) * size, len(missing), size, source.urls[0] + more)
        if isinstance(source, CorpusSource):
            count, size = ready.probe(source)
            return Expected(ready.INDEX_RATIO * size, count, size, source.folder)
        if isinstance(source, FilesSource):
            files = globs.find(source.globs)
            size = sum(path.stat().st_size for _, path in files)
            return Expected(PARQUET_RATIO * size, len(files), size, "this machine")
        return Expected(0.0)

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
            writers = {name: stack.enter_context(RawWriter(self.raw / name, source.min_chars)) for name in names}
            for document in documents:
                if self.stop():
                    raise Interrupted("stopped while the documents were read; run again")
                writers[document.source].add(document)
        for name, writer in writers.items():
            check_size(source, name, writer.tally)
        return {name: writer.tally for name, writer in writers.items()}

    def _files(self, source: FilesSource) -> tuple[Tally, Facts]:
        files = globs.find(source.globs)
        tally, facts = self._read(source, files)
        return tally, {"files": len(files), "files_sha256": globs.digest_of(files)} | facts

    def _remote(self, source: RemoteSource) -> tuple[Tally, Facts]:
        with self._locked_folder(*remote.slot(source)) as folder:
            files, objects = remote.fetch(source, folder, self._map_shards)
            tally, facts = self._read(source, files)
        return tally, {"urls": objects} | facts

    def _read(self, source: FilesSource | RemoteSource, files: Files) -> tuple[Tally, Facts]:
        tally, unreadable = self._read_files(source, files)
        facts = {"license": source.license} | ({"unreadable": unreadable.counts} if unreadable.errors else {})
        return tally, facts | self._hold_out(source.name, tally)

    def _corpus(self, source: CorpusSource) -> tuple[Tally, Facts]:
        inputs = {key: value for key, value in asdict(source).items() if key not in GATES}
        inputs |= {"val_fraction": self.val_fraction}
        with self._locked_folder("corpus", ready.__name__, inputs) as slot:
            tally, files = ready.index(source, self.raw, slot, self.val_fraction, self._map_shards)
            check_size(source, source.name, tally)
        facts = {"folder": source.folder, "files": files, "license": source.license}
        return tally, facts | self._hold_out(source.name, tally)

    def _http(self, source: HttpSource) -> tuple[Tally, Facts]:
        with self._locked_folder(HTTP_SLOT, http.__name__, _http_inputs(source)) as folder:
            files = http.fetch(source, folder, self._map_shards)
            tally, _ = self._read_files(source, files)
            if redirects := http.final_addresses(files):  # mirrors come and go: no part of the result
                self.fact(**{f"{source.name}_redirected_to": redirects})
            return tally, http.facts(source, files) | self._hold_out(source.name, tally)

    def _read_files(
        self, source: FilesSource | RemoteSource | HttpSource, files: Files
    ) -> tuple[Tally, select.Unreadable]:
        place = (self.val_fraction, self.raw / source.name, self._map_shards)
        tally, unreadable = file_tasks.write(source, files, *place)
        check_size(source, source.name, tally)
        return tally, unreadable

    def _map_shards(self, *arguments: Any, **options: Any) -> Mapping[str, Facts]:
        with stopping(self.stop):
            return self.map_shards(*arguments, **options)

    def _hold_out(self, name: str, tally: Tally) -> Facts:
        """Where chance held too little out, hold out what is nearest; returns how many documents that are."""
        wanted = holdout.ENOUGH - tally.val["documents"]
        if not self.val_fraction or wanted <= 0:
            return {}
        moved = holdout.hold_out(self.raw / name, wanted)
        for document in moved:
            tally.count(document, tally.train, -1)
            tally.count(document, tally.val, 1)
        return {"moved_to_validation": len(moved)} if moved else {}

    def _hub_inputs(self, source: HuggingFaceSource) -> Facts:
        inputs = {key: value for key, value in asdict(source).items() if key not in GATES}
        return inputs | {"val_fraction": self.val_fraction, "local": huggingface.local_digest(source.dataset)}

    def _hub(self, source: HuggingFaceSource) -> tuple[Tally, Facts]:
        inputs = self._hub_inputs(source)
        local = inputs["local"]
        with self._locked_folder(HUB_SLOT, hub_tasks.__name__, inputs) as folder:
            place = (folder, self.val_fraction, self.raw / source.name, self._map_shards)
            tally, row_count = hub_tasks.fetch(source, *place)
            check_size(source, source.name, tally)
        origin = {"local_sha256": local} if local else {"dataset": source.dataset, "revision": source.revision}
        return tally, {**origin, "license": source.license, "rows_read": row_count}

    @contextmanager
    def _locked_folder(self, name: str, module: str, inputs: Facts) -> Iterator[Path]:
        with self.progress_folder(name, module, inputs) as locked_folder:
            yield locked_folder.path
            locked_folder.mark_done()


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


def check_sources(
    download: DownloadParams,
    instruct: InstructParams,
    probe: Callable[[DocumentSource], Expected],
    host: datapath.Host,
    *,
    note: Callable[[str], None] = ignore,
    tick: Tick = ignore,
    stop: Callable[[], bool] = never,
) -> float:
    """Open every source; returns the bytes that they will take on the disk. InputError with all that is wrong.

    `probe` opens a source of documents; `note` hears its files, their bytes and where they lie. Limits of the `host`
    are those of the whole data path.
    """
    checks: list[tuple[str, Callable[[Any], Expected], Any]] = [
        (f"download.{key}[{number}] ({names_of(source)[0]})", probe, source)
        for key in ("sources", "labels")
        for number, source in enumerate(getattr(download, key))
    ] + [
        (f"instruct.sources[{number}] ({chats.name})", lambda chats: Expected(messages.probe(chats)), chats)
        for number, chats in enumerate(instruct.sources)
        if isinstance(chats, MessagesSource)
    ]
    needed, problems = 0.0, []
    for where, probe_source, source in checks:
        if stop():
            raise Interrupted("stopped while the sources were being opened; nothing was fetched")
        try:
            expected = probe_source(source)
            needed += expected.disk
            if expected.files:
                size = f"{expected.files:,} file{'s' * (expected.files > 1)} of {expected.bytes / 1e6:,.1f} MB"
                note(f"{names_of(source)[0]}: {size}, {expected.place}")
        except InputError as error:
            if error.what.startswith(UNREACHABLE):
                raise  # of the others too
            problems.append((where, error))
        tick(1)
    path = datapath.after_download(download, needed)
    if needed and (limit := datapath.first_limit(path, host)).share > 1:
        problems.append(("", InputError(str(limit), where="data path", fix=limit.fix)))
    if len(problems) == 1:
        where, error = problems[0]
        raise InputError(error.what, where=": ".join(piece for piece in (where, error.where) if piece), fix=error.fix)
    if problems:
        details = "; ".join(f"{where}: {error}" if where else str(error) for where, error in problems)
        raise InputError(f"{len(problems)} things are wrong with the sources; nothing was fetched: {details}")
    if needed > 1e8:
        sizes = (f"{size / 1e9:,.1f} GB" for size in (needed, sum(need.disk for need in path), host.disk))
        note("all sources can be read; {} are to come, {} with what is made of them, {} are free".format(*sizes))
    return needed

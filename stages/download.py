"""Fetch every document source, make the instruction data, and set the battery's questions aside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.errors import GateError, Interrupted
from athanor.base.work import Facts
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot
from athanor.sources import benchmarks, docstrings, identity, messages
from athanor.sources.battery_params import BatteryParams
from athanor.sources.datapath import Host
from athanor.sources.exercises.build import battery_items, check_held_out, training_conversations
from athanor.sources.fetch import Fetcher, Tally, check_pinned, check_sources
from athanor.sources.holdout import check_validation, not_taught, remarks, untaught
from athanor.sources.instruct_params import (
    DocstringsSource,
    ExercisesSource,
    IdentitySource,
    InstructParams,
    InstructSource,
)
from athanor.sources.params import DownloadParams, names_of
from athanor.text.conversations import BENCHMARKS, Conversation, check_messages, write_rows
from athanor.text.documents import LABELS


def run(run: Run) -> None:
    download, instruct = run.params("download", DownloadParams), run.params("instruct", InstructParams)
    battery = run.params("battery", BatteryParams)
    check_pinned(download, instruct, battery)
    open_sources(run, download, instruct)
    searched = [item for benchmark in battery.benchmarks for item in benchmarks.items(benchmark)]
    with new_dir("data/raw") as raw, new_dir("data/instruct") as chats, new_dir("data/battery") as held_out:
        tallies: dict[str, Tally] = {}
        provenance: dict[str, Facts] = {}
        # Filled by the first pass over the standard library, so that it is parsed once.
        pairs: list[docstrings.Pair] = []
        needs_docstrings = any(isinstance(source, DocstringsSource) for source in instruct.sources)
        document_fetcher = fetcher(run, raw, download.val_fraction)
        for source in download.sources:
            started = time.monotonic()
            fetched = document_fetcher.fetch(source, pairs if needs_docstrings and not pairs else None)
            for name, (tally, provenance[name]) in fetched.items():
                tallies[name] = tally
                for remark in remarks(name, provenance[name], tally.val["bytes"] / max(tally.bytes, 1)):
                    run.note(remark)
            run.fact(**{f"{names_of(source)[0]}_seconds": round(time.monotonic() - started, 2)})
        label_fetcher = fetcher(run, raw / LABELS, 0.0)
        labels = {source.name: label_fetcher.fetch(source, None)[source.name][1] for source in download.labels}
        counts = {name: asdict(tally) for name, tally in tallies.items()}
        check_validation(counts, download.val_fraction)
        write_manifest(raw, kind="raw", version=1, counts=counts, sources=provenance, labels=labels, **run.codes())
        started = time.monotonic()
        if needs_docstrings and not pairs:
            document_fetcher.python(None, pairs)
        left_out: dict[str, Counter[str]] = {source.name: Counter() for source in instruct.sources}
        conversations = {
            source.name: make_conversations(run, source, instruct, battery, pairs, left_out[source.name])
            for source in instruct.sources
        }
        own = (row for name in instruct.own.get("own", ()) for row in conversations[name])
        items = not_taught(battery_items(battery), own, run.note)
        categories = dict(sorted(Counter(item.category for item in items).items()))
        compared = check_held_out(conversations, items)
        write_rows(held_out / "items.jsonl", items)
        if searched:  # read wherever items.jsonl is searched for
            write_rows(held_out / BENCHMARKS, searched)
        write_manifest(held_out, kind="battery", version=1, counts=categories)
        for name, rows in conversations.items():
            write_rows(chats / f"{name}.jsonl", rows)
        chat_counts = {name: messages.counts(rows, left_out[name]) for name, rows in conversations.items()}
        write_manifest(chats, kind="instruct", version=1, counts=chat_counts, **instruct.own)
        run.fact(instruct_seconds=round(time.monotonic() - started, 2))
    run.metrics(
        {
            "documents": sum(tally.documents for tally in tallies.values()),
            "bytes": sum(tally.bytes for tally in tallies.values()),
            "sources": counts,
            "conversations": sum(count["rows"] for count in chat_counts.values()),
            "instruct": chat_counts,
            "battery": categories,
            "questions_compared_with_battery": compared,
        }
    )


def open_sources(run: Run, download: DownloadParams, instruct: InstructParams) -> None:
    """Nothing is fetched before every source has been opened, and all stages of the data path have room."""
    here = Host.here(run.root, machine().workers, machine().executor)
    look = fetcher(run, Path(), download.val_fraction).probe
    with run.progress(None, "opening the sources", "sources") as bar:
        check_sources(download, instruct, look, here, note=run.note, tick=bar.update, stop=run.stop_requested)


def fetcher(run: Run, raw: Path, val_fraction: float) -> Fetcher:
    def progress_folder(name: str, module: str, inputs: Facts) -> Slot:
        slot = run.sub_slot(name, module, inputs, {})
        run.fact(**{f"slot_{slot.fingerprint}": slot.fingerprint})  # each source of a type has its own slot
        return slot

    return Fetcher(raw, val_fraction, run.progress, run.stop_requested, progress_folder, run.fact, run.map_shards)


def make_conversations(
    run: Run,
    source: InstructSource,
    instruct: InstructParams,
    battery: BatteryParams,
    pairs: list[docstrings.Pair],
    left_out: Counter[str],
) -> list[Conversation]:
    if isinstance(source, ExercisesSource):
        conversations = training_conversations(source, instruct.seed, instruct.val_fraction, battery)
    elif isinstance(source, DocstringsSource):
        conversations = docstrings.conversations(source, pairs, instruct.val_fraction)
    elif isinstance(source, IdentitySource):
        download = run.params("download", DownloadParams)
        conversations = identity.conversations(source, download.sources, instruct, battery.seed)
    else:
        with run.progress(None, source.name, "conversations") as bar:
            rows = messages.conversations(source, instruct.val_fraction, bar.update, lambda why: left_out.update([why]))
            conversations = list(until_stopped(run, rows))
        for remark in untaught(source, conversations):
            run.note(remark)
    if len(conversations) < (minimum := getattr(source, "min_rows", 1)):
        what = f"source '{source.name}' gave {len(conversations):,} conversations, its minimum is {minimum:,}"
        raise GateError("source size", what, where="instruct.sources", fix="find out why, or lower its min_rows")
    for conversation in conversations:
        check_messages(conversation.messages, f"{source.name} conversation {conversation.key}")
    return conversations


def until_stopped(run: Run, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
    for conversation in conversations:
        if run.stop_requested():
            raise Interrupted("stopped; downloaded documents are kept, conversations are read again")
        yield conversation


if __name__ == "__main__":
    stage_main("download", run)

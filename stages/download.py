"""Fetch every document source, make the instruction data, and set the battery's questions aside."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from athanor.artifacts import new_dir, write_manifest
from athanor.corpus.conversations import Conversation, check_messages, write_rows
from athanor.corpus.exercises.build import battery_items, training_conversations
from athanor.corpus.instruct import docstrings, identity, leaks, messages
from athanor.corpus.sources import files, huggingface, python, rows, stdlib
from athanor.corpus.sources.collect import Tally, write_source
from athanor.errors import GateError
from athanor.params.battery import BatteryParams
from athanor.params.download import DocumentSource, DownloadParams, FilesSource, HuggingFaceSource, PythonSource
from athanor.params.instruct import DocstringsSource, ExercisesSource, IdentitySource, InstructParams, InstructSource
from athanor.pipeline.closure import code_digest
from athanor.pipeline.run import Run, stage_main
from athanor.pipeline.slots import Slot

HUB_MODULE = "athanor.corpus.sources.huggingface"
Facts = dict[str, Any]
Fetched = dict[str, tuple[Tally, Facts]]


def run(run: Run) -> None:
    download, instruct = run.params("download", DownloadParams), run.params("instruct", InstructParams)
    battery = run.params("battery", BatteryParams)
    with new_dir("data/raw") as raw, new_dir("data/instruct") as chats, new_dir("data/battery") as held_out:
        tallies: dict[str, Tally] = {}
        provenance: dict[str, Facts] = {}
        # Filled by the first pass over the standard library, so that it is parsed once.
        pairs: list[docstrings.Pair] = []
        wanted = any(isinstance(source, DocstringsSource) for source in instruct.sources)
        for source in download.sources:
            started = time.monotonic()
            if isinstance(source, PythonSource):
                fetched = fetch_python(run, source, download, raw, pairs if wanted and not pairs else None)
            elif isinstance(source, FilesSource):
                fetched = fetch_files(run, source, download, raw)
            else:
                fetched = fetch_hub(run, source, download, raw)
            tallies |= {name: tally for name, (tally, _) in fetched.items()}
            provenance |= {name: facts for name, (_, facts) in fetched.items()}
            run.fact(**{f"{source.names[0]}_seconds": round(time.monotonic() - started, 2)})
        counts = {name: asdict(tally) for name, tally in tallies.items()}
        write_manifest(raw, kind="raw", version=1, counts=counts, sources=provenance)

        started = time.monotonic()
        if wanted and not pairs:
            fetch_python(run, None, download, raw, pairs)
        items = battery_items(battery)
        categories = dict(sorted(Counter(item.category for item in items).items()))
        conversations = {source.name: converse(run, source, instruct, battery, pairs) for source in instruct.sources}
        compared = leaks.check(conversations, items)
        write_rows(held_out / "items.jsonl", items)
        write_manifest(held_out, kind="battery", version=1, counts=categories)
        for name, rows_ in conversations.items():
            write_rows(chats / f"{name}.jsonl", rows_)
        chat_counts = {name: chat_count(rows_) for name, rows_ in conversations.items()}
        write_manifest(chats, kind="instruct", version=1, counts=chat_counts)
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


def fetch_python(
    run: Run, source: PythonSource | None, download: DownloadParams, raw: Path, pairs: list[docstrings.Pair] | None
) -> Fetched:
    base = stdlib.root()
    with run.progress(python.total_bytes(base), "standard library", "B") as bar:
        library = python.read(source, download.val_fraction, base, tick=bar.update, visit=docstrings.collector(pairs))
    if pairs is not None:
        pairs.extend(docstrings.topic_pairs(stdlib.topics(base)))
    both = ((source.prose_name, library.prose), (source.code_name, library.code)) if source else ()
    return {name: (write(raw, name, documents, source), library.provenance) for name, documents in both}


def fetch_files(run: Run, source: FilesSource, download: DownloadParams, raw: Path) -> Fetched:
    found = rows.find(source.globs)
    facts = {"files": len(found), "files_sha256": rows.digest_of(found), "license": source.license}
    with run.progress(sum(path.stat().st_size for _, path in found), source.name, "B") as bar:
        documents = files.documents(source, found, download.val_fraction, bar.update)
        return {source.name: (write(raw, source.name, documents, source), facts)}


def fetch_hub(run: Run, source: HuggingFaceSource, download: DownloadParams, raw: Path) -> Fetched:
    local = huggingface.local_digest(source.dataset)
    # Not run.slot(): that one ends with any change to this stage's code, and days of download with it.
    unchanging = {"min_documents", "min_bytes", "checkpoint_documents"}
    inputs = {key: value for key, value in asdict(source).items() if key not in unchanging}
    inputs |= {"val_fraction": download.val_fraction, "local": local, "code": code_digest(run.root, HUB_MODULE)}
    with Slot(run.anchor / ".athanor" / "slots" / run.name, inputs) as slot:
        with run.progress(source.max_bytes, source.name, "B") as bar:
            read = huggingface.fetch(source, slot.path, download.val_fraction, tick=bar.update, stop=run.stop_requested)
        slot.mark_done()
        tally = write(raw, source.name, huggingface.documents(slot.path), source)
    where = {"local_sha256": local} if local else {"dataset": source.dataset, "revision": source.revision}
    return {source.name: (tally, {**where, "license": source.license, "rows_read": read["rows"]})}


def write(raw: Path, name: str, documents: Any, source: DocumentSource) -> Tally:
    least = {"min_documents": source.min_documents, "min_bytes": source.min_bytes}
    return write_source(raw / f"{name}.parquet", documents, min_chars=source.min_chars, **least)


def converse(
    run: Run, source: InstructSource, instruct: InstructParams, battery: BatteryParams, pairs: list[docstrings.Pair]
) -> list[Conversation]:
    if isinstance(source, ExercisesSource):
        made = training_conversations(source, instruct.seed, instruct.val_fraction, battery)
    elif isinstance(source, DocstringsSource):
        made = docstrings.conversations(source, pairs, instruct.val_fraction)
    elif isinstance(source, IdentitySource):
        made = identity.conversations(source, instruct.seed, instruct.val_fraction)
    else:
        with run.progress(None, source.name, "conversations") as bar:
            made = list(messages.conversations(source, instruct.val_fraction, bar.update))
    least = getattr(source, "min_rows", 1)
    if len(made) < least:
        what = f"source '{source.name}' gave {len(made):,} conversations, its minimum is {least:,}"
        raise GateError("source size", what, where="instruct.sources", fix="find out why, or lower its min_rows")
    for conversation in made:
        check_messages(conversation.messages, f"{source.name} conversation {conversation.key}")
    return made


def chat_count(conversations: list[Conversation]) -> Facts:
    splits = Counter(conversation.split for conversation in conversations)
    chars = sum(len(message.content) for conversation in conversations for message in conversation.messages)
    licenses = sorted({conversation.license for conversation in conversations})
    sizes = {"rows": len(conversations), "train": splits["train"], "val": splits["val"], "chars": chars}
    return {**sizes, "licenses": licenses}


if __name__ == "__main__":
    stage_main("download", run)

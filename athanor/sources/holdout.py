"""Hold something out where chance holds next to nothing out.

The split of a document follows the hash of its content, so a handful of
documents may all fall on the side of training. What is held out then is what
the hash puts nearest to the other side: it stays there when documents are added.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.sources.instruct_params import MessagesSource
from athanor.text.conversations import Conversation, Item
from athanor.text.documents import NEIGHBOURHOOD, Document, hash64, read_documents, split_of, write_shards
from athanor.text.questions import Taught, last_pair

DRAWN = "generated"  # the origin of items that nobody wrote
ENOUGH = 2  # documents: one alone gives no standard error
FEW = 1000  # conversations, of which their author knows each


def group_of(document: Document) -> str:
    """What is on one side of the split with the document: its neighbourhood in a long text, or the document alone."""
    return str(document.meta.get(NEIGHBOURHOOD, document.id))


def nearest(documents: Iterable[Document], wanted: int) -> set[str]:
    """Groups of training documents, these nearest to validation, that have together `wanted` documents.

    Half of all groups stay, so of a single one nothing is taken.
    """
    count = Counter((document.split, group_of(document)) for document in documents)
    groups = {group: documents for (split, group), documents in count.items() if split == "train"}
    chosen, held_out, most = set[str](), 0, len(count) // 2 - (len(count) - len(groups))
    for group in sorted(groups, key=hash64)[: max(most, 0)]:
        if held_out < wanted:
            chosen.add(group)
            held_out += groups[group]
    return chosen


def expected(documents: Iterable[Document], val_fraction: float) -> int:
    """The bytes of a source's documents that `download` will hold out."""
    divided = [replace(document, split=split_of(group_of(document), val_fraction)) for document in documents]
    moved = nearest(divided, ENOUGH - sum(each.split == "val" for each in divided))
    return sum(len(each.text.encode()) for each in divided if each.split == "val" or group_of(each) in moved)


def hold_out(folder: Path, wanted: int) -> list[Document]:
    """Move the nearest groups of a source's training documents to validation; returns the documents that moved."""
    paths = sorted(folder.glob("*.parquet"))
    chosen = nearest((document for path in paths for document in read_documents(path)), wanted)
    if not chosen:
        return []
    moved: list[Document] = []

    def divided() -> Iterator[Document]:
        for document in (document for path in paths for document in read_documents(path)):
            if document.split == "train" and group_of(document) in chosen:
                document = replace(document, split="val")
                moved.append(document)
            yield document

    new = folder.with_name(f"{folder.name}.divided")
    write_shards(new, divided())
    shutil.rmtree(folder)
    new.rename(folder)
    return moved


def check_validation(counts: Mapping[str, Facts], val_fraction: float) -> None:
    """InputError when no source has a document for validation: a later stage would find it minutes later."""
    if any(count["val"]["documents"] for count in counts.values()):
        return
    if not val_fraction:
        raise InputError("nothing is held out", where="download.val_fraction", fix="raise it, for example to 0.04")
    documents, size = (sum(count[unit] for count in counts.values()) for unit in ("documents", "bytes"))
    raise InputError(
        f"nothing can be held out for validation: {documents:,} documents of {size:,} bytes are one short text"
        " (of equal texts one counts)",
        where="download.sources",
        fix="bring more text, a hundred kilobytes are a start; or keep the standard library as a source beside it",
    )


def untaught(source: MessagesSource, conversations: Sequence[Conversation]) -> Iterator[str]:
    """A line about what validation takes from a few conversations of one's own: each of them would be missed."""
    held_out = sum(conversation.split == "val" for conversation in conversations)
    if source.files is not None and held_out and len(conversations) < FEW:
        yield (
            f"{source.name}: {held_out:,} of {len(conversations):,} conversations are held out to validate on"
            f" (instruct.val_fraction) and not taught; athanor sft peek --split val --source {source.name} shows them"
        )


def not_taught(items: Sequence[Item], conversations: Iterable[Conversation], note: Callable[[str], None]) -> list[Item]:
    """Without the drawn items that these conversations of one's own ask: what a person teaches is not held out."""
    rows = list(conversations)
    asked = {message.content for row in rows for message in row.messages if message.role == "user"}
    taught = Taught((*pair, 1) for pair in map(last_pair, (row.messages for row in rows)) if pair)

    def is_taught(item: Item) -> bool:
        text = item.prompt[-1].content
        # Whether another question about the same is taught shows by the answer.
        return text in asked or taught.asks(text) or any(taught.contradicts(text, said) for said in item.accepted)

    left = [item for item in items if item.origin != DRAWN or not is_taught(item)]
    if count := len(items) - len(left):
        note(f"{count} questions of the battery are taught by your own conversations, and not asked any more")
    return left


def remarks(name: str, facts: Facts, held_out: float) -> Iterator[str]:
    """What a person should know of how a source was read, from its provenance and the share of it that is held out."""
    if "unreadable" in facts:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in facts["unreadable"].items())
        yield f"{name}: files and rows left out, because they cannot be read: {reasons}"
    if moved := facts.get("moved_to_validation"):
        yield (
            f"{name}: chance held out fewer than {ENOUGH} of so few documents; the nearest {moved} are held out, too:"
            f" {held_out:.0%} of the text in all"
        )

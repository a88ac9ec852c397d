"""What is scored: held-out documents or conversations from a file, the same ones every time, with their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from athanor.base.artifacts import digest
from athanor.base.errors import InputError
from athanor.export.perplexity import Window
from athanor.model.validation import spans
from athanor.text.conversations import Message
from athanor.tokenizer.chat import render
from athanor.tokenizer.tokenizer import SPACE_MARK, Tokenizer

DOCUMENTS, CONVERSATIONS = "documents", "conversations"
FORMS = "a .txt, a .parquet of documents, JSON lines with `text` or `messages`, or a data/sft folder"
Packed = tuple[np.ndarray, np.ndarray]  # ids and mask of one conversation


@dataclass(frozen=True)
class EvalSet:
    """One of: texts, conversations, or conversations that are ids already (`packed`, for one tokenizer only)."""

    kind: str
    digest: str
    texts: tuple[str, ...] = ()
    conversations: tuple[tuple[Message, ...], ...] = ()
    packed: tuple[Packed, ...] = ()

    @property
    def text(self) -> str:
        """All documents as the one text that is cut into chunks, less a newline at its end."""
        return "\n\n".join(self.texts).removesuffix("\n")


def load_set(path: str | Path, max_bytes: int, max_conversations: int) -> EvalSet:
    """Documents in an order drawn by their content until `max_bytes` are reached, or conversations drawn alike.

    Documents with U+2581 are left out: llama.cpp reads it as a space.
    """
    path = Path(path)
    if path.is_dir():
        return _packed(path, max_conversations)
    if not path.is_file():
        raise InputError("file not found", where=str(path), fix=f"--set: {FORMS}")
    if path.suffix == ".parquet":
        from athanor.text.documents import read_documents

        return _documents((document.text for document in read_documents(path)), max_bytes, path)
    if path.suffix in (".jsonl", ".json"):
        rows = list(_rows(path))
        if rows and all("messages" in row for row in rows):
            return _conversations(rows, max_conversations, path)
        if rows and all(isinstance(row.get("text"), str) for row in rows):
            return _documents((row["text"] for row in rows), max_bytes, path)
        raise InputError("neither all rows have `text` nor all have `messages`", where=str(path), fix=f"--set: {FORMS}")
    try:
        return _documents([path.read_bytes().decode()], max_bytes, path)
    except UnicodeDecodeError as error:
        raise InputError(f"no UTF-8 text ({error.reason})", where=str(path), fix=f"--set: {FORMS}") from None


def conversation_ids(source: EvalSet, tokenizer: Tokenizer) -> list[Packed]:
    """Every conversation as ids and mask, by the one chat template."""
    rendered = [render(tokenizer, messages) for messages in source.conversations]
    return [*source.packed, *((np.array(ids), np.array(mask)) for ids, mask in rendered)]


def document_rows(source: EvalSet, tokenizer: Tokenizer) -> list[Packed]:
    """The ids and mask of each document, with BOS and EOS; all but the first id are targets."""
    rows = [np.array([tokenizer.bos, *ids, tokenizer.eos]) for ids in tokenizer.encode_batch(source.texts)]
    return [(ids, np.ones(len(ids), dtype=np.int64)) for ids in rows]


def row_windows(rows: Sequence[Packed], context_tokens: int) -> list[Window]:
    """Windows over sequences of any length; each masked target counts once, with half a context before it or more."""
    windows = []
    for ids, mask in rows:
        for start, end, first in spans(len(ids) - 1, context_tokens):
            targets = np.arange(first + 1, end + 1)
            targets = targets[np.asarray(mask)[targets] != 0]
            if len(targets):
                windows.append(Window(np.asarray(ids[start : end + 1], dtype=np.int64), targets - start))
    if not windows:
        raise InputError("nothing to score", where="evaluation set", fix="give it documents or supervised answers")
    return windows


def _documents(texts: Iterable[str], max_bytes: int, path: Path) -> EvalSet:
    ordered = sorted({text for text in texts if text and SPACE_MARK not in text}, key=_content_key)
    excerpts: list[str] = []
    bytes_left = max_bytes
    for text in ordered:
        excerpt = text.encode()[:bytes_left].decode("utf-8", errors="ignore")
        if excerpt:
            excerpts.append(excerpt)
        bytes_left -= len(excerpt.encode())
        if bytes_left <= 0:
            break
    if not excerpts:
        raise InputError("no text in it that can be scored", where=str(path), fix=f"--set: {FORMS}")
    return EvalSet(DOCUMENTS, digest({"documents": excerpts}), texts=tuple(excerpts))


def _conversations(rows: list[dict], limit: int, path: Path) -> EvalSet:
    try:
        distinct = {tuple(Message(m["role"], m["content"]) for m in row["messages"]) for row in rows}
    except (TypeError, KeyError) as error:
        raise InputError(f"a row is no conversation ({error!r})", where=str(path), fix="use role and content") from None
    chosen = sorted(distinct, key=lambda chat: _content_key(json.dumps([[m.role, m.content] for m in chat])))[:limit]
    as_lists = [[[m.role, m.content] for m in chat] for chat in chosen]
    return EvalSet(CONVERSATIONS, digest({"conversations": as_lists}), conversations=tuple(chosen))


def _packed(folder: Path, limit: int) -> EvalSet:
    from athanor.data.rows import PackedRows

    rows = PackedRows(folder, "val")
    chosen = sorted(
        range(rows.conversation_count), key=lambda n: _content_key(rows.conversation(n)[0].tobytes().hex())
    )[:limit]
    packed = tuple((ids.astype(np.int64), mask.astype(np.int64)) for ids, mask in map(rows.conversation, chosen))
    as_lists = [[ids.tolist(), mask.tolist()] for ids, mask in packed]
    return EvalSet(CONVERSATIONS, digest({"packed": as_lists}), packed=packed)


def _rows(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as file:  # splitlines() would also cut at U+2028 inside a text
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"not valid JSON ({error})", where=f"{path}:{number}") from None
            if not isinstance(row, dict):
                raise InputError("not a JSON object", where=f"{path}:{number}")
            yield row


def _content_key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

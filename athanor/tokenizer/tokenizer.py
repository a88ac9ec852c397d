"""The tokenizer: text to ids and back, byte for byte, with control ids that no text can produce.

SentencePiece BPE carries every string except U+2581, which it uses as its own
mark for a space; `encode` writes that character as three byte tokens instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece as spm

from athanor.base.artifacts import read_manifest, sha256_bytes
from athanor.base.errors import InputError

MODEL_FILE = "tokenizer.model"
FACTS_FILE = "tokenizer.json"
BYTES_FILE = "token_bytes.npy"
KIND, VERSION = "tokenizer", 1

# Names that are on none of llama.cpp's built-in lists: a listed name (`</s>`,
# `<|end|>`, ...) is retyped when a GGUF is loaded, and its text then tokenises differently there.
PAD, UNK, BOS, EOS = "<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>"
ROLE_PIECES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
STOP = "<|stop|>"
CONTROL_PIECES = (PAD, UNK, BOS, EOS, *ROLE_PIECES.values(), STOP)
NEWLINE, TAB = "\n", "\t"

SPACE_MARK = "\u2581"
# A string of many megabytes is slow and hungry in one call, so long texts are
# cut where no piece can reach across: beside a newline, tab or digit, or before the first space of a run.
CHUNK_CHARS = 1 << 15
THREADED_TEXTS = 64  # fewer are not worth threads
_CUT = re.compile(r"(?<=[\n\t0-9])|(?=[\n\t0-9])|(?<=[^ ])(?= )")


class Tokenizer:
    """Encoder and decoder around one SentencePiece model.

    `digest` is the SHA-256 of the model's bytes: what shards, checkpoints and
    exports store and compare. `token_bytes` is int32 [vocab]: how many UTF-8
    bytes of text each id stands for, 0 for control ids.
    """

    def __init__(self, model: bytes, where: str = "tokenizer model") -> None:
        self.model_bytes = model
        self.digest = sha256_bytes(model)
        try:
            self.processor = spm.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise InputError(f"not a SentencePiece model ({error})", where=where) from None
        self.vocab_size: int = self.processor.get_piece_size()
        ids = {piece: self.processor.piece_to_id(piece) for piece in CONTROL_PIECES}
        wrong = [piece for piece, i in ids.items() if self.processor.id_to_piece(i) != piece]
        if wrong:
            raise InputError(f"no control pieces {', '.join(wrong)}", where=where, fix="dvc repro train-tokenizer")
        self.control_ids: dict[str, int] = ids
        self.pad, self.unk, self.bos, self.eos = ids[PAD], ids[UNK], ids[BOS], ids[EOS]
        self.system, self.user, self.assistant = (ids[piece] for piece in ROLE_PIECES.values())
        self.stop = ids[STOP]
        self._pieces = [self._bytes_of(i) for i in range(self.vocab_size)]
        self.token_bytes = np.array([len(piece) for piece in self._pieces], dtype=np.int32)
        byte_ids = {self.processor.id_to_piece(i): i for i in range(self.vocab_size) if self.processor.is_byte(i)}
        if len(byte_ids) != 256:
            raise InputError("the model has no byte fallback", where=where, fix="dvc repro train-tokenizer")
        self._space_mark_ids = [byte_ids[f"<0x{value:02X}>"] for value in SPACE_MARK.encode()]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load from an artifact folder; InputError if it is missing or the model's bytes are not the manifest's."""
        path = Path(folder) / MODEL_FILE
        manifest = read_manifest(folder, KIND, VERSION)
        if not path.is_file():
            raise InputError("file not found", where=str(path), fix="dvc repro train-tokenizer")
        model = path.read_bytes()
        if sha256_bytes(model) != manifest["files"][MODEL_FILE]["sha256"]:
            raise InputError("changed since it was written", where=str(path), fix="dvc checkout --force")
        return cls(model, str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never a control id. Lone surrogates are an InputError."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Ids of each text."""
        return [ids.tolist() for ids in self.encode_arrays(texts, threads)]

    def encode_arrays(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Ids of each text as int32 arrays. `threads` changes the speed only."""
        chunks: list[bytes] = []
        # Per text, how to put it together again: the numbers of its parts, None where a U+2581 stood.
        layout: list[list[int | None]] = []
        for number, text in enumerate(texts):
            plan: list[int | None] = []
            for index, span in enumerate(text.split(SPACE_MARK) if SPACE_MARK in text else (text,)):
                if index:
                    plan.append(None)
                for chunk in cut(span):
                    plan.append(len(chunks))
                    chunks.append(_utf8(chunk, number))
            layout.append(plan)
        encoded = self._encode_chunks(chunks, threads)
        mark = np.array(self._space_mark_ids, dtype=np.int32)
        return [
            encoded[plan[0]]
            if len(plan) == 1 and plan[0] is not None
            else np.concatenate([mark if chunk_number is None else encoded[chunk_number] for chunk_number in plan])
            for plan in layout
        ]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes that `ids` stand for; control ids are dropped."""
        return b"".join([self._pieces[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; control ids are dropped and bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _encode_chunks(self, chunks: list[bytes], threads: int) -> list[np.ndarray]:
        # A list call starts threads anew (100 µs), one call for each text costs 8 µs.
        if threads > 1 and len(chunks) > THREADED_TEXTS:
            return self.processor.encode(chunks, out_type="numpy", num_threads=threads)
        return [self.processor.encode(chunk, out_type="numpy") for chunk in chunks]

    def _bytes_of(self, i: int) -> bytes:
        piece = self.processor.id_to_piece(i)
        if self.processor.is_control(i) or self.processor.is_unknown(i):
            return b""
        if self.processor.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE_MARK, " ").encode()


def cut(text: str) -> list[str]:
    """Divide a long text where no learned piece can reach across; short texts come back whole.

    A run without any such place stays in one part, however long.
    """
    if len(text) <= CHUNK_CHARS:
        return [text]
    chunks, start = [], 0
    while len(text) - start > CHUNK_CHARS:
        match = _CUT.search(text, start + CHUNK_CHARS)
        if match is None or match.start() >= len(text):
            break
        chunks.append(text[start : match.start()])
        start = match.start()
    return [*chunks, text[start:]]


def _utf8(text: str, number: int) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"a lone surrogate at character {error.start} is not valid Unicode",
            where=f"text {number}",
            fix="decode the source as UTF-8 with errors='replace'",
        ) from None

"""A SentencePiece BPE model as a list of pieces, checked for what other runtimes can reproduce.

transformers and llama.cpp re-implement SentencePiece; each handles only a part
of its settings, and what they do not handle they get wrong without an error.
So everything the exporters rely on is checked here first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import GateError, InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the numbers of SentencePiece and GGUF alike
SPACE = "\u2581"  # how SentencePiece writes a space inside a piece

# llama.cpp makes any of these an end-of-generation control token by its name alone, whatever the file says.
LLAMA_CPP_NAMES = frozenset(
    "<s> </s> <unk> <pad> <|end|> <|im_end|> <|eot_id|> <|eom_id|> <|endoftext|> <|end_of_text|> <|return|> <|call|> "
    "<|calls|> <|flush|> <end_of_turn> <end_of_utterance> <EOT> _<EOT> [EOT] <turn|>".split()
)


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int

    @property
    def plain(self) -> str:
        """The text that the piece stands for, with real spaces."""
        return self.text.replace(SPACE, " ")


@dataclass(frozen=True)
class Vocabulary:
    """All pieces in id order, and the bytes of the model file they came from."""

    pieces: tuple[Piece, ...]
    proto: bytes

    def __len__(self) -> int:
        return len(self.pieces)

    def ids(self, type: int) -> list[int]:
        return [index for index, piece in enumerate(self.pieces) if piece.type == type]

    @property
    def unk(self) -> int:
        return self.ids(UNKNOWN)[0]

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read `tokenizer.model`; InputError if unreadable, GateError if it cannot be exported faithfully."""
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        path = Path(path)
        model = sentencepiece_model_pb2.ModelProto()
        try:
            data = path.read_bytes()
            model.ParseFromString(data)
        except OSError as error:
            raise InputError(f"cannot be read ({error})", where=str(path), fix="dvc repro train-tokenizer") from None
        except DecodeError:
            raise InputError("not a SentencePiece model", where=str(path), fix="dvc repro train-tokenizer") from None
        pieces = tuple(Piece(piece.piece, piece.score, piece.type) for piece in model.pieces)
        vocabulary = cls(pieces, data)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        _require(trainer.model_type == trainer.BPE, "it is not a BPE model", path)
        _require(trainer.byte_fallback, "it has no byte fallback", path)
        _require(not trainer.treat_whitespace_as_suffix, "it treats whitespace as a suffix", path)
        _require(not normalizer.add_dummy_prefix, "it adds a dummy prefix", path)
        _require(not normalizer.remove_extra_whitespaces, "it removes extra whitespace", path)
        _require(normalizer.escape_whitespaces, "it does not escape whitespace", path)
        _require(not normalizer.precompiled_charsmap, "it normalises characters", path)
        vocabulary._check(path)
        return vocabulary

    def _check(self, path: Path) -> None:
        texts = {piece.text for piece in self.pieces}
        _require(len(texts) == len(self.pieces), "two pieces have the same text", path)
        expected = {f"<0x{byte:02X}>" for byte in range(256)}
        actual = {self.pieces[i].text for i in self.ids(BYTE)}
        _require(actual == expected, "it lacks some of the 256 byte pieces", path)
        _require(len(self.ids(UNKNOWN)) == 1, "it must have exactly one unknown piece", path)
        _require(not self.ids(UNUSED), "it has unused pieces", path)
        for piece in self.pieces:
            if piece.type not in (CONTROL, UNKNOWN, BYTE):
                continue
            listed = piece.type != BYTE and piece.text in LLAMA_CPP_NAMES
            _require(not listed, f"llama.cpp gives '{piece.text}' a meaning of its own", path)
            # llama.cpp merges any two symbols whose joined text is in the vocabulary, control pieces included:
            # with "</s" learned from HTML, the literal text "</s>" became the real end token.
            for cut in range(1, len(piece.text)):
                left, right = piece.text[:cut], piece.text[cut:]
                reachable = all(len(half) == 1 or half in texts for half in (left, right))
                _require(not reachable, f"plain text can assemble '{piece.text}' from '{left}' and '{right}'", path)

    def merges(self) -> list[tuple[str, str]]:
        """BPE merges, best first: every split of a normal piece into two normal pieces.

        SentencePiece joins the neighbours whose joined piece scores highest; a list of
        pairs sorted by that score makes the same choices.
        """
        index = {piece.text: number for number, piece in enumerate(self.pieces) if piece.type == NORMAL}
        candidates = []
        for text, number in index.items():
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in index and right in index:
                    candidates.append((-self.pieces[number].score, number, index[left], index[right], left, right))
        return [(left, right) for *_, left, right in sorted(candidates)]


def _require(condition: bool, problem: str, path: Path) -> None:
    if not condition:
        fix = "train it with the train-tokenizer stage of this version"
        raise GateError("exportable tokenizer", problem, where=str(path), fix=fix)

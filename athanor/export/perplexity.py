"""Perplexity of one model in one runtime: torch, transformers or llama.cpp.

All of them score windows of ids with marked targets, so a text is cut in one place, by the rules of llama.cpp's program
llama-perplexity (tools/perplexity/perplexity.cpp): the text loses one newline at its end and is encoded without control
symbols, with BOS in front if the model wants one. The ids are cut into chunks of a context each and the rest is dropped;
the first id of every chunk becomes BOS. Targets are the second half of a chunk. The figure is exp(mean nats) over all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from athanor.base.errors import GateError, InputError
from athanor.export.gguf_reader import read_header
from athanor.export.llamacpp import asking
from athanor.model.loss import Targets, token_losses
from athanor.tokenizer.tokenizer import MODEL_FILE, SPACE_MARK, Tokenizer

if TYPE_CHECKING:
    from athanor.model.transformer import Transformer

BATCH_TOKENS = 4096
LOGIT_NUMBERS = 1 << 25  # in one batch, where a runtime gives those of every position
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of a GGUF file's tokens


class TooCoarse(GateError):
    """The rounding of a small type costs more than it may. The file is right, and others may do."""


@dataclass(frozen=True)
class Window:
    """ids: int64 [T]. targets: int64, the positions (1 or later) whose id is predicted from all ids before it."""

    ids: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Measured:
    """loss: nats per target. stderr: of the perplexity, targets taken as independent, as llama-perplexity prints it.

    bits_per_byte: over the bytes that the targets stand for; None where nobody can tell these.
    """

    loss: float
    perplexity: float
    stderr: float | None
    tokens: int
    windows: int
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class TextScore:
    """The figure of a text, the ids of its chunks and the nats of its targets."""

    measured: Measured
    ids: np.ndarray
    nats: np.ndarray


class Scorer(ABC):
    """A loaded model. `name` of the runtime and `dtype` of the stored weights go into the history.

    `context_tokens` that the model was made for; `bos` is None without one, `token_bytes` (int64 [vocab], UTF-8 bytes of
    each id) where ids do not tell their bytes; `exact`: computes in fp32 throughout.
    """

    name: str
    dtype: str
    context_tokens: int
    bos: int | None
    token_bytes: np.ndarray | None
    exact = True

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids of a text by the runtime's own tokenizer, control symbols taken as text, with BOS in front if it has one."""

    @abstractmethod
    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Nats (float64) of every target, window by window."""

    def text(self, text: str, context_tokens: int, chunks: int | None = None) -> TextScore:
        """Score a text as llama-perplexity does."""
        windows = chunk_windows(self.encode(text.removesuffix("\n")), context_tokens, self.bos, chunks)
        measured, nats = self.score(windows, self.token_bytes)
        return TextScore(measured, np.concatenate([window.ids for window in windows]), nats)

    def score(self, windows: Sequence[Window], token_bytes: np.ndarray | None) -> tuple[Measured, np.ndarray]:
        """The figure of some windows and the nats of all their targets."""
        nats_N = np.concatenate(self.nats(windows))
        return measured(nats_N, len(windows), scored_bytes(windows, token_bytes)), nats_N


def chunk_windows(
    ids: Sequence[int] | np.ndarray, context_tokens: int, bos: int | None, chunks: int | None = None
) -> list[Window]:
    """The chunks of a text's ids; `bos` is None for a model without one. `chunks` limits their number.

    InputError below two contexts, where llama-perplexity gives no figure.
    """
    if context_tokens < 4:
        raise InputError(
            f"a context of {context_tokens} tokens leaves nothing to score", where="context", fix="use 4 or more"
        )
    array = np.asarray(ids, dtype=np.int64)
    if len(array) < 2 * context_tokens:
        raise InputError(
            f"{len(array)} tokens, and two contexts of {context_tokens} are needed",
            where="evaluation set",
            fix="score a longer text, or use a smaller context",
        )
    count = len(array) // context_tokens
    rows = array[: count * context_tokens].reshape(count, context_tokens).copy()
    if bos is not None:
        rows[:, 0] = bos
    targets = np.arange(context_tokens // 2 + 1, context_tokens)
    return [Window(row, targets) for row in rows[:chunks]]


def scored_bytes(windows: Sequence[Window], token_bytes: np.ndarray | None) -> int | None:
    """UTF-8 bytes that the targets stand for: those of the scored halves, which the text's average does not give."""
    if token_bytes is None:
        return None
    return sum(int(token_bytes[window.ids[window.targets]].sum()) for window in windows)


def measured(nats_N: np.ndarray, windows: int, size: int | None) -> Measured:
    """The figures for the nats of every target; `size` is the bytes they stand for. GateError if one is no number."""
    count = len(nats_N)
    if not count:
        raise InputError("no target to score", where="evaluation set", fix="give it more text")
    if not np.isfinite(nats_N).all():
        raise GateError("perplexity", f"{int((~np.isfinite(nats_N)).sum())} of {count} targets have no finite loss")
    loss = math.fsum(nats_N) / count
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if not math.isfinite(perplexity):
        raise GateError("perplexity", f"a loss of {loss:.6g} nats per token has no finite perplexity")
    variance = max(0.0, math.fsum(nats_N**2) / count - loss**2)
    stderr = perplexity * math.sqrt(variance / (count - 1)) if count > 1 else None
    bits = loss * count / math.log(2) / size if size else None
    return Measured(loss, perplexity, stderr, count, windows, bits)


class Ours(Scorer):
    """Our own model in torch."""

    name = "torch"

    def __init__(self, model: Transformer, tokenizer: Tokenizer, dtype: str = "float32") -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.context_tokens, self.bos, self.token_bytes = (
            model.config.context_tokens,
            tokenizer.bos,
            tokenizer.token_bytes,
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.tokenizer.bos, *self.tokenizer.encode(text)], dtype=np.int64)

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        device = self.model.head_weight.device
        return torch_nats(windows, lambda batch: token_losses(self.model, batch.to(device)), BATCH_TOKENS)


def load_directory(folder: str | Path, gate: str = "transformers") -> tuple[Any, Any]:
    """A directory's model, computing in fp32, and its tokenizer, by transformers; GateError for other weights than named."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"transformers cannot load it ({reason})", where=str(folder), fix="dvc repro export") from None
    # transformers invents missing weights and drops unknown ones; all it does is log.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            raise GateError(gate, f"{kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[:3]}")
    return model.eval(), tokenizer


class HuggingFace(Scorer):
    """A directory in transformers, with its own tokenizer, computing in fp32."""

    name = "transformers"

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.model, self.tokenizer = load_directory(folder)
        config = self.model.config
        self.dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        self.context_tokens = int(config.max_position_embeddings)
        first_ids = self.tokenizer.encode("a", split_special_tokens=True)[:1]
        self.bos = self.tokenizer.bos_token_id if first_ids == [self.tokenizer.bos_token_id] else None
        tokenizer_file = folder / MODEL_FILE
        self.token_bytes = (
            Tokenizer(tokenizer_file.read_bytes(), str(tokenizer_file)).token_bytes
            if tokenizer_file.is_file()
            else None
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, split_special_tokens=True), dtype=np.int64)

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        def score(batch: Targets) -> Tensor:
            # One document in each row, padded behind it: a causal model needs no mask.
            logits_NV = self.model(batch.ids_BT, attention_mask=torch.ones_like(batch.ids_BT)).logits.flatten(0, 1)
            return torch.nn.functional.cross_entropy(
                logits_NV.index_select(0, batch.where_N).float(), batch.next_N, reduction="none"
            )

        return torch_nats(windows, score, min(BATCH_TOKENS, LOGIT_NUMBERS // self.model.config.vocab_size))


@torch.inference_mode()
def torch_nats(windows: Sequence[Window], score: Callable[[Targets], Tensor], batch_tokens: int) -> list[np.ndarray]:
    """Nats of the targets of every window; windows of like length share a batch, padded on the right."""
    order = sorted((number for number, w in enumerate(windows) if len(w.targets)), key=lambda n: -len(windows[n].ids))
    nats = [np.zeros(0)] * len(windows)
    while order:
        width = len(windows[order[0]].ids) - 1
        group = order[: max(1, batch_tokens // width)]
        order = order[len(group) :]
        ids_BT = np.zeros((len(group), width), dtype=np.int64)
        for row, number in enumerate(group):
            ids = windows[number].ids
            ids_BT[row, : len(ids) - 1] = ids[:-1]
        positions = [row * width + windows[number].targets - 1 for row, number in enumerate(group)]
        next_ids = [windows[number].ids[windows[number].targets] for number in group]
        tensors = (torch.from_numpy(np.concatenate(array)) for array in (positions, next_ids))
        losses_N = score(Targets(torch.from_numpy(ids_BT), None, *tensors)).double().cpu().numpy()
        ends = np.cumsum([len(windows[number].targets) for number in group])
        for number, array in zip(group, np.split(losses_N, ends[:-1]), strict=True):
            nats[number] = array
    return nats


class LlamaCpp(Scorer):
    """A GGUF file in llama.cpp, with LoRAs added. exact: with an fp32 cache and no flash attention, else llama.cpp's own
    defaults."""

    name = "xllamacpp"

    def __init__(
        self, path: str | Path, *, exact: bool, threads: int, timeout_seconds: float, lora: Sequence[Path] = ()
    ) -> None:
        from gguf import LlamaFileType

        self.lora = lora
        self.path, self.exact, self.threads, self.timeout_seconds = Path(path), exact, threads, timeout_seconds
        self.header = header = read_header(path, arrays=True)
        try:
            model = header.get("tokenizer.ggml.model")
            tokens, file_type = header["tokenizer.ggml.tokens"], header.get("general.file_type")
            self.context_tokens = int(header[f"{header['general.architecture']}.context_length"])
            type_name = "unknown" if file_type is None else LlamaFileType(file_type).name
            self.dtype = type_name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
            with_bos = header.get("tokenizer.ggml.add_bos_token", model == "llama")
            self.bos = int(header.get("tokenizer.ggml.bos_token_id", 1)) if with_bos else None
            self.token_bytes = None
            if model == "llama":  # SentencePiece's
                types = header.get("tokenizer.ggml.token_type", [1] * len(tokens))
                self.token_bytes = np.array(
                    [_bytes(token, token_type) for token, token_type in zip(tokens, types, strict=True)]
                )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix="dvc repro export") from None

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._ask("tokens", [[text]])[0], dtype=np.int64)

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        calls = [[window.ids.tolist(), 0, window.targets.tolist()] for window in windows]
        return [-np.array([row[1] for row in rows], dtype=np.float64) for rows in self._ask("score", calls)]

    def _ask(self, method: str, calls: Sequence[Sequence[object]]) -> list:
        return asking.ask(
            self.path,
            {method: calls},
            context_tokens=self.context_tokens,
            exact=self.exact,
            threads=self.threads,
            timeout_seconds=self.timeout_seconds,
            lora=self.lora,
        )[method]


def _bytes(token: str, kind: int) -> int:
    if kind in (_CONTROL, _UNKNOWN):
        return 0
    if kind == _BYTE:
        return 1
    return len((token if kind == _USER_DEFINED else token.replace(SPACE_MARK, " ")).encode())

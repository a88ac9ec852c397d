"""Who scores: one interface, and the two runtimes that compute in torch.

`Evaluator` is what our own network, transformers and llama.cpp have in
common. All but the llama-perplexity program score ids, so the cutting of
chunks exists once (windows.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from athanor.errors import GateError, InputError
from athanor.evaluation.perplexity.windows import Measured, Window, chunk_windows, plain, scored_bytes, summary
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer
from athanor.training.loss import Targets, token_losses

if TYPE_CHECKING:
    from athanor.model.transformer import Transformer

BATCH_TOKENS = 4096
LOGIT_NUMBERS = 1 << 25  # in one batch, where a runtime gives those of every position


@dataclass(frozen=True)
class TextScore:
    """The figure of a text, the ids of its chunks and the nats of its targets (None where nobody tells them).

    A target whose nats alone are not known has NaN. resolution: by how much, relative to it, the perplexity may be off
    because it came as printed digits; a bound of the instrument, 0 where the figure came whole.
    """

    measured: Measured
    ids: np.ndarray | None
    nats: np.ndarray | None
    facts: dict[str, Any] = field(default_factory=dict)
    resolution: float = 0.0


class Evaluator(ABC):
    """A loaded model in one runtime. `name` goes into the history; `dtype` is that of the stored weights."""

    name: str
    dtype: str
    context_tokens: int  # that the model was made for

    @abstractmethod
    def text(self, text: str, context_tokens: int, chunks: int | None = None) -> TextScore:
        """Score a text as llama-perplexity does."""

    @abstractmethod
    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Nats (float64) of every target, window by window; InputError where the runtime takes no ids."""


class ByIds(Evaluator):
    """A runtime that scores ids. `bos` is None without one; `token_bytes` None where ids do not tell their bytes."""

    bos: int | None
    token_bytes: np.ndarray | None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids of a text by the runtime's own tokenizer, control symbols taken as text, with BOS in front if it has one."""

    def text(self, text: str, context_tokens: int, chunks: int | None = None) -> TextScore:
        if context_tokens > self.context_tokens:
            raise InputError(
                f"the model was made for contexts of {self.context_tokens} tokens, not {context_tokens}", where="context"
            )
        windows = chunk_windows(self.encode(plain(text)), context_tokens, self.bos, chunks)
        size = None if self.token_bytes is None else scored_bytes(windows, self.token_bytes)
        ids = np.concatenate([window.ids for window in windows])
        nats = self.nats(windows)
        return TextScore(summary(nats, len(windows), size), ids, np.concatenate(nats))


class Ours(ByIds):
    """Our own network."""

    name = "torch"

    def __init__(self, model: Transformer, tokenizer: Tokenizer, dtype: str = "float32") -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.context_tokens, self.bos, self.token_bytes = model.config.context_tokens, tokenizer.bos, tokenizer.token_bytes

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.tokenizer.bos, *self.tokenizer.encode(text)], dtype=np.int64)

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        device = self.model.head_weight.device
        return torch_nats(windows, lambda batch: token_losses(self.model, batch.to(device)), BATCH_TOKENS)


class HuggingFace(ByIds):
    """A directory in transformers, with its own tokenizer, computing in fp32."""

    name = "transformers"

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = Path(folder)
        try:
            self.model, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            said = " ".join(str(error).split())[:200]
            raise InputError(f"transformers cannot load it ({said})", where=str(folder), fix="dvc repro export") from None
        # transformers invents missing weights and drops unknown ones; all it does is log.
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if loading[kind]:
                raise GateError("transformers", f"{kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[:3]}")
        self.model.eval()
        config = self.model.config
        self.dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        self.context_tokens = int(config.max_position_embeddings)
        first = self.tokenizer.encode("a", split_special_tokens=True)[:1]
        self.bos = self.tokenizer.bos_token_id if first == [self.tokenizer.bos_token_id] else None
        own = folder / MODEL_FILE
        self.token_bytes = Tokenizer(own.read_bytes(), str(own)).token_bytes if own.is_file() else None

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
    found = [np.zeros(0)] * len(windows)
    while order:
        width = len(windows[order[0]].ids) - 1
        group = order[: max(1, batch_tokens // width)]
        order = order[len(group) :]
        ids_BT = np.zeros((len(group), width), dtype=np.int64)
        for row, number in enumerate(group):
            ids = windows[number].ids
            ids_BT[row, : len(ids) - 1] = ids[:-1]
        where = [row * width + windows[number].targets - 1 for row, number in enumerate(group)]
        following = [windows[number].ids[windows[number].targets] for number in group]
        parts = (torch.from_numpy(np.concatenate(part)) for part in (where, following))
        losses_N = score(Targets(torch.from_numpy(ids_BT), None, *parts)).double().cpu().numpy()
        ends = np.cumsum([len(windows[number].targets) for number in group])
        for number, part in zip(group, np.split(losses_N, ends[:-1]), strict=True):
            found[number] = part
    return found

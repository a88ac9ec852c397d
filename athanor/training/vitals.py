"""Early signs of a model that is about to fail, read from its weights and from one row of the batch.

They look at a twin that shares the weights, so hooks never touch the model
that trains (nor make its compiled blocks compile again), change nothing and
draw no random number. When they look is a matter of the step alone, so that
a run that was killed has the same readings at the same steps as one that was
not: after the last step, and before it so often that the tokens they look at
are at most one per cent of those trained on, without a backward pass.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from athanor.model.precision import autocast
from athanor.model.transformer import Transformer
from athanor.training.meter import Meter
from athanor.training.number_range import BlockRange, Frame, gradient_range

PROBE_TOKENS = 256
SHARE = 0.01  # of the tokens trained on
UNIT_STEPS = (
    10  # from one reading to the next it is a multiple of this, as to the next log point: both wait for the device
)
_SLICE_ROWS = 8
WIDE_EVERY = 4  # readings, for one of the blocks' ranges in a format that ends at 3e38: they cost a tenth more
FRAMES = 8  # readings of each block that are kept for a report


class Vitals:
    """Readings of one model:

    vitals.embedding_spread     99th percentile over median of the norms of the output matrix's rows of ids in the batch
    vitals.final_norm_gain      largest gain of the final norm, sign aside
    vitals.attention_logit_max  largest attention logit of any layer and head on the batch's first row
    vitals.residual_growth      root mean square of the residual stream behind the last block over that before the first
    vitals.update_ratio_max     largest change of a block's matrix in this step, over its norm
    vitals.largest              largest absolute value that a block computes on that row; `largest_block`: which, from 0
    vitals.gradient_tiny        largest share of zeros and subnormal numbers in a block's gradients; `gradient_tiny_block`

    `frames` holds the numbers of every block at the last readings. What a model does not let see (sharded weights,
    attention of another kernel) is left out.
    """

    def __init__(self, model: Transformer, meter: Meter, precision: str, batch_tokens: int, last: int = 0) -> None:
        self.model, self.meter, self.precision = model, meter, precision
        self.length = min(PROBE_TOKENS, model.config.context_tokens)
        self.every = UNIT_STEPS * math.ceil(self.length / (SHARE * batch_tokens * UNIT_STEPS))
        self.last = last
        self.frames: deque[Frame] = deque(maxlen=FRAMES)
        self._twin: Transformer | None = None
        self._before: tuple[int, list[Tensor]] | None = None

    def due(self, step: int) -> bool:
        """Whether there is a reading after this step."""
        return (step % self.every == 0 or step == self.last) and not hasattr(self.model.head_weight, "placements")

    def before(self, step: int) -> None:
        """Called before each step: keeps what the weights are, if there is a reading after it."""
        if self.due(step):
            with torch.no_grad():
                self._before = step, block_rows(self.model)

    def read(self, step: int, tokens_BS: np.ndarray, gradient_factor: float = 1.0) -> dict[str, float]:
        """A reading after `step` with its batch, if one is due; else nothing.

        `gradient_factor`: what gradients were multiplied with since backward made them.
        """
        if not self.due(step):
            return {}
        with self.meter.time("vitals"), torch.no_grad():
            looks = self.precision == "fp16" or step % (WIDE_EVERY * self.every) == 0 or step == self.last
            ranges = BlockRange(self._watched().model.layers if looks else (), self.precision)
            values = self._weights(step, tokens_BS) | self._forward(tokens_BS, ranges)
            gradients = gradient_range(self.model.model.layers, self.precision, gradient_factor) if looks else None
            blocks = [ranges.numbers(), gradients]
            seen = [numbers for numbers in blocks if numbers is not None]
            flat = [torch.stack([value.float() for value in values.values()]), *(each.T.flatten() for each in seen)]
            numbers = torch.cat(flat).tolist()
        told = dict(zip(values, numbers, strict=False))
        if len(seen) == len(blocks):
            count = len(seen[0])
            lists = [numbers[start : start + count] for start in range(len(values), len(numbers), count)]
            self.frames.append(Frame(step, *lists))
            told |= self.frames[-1].summary()
        return {f"vitals.{name}": number for name, number in told.items()}

    def _watched(self) -> Transformer:
        self._twin = self._twin or twin_of(self.model)
        return self._twin

    def _weights(self, step: int, tokens_BS: np.ndarray) -> dict[str, Tensor]:
        weight_VD = self.model.head_weight.detach()
        ids = torch.from_numpy(np.unique(tokens_BS)).to(weight_VD.device)
        norms = torch.linalg.vector_norm(weight_VD[ids], dim=-1).sort().values
        embedding_spread = norms[int(0.99 * (len(norms) - 1))] / norms[(len(norms) - 1) // 2]
        readings = {
            "embedding_spread": embedding_spread,
            "final_norm_gain": self.model.model.norm.weight.detach().abs().max(),
        }
        if self._before is not None and self._before[0] == step:
            slices = block_rows(self.model)
            change = torch.stack(torch._foreach_norm(torch._foreach_sub(slices, self._before[1])))
            readings["update_ratio_max"] = (change / torch.stack(torch._foreach_norm(slices))).max()
        self._before = None
        return readings

    def _forward(self, tokens_BS: np.ndarray, ranges: BlockRange) -> dict[str, Tensor]:
        length = min(self.length, tokens_BS.shape[1])
        device = self.model.head_weight.device
        ids_1T = torch.from_numpy(np.ascontiguousarray(tokens_BS[:1, :length])).to(device)
        with ranges, Logits() as logits, autocast(self.precision, device):
            growth = residual_growth(self._watched(), ids_1T)
        readings = {} if growth is None else {"residual_growth": growth}
        return readings | ({"attention_logit_max": torch.stack(logits.highest).max()} if logits.highest else {})


class Logits(TorchFunctionMode):
    """Notes the largest logit of every causal attention that runs inside, whatever module asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.highest: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k = args[0], args[1]
            groups = q.shape[1] // k.shape[1]
            scale = kwargs.get("scale") or q.shape[-1] ** -0.5
            logits = (q.unflatten(1, (k.shape[1], groups)) @ k.unsqueeze(2).transpose(-1, -2)).float() * scale
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            self.highest.append(logits.masked_fill_(later, -torch.inf).max())
        return func(*args, **kwargs)


def residual_growth(model: Transformer, ids_BT: Tensor) -> Tensor | None:
    """Root mean square of the residual stream behind the last block over that before the first; None if not seen."""
    depths: dict[str, Tensor] = {}
    hooks = [
        model.model.embed_tokens.register_forward_hook(lambda _m, _i, out: depths.__setitem__("first", rms(out))),
        model.model.norm.register_forward_pre_hook(lambda _m, given: depths.__setitem__("last", rms(given[0]))),
    ]
    try:
        model.hidden(ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return depths["last"] / depths["first"] if len(depths) == 2 else None


def rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()


def block_rows(model: Transformer) -> list[Tensor]:
    """Copies of the first rows of every matrix in the blocks; of a LoRA, as it acts together with what it is on."""
    if not isinstance(model, Transformer):
        return model.block_rows(_SLICE_ROWS)
    matrices = [weight.detach() for weight in model.model.layers.parameters() if weight.dim() == 2]
    return [weight[:_SLICE_ROWS].clone() for weight in matrices]


def twin_of(model: Transformer) -> Transformer:
    """Another module tree over the same memory, not compiled and without hooks.

    A foreign model is its own: it is never compiled, and hooks are taken off again.
    """
    if not isinstance(model, Transformer):
        return model
    with torch.device("meta"):
        twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict(), assign=True)
    for path, buffer in model.named_buffers():
        owner, _, name = path.rpartition(".")
        setattr(twin.get_submodule(owner), name, buffer)
    return twin

"""TRL's GRPOTrainer with a sampler that is fast where answers are short, and knows the chance of each token it drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from trl import GRPOTrainer

PARTS = 8  # of the rows of a pass


class PolicyTrainer(GRPOTrainer):
    """Measures how far sampler and trainer disagree, as TRL does for vLLM alone, and computes few pads."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """TRL's own in parts of rows of like length: it pads all to the longest, which may be many times the mean."""
        order, found = attention_mask.sum(1).argsort(), []
        for rows in order.chunk(PARTS):
            used = attention_mask[rows].any(0).nonzero()
            first, last = int(used[0]), int(used[-1]) + 1
            ids, mask, pads = input_ids[rows, first:last], attention_mask[rows, first:last], input_ids.size(1) - last
            part = super()._get_per_token_logps_and_entropies(model, ids, mask, logits_to_keep - pads, **options)
            found.append([pad(values, (0, pads)) for values in part if values is not None])
        tables = [torch.cat(values)[order.argsort()] for values in zip(*found, strict=True)]
        self.logps = tables[0].detach()
        return *tables, *[None] * (3 - len(tables))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        difference = (self.logps - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()]
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["sampling/sampling_logp_difference/mean"].append(difference.abs().mean().item())
        metrics["sampling/importance_sampling_ratio/min"].append(difference.exp().min().item())
        return loss


def rollout(prompts: Sequence[Sequence[dict[str, str]]], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    """Draw an answer to each prompt, as TRL's `rollout_func`; where it validates, the likeliest one.

    An answer that ended leaves the batch, so a long one does not cost as many steps for all.
    """
    model, training = trainer.model, trainer.model.training
    encoded = trainer.processing_class.apply_chat_template(
        list(prompts),
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    ).to(model.device)
    tokens, seen = encoded["input_ids"], encoded["attention_mask"]
    asked = [ids[mask.bool()].tolist() for ids, mask in zip(tokens, seen, strict=True)]
    answers: list[list[int]] = [[] for _ in asked]
    chances: list[list[float]] = [[] for _ in asked]
    cache, ends = DynamicCache(config=model.config), torch.tensor(trainer.eos_token_ids, device=model.device)
    rows = torch.arange(len(asked), device=model.device)
    model.eval()
    with torch.no_grad(), trainer.accelerator.autocast():
        for _ in range(trainer.max_completion_length):
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.size(1) :]
            context = {"attention_mask": seen, "position_ids": positions, "past_key_values": cache, "use_cache": True}
            logits = model(input_ids=tokens, logits_to_keep=1, **context).logits[:, -1]
            logp = (logits.float() / trainer.temperature).log_softmax(-1)
            tokens = logp.exp().multinomial(1) if training else logp.argmax(-1, keepdim=True)
            for row, token, chance in zip(rows.tolist(), tokens.tolist(), logp.gather(1, tokens).tolist(), strict=True):
                answers[row] += token
                chances[row] += chance
            going = ~torch.isin(tokens[:, 0], ends)
            if not going.any():
                break
            cache.batch_select_indices(going)
            rows, seen, tokens = rows[going], seen[going], tokens[going]
            seen = torch.cat([seen, torch.ones_like(tokens)], 1)
    model.train(training)
    return {"prompt_ids": asked, "completion_ids": answers, "logprobs": chances}

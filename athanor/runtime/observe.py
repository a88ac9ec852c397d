"""Things that watch a training run without touching it.

They import library code that no output depends on, so they live on the
infrastructure side: a change in generation must not re-train a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def sampler(tokenizer_folder: str | Path, prompts: Sequence[str], tokens: int = 48) -> Callable[[Any], list[str]]:
    """A function that continues each prompt greedily with the model it is given.

    Greedy on purpose: it draws no random number, so training goes on with the
    state it had.
    """
    import torch

    from athanor.decoding.generate import generate
    from athanor.decoding.sampling import Sampling
    from athanor.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    starts = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in prompts]

    def sample(model: Any) -> list[str]:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                done = generate(
                    model, starts, max_new_tokens=tokens, stop_ids=(tokenizer.eos,), sampling=Sampling(temperature=0.0)
                )
        finally:
            model.train(training)
        return [prompt + tokenizer.decode(answer.ids) for prompt, answer in zip(prompts, done, strict=True)]

    return sample

"""Ask a model every item of the battery, as a user would: chat template in, greedy answer out, scored exactly."""

from __future__ import annotations

from collections.abc import Sequence

from athanor.corpus.conversations import Item
from athanor.errors import InputError
from athanor.evaluation.generate import GREEDY, end_ids, generate
from athanor.evaluation.report import Answer, repeats
from athanor.evaluation.scoring import score_many
from athanor.model.transformer import Transformer
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer


def ask(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    *,
    max_new_tokens: int,
    batch_rows: int,
    workers: int,
    threads: int = 1,
) -> list[Answer]:
    """One answer per item, in the order of `items`. `workers` code answers run at a
    time, and `threads` batches are decoded side by side (see `generate`).

    Every control id ends an answer; only `<|stop|>` counts as having stopped.
    InputError if an item does not fit into the model's context.
    """
    prompts = [prompt_ids(tokenizer, item.prompt) for item in items]
    for item, prompt in zip(items, prompts, strict=True):
        if len(prompt) >= model.config.context_tokens:
            raise InputError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {model.config.context_tokens}",
                where=f"battery item {item.category}/{item.id}",
                fix="raise model.context_tokens, or leave the category out of the battery",
            )
    made = generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=end_ids(tokenizer),
        sampling=GREEDY,
        batch_rows=batch_rows,
        threads=threads,
    )
    texts = [tokenizer.decode(generation.ids) for generation in made]
    opening = (tokenizer.bos, tokenizer.system, tokenizer.user, tokenizer.assistant)
    return [
        Answer(
            item=item.id,
            category=item.category,
            model=name,
            text=text,
            tokens=len(generation.ids),
            stopped=generation.end == tokenizer.stop,
            fake_turn=generation.end in opening,
            repeats=repeats(generation.ids),
            correct=correct,
        )
        for item, generation, text, correct in zip(
            items, made, texts, score_many(items, texts, workers), strict=True
        )
    ]

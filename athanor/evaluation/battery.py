"""Ask a model every item of the battery, as a user would: chat template in, greedy answer out, scored exactly.

Items of kind likelihood are not answered but compared: the model's
log-likelihood takes one of their choices. All outputs go
through `score_outputs`, so that a fake model is scored as a real one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from athanor.base.errors import InputError
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids, exempt_ids
from athanor.decoding.sampling import GREEDY, Sampling
from athanor.evaluation.likelihood import choice_log_likelihoods, gold_bits
from athanor.evaluation.report import Answer, repeats
from athanor.evaluation.scoring import choose, score_many
from athanor.model.transformer import Transformer
from athanor.text.conversations import Item
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Output:
    """What came out of a model for one item: a text, or the log-likelihoods of its choices."""

    text: str = ""
    tokens: int = 0
    stopped: bool = True
    ended: bool = True
    fake_turn: bool = False
    repeats: bool = False
    log_likelihoods: tuple[float, ...] = ()


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
    sampling: Sampling = GREEDY,
    gold: bool = True,
) -> list[Answer]:
    """One answer per item, in the order of `items`. `workers` code answers run at a
    time, and `threads` batches are decoded side by side (see `generate`).

    Every control id ends an answer; only `<|stop|>` counts as having stopped.
    `gold` adds the bits of each item's accepted answer. InputError if an item
    does not fit into the model's context.
    """
    spoken = [item for item in items if item.kind != "likelihood"]
    compared = [item for item in items if item.kind == "likelihood"]
    spoken_outputs = _generate_outputs(model, tokenizer, spoken, max_new_tokens, batch_rows, threads, sampling)
    log_likelihoods = choice_log_likelihoods(model, tokenizer, compared, threads)
    outputs = dict(zip([item.id for item in spoken], spoken_outputs, strict=True))
    outputs |= {item.id: Output(log_likelihoods=values) for item, values in zip(compared, log_likelihoods, strict=True)}
    gold_costs = gold_bits(model, tokenizer, items, threads) if gold else None
    return score_outputs(name, items, [outputs[item.id] for item in items], workers, gold_costs)


def score_outputs(
    name: str,
    items: Sequence[Item],
    outputs: Sequence[Output],
    workers: int,
    gold: tuple[Sequence[float], Sequence[int]] | None = None,
) -> list[Answer]:
    """Score the outputs of a model, real or fake. `gold` holds bits and bytes of the accepted answers."""
    plain, normalised = (
        [_scored_text(item, output, use_norm) for item, output in zip(items, outputs, strict=True)]
        for use_norm in (0, 1)
    )
    correct = score_many(items, plain, workers)
    compared = [index for index, item in enumerate(items) if item.kind == "likelihood"]
    norm_results = score_many([items[index] for index in compared], [normalised[index] for index in compared], workers)
    correct_norm: dict[int, bool | None] = dict(zip(compared, norm_results, strict=True))
    bits, sizes = gold if gold is not None else ([0.0] * len(items), [0] * len(items))
    return [
        Answer(
            **{**vars(output), "text": text},
            item=item.id,
            category=item.category,
            model=name,
            correct=correct[index],
            correct_norm=correct_norm.get(index),
            gold_bits=bits[index],
            gold_bytes=sizes[index],
        )
        for index, (item, output, text) in enumerate(zip(items, outputs, plain, strict=True))
    ]


def _scored_text(item: Item, output: Output, normalised: int) -> str:
    if item.kind != "likelihood":
        return output.text
    return item.choices[choose(output.log_likelihoods, item.choices, normalised=bool(normalised))]


def _generate_outputs(
    model: Transformer,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    max_new_tokens: int,
    batch_rows: int,
    threads: int,
    sampling: Sampling,
) -> list[Output]:
    prompts = [prompt_ids(tokenizer, item.prompt) for item in items]
    for item, prompt in zip(items, prompts, strict=True):
        if len(prompt) >= model.config.context_tokens:
            raise InputError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {model.config.context_tokens}",
                where=f"battery item {item.category}/{item.id}",
                fix="raise model.context_tokens, or leave the category out of the battery",
            )
    generations = generate(
        FusedDecoder(model),
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=end_ids(tokenizer),
        sampling=sampling,
        batch_rows=batch_rows,
        threads=threads,
        exempt=exempt_ids(tokenizer) if sampling.repetition_penalty != 1 else (),
    )
    opening_ids = (tokenizer.bos, tokenizer.system, tokenizer.user, tokenizer.assistant)
    return [
        Output(
            text=tokenizer.decode(generation.ids),
            tokens=len(generation.ids),
            stopped=generation.end == tokenizer.stop,
            ended=generation.stopped,
            fake_turn=generation.end in opening_ids,
            repeats=repeats(generation.ids),
        )
        for generation in generations
    ]

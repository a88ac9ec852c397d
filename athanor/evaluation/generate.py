"""The one sampler: battery, chat and server all decode through here.

No banned n-grams, and no repetition penalty unless asked for: answers have to
repeat digits, names and punctuation, and such rules once hid what a model
knew. The penalty is there to show that: it is one of the battery's conditions.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.corpus.conversations import Message
from athanor.errors import InputError
from athanor.model.cache import KVCache
from athanor.model.transformer import Transformer
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

COMPACT_SHARE = 0.75  # finished rows leave the batch once fewer than this share of its rows are alive


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen: penalty, temperature, then top-k, top-p and min-p on what it leaves.

    temperature 0 is greedy and ignores the filters. top_k 0, top_p 1 and min_p 0
    switch a filter off. top-p keeps the id that crosses p; min-p drops ids
    less likely than min_p times the likeliest. A repetition penalty above 1
    divides positive logits of ids generated before in this answer and
    multiplies negative ones (Keskar et al. 2019); ids of the prompt and exempt
    ids are left alone, and 1 switches it off. Equal seeds give equal text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        good = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1
        if not good or not self.repetition_penalty > 0:
            raise InputError(
                f"impossible sampling settings {asdict(self)}",
                fix="use temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1 and repetition_penalty > 0",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sampling:
        """From a mapping with more keys than needed, such as a generation_config.json."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


GREEDY = Sampling()


@dataclass(frozen=True)
class Generation:
    """Generated ids without the one that ended them, and that one (None: cut at the limit)."""

    ids: list[int]
    end: int | None

    @property
    def stopped(self) -> bool:
        return self.end is not None


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer: <|stop|> as trained, and every control id that can only start something else."""
    return tuple(sorted(tokenizer.control_ids.values()))


def exempt_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids no repetition penalty may touch: control ids, and those without a letter (digits, punctuation, space).

    A byte of a character of several bytes is one letter in the making, so it is not exempt.
    """
    free = set(tokenizer.control_ids.values())
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode_bytes([i])
        if text and all(byte < 128 and not chr(byte).isalpha() for byte in text):
            free.add(i)
    return frozenset(free)


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    batch_rows: int = 64,
    threads: int = 1,
    exempt: Collection[int] = (),
) -> list[Generation]:
    """Continue every prompt, in batches of similar length; results in the order of `prompts`.

    `sampling` is one setting per prompt, or one for all (prompt i then draws
    from seed + i). A prompt's result does not depend on its batch, beyond
    floating-point ties. An answer ends at a stop id, after `max_new_tokens`,
    or where the model's context is full. Where torch keeps to one thread per
    operation, `threads` batches run side by side on the CPU. `exempt` ids are
    free of repetition penalties. InputError for an empty prompt or one that
    leaves no room in the context.
    """
    if isinstance(sampling, Sampling):
        sampling = [Sampling(**asdict(sampling) | {"seed": sampling.seed + i}) for i in range(len(prompts))]
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(sampling)} sampling settings for {len(prompts)} prompts")
    if max_new_tokens < 1 or batch_rows < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} and batch_rows {batch_rows} must be at least 1")
    ids: list[list[int]] = [[] for _ in prompts]
    ends: list[int | None] = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))

    def decode(chosen: list[int]) -> None:
        settings = [sampling[i] for i in chosen]
        rows = _decode(
            model, [prompts[i] for i in chosen], max_new_tokens, frozenset(stop_ids), settings, frozenset(exempt)
        )
        for row, token in rows:
            if token in stop_ids:
                ends[chosen[row]] = token
            else:
                ids[chosen[row]].append(token)

    # Longest prompts first, so that no thread starts the longest batch when the others are done.
    batches = [order[first : first + batch_rows] for first in range(0, len(order), batch_rows)][::-1]
    workers = threads if model.head_weight.device.type == "cpu" and torch.get_num_threads() == 1 else 1
    with ThreadPoolExecutor(workers, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        for _ in pool.map(decode, batches) if workers > 1 else map(decode, batches):
            pass
    return [Generation(i, end) for i, end in zip(ids, ends, strict=True)]


def stream(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling = GREEDY,
    exempt: Collection[int] = (),
) -> Iterator[int]:
    """Ids of one continuation as they are made, the stop id that ends it included; else as `generate`."""
    for _, token in _decode(model, [prompt], max_new_tokens, frozenset(stop_ids), [sampling], frozenset(exempt)):
        yield token


@torch.inference_mode()
def _decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    sampling: Sequence[Sampling],
    exempt: frozenset[int],
) -> Iterator[tuple[int, int]]:
    """The loop: yields (row, id), stop ids included, step by step for all rows still alive."""
    context, device = model.config.context_tokens, model.head_weight.device
    lengths = [len(prompt) for prompt in prompts]
    for prompt in prompts:
        if not 0 < len(prompt) < context:
            raise InputError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}",
                fix="shorten it, or drop the oldest turns",
            )
    longest = min(max(lengths) + max_new_tokens, context)
    cache = KVCache(model.config, len(prompts), longest, device=device, dtype=model.head_weight.dtype)
    draws = [random.Random(setting.seed) for setting in sampling]
    budgets = [min(max_new_tokens, context - length) for length in lengths]
    logits_BV = _prefill(model, prompts, cache)
    slots = list(range(len(prompts)))  # row of the cache -> number of the prompt
    alive = set(slots)
    said: dict[int, set[int]] = {row: set() for row in slots if sampling[row].repetition_penalty != 1}
    while True:
        for slot, row in enumerate(slots):
            if said.get(row):
                penalise(logits_BV[slot], said[row], sampling[row].repetition_penalty)
        tokens = pick(logits_BV, [sampling[row] for row in slots], [draws[row] for row in slots])
        for row, token in zip(slots, tokens, strict=True):
            if row in alive:
                budgets[row] -= 1
                if token in stop_ids or budgets[row] == 0:
                    alive.discard(row)
                if row in said and token not in exempt:
                    said[row].add(token)
                yield row, token
        if not alive:
            return
        if len(alive) < COMPACT_SHARE * len(slots):
            kept = [slot for slot, row in enumerate(slots) if row in alive]
            cache.keep(kept)
            slots, tokens = [slots[slot] for slot in kept], [tokens[slot] for slot in kept]
        cache.truncate(max(lengths[row] for row in slots))  # the exact longest row: attention reads no further
        even = len({lengths[row] for row in slots}) == 1
        # A finished row that has not left yet is padding: it must not run past the end of the cache.
        places = [lengths[row] if row in alive else -1 for row in slots]
        positions_B1 = None if even and len(alive) == len(slots) else torch.tensor(places, device=device)[:, None]
        ids_B1 = torch.tensor(tokens, device=device)[:, None]
        for row in alive:
            lengths[row] += 1
        logits_BV = F.linear(model.hidden(ids_B1, positions_BT=positions_B1, cache=cache)[:, -1], model.head_weight)


def _prefill(model: Transformer, prompts: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
    """Put the prompts into the cache; logits [B, V] after the last id of each."""
    device, width = model.head_weight.device, max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    places_BT = torch.arange(width, device=device).expand(len(prompts), width)
    even = all(len(prompt) == width for prompt in prompts)
    positions_BT = None if even else places_BT.where(places_BT < lengths_B[:, None], -1)
    h_BTD = model.hidden(ids_BT, positions_BT=positions_BT, cache=cache)
    return F.linear(h_BTD[torch.arange(len(prompts), device=device), lengths_B - 1], model.head_weight)


def penalise(logits_V: Tensor, said: Collection[int], penalty: float) -> None:
    """Make the ids `said` less likely, in place."""
    ids = torch.tensor(sorted(said), device=logits_V.device)
    found = logits_V[ids]
    logits_V[ids] = torch.where(found > 0, found / penalty, found * penalty)


def pick(logits_BV: Tensor, sampling: Sequence[Sampling], draws: Sequence[random.Random]) -> list[int]:
    """The next id of every row; a row that samples takes one number from its own generator."""
    tokens = logits_BV.argmax(-1).tolist()
    for row, (setting, draw) in enumerate(zip(sampling, draws, strict=True)):
        if setting.temperature > 0:
            tokens[row] = _sample(logits_BV[row], setting, draw.random())
    return tokens


def filtered(logits_V: Tensor, setting: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature and filters, likeliest first, with their ids (equal ones by id)."""
    # fp64 on the CPU: the same draw gives the same id on every device.
    scaled_V = logits_V.double().cpu() / setting.temperature
    probs_V, ids_V = torch.sort(scaled_V.softmax(-1), descending=True, stable=True)
    if setting.top_k:
        probs_V, ids_V = probs_V[: setting.top_k], ids_V[: setting.top_k]
    if setting.top_p < 1:
        probs_V = probs_V / probs_V.sum()
        count = int((probs_V.cumsum(0) - probs_V < setting.top_p).sum())
        probs_V, ids_V = probs_V[:count], ids_V[:count]
    count = int((probs_V >= setting.min_p * probs_V[0]).sum())
    probs_V, ids_V = probs_V[:count], ids_V[:count]
    return probs_V / probs_V.sum(), ids_V


def _sample(logits_V: Tensor, setting: Sampling, draw: float) -> int:
    probs_V, ids_V = filtered(logits_V, setting)
    place = int(torch.searchsorted(probs_V.cumsum(0), torch.tensor(draw, dtype=torch.float64), right=True))
    return int(ids_V[min(place, len(ids_V) - 1)])


def fit_history(
    tokenizer: Tokenizer, messages: Sequence[Message], *, context_tokens: int, reserve_tokens: int
) -> tuple[list[Message], int]:
    """Drop the oldest user and assistant pairs until the prompt and an answer of `reserve_tokens` fit.

    The system message stays and so does the last user message; when those two
    leave less than the reserve, the answer gets what is left. Returns the
    messages and the number of pairs dropped. InputError if nothing is left.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = list(messages[len(system) :])
    dropped = 0
    while True:
        size = len(prompt_ids(tokenizer, [*system, *turns]))
        if size + reserve_tokens <= context_tokens:
            break
        if len(turns) < 3:
            if size >= context_tokens:
                raise InputError(
                    f"a prompt of {size} tokens does not fit into a context of {context_tokens}",
                    fix="shorten the message or the system message",
                )
            break
        turns, dropped = turns[2:], dropped + 1
    return [*system, *turns], dropped

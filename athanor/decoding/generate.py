"""Continue prompts, many at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch

from athanor.decoding.engine import DecoderModel, Engine, check_prompt
from athanor.decoding.sampling import GREEDY, Sampling

PROMPT_GROUPS = (
    8  # parts that the prompts are dealt to on a CPU, however many cores it has: they decide who is batched with whom
)
REFILL_SHARE = 0.25  # so many of the rows have to be free before the next prompts are read, in one pass


@dataclass(frozen=True)
class Generation:
    """Generated ids without the one that ended them, and that one (None: cut at the limit)."""

    ids: list[int]
    end: int | None

    @property
    def stopped(self) -> bool:
        return self.end is not None


def generate(
    model: DecoderModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    batch_rows: int = 64,
    threads: int = 1,
    exempt: Collection[int] = (),
) -> list[Generation]:
    """Continue every prompt, `batch_rows` at a time; results in the order of `prompts`.

    `sampling` is one setting per prompt, or one for all (prompt i then draws
    from seed + i). A prompt's result does not depend on its batch, beyond
    floating-point ties, and batches do not depend on timing. An answer ends at
    a stop id, after `max_new_tokens`, or where the model's context is full.
    Where torch keeps to one thread per operation, `threads` batches run side
    by side on the CPU. `exempt` ids are free of repetition penalties.
    InputError for an empty prompt or one that leaves no room in the context.
    """
    if isinstance(sampling, Sampling):
        sampling = [Sampling(**asdict(sampling) | {"seed": sampling.seed + i}) for i in range(len(prompts))]
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(sampling)} sampling settings for {len(prompts)} prompts")
    if max_new_tokens < 1 or batch_rows < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} and batch_rows {batch_rows} must be at least 1")
    for prompt in prompts:
        check_prompt(prompt, model.config.context_tokens)
    if not prompts:
        return []
    ids: list[list[int]] = [[] for _ in prompts]
    ends: list[int | None] = [None] * len(prompts)
    stops = frozenset(stop_ids)

    def decode(chosen: list[int]) -> None:
        longest = max(len(prompts[i]) for i in chosen) + max_new_tokens
        tokens = min(longest, model.config.context_tokens)
        engine = Engine(model, rows=min(batch_rows, len(chosen)), tokens=tokens, stop_ids=stops, exempt=exempt)
        pending = [(i, prompts[i], max_new_tokens, sampling[i]) for i in chosen][::-1]
        while pending or engine.rows:
            events = engine.step()
            if pending and engine.free >= REFILL_SHARE * engine.capacity:
                events += engine.add_requests([pending.pop() for _ in range(min(engine.free, len(pending)))])
            for i, token, _ in events:
                if token in stops:
                    ends[i] = token
                else:
                    ids[i].append(token)

    # Prompts of like length are neighbours, so that little is padded; the longest, whose steps cost most, come first.
    # Equal ones stay together: the engine reads such prompts once.
    copies: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))[::-1]:
        copies.setdefault(tuple(prompts[i]), []).append(i)
    distinct = list(copies.values())
    on_cpu = model.head_weight.device.type == "cpu"
    workers, groups = (threads if on_cpu and torch.get_num_threads() == 1 else 1), (PROMPT_GROUPS if on_cpu else 1)
    prompt_groups = [sum(members, []) for group in range(groups) if (members := distinct[group::groups])]
    with ThreadPoolExecutor(workers, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        for _ in pool.map(decode, prompt_groups) if workers > 1 else map(decode, prompt_groups):
            pass
    return [Generation(i, end) for i, end in zip(ids, ends, strict=True)]

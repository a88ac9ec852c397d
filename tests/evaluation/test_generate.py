"""The sampler: equal to the plain loop without a cache, filters as documented, histories that stay well formed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from athanor.base.errors import InputError
from athanor.decoding import sampling as module
from athanor.decoding.cache import KVCache
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids, exempt_ids, fit
from athanor.decoding.sampling import GREEDY, Sampling, filtered
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids, render
from tests.evaluation.tiny import always_says, make_model, silence


@torch.no_grad()
def plain_greedy(model, prompt, max_new_tokens, stop_ids):
    """One prompt, no cache, nothing clever."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new_tokens and len(ids) < model.config.context_tokens:
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token in stop_ids:
            return ids[len(prompt) :], token
        ids.append(token)
    return ids[len(prompt) :], None


def prompts(vocab_size, count=40, longest=90, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 7, 64])
@pytest.mark.parametrize("arrange", [lambda model: model, FusedDecoder], ids=["plain", "folded"])
def test_batches_of_any_lengths_give_the_plain_greedy_ids(tokenizer, qk_norm, batch_rows, arrange):
    model = make_model(tokenizer, qk_norm=qk_norm, context=100)
    asked = prompts(tokenizer.vocab_size, longest=99)
    stops = set(range(0, 512, 31))
    expected = [plain_greedy(model, prompt, 20, stops) for prompt in asked]
    found = generate(arrange(model), asked, max_new_tokens=20, stop_ids=stops, batch_rows=batch_rows)
    assert [(g.ids, g.end) for g in found] == expected
    # The set has to exercise what it claims to: stops early and late, cuts at the limit and at the context.
    assert len({len(ids) for ids, end in expected if end is not None}) > 5
    assert any(end is None and len(ids) == 20 for ids, end in expected)
    assert any(end is None and len(ids) < 20 for ids, end in expected)


@pytest.mark.parametrize("planted", ["move", "write_rows", "first_rows"])
def test_a_wrong_cache_is_noticed(tokenizer, monkeypatch, planted):
    if planted == "move":
        monkeypatch.setattr(KVCache, "move", lambda self, source, target: None)
    elif planted == "write_rows":
        right = KVCache.write_rows
        monkeypatch.setattr(KVCache, "write_rows", lambda self, first, *more: right(self, 0, *more))
    else:
        right = KVCache.first_rows
        monkeypatch.setattr(KVCache, "first_rows", lambda self, rows, length: right(self, rows, length - 1))
    model, asked, stops = make_model(tokenizer), prompts(tokenizer.vocab_size), set(range(0, 512, 17))
    expected = [plain_greedy(model, prompt, 20, stops)[0] for prompt in asked]
    try:
        found = [g.ids for g in generate(model, asked, max_new_tokens=20, stop_ids=stops, batch_rows=2)]
    except (ValueError, RuntimeError, IndexError):
        return
    assert found != expected


def test_sampling_depends_on_the_seed_and_not_on_the_batch(tokenizer):
    model, asked = make_model(tokenizer), prompts(tokenizer.vocab_size, 12)
    hot = Sampling(temperature=3.0, seed=5)
    first = generate(model, asked, max_new_tokens=12, stop_ids=(), sampling=hot)
    assert first == generate(model, asked, max_new_tokens=12, stop_ids=(), sampling=hot, batch_rows=5)
    for number in (0, 7):
        alone = Sampling(temperature=3.0, seed=5 + number)
        assert generate(model, [asked[number]], max_new_tokens=12, stop_ids=(), sampling=alone) == [first[number]]
    assert first != generate(model, asked, max_new_tokens=12, stop_ids=(), sampling=Sampling(temperature=3.0, seed=99))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, seed=3)], ids=["greedy", "sampled"])
def test_neither_threads_nor_cores_change_a_result(tokenizer, sampling):
    model, asked = FusedDecoder(make_model(tokenizer)), prompts(tokenizer.vocab_size, 90)
    settings = {"max_new_tokens": 12, "stop_ids": range(0, 512, 17), "sampling": sampling, "batch_rows": 8}
    assert torch.get_num_threads() == 1
    found = [generate(model, asked, **settings, threads=threads) for threads in (1, 3, 16)]
    assert found[0] == found[1] == found[2] and len(found[0]) == len(asked)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-6), Sampling(temperature=1.0, repetition_penalty=100.0)])
def test_settings_at_their_bounds_still_choose(tokenizer, sampling):
    model, asked = make_model(tokenizer), prompts(tokenizer.vocab_size, 4)
    assert all(len(g.ids) == 20 for g in generate(model, asked, max_new_tokens=20, stop_ids=(), sampling=sampling))


def test_one_batch_may_mix_settings(tokenizer):
    model, prompt = make_model(tokenizer), prompts(tokenizer.vocab_size, 1)[0]
    settings = [GREEDY, Sampling(temperature=5.0, seed=1), GREEDY, Sampling(temperature=5.0, top_k=1)]
    cold, hot, again, one = generate(model, [prompt] * 4, max_new_tokens=12, stop_ids=(), sampling=settings)
    assert cold == again == one and hot != cold


def test_sampling_leaves_the_global_random_state_alone(tokenizer):
    model = make_model(tokenizer)
    before = torch.random.get_rng_state().clone()
    generate(model, [[1, 2]], max_new_tokens=5, stop_ids=(), sampling=Sampling(temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())


PROBS = [0.5, 0.25, 0.15, 0.1]


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),  # the id that crosses p stays
        ({"top_p": 0.9}, [0, 1, 2]),
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 1]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),  # p counts what top-k left: 0.5 + 0.25 of 0.9
    ],
)
def test_filters(setting, kept):
    probs, ids = filtered(torch.tensor(PROBS).log()[[3, 0, 2, 1]], Sampling(temperature=1.0, **setting))
    order = [1, 3, 2, 0]  # where the shuffled logits put the likeliest, second, ...
    assert ids.tolist() == [order[k] for k in kept]
    total = sum(PROBS[k] for k in kept)
    assert probs.tolist() == pytest.approx([PROBS[k] / total for k in kept], rel=1e-6)


def test_temperature_is_applied_before_the_filters():
    probs, _ = filtered(torch.tensor(PROBS).log(), Sampling(temperature=0.5))
    squares = [p * p for p in PROBS]
    assert probs.tolist() == pytest.approx([s / sum(squares) for s in squares], rel=1e-6)


@pytest.mark.parametrize("size", [3, 64, 65, 66, 700])
def test_the_likeliest_ids_decide_as_the_whole_vocabulary_would(size):
    draw = random.Random(size)
    decided = 0
    for case in range(400):
        heat = draw.choice([0.3, 1.0, 4.0])
        logits = torch.randn(size, generator=torch.Generator().manual_seed(case)) * draw.choice([0.1, 1.0, 5.0])
        if case % 3 == 0:
            logits = logits.round()  # many are equal, and equal ones go by id
        setting = Sampling(
            temperature=heat,
            top_k=draw.choice([0, 0, 1, 40, 64, 65, 100]),
            top_p=draw.choice([1.0, 1.0, 0.9513, 0.5171]),
            min_p=draw.choice([0.0, 0.0, 0.0513, 0.5171]),
        )
        u = draw.choice([0.0, draw.random(), draw.random(), 1 - 1e-12])
        top = (logits.double() / heat).softmax(-1).topk(min(module.TOP_IDS + 1, size))
        quick = module._among_likeliest(top.values.tolist(), top.indices.tolist(), size, setting, u)
        decided += quick is not None
        assert quick is None or quick == module._sample(logits, setting, u), (case, setting, u)
    assert decided > 100


def test_sampled_shares_match_the_probabilities():
    logits, setting = torch.tensor([PROBS]).log(), Sampling(temperature=1.0)
    draw = random.Random(3)
    counts = Counter(module.pick(logits, [setting], [draw])[0] for _ in range(4000))
    for token, p in enumerate(PROBS):
        assert abs(counts[token] / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-38},  # the logit overflowed, and every answer of the batch failed
        {"temperature": 3e-308},
        {"temperature": float("inf")},
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(InputError, match="sampling"):
        Sampling(**bad)


@torch.no_grad()
def plain_penalty(model, prompt, max_new_tokens, penalty, exempt):
    """One prompt, no cache: greedy with the penalty on what was generated."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new_tokens:
        logits = model(torch.tensor([ids]))[0, -1].clone()
        for token in sorted(set(ids[len(prompt) :]) - exempt):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_the_penalty_is_on_generated_ids_only_and_spares_the_exempt(tokenizer):
    model, asked = silence(make_model(tokenizer), tokenizer), prompts(tokenizer.vocab_size, 8, 30)
    exempt, strong = exempt_ids(tokenizer), Sampling(repetition_penalty=3.0)
    for free in (frozenset(), exempt):
        found = generate(model, asked, max_new_tokens=16, stop_ids=(), sampling=strong, exempt=free, batch_rows=3)
        assert [g.ids for g in found] == [plain_penalty(model, prompt, 16, 3.0, free) for prompt in asked]
    plain = generate(model, asked, max_new_tokens=16, stop_ids=())
    assert plain != found and plain == generate(model, asked, max_new_tokens=16, stop_ids=(), exempt=exempt)
    assert plain == generate(model, asked, max_new_tokens=16, stop_ids=(), sampling=Sampling(repetition_penalty=1.0))


def test_one_batch_may_mix_penalties(tokenizer):
    (letter,) = tokenizer.encode("e")
    settings = [GREEDY, Sampling(repetition_penalty=50.0), GREEDY]
    made = generate(
        always_says(tokenizer, letter), [[tokenizer.assistant]] * 3, max_new_tokens=6, stop_ids=(), sampling=settings
    )
    assert made[0] == made[2] and made[0].ids == [letter] * 6 != made[1].ids


def test_digits_punctuation_and_control_ids_are_exempt(tokenizer):
    exempt = exempt_ids(tokenizer)
    assert set(tokenizer.control_ids.values()) <= exempt
    for text in ("7", ".", ",", "-", "\n", "(", "+"):
        assert set(tokenizer.encode(text)) <= exempt, text
    for text in ("e", "value", "\u00e9"):
        assert not set(tokenizer.encode(text)) & exempt, text


def test_sampling_reads_a_generation_config():
    values = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [1]}
    assert Sampling.from_dict(values) == Sampling(temperature=0.7, top_p=0.9)


def test_prompts_that_leave_no_room_are_refused(tokenizer):
    model = make_model(tokenizer, context=32)
    for prompt in ([], [1] * 32, [1] * 40):
        with pytest.raises(InputError, match="context"):
            generate(model, [prompt], max_new_tokens=4, stop_ids=())
    (almost,) = generate(model, [[1] * 31], max_new_tokens=4, stop_ids=())
    assert len(almost.ids) == 1 and not almost.stopped


def test_the_control_ids_end_an_answer(tokenizer):
    assert {tokenizer.stop, tokenizer.eos, tokenizer.user, tokenizer.assistant} <= set(end_ids(tokenizer))
    model = silence(make_model(tokenizer), tokenizer)
    made = generate(model, prompts(tokenizer.vocab_size, 10, 60), max_new_tokens=30, stop_ids=end_ids(tokenizer))
    assert all(len(g.ids) == 30 for g in made)


def history(pairs, system=True):
    head = [Message("system", "Be brief.")] if system else []
    turns = [Message(role, f"{role} says {n}") for n in range(pairs) for role in ("user", "assistant")]
    return [*head, *turns, Message("user", "and now?")]


@pytest.mark.parametrize("system", [True, False])
def test_long_histories_lose_their_oldest_exchanges(tokenizer, system):
    messages = history(9, system)
    whole = len(prompt_ids(tokenizer, messages))
    assert fit(messages, lambda some: len(prompt_ids(tokenizer, some)), context_tokens=whole + 8, reserve_tokens=8) == (
        messages,
        0,
    )
    kept, dropped = fit(
        messages, lambda some: len(prompt_ids(tokenizer, some)), context_tokens=whole // 2, reserve_tokens=8
    )
    assert 0 < dropped < 9 and len(prompt_ids(tokenizer, kept)) + 8 <= whole // 2
    head = messages[: int(system)]
    assert kept == head + messages[len(head) + 2 * dropped :]
    # No more than needed was dropped, and what is left is a prefix training could have seen.
    fuller = head + messages[len(head) + 2 * (dropped - 1) :]
    assert len(prompt_ids(tokenizer, fuller)) + 8 > whole // 2
    trained, _ = render(tokenizer, [*kept, Message("assistant", "yes")])
    assert trained[: len(prompt_ids(tokenizer, kept))] == prompt_ids(tokenizer, kept)


def test_a_last_message_that_does_not_fit_alone_is_refused(tokenizer):
    messages = [*history(3)[:-1], Message("user", "word " * 80)]
    size = len(prompt_ids(tokenizer, [messages[0], messages[-1]]))
    kept, dropped = fit(
        messages, lambda some: len(prompt_ids(tokenizer, some)), context_tokens=size + 1, reserve_tokens=30
    )
    assert dropped == 3 and len(kept) == 2
    with pytest.raises(InputError, match="does not fit"):
        fit(messages, lambda some: len(prompt_ids(tokenizer, some)), context_tokens=size, reserve_tokens=30)

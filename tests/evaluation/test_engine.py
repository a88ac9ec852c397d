"""The running batch: answers join and leave at any time, and each is what it would have been alone."""

from __future__ import annotations

import random

import pytest
import torch

from athanor.base.errors import InputError
from athanor.decoding.cache import KVCache
from athanor.decoding.engine import Engine
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.generate import generate
from athanor.decoding.sampling import GREEDY, Sampling
from tests.evaluation.test_generate import plain_greedy, prompts
from tests.evaluation.tiny import make_model

STOPS = frozenset(range(0, 512, 31))


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_the_same_whoever_joins_and_leaves(tokenizer, seed):
    draw, model = random.Random(seed), make_model(tokenizer, qk_norm=bool(seed % 2), context=100)
    asked = prompts(tokenizer.vocab_size, 30, 60, seed)
    engine = Engine(FusedDecoder(model), rows=6, stop_ids=STOPS)
    waiting, said, done, left = list(range(len(asked))), {}, set(), set()
    while waiting or engine.rows:
        made = engine.step()
        count = min(engine.free, len(waiting), draw.randrange(4))
        joined = [waiting.pop() for _ in range(count)]
        made += engine.add_requests([(number, asked[number], 20, GREEDY) for number in joined])
        for number, token, last in made:
            said.setdefault(number, []).append(token)
            if last:
                done.add(number)
        if engine.rows and draw.random() < 0.1:
            number = draw.choice(engine.rows).key
            engine.cancel(number)
            left.add(number)
    assert done | left == set(range(len(asked))) and len(left) > 2
    for number, prompt in enumerate(asked):
        ids, end = plain_greedy(model, prompt, 20, STOPS)
        whole = ids if end is None else [*ids, end]
        found = said[number]
        assert found == (whole if number in done else whole[: len(found)])


def test_a_seed_decides_an_answer_whoever_is_beside_it(tokenizer):
    model, (prompt, *others) = make_model(tokenizer), prompts(tokenizer.vocab_size, 5, 40)
    hot = Sampling(temperature=3.0, seed=7)

    def said(company):
        engine = Engine(model, rows=8, stop_ids=())
        made = engine.add_requests([(n, other, 30, GREEDY) for n, other in enumerate(company)])
        made = engine.add_requests([("asked", prompt, 12, hot)])
        while engine.rows:
            made += engine.step()
        return [one.token for one in made if one.key == "asked"]

    assert said([]) == said(others) and len(said([])) == 12


def test_copies_of_a_prompt_are_read_once_and_answered_each_as_if_alone(tokenizer, monkeypatch):
    model, asked = make_model(tokenizer), prompts(tokenizer.vocab_size, 10, 40)
    copies = [prompt for prompt in asked for _ in range(5)]
    options = {"max_new_tokens": 8, "stop_ids": STOPS, "batch_rows": 9}
    settings = [GREEDY if n % 5 == 0 else Sampling(temperature=2.0, seed=n) for n in range(len(copies))]
    alone = [generate(model, [copies[n]], sampling=[settings[n]], **options)[0] for n in range(len(copies))]
    rows_read, hidden = [], model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, **words: rows_read.append(len(ids) * (ids.shape[1] > 1)) or hidden(ids, **words)
    )
    assert generate(model, copies, sampling=settings, **options) == alone
    assert len({tuple(answer.ids) for answer in alone}) > 20
    # A prompt whose copies did not all find a free row is read again for the rest.
    assert sum(rows_read) < 2 * len(asked)


def test_a_prompt_that_does_not_fit_changes_nothing(tokenizer):
    engine = Engine(make_model(tokenizer, context=32), rows=4, stop_ids=())
    engine.add_requests([("first", [5, 6], 9, GREEDY)])
    for bad in ([], [1] * 32):
        with pytest.raises(InputError, match="leaves no room"):
            engine.add_requests([("good", [1, 2], 4, GREEDY), ("bad", bad, 4, GREEDY)])
    assert [row.key for row in engine.rows] == ["first"]
    with pytest.raises(ValueError, match="free rows"):
        engine.add_requests([(n, [1], 4, GREEDY) for n in range(4)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_folded_is_the_model_to_rounding(tokenizer, qk_norm, tied):
    model = make_model(tokenizer, qk_norm=qk_norm, tied=tied)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 2.0)
    folded, ids = FusedDecoder(model), torch.randint(0, tokenizer.vocab_size, (3, 24))
    with torch.inference_mode():
        truth, cache = model.hidden(ids), KVCache(model.config, 3, 24)
        found = [folded.hidden(ids[:, :4], cache=cache)]
        found += [folded.hidden(ids[:, n : n + 1], cache=cache) for n in range(4, 24)]
    assert torch.allclose(torch.cat(found, 1), truth, atol=2e-5, rtol=1e-4)


def test_folding_refuses_what_could_overflow(tokenizer):
    with pytest.raises(ValueError, match="overflow"):
        FusedDecoder(make_model(tokenizer).half())

"""What is kept of answers that ended: the next turn reads what is new, and says what it would have said without."""

from __future__ import annotations

import random

import pytest
import torch

from athanor.decoding.cache import KVCache
from athanor.decoding.engine import Engine, prefill
from athanor.decoding.sampling import GREEDY
from athanor.serving.backends import keeping
from athanor.serving.backends.base import prepare
from athanor.serving.backends.keeping import KeepingEngine
from athanor.serving.backends.torch_backend import TorchBackend, row_bytes
from athanor.serving.loading import load_export
from athanor.text.conversations import Message
from tests.evaluation.tiny import make_model
from tests.serving.parrot import CODE, CONTEXT, LONG, MARKDOWN, PLAIN, SYSTEM, WHO
from tests.serving.test_backends import Answers, collect, said

TOKEN_BYTES = 2 * 4 * 2 * 2 * 8  # of the tiny model


@pytest.fixture
def starts(monkeypatch):
    """How many ids each prompt took over, in the order of reading."""
    taken = []
    monkeypatch.setattr(keeping, "prefill", lambda *words: taken.extend(words[-1]) or prefill(*words))
    return taken


def test_logits_are_those_of_reading_all_of_it(tokenizer, starts):
    model, ids = make_model(tokenizer, context=256, qk_norm=True), list(range(200))
    engine = KeepingEngine(model, rows=1, stop_ids=(), keep_bytes=120 * TOKEN_BYTES)
    engine.add_requests([("", ids[:120], 1, GREEDY)])
    starts.clear()
    for prompts in ([ids], [ids[:121]] * 2, [ids, [*ids[:70], 5], ids[:15], [5, *ids], ids[:120]]):
        with torch.inference_mode():
            found, truth = (
                read(engine, prompts, KVCache(model.config, len(prompts), 201))
                for read in (KeepingEngine._read, Engine._read)
            )
        torch.testing.assert_close(found, truth, atol=2e-4, rtol=1e-4)
    assert starts == [120, 120, 120, 120, 70, 0, 0, 119]


@pytest.mark.parametrize("seed", range(3))
def test_chats_side_by_side_say_what_they_would_say_without_it(tokenizer, starts, seed):
    model, draw, chats = make_model(tokenizer, context=256, seed=seed), random.Random(seed), [[]] * 3
    engines = [
        KeepingEngine(model, rows=4, stop_ids=range(0, 512, 31), keep_bytes=size * TOKEN_BYTES) for size in (0, 500)
    ]
    for _ in range(20):
        asked = [chat[:200] + draw.choices(range(512), k=40) for chat in chats]  # a full one goes on from its middle
        asked.append(asked[0])
        stopped, told = draw.randrange(4), []
        for engine in engines:
            events = engine.add_requests([(n, ids, 12, GREEDY) for n, ids in enumerate(asked)]) + engine.step()
            engine.cancel(stopped)
            while engine.rows:
                events += engine.step()
            told.append(sorted(events))
        assert told[0] == told[1] and sum(len(one.ids) for one in engine.kept) <= 500
        chats = [[*asked[n], *(one.token for one in told[0] if one.key == n)] for n in range(3)]
    assert max(starts) == 200


def test_the_oldest_goes_first_and_what_is_gone_on_from_at_once(tokenizer):
    one, two, three = ([number] * 50 for number in (1, 2, 3))
    engine = KeepingEngine(make_model(tokenizer), rows=1, stop_ids=(), keep_bytes=120 * TOKEN_BYTES)
    for prompt in (one, two, one + [7] * 20, three, [5] * 127):
        kept = [each.ids for each in engine.kept]
        engine.add_requests([(0, prompt, 1, GREEDY)])
    assert kept == [one + [7] * 20, three] and [each.ids for each in engine.kept] == [[5] * 120]


def test_the_next_turn_begins_with_the_ids_of_the_last_and_its_answer(parrot_dir, starts):
    model, tokenizer = load_export(parrot_dir)
    texts = []
    for cache_bytes in (0, 1 << 30):
        backend = TorchBackend(model, tokenizer, {"max_new_tokens": 256}, rows=2, cache_bytes=cache_bytes)
        ask, history, before = Answers(backend), [Message("system", SYSTEM)], []
        for (question, _), stop in (
            (CODE, ()),
            (PLAIN, ()),
            (WHO, "a"),
            (MARKDOWN, ()),
            (LONG, ()),
            ((LONG[1], ""), ()),
        ):
            history.append(Message("user", question))
            prompt = prepare(tokenizer, history, context_tokens=CONTEXT, max_new_tokens=256)
            starts.clear()
            pair = [collect(events) for _, events in [ask.begin(history, stop=stop), ask.begin(history, stop=stop)]]
            history.append(Message("assistant", said(pair[0])))
            texts.append([said(events) for events in pair])
            if cache_bytes and not prompt.forgotten:
                assert len(before) - 4 < starts[0] <= len(before) and prompt.ids[: len(before)] == before
                before = [*prompt.ids, *tokenizer.encode(said(pair[0])), tokenizer.stop]
                assert stop or before == [*backend.engine.kept[-1].ids, tokenizer.stop]
        assert prompt.forgotten
        backend.close()
    assert texts[:6] == texts[6:] and texts[0][0] == CODE[1]


@pytest.mark.parametrize("share", [0, 1, 2, 7, 200])
def test_rows_and_what_is_kept_take_no_more_than_they_may(tokenizer, share):
    row = row_bytes((model := make_model(tokenizer)).config)
    backend = TorchBackend(model, tokenizer, {"max_new_tokens": 8}, rows=16, cache_bytes=share * row)
    backend.close()
    used = backend.engine.cache.keys_LBKSE.nbytes * 2 + backend.engine.keep_tokens * TOKEN_BYTES
    assert used <= max(1, share) * row and backend.engine.keep_tokens >= 128 * (share > 1)

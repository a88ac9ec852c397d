"""The engine: equal to evaluation's decoder id for id, replaced after a crash and after silence, ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from athanor.base.errors import InputError
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.export.llamacpp.engine import Engine, EngineDied, Job
from athanor.export.llamacpp.stream import Refused
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, write_tiny_tokenizer
from tests.serving.live import ROOT

pytest.importorskip("xllamacpp")
QUESTIONS = ("hi", "Who are you?", "def f(x):", "naïve — 日本 🙂", "a  b\n\n\tc", "<|user|>")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("engine")
    tokenizer = write_tiny_tokenizer(root / "tokenizer")
    model = make_model(tokenizer)
    write_export(root / "export", model, tokenizer, root / "tokenizer", types=("f32",))
    (path,) = (root / "export").glob("*.gguf")
    return model, tokenizer, Job(str(path), 128, rows=4, exact=True)


def run(job: Job, work):
    async def within():
        engine = Engine(job)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(within())


async def greedy(engine: Engine, ids, limit=12, **more):
    body = {"prompt": ids, "n_predict": limit, "temperature": 0, "return_tokens": True, **more}
    return (await engine.ask("/completion", body))["tokens"]  # a stream has none for tokens that end no character


def test_greedy_answers_are_those_of_evaluation_id_for_id_also_side_by_side(made):
    model, tokenizer, job = made
    prompts = [prompt_ids(tokenizer, [Message("user", text)]) for text in QUESTIONS]
    stops = end_ids(tokenizer)
    expected = [one.ids for one in generate(model, prompts, max_new_tokens=12, stop_ids=stops)]

    async def work(engine):
        alone = [await greedy(engine, ids) for ids in prompts]
        return alone, await asyncio.gather(*(greedy(engine, ids) for ids in prompts))

    for answers in run(job, work):
        assert [[token for token in ids if token not in stops] for ids in answers] == [list(ids) for ids in expected]


def test_given_tokens_are_scored_as_the_model_scores_them(made):
    import torch

    model, tokenizer, job = made
    ids = [tokenizer.bos, *tokenizer.encode("def f(x):\n    return 'é🙂'")]
    scored = run(job, lambda engine: engine.score(ids, 3))
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))[0].log_softmax(-1)
    for position, (number, log_probability, top) in enumerate(scored):
        assert number == ids[position + 1]
        assert log_probability == pytest.approx(expected[position, number].item(), abs=0.01)
        assert [one for one, _ in top] == expected[position].topk(3).indices.tolist()


def test_a_killed_engine_ends_its_answers_and_the_next_request_has_another(made):
    _, tokenizer, job = made
    ids = prompt_ids(tokenizer, [Message("user", "hi")])

    async def stream(engine):
        return [rows async for rows in engine.rows_of({"prompt": ids, "n_predict": 9})]

    async def work(engine):
        before, pid = await greedy(engine, ids), engine.pid
        os.kill(pid, signal.SIGSTOP)  # it must not be done before the kill
        answer = asyncio.create_task(stream(engine))
        while not engine.under_way:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await answer
        assert await greedy(engine, ids) == before and engine.pid != pid

    run(job, work)


@pytest.mark.long
def test_two_hundred_kills_at_any_moment_of_a_stream_lose_no_later_answer(made):
    model, tokenizer, job = made
    ids = prompt_ids(tokenizer, [Message("user", "hi")])
    rng = random.Random(0)

    async def work(engine):
        before, ends = await greedy(engine, ids), Counter()
        for _ in range(200):
            left, pid = rng.choice((0, rng.randrange(100))), engine.pid
            try:
                async for rows in engine.rows_of({"prompt": ids, "n_predict": 110, "ignore_eos": True, "n_probs": 50}):
                    left -= len(rows)
                    if left <= 0 and pid:
                        pid = os.kill(pid, signal.SIGKILL)
                ends["whole"] += 1  # all of it was there before the kill
                while not pid and engine.alive:
                    await asyncio.sleep(0)
            except EngineDied:
                ends["died"] += 1
            assert await greedy(engine, ids) == before
        return ends

    ends = run(job, work)
    assert ends.total() == 200 and ends["died"] > 20


def test_a_silent_engine_is_replaced_and_what_it_was_silent_under_twice_is_refused(made, monkeypatch):
    monkeypatch.setattr("athanor.export.llamacpp.engine.SILENT_SECONDS", 0.5)
    monkeypatch.setattr("athanor.export.llamacpp.engine.PROBE_SECONDS", 0.1)
    _, tokenizer, job = made
    ids = prompt_ids(tokenizer, [Message("user", "hi")])

    async def work(engine):
        before = await greedy(engine, ids)
        for seed in range(2):
            os.kill(engine.pid, signal.SIGSTOP)
            with pytest.raises(EngineDied):
                await greedy(engine, ids, seed=seed)
            assert await greedy(engine, ids, 11) == before[:11]
        with pytest.raises(InputError, match="2 engines ended under this very request"):
            await greedy(engine, ids, seed=2)

    run(job, work)


def test_a_start_that_is_cancelled_leaves_no_half_engine(made):
    _, tokenizer, job = made
    ids = tokenizer.encode("def f(x):")

    async def work(engine):
        first = asyncio.create_task(engine.score(ids))
        while engine.pid is None:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        tasks = [asyncio.create_task(engine.score(ids)) for _ in range(3)]
        while sum(engine.under_way.values()) < len(tasks):
            await asyncio.sleep(0)
        tasks[1].cancel()  # waits for the first: never computed
        return len(await tasks[0]), len(await tasks[2])

    assert run(job, work) == (len(ids) - 1, len(ids) - 1)


def test_answers_that_cannot_be_read_end_the_engine_and_not_the_patience(made, monkeypatch):
    monkeypatch.setattr("athanor.export.llamacpp.engine.LINE_BYTES", 2048)
    _, tokenizer, job = made

    async def work(engine):
        with pytest.raises(EngineDied):
            await engine.score(tokenizer.encode("def f(x):"), 400)

    run(Job(job.path, 100), work)


def test_a_refusal_has_its_words_and_harms_nothing(made):
    _, tokenizer, job = made

    async def work(engine):
        with pytest.raises(Refused, match="exceeds the available context size") as error:
            await greedy(engine, [tokenizer.bos] * 500)
        return error.value.status, await greedy(engine, [tokenizer.bos], 1)

    status, answer = run(job, work)
    assert status == 400 and len(answer) == 1


def test_a_file_that_is_no_model_is_refused_with_the_reason(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match="llama.cpp does not start"):
        run(Job(str(tmp_path / "x.gguf"), 128), lambda engine: engine.ask("/slots"))


def test_no_engine_and_no_folder_of_one_outlives_its_owner(made):
    code = (
        "import asyncio, os, signal, sys\nfrom athanor.export.llamacpp.engine import Engine, Job\n"
        "async def work():\n    engine = Engine(Job(sys.argv[1], 128))\n    await engine.ask('/slots')\n"
        "    print(engine.pid, engine.socket, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\nasyncio.run(work())\n"
    )
    owner = subprocess.run([sys.executable, "-c", code, made[2].path], cwd=ROOT, capture_output=True, text=True)
    assert owner.returncode == -signal.SIGKILL
    pid, socket = owner.stdout.split()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(60)
    assert not Path(socket).parent.exists()

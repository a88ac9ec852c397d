"""Training on several processes gives what one process gives, and ends soon when one of them does.

Real processes under gloo, several jobs for each start (see micro_world.py). Sums in another order differ in the last
bits: losses of about 4 and weights of about 1 agree to 1e-5 after 24 steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from athanor.base.errors import Interrupted
from athanor.model.validation import sequence_nats
from athanor.training import checkpoint
from athanor.training.memory import StepFootprint, training_bytes
from athanor.training.step import own_batches
from athanor.training.world import World
from tests.training import micro

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-5
CLOSE_MUON = 2e-3  # in the mean: of sums in another order some round to another bf16 number, and later steps differ
LIMIT = 600.0  # s; a start takes 3 s on an idle machine


def free_port():
    """Not one that the system gives out by itself: a later job's would be another program's by then."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start(folder, size, jobs, nodes=1):
    """Processes 0..size-1 of so many nodes, at work on the jobs in turn."""
    folder.mkdir(exist_ok=True)
    for number, job in enumerate(jobs):
        job.setdefault("folder", str(folder / f"checkpoints-{number}"))
        job["port"] = free_port()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(ROOT / "tests/training/micro_world.py"), str(folder / "jobs.json")]
    return [
        subprocess.Popen(
            command,
            env={
                **shared,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % (size // nodes)),
                "LOCAL_WORLD_SIZE": str(size // nodes),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def told(folder, size, jobs, nodes=1):
    """What each process told of each job.

    Once again where gloo ended a process by SIGABRT (`vector::reserve`, seen once in its first meeting): that is torch's.
    """
    given = [Path(job["folder"]) for job in jobs if "folder" in job and Path(job["folder"]).is_dir()]
    for path in given:
        shutil.copytree(path, f"{path}.kept")
    for _ in range(2):
        processes = start(folder, size, jobs, nodes)
        try:
            # The one that was lost says why; the others only that it was.
            errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if not any(process.returncode == -signal.SIGABRT for process in processes):
            break
        shutil.rmtree(folder)
        for path in given:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(f"{path}.kept", path)
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return [
        [json.loads((folder / f"told-{number}-{rank}.json").read_text()) for rank in range(size)]
        for number in range(len(jobs))
    ]


def flat(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).numpy()


def nats(model):
    """What micro_world.py scores in its validations."""
    return sequence_nats(model, [np.arange(length) % 64 for length in (5, 17, 40, 9)], None, 16, 32)[0].tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def one(root):
    """The results of one process, without and with a loss mask; and three folders where it stopped on the way."""
    torch.set_num_threads(1)
    results = {}
    for masked in (False, True):
        model, result = micro.run(root / f"one-{masked}", micro.CountingSampler(masked))
        results[masked] = (flat(model), result)
        if not masked:
            results["nats"] = nats(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro, "ADAMW", dataclasses.replace(micro.ADAMW, name="muon"))
            model, result = micro.run(root / f"muon-{masked}", micro.CountingSampler(masked))
            results["muon", masked] = (flat(model), result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro, "CONFIG", dataclasses.replace(micro.CONFIG, tied_embeddings=False))
        model, result = micro.run(root / "one-untied")
    results["untied"] = (flat(model), result)
    results["near"] = results[False][1].validations[2]["scores"]["score"]
    results["best"] = flat(micro.run(root / "best", selection_key=micro.near(results["near"]))[0])
    for strategy in ("ddp", "fsdp", "hsdp", "nobody"):
        asked = []
        stop = {"should_stop": lambda asked=asked: asked.append(1) or len(asked) == 9}
        with pytest.raises(Interrupted):
            micro.run(root / f"for-{strategy}", hooks=stop)
    return results


JOBS = {
    "ddp": {"strategy": "ddp"},
    "ddp masked": {"strategy": "ddp", "masked": True, "main": 1},
    "ddp whole batch": {"strategy": "ddp", "settings": {"micro_batch_rows": 8}},
    "ddp overlap": {"strategy": "ddp", "masked": True, "overlap": True},
    "ddp poll": {"strategy": "ddp", "poll": 1.0},
    "ddp drift": {"strategy": "ddp", "at": {"1": {"drift": 5}}},
    "fsdp": {"strategy": "fsdp"},
    "fsdp masked": {"strategy": "fsdp", "masked": True, "main": 1},
    "fsdp one row": {"strategy": "fsdp", "settings": {"micro_batch_rows": 1}},
    "fsdp stopped": {"strategy": "fsdp", "at": {"1": {"stop": 9}}},
    "ddp untied": {"strategy": "ddp", "tied": False},
    "fsdp untied": {"strategy": "fsdp", "tied": False},
    "ddp muon": {"strategy": "ddp", "optimizer": "muon"},
    "fsdp muon": {"strategy": "fsdp", "optimizer": "muon"},
}


@pytest.fixture(scope="module")
def two(root, one):
    jobs = {name: dict(job) for name, job in JOBS.items()}
    for strategy in ("ddp", "fsdp"):
        jobs[f"{strategy} resumed"] = {"strategy": strategy, "folder": str(root / f"for-{strategy}")}
        jobs[f"{strategy} best"] = {"strategy": strategy, "near": one["near"]}
    jobs["fsdp stopped"]["folder"] = str(root / "stopped")
    return dict(zip(jobs, told(root / "two", 2, list(jobs.values())), strict=True))


@pytest.fixture(scope="module")
def odd(root):
    """Three processes, which do not get equal parts of eight rows."""
    job = {"strategy": "fsdp", "masked": True, "main": 2}
    return dict(zip(("adamw", "muon"), told(root / "three", 3, [job, job | {"optimizer": "muon"}]), strict=True))


@pytest.fixture(scope="module")
def nodes(root, one):
    """Two nodes with two processes each, which share one model on each node."""
    jobs = {
        "masked": {"strategy": "hsdp", "masked": True, "main": 2},
        "muon": {"strategy": "hsdp", "optimizer": "muon"},
        "resumed": {"strategy": "hsdp", "folder": str(root / "for-hsdp")},
        "stopped": {"strategy": "hsdp", "at": {"3": {"stop": 9}}, "folder": str(root / "stopped-hsdp")},
        "drift": {"strategy": "hsdp", "at": {"2": {"drift": 5}}},
    }
    return dict(zip(jobs, told(root / "four", 4, list(jobs.values()), nodes=2), strict=True))


def check(answers, main, expected, first_step=1, close=CLOSE):
    """The main process has the weights and the curve of one process; every process has its losses."""
    weights, result = expected
    apart = np.abs(np.array(answers[main]["weights"]) - weights)
    assert (apart.max() if close == CLOSE else apart.mean()) < close
    losses = np.array([row["loss"] for row in result.curve])
    for answer in answers:
        assert [row["step"] for row in answer["rows"]] == list(range(first_step, len(losses) + 1))
        assert np.abs(np.array([row["loss"] for row in answer["rows"]]) - losses[first_step - 1 :]).max() < close
        assert np.abs(np.array([row["loss"] for row in answer["curve"]]) - losses).max() < close
        assert answer["supervised"] == result.supervised_tokens
        assert [row["step"] for row in answer["validations"]] == [row["step"] for row in result.validations]
    scores = [[row["scores"]["score"] for row in rows] for rows in (answers[main]["validations"], result.validations)]
    assert np.abs(np.subtract(*scores)).max() < 100 * close  # a sum of a thousand logits


@pytest.mark.parametrize(
    ("name", "main", "expected"),
    [
        ("ddp", 0, False),
        ("ddp masked", 1, True),
        ("ddp whole batch", 0, False),
        ("ddp overlap", 0, True),
        ("fsdp", 0, False),
        ("fsdp masked", 1, True),
        ("fsdp one row", 0, False),
        ("ddp untied", 0, "untied"),
        ("fsdp untied", 0, "untied"),
    ],
)
def test_two_processes_give_the_result_of_one(one, two, name, main, expected):
    check(two[name], main, one[expected])


def test_the_main_process_ends_no_group_before_every_other_one_has_seen_its_last_word(one, two):
    check(two["ddp poll"], 0, one[False])


def test_three_processes_with_unequal_parts_give_the_result_of_one(one, odd):
    check(odd["adamw"], 2, one[True])


def test_muon_works_on_whole_matrices_however_they_are_divided(one, two, odd):
    """Of 8, 16 and 32 rows, in two parts and in three."""
    check(two["ddp muon"], 0, one["muon", False], close=CLOSE_MUON)
    check(two["fsdp muon"], 0, one["muon", False], close=CLOSE_MUON)
    check(odd["muon"], 2, one["muon", True], close=CLOSE_MUON)


def test_a_model_for_each_node_gives_the_result_of_one_process(one, nodes):
    check(nodes["masked"], 2, one[True])
    check(nodes["muon"], 0, one["muon", False], close=CLOSE_MUON)
    check(nodes["resumed"], 0, one[False], first_step=10)


def test_the_best_validation_is_kept_by_the_main_process(one, two):
    """Chosen by the score of one process, whose weights after that step two processes must end with."""
    for name in ("ddp best", "fsdp best"):
        assert [answer["chosen"] for answer in two[name]] == [15, 15]
        assert np.abs(np.array(two[name][0]["weights"]) - one["best"]).max() < CLOSE


def test_every_process_takes_the_same_decisions(two, odd, nodes):
    for answers in (two["ddp"], two["fsdp"], two["fsdp muon"], odd["adamw"], odd["muon"], nodes["muon"]):
        kept = [[(row["loss"], row["grad_norm"], row["skipped"]) for row in answer["rows"]] for answer in answers]
        assert all(rows == kept[0] for rows in kept)


def test_a_checkpoint_of_one_process_goes_on_under_two(one, two):
    for strategy in ("ddp", "fsdp"):
        check(two[f"{strategy} resumed"], 0, one[False], first_step=10)


@pytest.mark.parametrize(("made", "folder"), [("two", "stopped"), ("nodes", "stopped-hsdp")])
def test_a_sharded_checkpoint_goes_on_in_one_process(root, one, made, folder, request):
    for answer in request.getfixturevalue(made)["fsdp stopped" if made == "two" else "stopped"]:
        assert answer["error"].startswith("Interrupted: stopped at step 9 of 24")
    assert [path.name for path in checkpoint.steps(root / folder)] == ["step_00000009"]
    saved, plain = (checkpoint.load(root / where / "step_00000009") for where in (folder, "for-nobody"))
    kinds = [{name: (t.shape, t.dtype) for name, t in found.tensors.items()} for found in (saved, plain)]
    assert kinds[0] == kinds[1]  # as one process writes it
    model, result = micro.run(root / folder)
    assert np.abs(flat(model) - one[False][0]).max() < CLOSE
    assert np.abs(np.subtract(*[[row["loss"] for row in r.curve] for r in (result, one[False][1])])).max() < CLOSE


def test_only_the_main_process_writes(two, odd):
    for answers in (*two.values(), *odd.values()):
        assert sum(answer["wrote"] for answer in answers) == 1


def test_held_out_text_is_divided_over_the_processes(one, two, odd):
    for answers in (two["ddp"], two["fsdp"]):
        for answer in answers:
            assert answer["validations"][-1]["scores"]["nats"] == pytest.approx(one["nats"], rel=1e-5)
            assert answer["scored"] < answers[0]["scored"] + answers[-1]["scored"]
    assert all(answer["scored"] for answer in odd["adamw"])


def test_nodes_whose_models_drifted_apart_stop_before_they_save(nodes):
    for answer in nodes["drift"]:
        assert answer["error"].startswith("GateError: gate 'one model' failed: the weights differ")


def test_processes_whose_weights_drifted_apart_stop_before_they_save(root, two):
    for answer in two["ddp drift"]:
        assert answer["error"].startswith("GateError: gate 'one model' failed: the weights differ between the 2")


@pytest.fixture(scope="module")
def failures(root):
    """Pairs of processes of which number 1 is killed, freezes, or has an error of its own, in its 9th step."""
    running = {}
    for kind in ("kill", "freeze", "raise"):
        job = {
            "strategy": "fsdp" if kind == "kill" else "ddp",
            "timeout": 5.0 if kind == "freeze" else 60.0,
            "at": {"1": {kind: 9}},
            "settings": {"save_every_seconds": 0.0},
        }
        running[kind] = start(root / kind, 2, [job])
    return running


@pytest.mark.parametrize("kind", ["kill", "freeze", "raise"])
def test_a_lost_process_ends_the_others_and_the_next_start_goes_on(root, one, failures, kind):
    first, second = failures[kind]
    _, errors = first.communicate(timeout=LIMIT)
    if kind == "freeze":
        assert second.poll() is None
        second.send_signal(signal.SIGKILL)
    _, others = second.communicate(timeout=LIMIT)
    assert first.returncode == 1 and "process 0 of 2 lost another one" in errors
    assert second.returncode == (1 if kind == "raise" else -signal.SIGKILL)
    assert ("an error of one process" in others) == (kind == "raise")
    assert checkpoint.latest(root / kind / "checkpoints-0", pytest.fail).step == 8
    model, _ = micro.run(root / kind / "checkpoints-0")
    assert np.abs(flat(model) - one[False][0]).max() < CLOSE


class _Rank(World):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize(("size", "micro_rows"), [(1, 3), (2, 2), (3, 2), (5, 1), (8, 4), (11, 2)])
def test_each_row_is_learnt_from_by_one_process(size, micro_rows):
    rows = micro.CountingSampler(True).batch(0, 128)
    parts = [own_batches(rows, _Rank(rank, size), micro_rows, True) for rank in range(size)]
    assert len({len(batches) for batches in parts}) == 1  # or FSDP would wait for ever
    learnt = torch.cat([batch.next_N for batches in parts for batch in batches])
    (whole,) = own_batches(rows, _Rank(0, 1), 8, True)
    assert torch.equal(learnt, whole.next_N)


def test_sharding_takes_less_memory_the_more_processes_there_are():
    load = StepFootprint(2, 16, "fp32")
    cpu = torch.device("cpu")
    needed = [training_bytes(micro.CONFIG, load, cpu, shards=size) for size in (2, 4, 8)]
    assert needed == sorted(needed, reverse=True)
    parameters = micro.CONFIG.parameter_count()
    assert training_bytes(micro.CONFIG, load, cpu) - needed[2] == 16 * parameters - 2 * parameters - 4 * parameters

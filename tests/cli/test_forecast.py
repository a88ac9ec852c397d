"""Forecasts from runs whose time is known, and the step that an unfinished slot is at."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.cli.plan.forecast import (
    PastRun,
    RunHistory,
    backtest,
    code_questions,
    estimate,
    forecast,
)
from athanor.cli.plan.simulate import RUN, Step
from athanor.cli.plan.training import Training, training_of
from athanor.runtime import presets
from athanor.runtime.closure import file_digests
from athanor.runtime.dvc_view import open_repo
from athanor.runtime.facts import flatten
from athanor.runtime.journal import Journal
from athanor.runtime.schema import check_values, filled
from athanor.runtime.slots import Code, Slot
from athanor.sizing.reference import TOKEN_FLOPS
from tests.cli import toy_pipeline as toy

ROOT = Path(__file__).resolve().parents[2]
MICRO = presets.values(ROOT / "presets" / "micro.yaml")
SECTIONS = ("model", "pretrain")
INPUTS = {"data/shards": "1" * 32 + ".dir", "models/tokenizer": "2" * 32 + ".dir"}
DIGESTS = {"shards": "s", "tokenizer": "t"}
WORK = 48e6 + 98304 * TOKEN_FLOPS  # of the runs below


def past(seconds: float, work: float | None = None, slope: float | None = None, **params: Any) -> PastRun:
    return PastRun(int(seconds * 1000), seconds, work, slope, params, {}, {})


def step(stage: str = "pretrain", inputs: dict[str, str | None] | None = None, **params: Any) -> Step:
    sections = {name: dict(MICRO[name]) for name in SECTIONS}
    for key, value in params.items():
        sections["pretrain"][key] = value
    return Step(stage, RUN, False, (), (), dict(inputs or {}), sections, f"python -m stages.{stage}", None)


def test_no_past_run_no_forecast():
    assert estimate(1.0, {}, []) is None and backtest([]) is None and backtest([past(1.0)]) is None


def test_the_nearest_run_in_work_is_moved_along_a_line():
    small, large = past(20.0, 100.0), past(110.0, 1000.0)
    assert estimate(100.0, {}, [small]) == 20.0
    assert estimate(200.0, {}, [small]) == 40.0  # one run: proportional
    assert estimate(2000.0, {}, [small, large]) == pytest.approx(210.0)  # two: the line 10 + 0.1 work
    assert estimate(500.0, {}, [small, large]) == pytest.approx(60.0)
    assert estimate(200.0, {}, [past(20.0, 100.0, slope=0.15)]) == pytest.approx(35.0)  # 5 s are not training
    assert estimate(200.0, {}, [past(20.0, 100.0, slope=0.15)], share=0.5) == pytest.approx(20.0)
    assert estimate(100.0, {}, [past(20.0, 100.0, slope=0.15)], share=0.0) == pytest.approx(5.0)


def test_among_runs_of_equal_work_equal_parameters_decide_and_outliers_do_not():
    runs = [past(9.0, 100.0, lr=1), past(10.0, 100.0, lr=1), past(50.0, 100.0, lr=1), past(3.0, 100.0, lr=2)]
    assert estimate(100.0, {"lr": 1}, runs) == 10.0
    assert estimate(None, {"lr": 2}, runs) == 3.0


def test_backtest_forecasts_each_run_from_those_before_it():
    # 10 forecasts 20 (off by 50 %); 10 and 20 forecast 15 for 15 (0 %); their median 15 forecasts 10 (50 %).
    assert backtest([past(10.0), past(20.0)]) == pytest.approx(0.5)
    assert backtest([past(10.0), past(20.0), past(15.0)]) == pytest.approx(0.25)
    assert backtest([past(10.0), past(20.0), past(15.0), past(10.0)]) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make(tmp_path_factory.mktemp("checkout") / "repo")


def record(
    anchor: Path,
    name: str,
    *,
    stage: str = "pretrain",
    steps: int = 48,
    seconds: float = 10.0,
    started: int = 1_000_000,
    host: str | None = None,
    pauses: tuple[tuple[int, int], ...] = (),
    end: bool = True,
    params: dict[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """A run as a stage leaves it; each pause (to, from) is a kill and a start again, ms after the beginning."""
    journal = Journal(anchor / ".athanor" / "runs" / name)
    clock = [started]

    def write(row: dict[str, Any]) -> None:
        journal._file.write(json.dumps({**row, "t": clock[0]}) + "\n")

    for number in range(1, steps + 1):
        write({"s": number, "m": {"loss": 1.0, "tokens": 2048.0 * number, "tokens_per_second": 1.0}})
    for stopped, resumed in pauses:
        clock[0] = started + stopped
        write({"event": "note"})
        clock[0] = started + resumed
        write({"event": "resumed"})
    write_json(
        journal.folder / "meta.json",
        {
            "run": name,
            "stage": stage,
            "started_ms": started,
            "resumed": len(pauses),
            "params": dict(flatten(params or {section: MICRO[section] for section in SECTIONS})),
            "inputs": INPUTS,
            "hardware": {"host": host or platform.node()},
        },
    )
    if end:
        facts = {**({"slot": "x"} if stage in ("pretrain", "sft") else {}), **facts}
        journal.close("FINISHED", seconds=seconds, facts=facts, metrics={"flops": 48e6, "steps": 48, "tokens": 98304})
    return journal.folder


def test_a_resumed_run_took_the_sum_of_its_processes(tmp_path, checkout):
    record(tmp_path, "one", seconds=7.0, pauses=((4_000, 60_000), (61_500, 99_000)))
    (run,) = RunHistory(open_repo(checkout), tmp_path).runs_of("pretrain")
    assert run.seconds == pytest.approx(4.0 + 1.5 + 7.0) and run.work == pytest.approx(WORK)


def test_a_resumed_run_gives_no_slope_for_its_training_seconds_are_of_the_last_process(tmp_path, checkout):
    record(tmp_path, "whole", seconds=10.0, train_seconds=9.6, started=1000)
    record(tmp_path, "resumed", seconds=6.0, train_seconds=4.8, started=2000, pauses=((4_000, 60_000),))
    whole, resumed = RunHistory(open_repo(checkout), tmp_path).runs_of("pretrain")
    assert whole.slope == pytest.approx(9.6 / WORK) and resumed.slope is None
    assert estimate(2 * WORK, {}, [resumed]) == pytest.approx(2 * (4.0 + 6.0))  # proportional


def test_runs_that_say_nothing_about_time_do_not_count(tmp_path, checkout):
    record(tmp_path, "given-out-again", steps=0, seconds=0.5)
    record(tmp_path, "elsewhere", host="another-machine")
    record(tmp_path, "unfinished", end=False)
    folder = record(tmp_path, "failed", end=False)
    write_json(folder / "end.json", {"status": "FAILED", "ended_ms": 5, "seconds": 1.0})
    torn = record(tmp_path, "torn")
    (torn / "meta.json").write_text("{")
    memory = RunHistory(open_repo(checkout), tmp_path)
    assert memory.runs_of("pretrain") == []
    told = forecast(step(), memory, ROOT, training_of(step(), ROOT, check_values(MICRO)))
    assert (told.seconds, told.error, told.runs, told.tokens) == (None, None, 0, 98304)


def test_a_run_that_began_on_a_trunk_counts_what_it_trained(tmp_path, checkout):
    record(tmp_path, "half", steps=24, seconds=5.0)
    (run,) = RunHistory(open_repo(checkout), tmp_path).runs_of("pretrain")
    assert run.work == pytest.approx(WORK / 2)


def test_work_of_training_is_tokens_times_operations():
    built = check_values(MICRO)
    work = training_of(step(), ROOT, built)
    assert work is not None and (work.tokens, work.steps) == (98304, 48)
    assert work.trunk_steps == 33 and work.parameters == 295392
    assert training_of(step("shard"), ROOT, built) is None
    assert training_of(step("sft"), ROOT, built).tokens is None  # its rows are not there yet


def test_a_model_of_twice_the_tokens_takes_twice_as_long_and_says_how_wrong_that_was(tmp_path, checkout):
    record(tmp_path, "first", seconds=10.0, started=1000)
    record(tmp_path, "second", seconds=12.5, started=2000)
    work = Training(98304 * 2, 2048, 48e6 / 98304, 100)
    told = forecast(step(), RunHistory(open_repo(checkout), tmp_path), ROOT, work)
    assert told.seconds == pytest.approx(22.5) and told.error == pytest.approx(0.2) and told.runs == 2
    assert told.tokens == 2 * 98304 and told.disk_bytes and told.from_step is None


def sft(**inputs: str | None) -> Step:
    sections = {name: dict(MICRO[name]) for name in ("model", "sft")}
    return Step("sft", RUN, False, (), (), dict(inputs), sections, "python -m stages.sft", None)


def test_training_on_data_still_to_be_made_takes_the_last_rows_by_this_model(tmp_path, checkout):
    sections = {name: dict(MICRO[name]) for name in ("model", "sft")}
    record(tmp_path, "first", stage="sft", seconds=10.0, train_seconds=8.0, params=sections)
    planned = sft(**{"data/sft": None})
    larger = Training(None, 1024, 5 * WORK / 98304 - TOKEN_FLOPS, 100)  # a token costs five times as much
    told = forecast(planned, RunHistory(open_repo(checkout), tmp_path), ROOT, larger)
    assert (told.tokens, told.input_known) == (None, False)
    assert told.seconds == pytest.approx(2.0 + 5 * 8.0)
    planned.params["sft"]["epochs"] = sections["sft"]["epochs"] * 2
    told = forecast(planned, RunHistory(open_repo(checkout), tmp_path), ROOT, larger)
    assert told.seconds == pytest.approx(2.0 + 10 * 8.0)


def test_an_input_that_is_made_anew_is_said_to_be_unknown(tmp_path, checkout):
    record(tmp_path, "first", stage="shard", steps=0, seconds=3.0)
    memory = RunHistory(open_repo(checkout), tmp_path)
    assert not forecast(step("shard", dict.fromkeys(INPUTS)), memory, ROOT, None).input_known
    assert forecast(step("shard", INPUTS), memory, ROOT, None).input_known


@pytest.fixture
def slot_facts() -> dict[str, Any]:
    sections = filled({name: MICRO[name] for name in SECTIONS})
    sections["model"]["vocab_size"] = 1024
    for name in ("sample_every_tokens", "sample_prompts"):
        del sections["pretrain"][name]
    return {"params": sections, "inputs": DIGESTS}


def slot(anchor: Path, facts: dict[str, Any], *steps: int, run: str | None = None) -> Path:
    code = Code("stages.pretrain", file_digests(ROOT, "stages.pretrain"))
    with Slot(anchor / ".athanor" / "slots" / "pretrain", facts, code=code) as found:
        for number in steps:
            (found.path / f"step_{number:08d}").mkdir()
        if run:
            write_json(found.path / "run.json", {"run": run})
    return found.path


def begun(anchor: Path, checkout: Path, planned: Step | None = None) -> int | None:
    planned = planned or step(inputs=INPUTS)
    built = check_values(MICRO)
    return forecast(planned, RunHistory(open_repo(checkout), anchor), ROOT, training_of(planned, ROOT, built)).from_step


def test_an_unfinished_slot_is_continued_and_only_the_rest_forecast(tmp_path, checkout, slot_facts):
    record(tmp_path, "whole", seconds=10.0, train_seconds=9.6)
    record(tmp_path, "killed", end=False)
    slot(tmp_path, slot_facts, 24, 36, run="killed")
    planned = step(inputs=INPUTS, sample_prompts=["other"])  # decides nothing about the weights
    work = Training(98304, 2048, 48e6 / 98304, 100, 33)
    told = forecast(planned, RunHistory(open_repo(checkout), tmp_path), ROOT, work)
    assert (told.from_step, told.steps, told.tokens) == (36, 48, 12 * 2048)
    assert told.seconds == pytest.approx(0.4 + 9.6 / 4)


def test_a_slot_of_anything_else_is_not_continued(tmp_path, checkout, slot_facts):
    record(tmp_path, "killed", end=False)
    path = slot(tmp_path, slot_facts, 24, run="killed")
    assert begun(tmp_path, checkout) == 24
    assert begun(tmp_path, checkout, step(inputs=INPUTS, lr=1.0e-3)) is None
    assert begun(tmp_path, checkout, step(inputs={**INPUTS, "data/shards": "3" * 32 + ".dir"})) is None
    assert begun(tmp_path, checkout, step(inputs={**INPUTS, "data/shards": None})) is None
    planned = step(inputs=INPUTS)
    assert code_questions(planned, ROOT, tmp_path) == []
    other = {**read_json(path / "code.json")["files"], "athanor/base/errors.py": "other"}
    write_json(path / "code.json", {**read_json(path / "code.json"), "files": other})
    (path / "seconds").write_text("3600")
    (path / "step_00000024" / "state.json").write_text("{}")
    assert begun(tmp_path, checkout) is None
    (text,) = code_questions(planned, ROOT, tmp_path)
    assert (
        "pretrain will stop and ask" in text
        and "athanor/base/errors.py. It holds 24 steps (49,152 tokens), 1 h" in text
    )


def test_a_trunk_is_continued_up_to_the_cooldown(tmp_path, checkout, slot_facts):
    record(tmp_path, "killed", end=False)
    slot(tmp_path, slot_facts, run="killed")
    sections = {name: dict(values) for name, values in slot_facts["params"].items()}
    for name in ("tokens", "cooldown_fraction", "cooldown_shape", "final_lr_fraction"):
        del sections["pretrain"][name]
    slot(tmp_path, {**slot_facts, "params": sections, "part": "trunk"}, 10, 33, 60)
    assert begun(tmp_path, checkout) == 33  # 60 lies behind this run's cooldown


def test_bytes_of_an_input_come_from_the_cache_or_the_workspace(tmp_path, checkout):
    memory = RunHistory(open_repo(checkout), tmp_path)
    store = checkout / ".dvc" / "cache" / "files" / "md5"
    for name, text in (("a" * 32, "x" * 100), ("b" * 32 + ".dir", json.dumps([{"md5": "a" * 32, "relpath": "f"}] * 3))):
        (store / name[:2]).mkdir(parents=True, exist_ok=True)
        (store / name[:2] / name[2:]).write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_text("y" * 7)
    assert memory.bytes({"p": "a" * 32, "q": "b" * 32 + ".dir"}) == 400
    assert memory.bytes({"data": "c" * 32}) is None
    assert memory.bytes({"data": "c" * 32, "p": "a" * 32}, tmp_path) == 107

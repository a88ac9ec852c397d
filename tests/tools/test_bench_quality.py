"""The bench of quality: when a curve reaches a loss, whom we are compared with, one score for all, and whose time runs."""

from __future__ import annotations

import io
import json
import math
import sys

import numpy as np
import pytest

from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.validation import bits_per_byte
from tools import quality_contenders as contenders
from tools.bench_quality import Entry, Point, entries, opponent, ratio, summary, time_to

CURVE = [(10.0, 3.0), (20.0, 2.0), (40.0, 1.5)]
SCRIPT = """
import nothing_of_that_name
parser = Parser()
parser.add_argument("--rate")
rate = 2 * base
if rate != 1:
    rate = rate + 1
    print0("told")
unknown = missing_function()
def schedule(step):
    return rate * step
"""


def test_time_to_a_loss():
    assert time_to(CURVE, 2.5) == 15.0 and time_to(CURVE, 2.0) == 20.0 and time_to(CURVE, 1.6) == pytest.approx(36.0)
    assert time_to(CURVE, 3.5) == 10.0  # at most
    assert time_to(CURVE, 1.4) == math.inf and time_to([], 1.4) == math.inf


def test_a_curve_that_rises_again_has_reached_it():
    assert time_to([(1.0, 3.0), (2.0, 2.0), (3.0, 2.8), (4.0, 1.0)], 2.5) == 1.5


def run_of(seconds: float, end: float) -> list[Point]:
    return [Point(1000 * n, 2 * seconds * n / 4, seconds * n / 4, end + 4 - n) for n in range(1, 5)]


def test_the_best_scale_of_the_fastest_numerics_counts():
    names = "ours,nanochat,ours@main:700"
    ours, *theirs, before = entries(names, ["fp32", "bf16"], ["0.5", "rule"])
    assert (ours, before) == (Entry("ours"), Entry("ours", "main", 700)) and len(theirs) == 4
    assert [str(entry) for entry in (before, theirs[1])] == ["ours@main:700", "nanochat fp32 xrule"]
    ends = {theirs[0]: (40.0, 1.5), theirs[1]: (40.0, 1.9), theirs[2]: (20.0, 1.7), theirs[3]: (21.0, 1.6)}
    curves = {entry: {seed: run_of(*end) for seed in (1, 2)} for entry, end in ends.items()}
    curves |= {ours: {1: run_of(10.0, 1.6), 2: run_of(10.0, 1.1)}, before: {1: run_of(10.0, 1.6)}}
    assert opponent(curves) == theirs[3]
    assert ratio(curves[ours][1], curves[theirs[3]][1], "wall") == pytest.approx(10 / 21)
    assert ratio(curves[ours][2], curves[theirs[3]][2], "cpu") == pytest.approx((7.5 + 2.5 / 2) / 21)
    told = "\n".join(summary(curves))
    assert "ours to ours@main:700, wall: 1.000; median 1.000" in told and told.count("<- counts") == 2
    with pytest.raises(SystemExit, match="their"):
        entries("theirs", ["fp32"], ["1"])


def test_one_score_is_the_one_of_our_validation():
    model = Transformer.fresh(ModelConfig(64, 1, 16, 2, 1, 8, 32, 16, 1e4, 1e-6, True), 3)
    draw = np.random.Generator(np.random.PCG64(1))
    documents = [draw.integers(0, 64, length) for length in (2, 3, 16, 17, 18, 25, 40, 90, 90)]
    token_bytes = draw.integers(0, 5, 64).astype(np.int32)
    text_bytes = sum(int(token_bytes[document].sum()) for document in documents)
    parts = contenders.batches(documents, 16)
    assert sum(int((following != contenders.UNSCORED).sum()) for _, following in parts) == sum(map(len, documents)) - 9
    expected = bits_per_byte(model, documents, token_bytes, 16).bpb
    for workers in (1, 2):
        found = contenders.bits_per_byte(model, parts, text_bytes, 64, workers)
        assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="64 logits for 65 ids"):
        contenders.bits_per_byte(model, parts, text_bytes, 65)


def test_only_the_named_statements_of_a_script_run(tmp_path):
    class Parser:
        def add_argument(self, name: str) -> None:
            said.append(name)

    said: list[str] = []
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    space = {"base": 1, "print0": said.append, "Parser": Parser}
    contenders.run_statements(script, {"rate", "schedule"}, space)
    assert space["rate"] == 3 and space["schedule"](2) == 6 and said == ["told"] and "parser" not in space
    contenders.run_statements(script, {"parser"}, space)
    assert said == ["told", "--rate"]
    with pytest.raises(SystemExit, match="does not set momentum"):
        contenders.run_statements(script, {"momentum"}, space)


def test_clocks_stand_still_while_others_have_their_turn(monkeypatch):
    now = [0.0]

    class Waits(io.StringIO):
        def readline(self) -> str:  # type: ignore[override]
            now[0] += 100.0
            return "\n"

    monkeypatch.setattr(contenders, "CLOCKS", {"cpu": lambda: 2 * now[0], "wall": lambda: now[0]})
    monkeypatch.setattr(sys, "stdin", Waits())
    answers = io.StringIO()
    turns = contenders.Turns(answers, 20)
    turns.begin(parameters=7)
    for tokens in (10, 20, 30, 40):
        now[0] += 1.0
        turns.step_done(tokens)
    with turns.stopped():
        now[0] += 50.0
    turns.wait(tokens=40, bpb=1.5)
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert told[0] == {"parameters": 7}
    assert told[1:3] == [{"tokens": 20, "cpu": 4.0, "wall": 2.0}, {"tokens": 40, "cpu": 8.0, "wall": 4.0}]
    assert told[3] == {"tokens": 40, "bpb": 1.5, "cpu": 8.0, "wall": 4.0}

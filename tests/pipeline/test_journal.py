"""The journal survives kills and never doubles a point."""

from __future__ import annotations

import json

from athanor.pipeline.journal import Journal


def rows(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_torn_last_line_is_cut_at_the_next_open(tmp_path):
    journal = Journal(tmp_path)
    journal.scalars(0, {"loss": 2.0})
    journal.scalars(1, {"loss": 1.0})
    journal.close("KILLED")
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"t": 1, "s": 2, "m": {"lo')
    again = Journal(tmp_path)
    again.scalars(2, {"loss": 0.5})
    again.close("FINISHED")
    assert [row["s"] for row in rows(tmp_path)] == [0, 1, 2]


def test_resumed_steps_are_logged_once(tmp_path):
    first = Journal(tmp_path)
    for step in range(5):
        first.scalars(step, {"loss": float(step)})
    first.close("KILLED")
    again = Journal(tmp_path)
    for step in range(3, 8):  # resumed from the checkpoint at step 3
        again.scalars(step, {"loss": float(step)})
        if step == 6:
            again.scalars(step, {"val": 1.0})
    again.close("FINISHED")
    assert [row["s"] for row in rows(tmp_path) if "loss" in row["m"]] == list(range(8))
    assert [row["s"] for row in rows(tmp_path) if "val" in row["m"]] == [6]


def test_non_finite_values_stay_valid_json(tmp_path):
    journal = Journal(tmp_path)
    journal.scalars(0, {"loss": float("nan"), "norm": float("inf")})
    journal.close("FINISHED")
    assert rows(tmp_path)[0]["m"] == {"loss": "nan", "norm": "inf"}
    assert float("nan") != float(rows(tmp_path)[0]["m"]["loss"])

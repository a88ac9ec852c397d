"""The report on a GPU, rehearsed on this CPU: cheap parts give figures, and a part that fails stops no other (about 20 s)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.e2e.clone import environment

ROOT = Path(__file__).resolve().parents[2]


def crash(job):
    yield {"begun": True}
    raise MemoryError("too large")


def hang(job):
    yield {"begun": True}
    signal.pause()


def die(job):
    yield {"begun": True}
    os.kill(os.getpid(), signal.SIGKILL)


def lacks(job):
    import nobody_has_this

    yield {"has": nobody_has_this}


def report(out: Path, parts: str, *words: str) -> dict[str, dict]:
    parts = ",".join(f"{__name__}:{part}" if part in globals() else part for part in parts.split())
    command = [
        sys.executable,
        "tools/gpu_report.py",
        str(out),
        "--device",
        "cpu",
        "--preset",
        "micro",
        "--parts",
        parts,
    ]
    done = subprocess.run([*command, *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (out / "report.jsonl").read_text()
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["part"] for row in rows] == parts.split(",")
    return {row.pop("part").rpartition(":")[2]: row for row in rows}


def test_cheap_parts(tmp_path):
    np.savez(tmp_path / "reference.npz", **{"adamw 0": np.ones(1), "adamw 1": np.ones(1)})
    rows = report(
        tmp_path / "out", "attention pieces resume save compiled", "--reference", str(tmp_path / "reference.npz")
    )
    assert {name: row["ok"] for name, row in rows["pieces"].items() if isinstance(row, dict) and not row["ok"]} == {
        "adamw": False  # what the file says is not so
    }
    assert rows["pieces"]["muon"]["found_inf_changes_nothing"]
    assert rows["attention"]["flash documents fp32"]["ok"] and rows["attention"]["varlen"] == "not on cpu"
    assert rows["resume"]["killed"] and rows["resume"]["resumed_from"] == 3
    assert rows["resume"]["max_weight_difference"] == 0 < rows["resume"]["tokens_per_second"]
    assert rows["save"]["second"]["gb"] > 0
    assert rows["compiled"]["skipped"] == "not on cpu"


def test_a_part_that_fails_stops_no_other(tmp_path):
    rows = report(tmp_path, "crash die lacks resume-deterministic")
    assert {name: row.get("error") for name, row in rows.items()} == {
        "crash": "MemoryError: too large",
        "die": "killed by signal 9",
        "lacks": "needs nobody_has_this",
        "resume-deterministic": None,
    }
    assert rows["crash"]["begun"] and "too large" in (tmp_path / "stderr.txt").read_text()


def test_limits(tmp_path):
    rows = report(tmp_path / "each", "hang resume-deterministic", "--limit", "1")
    assert rows["hang"]["error"] == "no end within 1 s"
    assert rows["resume-deterministic"]["skipped"] == "not on cpu"
    assert report(tmp_path / "all", "machine", "--seconds", "0")["machine"] == {"skipped": "0 s are left"}

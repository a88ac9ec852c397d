"""The monitor beside a run: what it tells, once, also after a kill, and where it ends up. About 4 s."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json
from athanor.base.errors import ParamsError
from athanor.cli.health import read
from athanor.monitor.finding import Finding
from athanor.monitor.thresholds import Thresholds
from athanor.runtime import presets
from athanor.runtime.journal import Journal, rows
from athanor.runtime.run import Run
from athanor.runtime.watch import FILE, Health
from tests.monitor.curves import change, healthy, plan, schedule
from tests.runtime.view import ROOT

STEPS = 490


def faulty():
    """A spike, a burst of the gradient, and a loss that is no number at the end."""
    curve = change(healthy(STEPS, seed=21), "loss", lambda step, value: 3 * value, 150, 152)
    curve = change(curve, "grad_norm", lambda step, value: 60 * value, 300, 300)
    return change(curve, "loss", lambda step, value: math.nan, 480)


class Process:
    """One process of a run: opens the journal, goes on from a step, and logs until it is killed."""

    def __init__(self, folder: Path, thresholds: Thresholds | None = None) -> None:
        begun = (folder / "journal.jsonl").is_file()
        self.said: list[str] = []
        self.journal = Journal(folder)
        if begun:
            self.journal.event("resumed", pid=1)
        self.health = Health(self.journal, self.said.append, thresholds or Thresholds(), plan("pretrain", STEPS))

    def log(self, curve, first, last):
        for row in curve:
            if first <= row["step"] <= last:
                values = {name: value for name, value in row.items() if name != "step"}
                fresh = self.journal.scalars(int(row["step"]), values)
                if fresh:
                    self.health.see(int(row["step"]), fresh)


def told(folder: Path) -> list[Finding]:
    lines = rows((folder / "journal.jsonl").read_bytes())
    return [Finding.from_dict(row) for row in lines if row.get("event") == "finding"]


def key(found):
    return [(each.rule, each.level, each.step, each.diagnosis) for each in found]


def test_live_findings_are_those_of_the_journal(tmp_path):
    process = Process(tmp_path)
    process.log(faulty(), 1, STEPS)
    rules = [each.rule for each in told(tmp_path)]
    assert rules == ["loss_spike", "spike_recovery", "gradient_spike", "nan_loss"]
    assert [line.split()[0] for line in process.said] == ["CRITICAL", "INFO", "CRITICAL", "CRITICAL"]
    assert key(read(tmp_path, Thresholds()).findings) == key(told(tmp_path))
    kept = read_json(tmp_path / "files" / FILE)
    assert kept["status"] == "critical" and [each["rule"] for each in kept["findings"]] == rules
    assert kept["findings"][-1]["value"] == "nan"


@pytest.mark.parametrize("kills", [(100, 200), (151, 153, 160), (302,), (479, 481, 485)])
def test_killed_run_tells_nothing_twice_and_forgets_nothing(tmp_path, kills):
    """Each process goes back 20 steps to its checkpoint, as a resumed training does."""
    curve, first, said = faulty(), 1, []
    for last in (*kills, STEPS):
        process = Process(tmp_path)
        process.log(curve, first, last)
        process.journal._file.close()
        said += process.said
        first = max(1, last - 20)
    found = told(tmp_path)
    assert len(set(key(found))) == len(found) == len(said)
    assert [each.rule for each in found if each.level == "critical"] == ["loss_spike", "gradient_spike", "nan_loss"]
    assert key(read(tmp_path, Thresholds()).findings) == key(found)


def test_resume_is_seen_live_and_in_the_journal(tmp_path):
    """After the kill the loss is a quarter higher, as if the optimizer had been lost."""
    curve = change(healthy(STEPS, seed=23), "loss", lambda step, value: 1.25 * value, 201)
    Process(tmp_path).log(curve, 1, 200)
    process = Process(tmp_path)
    process.log(curve, 181, 300)
    assert [each.rule for each in told(tmp_path) if each.level != "info"] == ["resume_spike"]
    assert "resume_spike" in process.said[0]
    assert key(read(tmp_path, Thresholds()).findings) == key(told(tmp_path))


def test_finding_that_a_kill_kept_from_the_journal_is_told_after_it(tmp_path):
    """Killed between the row and the finding: the next process makes up for it, once."""
    Process(tmp_path).log(faulty(), 1, 200)
    path = tmp_path / "journal.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"loss_spike"' not in line]
    path.write_text("\n".join(lines) + "\n")
    assert len(Process(tmp_path).said) == 1
    assert Process(tmp_path).said == []


def test_healthy_run_says_so_and_nothing_else(tmp_path):
    process = Process(tmp_path)
    process.log(healthy(STEPS, seed=22), 1, STEPS)
    assert process.said == [] and read_json(tmp_path / "files" / FILE) == {"status": "ok", "findings": []}


def test_trouble_of_the_monitor_does_not_stop_the_run(tmp_path):
    process = Process(tmp_path)
    for step in (1, 2):
        process.health.see(step, {"loss": "much"})
    assert len(process.said) == 1 and "the training goes on" in process.said[0]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"))
    stage = "stages:\n  pretrain:\n    cmd: python -m stages.pretrain\n    params: [pretrain]\n"
    (tmp_path / "dvc.yaml").write_text(stage)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def log(run: Run, curve) -> None:
    for row in curve:
        run.log(int(row["step"]), **{name: value for name, value in row.items() if name != "step"})


def test_run_log_feeds_the_monitor(checkout, capsys):
    run = Run("pretrain", "stages.pretrain")
    run.watch_health(schedule(STEPS), 2048, 4096)
    log(run, faulty())
    assert "pretrain: CRITICAL at step 480, nan_loss: The loss is nan" in capsys.readouterr().err
    assert read_json(run.journal.folder / "files" / FILE)["status"] == "critical"


def test_stage_that_does_not_train_is_not_watched(checkout, capsys):
    run = Run("pretrain", "stages.pretrain")
    log(run, faulty())
    assert capsys.readouterr().err == "" and not (run.journal.folder / "files" / FILE).exists()


def test_health_yaml_moves_a_threshold_and_is_checked(checkout, capsys):
    (checkout / "health.yaml").write_text("off: [nan_loss, gradient_spike]\nspike_sigma: 1.0e+9\n")
    run = Run("pretrain", "stages.pretrain")
    run.watch_health(schedule(STEPS), 2048, 4096)
    log(run, faulty())
    assert capsys.readouterr().err == ""
    (checkout / "health.yaml").write_text("spike_sigm: 7.0\n")
    with pytest.raises(ParamsError, match="health.spike_sigm: unknown key. Fix: did you mean 'health.spike_sigma'"):
        Run("pretrain", "stages.pretrain").watch_health(schedule(STEPS), 2048, 4096)
    (checkout / "health.yaml").write_text("off: [nan_los]\n")
    with pytest.raises(ParamsError, match="health.off: there is no rule 'nan_los'"):
        Run("pretrain", "stages.pretrain").watch_health(schedule(STEPS), 2048, 4096)


def test_health_yaml_is_no_dependency_of_a_stage():
    assert "health.yaml" not in (ROOT / "dvc.yaml").read_text()

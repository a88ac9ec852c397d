"""What stops or saves a stage from outside: time budget, STOP and SAVE, a full disk. Real processes; about 30 s."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from athanor.base.errors import ParamsError
from athanor.runtime.guards import MIB, SLURM_END, UNTIL, Guards, newest_bytes
from athanor.runtime.machine import machine
from tests.runtime.guarded_stage import Place, ended, until


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an undisturbed training makes."""
    place = Place(tmp_path_factory.mktemp("whole"))
    assert place.run({"train": True})[0] == 0
    return (place.path / "out.bin").read_bytes()


def guards(tmp_path: Path, **environ: str) -> Guards:
    return Guards(tmp_path / ".athanor", tmp_path, machine(), environ)


def test_a_budget_ends_a_training_and_the_same_command_goes_on_to_the_same_bytes(place, whole):
    plan = {"train": True, "4": "sleeps", "seconds": 1.5}
    code, said = place.run(plan, ATHANOR_MAX_MINUTES="0.02")
    assert code == 75 and "the 1.2 s of max_minutes are used up: stopped at step" in said, said
    assert "the same command goes on from there" in said
    steps = place.log(place.children[-1])
    assert 1 <= len(steps) <= 4 and not (place.path / "out.bin").exists()
    code, said = place.run(plan)
    assert code == 0 and place.log(place.children[-1]) == list(range(len(steps) + 1, 25)), said
    assert (place.path / "out.bin").read_bytes() == whole


def test_save_writes_a_checkpoint_of_a_training_that_goes_on(place, whole):
    place.hold(7)
    child = place.start({"train": True})
    place.wait_held(child)
    assert place.checkpoints() == []
    (place.state / "SAVE").touch()
    place.release(until=12)
    until(lambda: not (place.state / "SAVE").exists(), "the request is obeyed", child)
    saved = place.checkpoints()
    (place.control / "hold").unlink()
    assert ended(child)[0] == 0 and saved == ["step_00000007"]
    assert (place.path / "out.bin").read_bytes() == whole


def test_stop_ends_the_stage_that_takes_the_file(place):
    place.hold(3)
    child = place.start()
    place.wait_held(child)
    (place.state / "STOP").touch()
    place.release()
    code, said = ended(child)
    assert code == 75 and ".athanor/STOP asked for it: stopped at step 3" in said, said
    assert not (place.state / "STOP").exists() and place.checkpoints() == ["step_00000003"]
    assert place.run()[0] == 0 and place.log(place.children[-1])[0] == 4


def test_files_that_are_older_than_the_stage_ask_for_nothing_until_touched(place):
    place.state.mkdir()
    (place.state / "STOP").touch()
    (place.state / "SAVE").touch()
    place.hold(2)
    child = place.start()
    place.wait_held(child)
    place.release(until=5)
    until(lambda: 5 in place.log(child), "it has gone on", child)
    assert place.checkpoints() == [] and (place.state / "STOP").exists()
    (place.state / "STOP").touch()
    place.release()
    code, said = ended(child)
    assert code == 75 and "stopped at step 5" in said and said.count("is older than this stage and is ignored") == 2
    assert not (place.state / "STOP").exists() and (place.state / "SAVE").exists()


def test_the_commands_reach_every_stage_that_runs(place):
    nothing = place.athanor("stop")
    assert nothing.returncode == 1 and "no stage runs here" in nothing.stderr and not (place.state / "STOP").exists()
    place.hold(2)
    # The other one does not look for the file before it has been asked for again.
    children = [place.start({"name": "a"}), place.start({"name": "b", "2": "waits_until_over"})]
    for child in children:
        place.wait_held(child)
    late = place.athanor("save", "--wait", "0.3")
    assert late.returncode == 1 and "has not answered in 0.3 s" in late.stderr and (place.state / "SAVE").exists()
    stopping = subprocess.Popen(
        [sys.executable, "-m", "athanor", "stop"], cwd=place.path, env=place.environment({}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until((place.state / "STOP").exists, "the command has asked")
    rows = place.athanor("slots").stdout
    assert rows.count("training, step 1, sign of life") == 2, rows
    place.release()
    until(lambda: children[0].poll() is not None, "one has taken the file")
    until((place.state / "STOP").exists, "the command asks again, for the other one")
    time.sleep(0.6)
    (place.control / "over").touch()
    out, _ = stopping.communicate(timeout=120)
    assert [ended(child)[0] for child in children] == [75, 75] and stopping.returncode == 0, out
    assert out.count("asked for it: stopped at step 2") == 2, out
    assert not (place.state / "STOP").exists() and not (place.state / "SAVE").exists()


def test_the_stages_of_one_repro_share_its_minutes(place):
    """The first stage uses them up; the second then stops after its first step and does not get them again."""
    waits = f"import os, time; time.sleep(max(0, float(os.environ['{UNTIL}']) - time.time()))"
    (place.path / "wait.py").write_text(f"{waits}\nopen('w', 'w').close()\n")
    stage = "  toy:\n    cmd: python -m stages.toy\n    deps: [w]\n    outs: [o]\n"
    (place.path / "dvc.yaml").write_text(f"stages:\n  wait:\n    cmd: python wait.py\n    outs: [w]\n{stage}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = place.environment({}, PATH=path, DVC_NO_ANALYTICS="1", DVC_SITE_CACHE_DIR=str(place.control / "site"))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=place.path, env=env, check=True)
    command = [sys.executable, "-m", "athanor", "repro", "--max-minutes", "0.04"]
    done = subprocess.run(command, cwd=place.path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr
    assert "athanor repro --max-minutes is used up: stopped at step 1" in done.stderr
    assert "The same command goes on from there" in done.stderr


def test_the_end_of_a_slurm_job_is_a_budget_with_time_left_to_save(tmp_path):
    assert guards(tmp_path).stop() is None
    assert guards(tmp_path, **{SLURM_END: f"{time.time() + 1e5:.0f}"}).stop() is None
    end = time.time() + 4
    job = guards(tmp_path, **{SLURM_END: str(end)})
    assert job.stop() is None or time.time() > end - 2.1
    while (stop := job.stop()) is None:
        time.sleep(0.01)
    assert stop.save and "the Slurm job ends in" in stop.why and "in 0.0 s" not in stop.why
    assert time.time() >= end - 2.1  # a short job is used for half of its time at least
    over = guards(tmp_path, **{SLURM_END: f"{time.time() - 9:.0f}"}).stop()
    assert over is not None and "ends in 0.0 s" in over.why
    with pytest.raises(ParamsError, match=SLURM_END):
        guards(tmp_path, **{SLURM_END: "soon"})


def test_only_the_main_process_of_several_looks(tmp_path):
    (tmp_path / ".athanor").mkdir()
    for main in (True, False):
        asked = Guards(tmp_path / ".athanor", tmp_path, machine(), {UNTIL: "1"}, main=main)
        (tmp_path / ".athanor" / "SAVE").write_text(str(main))
        assert (asked.stop() is not None) == main and asked.save() == main


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MiB. Its reserve is a fiftieth: 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)]
    if not mount or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leave_mib: float) -> None:
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(bytes(int(shutil.disk_usage(disk).free - leave_mib * MIB)))


@pytest.mark.parametrize(
    ("free_mib", "saves"),  # two checkpoints and the reserve are 14 MiB; one is sure to fit above 7.3
    [(60, None), (14.5, None), (13.5, True), (7.5, True), (7, False)],
)
def test_a_stage_stops_while_a_checkpoint_still_fits(small_disk, free_mib, saves):
    slot = small_disk / ".athanor" / "slots" / "toy" / "x"
    for step, mib in ((1, 20), (2, 6)):
        (slot / f"step_{step:08d}").mkdir(parents=True)
        (slot / f"step_{step:08d}" / "data").write_bytes(bytes(mib * MIB))
    assert newest_bytes(slot) == 6 * MIB
    fill(small_disk, free_mib)
    watched = guards(small_disk)
    watched.slots.append(slot)
    stop = watched.stop()
    assert (stop and stop.save) == saves, stop
    assert abs(watched.scalars()["disk.free_bytes"] / MIB - free_mib) < 0.1 and watched.scalars() == {}


def test_a_full_disk_ends_the_stage_with_75_and_says_what_to_do(place, small_disk):
    fill(small_disk, 1.0)
    code, said = place.run(DVC_ROOT=str(small_disk))
    assert code == 75 and "MiB are free in" in said and str(small_disk) in said, said
    assert "athanor slots prune" in said and "stopped without saving" in said and "Traceback" not in said
    assert not list(small_disk.glob(".athanor/slots/toy/*/step_*"))
    code, said = place.run(DVC_ROOT=str(small_disk), ATHANOR_MIN_FREE_GIB="0")
    assert code == 0, said
    (small_disk / "filler").unlink()
    place.state.mkdir()
    assert place.run()[0] == 0
    (row,) = [row for row in place.rows() if "disk.free_bytes" in row.get("m", ())]
    assert row["s"] == 2 and row["m"]["disk.free_bytes"] > 0  # first asked after step 1, told with the next


def test_both_training_stages_ask_at_every_step(tmp_path, monkeypatch):
    from athanor.runtime.run import Run
    from tests.stages import test_train_stages as stages

    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("ATHANOR_THREADS", "1")
    monkeypatch.setenv("ATHANOR_DEVICE", "cpu")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    stages.write_inputs(tmp_path / "work")
    asked: list[str] = []
    monkeypatch.setattr(Run, "save_requested", lambda run: asked.append(run.stage) or True)
    for stage in ("pretrain", "sft"):
        stages.execute(stage, pretrain={"tokens": 640})
        steps = json.loads(Path(f"metrics/{stage}.json").read_text())["steps"]
        assert asked.count(stage) == steps > 5
        kept = {path.name for path in Path(f".athanor/slots/{stage}").glob("*/step_*")}
        assert f"step_{steps - 1:08d}" in kept, kept  # without the request only the last step and the trunk's end

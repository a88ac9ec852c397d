"""Code that is corrected while a run is under way: what was trained is kept, and the result tells by which code."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError, Interrupted
from athanor.cli import slots as command
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.runtime.slots import Code, Slot
from stages import download
from tests.e2e.clone import environment
from tests.stages import test_train_stages
from tests.stages.test_train_stages import MODEL, PRETRAIN, ROOT, SFT, edit, execute, slots

inputs, work = test_train_stages.inputs, test_train_stages.work
MESSAGE, OTHER = 'f"{text}. Fix: {fix}"', 'f"{text}. Repair: {fix}"'


@pytest.fixture
def place(work):
    """The inputs, with the code as files that can be edited."""
    for name in ("athanor", "stages"):
        (work / name).unlink()
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    return work


def hours(seconds=36000):
    """Count the work in all slots as ten hours."""
    for path in Path(".athanor/slots").glob("*/*/seconds"):
        path.write_text(str(seconds))


def correct_a_message():
    edit("athanor/base/errors.py", MESSAGE, OTHER)


def stage(**more):
    env = environment(ATHANOR_THREADS="1", ATHANOR_DEVICE="cpu", ATHANOR_TRACKING="off", **more)
    command = [sys.executable, "-m", "stages.pretrain"]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_killed_corrected_and_adopted_it_ends_and_tells_which_code_trained_which_steps(place):
    """An edited message once began the training again at step 0, in silence."""
    whole = dict(presets.values(ROOT / "presets" / "micro.yaml"))
    whole |= {"model": MODEL, "pretrain": PRETRAIN | {"schedule": "cosine", "tokens": 64 * 320}, "sft": SFT}
    YAML().dump(whole, Path("params.yaml"))
    victim = stage()
    while not list(Path(".athanor/slots").glob("pretrain/*/anchors/step_00000256")):
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    hours()
    correct_a_message()
    refused = stage()
    said = refused.communicate()[1]
    assert refused.returncode == 1 and "athanor/base/errors.py" in said and "10 h" in said and "steps (" in said
    assert "athanor slots adopt" in said and "athanor slots drop" in said and not Path("models/base").exists()
    answer = subprocess.run([sys.executable, "-m", "athanor", "slots", "adopt"], capture_output=True, text=True)
    assert answer.returncode == 0 and "is adopted" in answer.stdout
    on = stage()
    said = on.communicate()[1]
    assert on.returncode == 0, said
    (slot,) = slots("pretrain")
    first, second = read_json(slot / "code.json")["digests"]
    rows = read_json("models/base/manifest.json")["trained_by"]
    assert [row["code"] for row in rows] == [first, second]
    assert rows[0]["after_step"] == 0 < rows[0]["to_step"] == rows[1]["after_step"] < rows[1]["to_step"] == 320
    leaf = read_json("metrics/runs/pretrain.json")
    assert (
        leaf["code"] == second and leaf["codes"] == {slot.name: [first, second]} and leaf["facts"]["trained_by"] == rows
    )


def half(place, **changes):
    with pytest.raises(Interrupted):
        execute("pretrain", stop_after=17, pretrain={"tokens": 64 * 40} | changes)
    hours()


def asked(**changes):
    with pytest.raises(InputError) as error:
        execute("pretrain", pretrain={"tokens": 64 * 40} | changes)
    return str(error.value)


def test_dropped_it_begins_at_step_0(place):
    half(place, schedule="cosine")
    correct_a_message()
    assert "holds 17 steps (1,088 tokens)" in asked(schedule="cosine")
    assert subprocess.run([sys.executable, "-m", "athanor", "slots", "drop"], stdout=subprocess.DEVNULL).returncode == 0
    run = execute("pretrain", pretrain={"tokens": 64 * 40, "schedule": "cosine"})
    assert run._facts["trained_tokens"] == 40 * 64 and "trained_by" not in read_json("models/base/manifest.json")


def test_a_cooldown_branches_from_an_adopted_trunk_and_knows_who_trained_it(place):
    half(place)  # stopped in the trunk, at step 17 of 30
    correct_a_message()
    assert "holds 17 steps" in asked()
    (slot,) = command.adopt(command.find(place), "")
    assert slot.state == "trunk" and not [one for one in command.find(place) if command.waits(one)]
    execute("pretrain", pretrain={"tokens": 64 * 40})
    first, second = slot.code.digests[0], read_json("metrics/runs/pretrain.json")["code"]
    expected = [
        {"code": first, "after_step": 0, "to_step": 17},
        {"code": second, "after_step": 17, "to_step": 40},
    ]
    assert read_json("models/base/manifest.json")["trained_by"] == expected


def test_an_edit_while_the_stage_runs_leaves_its_work_to_be_adopted(place, monkeypatch):
    """A training that ended with edited code once counted as done: the next start would have begun it anew."""
    begin = Run.watch_health

    def late(self, *words, **more):
        begin(self, *words, **more)
        self.begin()
        correct_a_message()

    monkeypatch.setattr(Run, "watch_health", late)
    with pytest.raises(InputError, match="edited while the stage ran"):
        execute("pretrain", pretrain={"schedule": "cosine"})
    monkeypatch.undo()
    monkeypatch.chdir(place)
    hours()
    assert "holds 20 steps" in asked(schedule="cosine", tokens=1300)
    command.adopt(command.find(place), "")
    run = execute("pretrain", pretrain={"schedule": "cosine"})
    assert "trained_tokens" not in run._facts and len(read_json("models/base/manifest.json")["trained_by"]) == 2


def test_what_was_downloaded_survives_an_edit_of_errors_py(place):
    """The slot of a source had another name then: 58 GB were fetched again."""
    Path("params.yaml").write_text("{}\n")

    def source(url):
        run = Run("download", "stages.download")
        return run, download.fetcher(run, Path("data/raw"), 0.1).progress_folder(
            "web", "athanor.sources.http", {"urls": [url]}
        )

    with source("https://a")[1] as slot:
        (slot.path / "file-0").write_bytes(b"bytes")
    hours()
    correct_a_message()
    with (
        pytest.raises(InputError, match="athanor/base/errors.py. It holds 1 file of 0.0 MB, 10 h"),
        source("https://a")[1],
    ):
        pass
    with source("https://b")[1]:
        pass  # has nothing yet to ask about
    assert [one.path for one in command.adopt(command.find(place), "")] == [slot.path]
    run, again = source("https://a")
    with again:
        assert again.path == slot.path and (slot.path / "file-0").read_bytes() == b"bytes"
        assert run.codes() == {"codes": {slot.fingerprint: [slot.code.digest, again.code.digest]}}
    run, other = source("https://b")
    with other:
        assert run.codes() == {}  # the manifest of one code has nothing that depends on the run


def test_the_parts_of_a_download_are_adopted_together(tmp_path, monkeypatch):
    """Nine sources would be nine questions. Finished ones ask, too: an edit of errors.py fetched all of them again."""
    folder, old, new = tmp_path / ".athanor/slots/download", Code("web", {"e.py": "1"}), Code("web", {"e.py": "2"})
    for name in "abc":
        with Slot(folder, {"params": {"url": name}, "part": "web"}, code=old, shared=True) as slot:
            (slot.path / "file-0").write_bytes(b"x")
            slot.mark_done()
        (slot.path / "seconds").write_text("36000")
    with pytest.raises(InputError, match="1 file of 0.0 MB"):
        with Slot(folder, {"params": {"url": "a"}, "part": "web"}, code=new, shared=True):
            pass
    assert "waits for adopt or drop" in command.table(command.find(tmp_path))
    assert len(command.adopt(command.find(tmp_path), "")) == 3
    for name in "abc":
        with Slot(folder, {"params": {"url": name}, "part": "web"}, code=new, shared=True) as slot:
            assert slot.done and slot.digests == (old.digest, new.digest)
    with pytest.raises(InputError, match="0 slots wait"):
        command.adopt(command.find(tmp_path), "")

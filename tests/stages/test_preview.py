"""A model that is still training, talked to: as it is, cooled down, on the page; and the run that knows nothing of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.catalog.loading import load_export
from athanor.catalog.places import origin
from athanor.catalog.running import running
from athanor.cli import cli
from athanor.model.weights import model_tensors
from athanor.runtime.locks import try_lock
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.schedule import Schedule
from stages import pretrain, shard
from tests.runtime.toy_pipeline import until
from tests.serving.live import ROOT, Live
from tests.stages.conftest import PARAMS, run_stage, run_text_stage

SECTIONS = {"model": PARAMS["model"], "pretrain": {**PARAMS["pretrain"], "tokens": 2560}}
HELD = 12  # of 40 steps, 30 of them in the trunk
# A training that writes a checkpoint after each step, and waits after one while the file `hold` is there.
TRAINING = f"""
import time
from pathlib import Path
from athanor.runtime.run import Run
from stages import pretrain
from tests.stages.conftest import run_stage

def save_requested(run, done=[]):
    done.append(1)
    while len(done) > {HELD} and Path("hold").exists():
        time.sleep(0.05)
    return True

Run.save_requested = save_requested
run_stage(pretrain)
"""


@pytest.fixture
def work(tokenizer_world: Path) -> Path:
    run_text_stage(shard)
    run_stage(pretrain, SECTIONS)
    return tokenizer_world


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return model_tensors(load_export(folder)[0])


def previews() -> dict[str, Path]:
    return {path.name.split("step_")[1]: path for path in Path(".athanor/previews").glob("[!.]*")}


def test_a_run_is_previewed_while_it_trains_and_ends_with_the_same_bytes(work: Path) -> None:
    expected, result = Path("models/base/model.safetensors").read_bytes(), Path("models/base/model.safetensors")
    shutil.rmtree(".athanor")
    shutil.rmtree("models/base")
    Path("hold").touch()
    training = subprocess.Popen([sys.executable, "-c", TRAINING], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        # A pattern that names each folder: one that walks the tree stops at a temporary folder that the run has renamed.
        written = f"slots/pretrain/*/step_{HELD:08d}/state.json"
        until(lambda: any(Path(".athanor").glob(written)), "it trains")
        (slot,) = {path.parents[1] for path in Path(".athanor").glob(written)}
        before = {str(path): path.read_bytes() for path in slot.rglob("*") if path.is_file() and path.name != "lock"}
        for words in (["--raw"], ["--minutes", "0.05"]):
            assert cli.call("preview", [*words, "--no-chat"]) == 0
        after = {str(path): path.read_bytes() for path in slot.rglob("*") if path.is_file() and path.name != "lock"}
        assert after == before and not list(Path(".athanor").glob(".*")) and training.poll() is None
        raw, cooled = previews()[f"{HELD:08d}-raw"], previews()[f"{HELD:08d}-cooled"]
        about = origin(cooled)
        assert origin(raw) == {"stage": "pretrain", "step": HELD} and 1 <= about["cooled"] <= HELD
        assert about["step"] > HELD + 3 and about["bits_per_byte"] > 0
        newest = slot / f"step_{HELD:08d}"
        assert all(torch.equal(weights(newest)[name], weight) for name, weight in weights(raw).items())
        assert not all(torch.equal(weights(cooled)[name], weight) for name, weight in weights(raw).items())
        with Live(work) as server:
            models = {row["id"]: row for row in server.ask(None, "/api/state")[2]["models"]}
            (listed,) = [row for row in models.values() if "still training" in row["label"]]
            assert f"step {HELD} " in listed["label"] and "base model" in listed["label"] and len(models) == 3
            assert {row["template"] for row in models.values()} == {"none"}
            text = "def "
            answer = server.ask({"model": raw.name, "messages": [{"role": "user", "content": text}]})[2]
            ids = Tokenizer.load("models/tokenizer").encode(text)
            assert answer["usage"]["prompt_tokens"] == 1 + len(ids)  # no conversation is laid out
            Path("hold").unlink()
            assert training.wait(60) == 0 and not newest.is_dir()
            status, _, reply = server.ask({"model": listed["id"], "prompt": text}, "/v1/completions")
            assert status == 404 and "there is no model" in reply["error"]["message"]
            models = {row["id"] for row in server.ask(None, "/api/state")[2]["models"]}
            assert models - {"base"} == {raw.name, cooled.name}
    finally:
        training.kill()
        training.wait()
    assert result.read_bytes() == expected


def test_a_torn_checkpoint_is_passed_over_and_a_run_without_a_whole_one_too(work: Path, capsys) -> None:
    (slot,) = (path.parent for path in Path(".athanor/slots/pretrain").glob("*/PINNED"))
    (whole,) = slot.glob("step_*")
    newer = slot / "step_00000035"
    shutil.copytree(whole, newer)
    tensors = newer / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    words = ["--raw", "--no-chat", "--slot", slot.name]
    with try_lock(slot / "lock"):
        tensors.write_bytes(data)
        assert [model.id[-8:] for model in running(Path.cwd())] == [newer.name[-8:]]  # that shows only when it is read
        assert cli.call("preview", words) == 0 and "passed over" in capsys.readouterr().err
        assert list(previews()) == [f"{whole.name[5:]}-raw"]
        shutil.rmtree(".athanor/previews")
        tensors.write_bytes(data[:-9])
        assert [model.id[-8:] for model in running(Path.cwd())] == [whole.name[-8:]]
        (whole / "state.json").write_text("{")
        assert running(Path.cwd()) == []
        with pytest.raises(InputError, match="no whole checkpoint"):
            cli.call("preview", words)
    with pytest.raises(InputError, match="no training is at work"):
        cli.call("preview", ["--raw"])


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_the_rate_falls_from_where_the_run_has_it_to_nothing(work: Path, monkeypatch, schedule: str) -> None:
    from athanor.cli import preview
    from athanor.training import loop

    sections = {**SECTIONS, "pretrain": {**SECTIONS["pretrain"], "schedule": schedule, "final_lr_fraction": 0.5}}
    run_stage(pretrain, sections)
    shown: list[Schedule] = []
    real = loop._Training.__init__
    monkeypatch.setattr(
        loop._Training, "__init__", lambda self, *parts: (shown.append(parts[2]), real(self, *parts))[1]
    )
    slots = [path.parent for path in Path(".athanor/slots/pretrain").glob("*/step_00000040")]
    (slot,) = [
        slot for slot in slots if read_json(slot / "facts.json")["params"]["pretrain"]["final_lr_fraction"] == 0.5
    ]
    copy = Path("copy/pretrain") / slot.name
    copy.mkdir(parents=True)
    shutil.copytree(slot / "step_00000040", copy / "step_00000040")
    shutil.copy(slot / "facts.json", copy)
    steps = preview.cool_down(copy, 2.0)["cooled"]
    batch = SECTIONS["pretrain"]["batch_tokens"]
    first, last = shown
    begun = last.total_tokens - steps * batch
    assert first.lr_at(41 * batch) == last.lr_at(begun) == pytest.approx(0.005)
    assert last.lr_at(begun + batch) < 0.005 and last.lr_at(last.total_tokens) == 0

"""The list of a server that runs: models of the checkout that come, are replaced, and go. Workers are test_models' own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from athanor.base.artifacts import write_manifest
from athanor.serving import discover
from athanor.serving.discover import AvailableModel, Local
from athanor.serving.models import Models
from athanor.serving.running import AT_WORK, UNDONE
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer
from tests.serving.live import Live
from tests.serving.models_tiny import write_export
from tests.serving.test_models import Workers, ask, until


@pytest.fixture
def checkout(tmp_path):
    """A checkout without a model, and what writes its export."""
    tokenizer = write_tiny_tokenizer(tmp_path / "models/tokenizer")

    def export(seed: int, *types: str) -> None:
        shutil.rmtree(tmp_path / "models/export", ignore_errors=True)
        model = make_model(tokenizer, seed=seed)
        write_export(tmp_path / "models/export", model, tokenizer, tmp_path / "models/tokenizer", types=types)

    return tmp_path, tokenizer, export


def test_a_server_that_was_there_first_lists_what_is_made_since(checkout):
    root, tokenizer, export = checkout
    with Live(root) as server:

        def listed() -> tuple[str | None, list[str]]:
            state = json.loads(server.get("/api/state"))
            return state["default_model"], [model["id"] for model in state["models"]]

        assert listed() == (None, [])
        save(root / "models/base", make_model(tokenizer), tokenizer)
        assert listed() == ("base", ["base"])
        export(1)
        # A client that never asks for the list.
        said = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
        assert server.post("/v1/chat/completions", said)["model"] == "tiny"
        assert listed() == ("tiny", ["tiny", "base"])
        export(2, "q8_0")
        assert listed() == ("tiny", ["tiny", "tiny-q8_0", "base"])
        (root / "models/export/model-q8_0.gguf").unlink()
        assert listed() == ("tiny", ["tiny", "base"])


def test_the_models_are_looked_at_again_after_a_change_alone(checkout, monkeypatch):
    root, _, export = checkout
    looks = []
    monkeypatch.setattr(discover, "_local", lambda root, look=discover._local: looks.append(root) or look(root))
    local = Local(root)
    assert local.changed() is None and not looks
    export(1)
    assert [model.id for model in local.changed()] == ["tiny"]
    (root / "models/export/x.gguf").symlink_to("nothing")  # cannot be looked at, and is listed with that
    assert len(local.changed()) == 2
    assert local.changed() is None and len(looks) == 2
    write_manifest(root / "models/export", kind="export", version=1, counts={}, parents={"sft": "1" * 64})
    assert not local.changed()[0].problem
    (root / "models/sft").mkdir()
    write_manifest(root / "models/sft", kind="sft", version=1, counts={})
    assert "other weights" in local.changed()[0].problem  # of the weights that it is made from, too


@pytest.fixture
def world(checkout):
    """A registry of one export, whose disk and trainings a test changes: `now` is what each tells next."""
    root, _, export = checkout
    export(1)
    (own,) = discover.discover(root, [])
    now: dict = {"local": None, "running": ()}
    workers = Workers(hf=1, step_3=1)
    following = lambda name: lambda: now[name]  # noqa: E731
    models = Models(
        [own],
        memory_bytes=1 << 40,
        root=root,
        start=workers.start,
        running=following("running"),
        local=following("local"),
    )
    return models, workers, now, own


def labels(models: Models) -> dict[str, str]:
    models.refresh()
    return {state["id"]: state["label"] for state in models.states()}


async def test_a_loaded_model_answers_while_its_export_is_made_again(world):
    models, workers, now, own = world
    await ask(models, own.id)
    now["local"] = [replace(own, problem="it was made from other weights")]
    assert labels(models) and models.default() == own.id and models.state(own.id)["state"] == "ready"
    now["local"] = []  # dvc removes it before it makes it
    assert labels(models) and (await ask(models, own.id))[-1]["type"] == "end"
    now["local"] = [replace(own, created=own.created + 1)]
    assert labels(models) and models.state(own.id)["created"] == own.created + 1
    now["local"] = []
    workers.alive["hf"].alive = False
    assert labels(models) == {}
    await models.close()


async def test_a_loaded_checkpoint_leaves_when_its_training_has_come_to_a_model(world):
    models, workers, now, own = world
    path = Path(own.path).parents[2] / ".athanor/slots/sft/a/step_3"
    path.mkdir(parents=True)
    checkpoint = AvailableModel("sft-a", f"sft step 3 ({AT_WORK})", str(path), "torch", UNDONE, own.created + 1, 1)
    now["running"] = [checkpoint]
    models.refresh()
    await ask(models, "sft-a")
    now["running"] = []
    assert labels(models)["sft-a"] == "sft step 3 (not the newest any more)"
    workers.may_end.clear()
    answer = asyncio.create_task(ask(models, "sft-a"))
    await until(lambda: workers.alive["step_3"].running)
    now["local"] = [replace(own, created=own.created + 2), replace(own, id="b", path=os.devnull, created=0.0)]
    assert list(labels(models)) == [own.id, "b", "sft-a"]  # nobody's answer is cut off
    workers.may_end.set()
    assert (await answer)[-1]["type"] == "end"
    assert list(labels(models)) == [own.id, "b"]
    await until(lambda: workers.closed == ["step_3"])
    await models.close()

"""`athanor data steps` shows what a training reads in a step, with what it left out before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.errors import InputError
from athanor.cli import cli
from athanor.cli.data.steps import parts
from athanor.data.sampler import PretrainSampler, SftSampler
from athanor.tokenizer.tokenizer import Tokenizer
from stages import shard
from tests.stages.conftest import PARAMS, run_text_stage
from tests.stages.test_train_stages import MODEL, inputs  # noqa: F401  (fixture)
from tests.stages.test_train_stages import work as trained  # noqa: F401  (fixture)

SECTIONS = {"model": PARAMS["model"], "pretrain": {**PARAMS["pretrain"], "tokens": 2560}}
BATCH, CONTEXT = PARAMS["pretrain"]["batch_tokens"], PARAMS["model"]["context_tokens"]


@pytest.fixture
def work(tokenizer_world: Path) -> Path:
    run_text_stage(shard)
    YAML().dump(SECTIONS, Path("params.yaml"))
    return tokenizer_world


def told(capsys: pytest.CaptureFixture[str], steps: str) -> list[str]:
    assert cli.call("data", ["steps", steps]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_documents_of_a_step_are_those_that_it_trains_on(work: Path, capsys) -> None:
    lines = told(capsys, "2:3")
    heads = [number for number, line in enumerate(lines) if line.startswith("step ")]
    assert [lines[number] for number in heads] == ["step 2", "step 3"]
    batch = PretrainSampler("data/shards", CONTEXT, PARAMS["pretrain"]["seed"]).batch(BATCH, BATCH)
    first = lines[1 : heads[1]]
    assert sum(int(line.split(" tokens")[0].replace(",", "")) for line in first) == BATCH
    assert f"document {batch.document_BS[0, 0]} of train (" in first[0]
    begin = int((batch.document_BS[0, :-1] == batch.document_BS[0, 0]).sum())
    text = Tokenizer.load("models/tokenizer").decode(batch.tokens_BS[0, :begin].tolist())
    assert repr(text[:60]) in first[0]
    assert lines[-1].endswith(f" of {2 * BATCH:,} tokens") and "code " in lines[-1] and "prose " in lines[-1]


def test_data_that_the_latest_run_left_out_is_left_out(work: Path, capsys) -> None:
    third = told(capsys, "3")
    folder = Path(".athanor/runs/pretrain-1-1")
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"stage": "pretrain", "started_ms": 1, "pid": 1}))
    skip = {"found": 9, "step": 2, "from": BATCH, "to": 2 * BATCH, "reason": "planted"}
    (folder / "journal.jsonl").write_text(json.dumps({"t": 1, "event": "rollback", "to": 1, "skip": skip}) + "\n")
    assert told(capsys, "2")[1:] == third[1:]


@pytest.mark.parametrize("steps", ["0:3", "4:2", "ten"])
def test_what_names_no_steps_is_refused(work: Path, steps: str) -> None:
    with pytest.raises(InputError, match="names no steps.*1250:1253"):
        cli.call("data", ["steps", steps])


def test_of_fine_tuning_conversations_are_named_and_padding_is_not_counted(trained: Path) -> None:  # noqa: F811
    sampler = SftSampler("data/sft", MODEL["context_tokens"], 0)
    found = list(parts(sampler, 0, 4 * MODEL["context_tokens"], 0))
    batch = sampler.batch(0, 4 * MODEL["context_tokens"])
    inside = batch.document_BS[:, :-1] >= 0
    assert sum(len(part.ids) for part in found) == inside.sum() < inside.size
    assert all(part.name.endswith(f" of {part.source}") for part in found) and len(found) >= 4

"""The experiment `athanor trace --influence`: its gradients beside autograd's, and its cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from athanor.base.artifacts import manifest_digest
from athanor.base.errors import InputError
from athanor.cli.cli import call
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.origins import influence
from athanor.origins.influence import Influence, question_and_answer, sketches
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from tests.evaluation.tiny import make_model, write_tiny_tokenizer
from tests.origins.world import CONTEXT, write_data

ODD = ("What does a zorp eat?", "Seven violet umbrellas.")
TALKS = [(f"What does {name} like?", f"{name} likes {what}.") for name in "class import return raise".split()
         for what in ("lists", "names", "strings", "modules", "values")]  # fmt: skip


def write_model(root: Path, name: str, model: Transformer, tokenizer: Tokenizer) -> None:
    facts = {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)}
    parents = {"sft": manifest_digest(root / "data/sft")}
    save_model(root / "models" / name, model, model.config, facts, parents=parents)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    tokenizer = write_tiny_tokenizer(tmp_path / "models/tokenizer")
    write_data(tmp_path, tokenizer, ["A text."], [*TALKS, ODD, ODD])
    config = make_model(tokenizer, context=CONTEXT).config
    write_model(tmp_path, "base", Transformer.fresh(config, 1), tokenizer)
    write_model(tmp_path, "sft", make_model(tokenizer, context=CONTEXT), tokenizer)
    return tmp_path


def test_a_sketch_is_the_projected_gradient_and_its_products_are_about_the_gradients(root: Path, monkeypatch) -> None:
    tokenizer = Tokenizer.load(root / "models/tokenizer")
    model = make_model(tokenizer, tied=False)
    entries = [question_and_answer(tokenizer, *talk) for talk in [*TALKS, ODD]]
    sketched = sketches(model, entries)
    ids, mask = entries[0]
    logits_TV = model(torch.from_numpy(ids)[None])[0, :-1]
    losses_T = torch.nn.functional.cross_entropy(logits_TV, torch.from_numpy(ids[1:]), reduction="none")
    losses_T[torch.from_numpy(mask[1:]) == 1].sum().backward()
    for name, size in zip("AB", model.lm_head.weight.shape, strict=True):
        monkeypatch.setattr(influence, name, size)
    monkeypatch.setattr(influence, "_signs", lambda rows, columns: torch.eye(rows))
    whole = sketches(model, entries)
    assert np.allclose(whole[0], model.lm_head.weight.grad.flatten(), atol=1e-4)
    assert np.corrcoef((sketched @ sketched.T).ravel(), (whole @ whole.T).ravel())[0, 1] > 0.95


def test_the_command_names_what_it_was_asked_for_and_sketches_are_made_once_for_a_model(
    root, capsys, monkeypatch
) -> None:
    assert call("trace", ["--influence", *ODD, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first = told["conversations"][0]
    assert (first["question"], first["answer"]) == ODD and first["score"] == 1.0 and len(told["conversations"]) == 10
    assert first["entries"] == [len(TALKS), len(TALKS) + 1] and first["times"] == 2
    (folder,) = (root / ".athanor/origins").glob("influence-*")
    with monkeypatch.context() as patch:
        patch.setattr(Influence, "_write", None)
        assert call("trace", ["--influence", ODD[0]]) == 0
    assert capsys.readouterr().out.startswith("An experiment")
    tokenizer = Tokenizer.load(root / "models/tokenizer")
    write_model(root, "sft", make_model(tokenizer, context=CONTEXT, seed=1), tokenizer)
    Influence(root).scores(*ODD)
    assert len(others := list((root / ".athanor/origins").glob("influence-*"))) == 1 and others != [folder]
    (root / "data/sft/manifest.json").write_bytes((root / "data/sft/manifest.json").read_bytes() + b"\n")
    with pytest.raises(InputError, match="models/sft: was trained on another data/sft"):
        Influence(root)

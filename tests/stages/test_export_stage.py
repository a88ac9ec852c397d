"""The export stage on a whole, small set of inputs: what it publishes, and that a failed check publishes nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from athanor.base.artifacts import read_json, rounded, sha256_file, verify_files, write_json, write_manifest, write_text
from athanor.base.errors import GateError, InputError
from athanor.cli.summary import unwritten
from athanor.evaluation.report import Answer, answer_rows, health, score_table
from athanor.export import gguf_writer
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.text.conversations import Item, Message
from athanor.text.documents import Document, write_documents
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer_training.params import TokenizerParams
from athanor.tokenizer_training.train import train, write_tokenizer
from stages import export
from tests.stages.conftest import run_stage, settle

PARAMS = """
pretrain: {seed: 1, tokens: 200000, batch_tokens: 4096, lr: 2.0e-3, final_lr_fraction: 0.0, schedule: wsd,
  warmup_tokens: 4096, cooldown_fraction: 0.3, optimizer: adamw, muon_momentum: 0.95,
  beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1,
  spike_guard: true, max_rollbacks: 3, grad_clip: 1.0,
  z_loss: 0.0, document_mask: true, precision: fp32, validation_every_tokens: 0, validation_max_bytes: 1000,
  sample_every_tokens: 0, sample_prompts: ["The"]}
sft: {base: scratch, seed: 1, epochs: 2, batch_tokens: 4096, lr: 1.0e-3, final_lr_fraction: 0.0, schedule: cosine,
  warmup_fraction: 0.1, cooldown_fraction: 0.3, optimizer: adamw, muon_momentum: 0.95,
  beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.0,
  spike_guard: true, max_rollbacks: 3, grad_clip: 1.0,
  z_loss: 0.0, precision: fp32, validations_per_epoch: 1, validation_max_conversations: 100,
  select: best, min_stop_rate: 0.99}
export: {name: tiny, dtype: float32, gguf_types: [f16, q8_0], llama_cpp: LLAMA, llama_cpp_timeout_seconds: 60,
  parity_prompts: 8, parity_new_tokens: 8, parity_texts: 50, parity_windows: 2, parity_positions: 3, kl_limit: 0.1,
  logit_tolerance: 1.0e-4,
  margin_logits: 0.1, perplexity_chunks: 2,
  perplexity_tolerance: {f32: 1.0e-5, f16: 1.0e-3, q8_0: 2.0e-3, k_types: 0.05}}
"""


def texts() -> list[str]:
    rng = random.Random(3)
    words = [line.split("(")[0] for line in Path(__file__).read_text().split() if line.isascii()]
    return ["def main():\n\treturn 'x'\n" + " ".join(rng.choices(words, k=120)) for _ in range(60)]


def items() -> list[Item]:
    """Facts with ten different answers, and lists that the constant "Yes" gets all right."""
    made = []
    for number in range(20):
        category = ("facts", "lists")[number % 2]
        answer = f"x{number}" if category == "facts" else "Yes"
        prompt = (Message("user", f"What is number {number}?"),)
        made.append(Item(category, prompt, "exact", answer, accepted=(answer,), rejected=("y", "z")))
    return made


def build(root: Path) -> None:
    """Every input of the stage, by the functions that write it in the pipeline where there is one."""
    params = TokenizerParams(448, 10**6, 10**4, 1.0, 8, False)
    (root / "models" / "tokenizer").mkdir(parents=True)
    tokenizer = write_tokenizer(root / "models" / "tokenizer", train(texts(), params), {})
    config = ModelConfig(448, 2, 64, 4, 2, 16, 96, 64, 10000.0, 1e-5, False)
    model = Transformer(config)
    model.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():  # wide enough apart for greedy answers to be decided
        model.model.norm.weight.mul_(30)
    facts = {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)}
    for name in ("base", "sft"):
        save_model(root / "models" / name, model, config, facts)

    documents = [Document(text, "docs", "prose", "PSF-2.0", "val", {}) for text in texts()]
    size = sum(len(document.text) for document in documents)
    folders = {name: root / "data" / name for name in ("raw", "instruct", "clean", "shards", "sft", "eval")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    write_documents(folders["clean"] / "val.parquet", documents)
    counts = {"documents": 60, "bytes": size}
    write_manifest(
        folders["raw"],
        kind="raw",
        version=1,
        counts={"docs": {**counts, "train": {"documents": 0, "bytes": 0}, "val": counts}},
        sources={"docs": {"license": "PSF-2.0", "python": "3.11.7", "files": 12}},
    )
    chats = {"rows": 9, "train": 8, "val": 1, "chars": 99, "licenses": ["Apache-2.0"]}
    write_manifest(folders["instruct"], kind="instruct", version=1, counts={"identity": chats})
    write_manifest(folders["clean"], kind="clean", version=1, counts={"train": {}, "val": {"docs": counts}}, funnel=[])
    mixed = {"docs": {"tokens": 12345, "unique_tokens": 8230, "share": 1.0, "target_share": 1.0, "epochs": 1.5}}
    write_manifest(folders["shards"], kind="shards", version=1, counts={}, sources=mixed)
    write_manifest(folders["sft"], kind="sft", version=1, counts={})

    said = {
        model: [
            Answer(item.id, item.category, model, "x", 1, True, True, False, False, correct=model == "sft")
            for item in items()
        ]
        for model in ("base", "sft")
    }
    rows = answer_rows(items(), [*said["base"], *said["sft"]])
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows]
    write_text(folders["eval"] / "battery.jsonl", "".join(lines))
    write_manifest(folders["eval"], kind="eval", version=1, counts={"items": 20})
    rate = {"base": {"bpb": 2.5, "stderr": 0.01}, "sft": {"bpb": 2.6, "stderr": 0.01}, "gzip": 3.1, "xz": 3.2}
    metrics = {
        "train_tokenizer": {"vocab_size": 448, "check": {"bytes_per_token": 2.25}},
        "pretrain": {"tokens": 200000, "epochs": 0.5, "validation": {"all": {"bpb": 2.5}}},
        "sft": {"tokens": 3000, "supervised_tokens": 1200},
        "eval": {
            "bpb": {"sources": {"docs": rate}, "all": rate},
            "taught": {"talks": {"taught": {"n": 70, "right": 63}}},
            "battery": {model: score_table(items(), said[model], 1) for model in said},
            "health": {model: health(said[model]) for model in said},
        },
    }
    for name, values in metrics.items():
        write_json(root / "metrics" / f"{name}.json", rounded(values))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("export") / "built"
    build(root)
    return root


@pytest.fixture
def project(built, tmp_path, monkeypatch):
    root = tmp_path / "project"
    shutil.copytree(built, root)
    settle(monkeypatch, root)
    return root


def execute(root: Path, llama_cpp: str) -> None:
    (root / "params.yaml").write_text(PARAMS.replace("LLAMA", llama_cpp))
    run_stage(export)


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def test_publishes_checked_files_and_a_card_the_same_each_time(project, capsys):
    pytest.importorskip("xllamacpp")
    execute(project, "required")
    out = project / "models" / "export"
    first, metrics = contents(out), (project / "metrics" / "export.json").read_text()
    verify_files(out)
    assert {path.name for path in out.iterdir()} == {
        "hf", "model-f16.gguf", "model-q8_0.gguf", "Modelfile", "parity.json", "MODEL_CARD.md", "manifest.json"
    }  # fmt: skip
    facts = read_json(project / "metrics" / "export.json")
    assert facts["llama_cpp_checked"] == 1 and set(facts["parity"]) == {
        "transformers", "llama_cpp_f32", "llama_cpp_f16", "llama_cpp_q8_0"
    }  # fmt: skip
    assert facts["parity"]["llama_cpp_f16"]["positions"] == 2 * 3
    assert "FROM ./model-f16.gguf" in (out / "Modelfile").read_text()
    assert facts["bytes"]["model-q8_0.gguf"] < facts["bytes"]["model-f16.gguf"] < facts["bytes"]["hf/model.safetensors"]
    execute(project, "required")
    assert contents(out) == first and (project / "metrics" / "export.json").read_text() == metrics
    assert "NOT CHECKED" not in capsys.readouterr().err


def test_card_says_what_the_inputs_say(project):
    execute(project, "off")
    card = (project / "models" / "export" / "MODEL_CARD.md").read_text()
    parameters = read_json(project / "metrics" / "export.json")["parameters"]
    assert f"{parameters:,} parameters" in card
    assert "| docs | 60 |" in card and "PSF-2.0" in card and "| docs.python | 3.11.7 |" in card
    assert "| identity | 9 | 8 | 1 | Apache-2.0 |" in card
    assert "| docs | 2.500 ± 0.010 | 2.600 ± 0.010 | 3.100 | 3.200 |" in card
    assert "| facts | 10 | 0.0% ± " in card and re.search(r"\| lists \| 10 \| 0.0% ± .* \| 100.0% \|", card)
    assert "| talks: your own questions, in the words that were taught | 70 | | 90.0% | | |\n| facts " in card
    # The stream holds the source one and a half times, and training read half of the stream.
    assert "| docs | 8,230 | 100.0% | 100.0% | 0.75 |" in card
    # All lists are right, and so is one fixed answer: no knowledge, and the card says so.
    assert "- One answer passes every item of lists: a check of habit, not knowledge." in card
    assert "Not clearly above its floor" not in card
    assert "| sft.lr |" not in card and "| lr | 0.001 |" in card and "| supervised_tokens | 1200 |" in card
    assert sha256_file(project / "models" / "sft" / "manifest.json") in card
    assert sha256_file(project / "metrics" / "eval.json") in card
    assert "not checked: export.llama_cpp is off" in card
    assert "What rounding costs" in card
    assert re.search(r"\| transformers \| \d+ \| below 1e-07 \| below 1e-07 \| 100.0% \| 8 of 8 \|", card)
    assert str(project) not in card


def test_missing_llama_cpp_is_said_loudly_or_is_an_error(project, monkeypatch, capsys, tmp_path):
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InputError, match="pip install xllamacpp"):
        execute(project, "required")
    assert not (project / "models" / "export").exists()
    execute(project, "if_installed")
    assert "NOT CHECKED" in capsys.readouterr().err
    parity = read_json(project / "models" / "export" / "parity.json")
    assert parity["llama_cpp"] == "not checked: xllamacpp is not installed"
    assert read_json(project / "metrics" / "export.json")["llama_cpp_checked"] == 0
    assert not (project / "models" / "export" / "model-f32.gguf").exists()


def test_a_missing_quantiser_for_the_only_type_still_has_a_card(project, monkeypatch):
    """Nothing to name for llama-server once ended the stage, after all comparisons."""
    monkeypatch.setattr("athanor.export.kquants.find", lambda: None)
    monkeypatch.setitem(globals(), "PARAMS", PARAMS.replace("[f16, q8_0]", "[q4_k_m]"))
    execute(project, "if_installed")
    out = project / "models" / "export"
    card = (out / "MODEL_CARD.md").read_text()
    assert (
        "llama-server" not in card
        and "Decoding is greedy" in card
        and "not written: there is no llama-quantize" in card
    )
    assert not list(out.glob("*.gguf")) and not (out / "Modelfile").exists()
    verify_files(out)


def test_a_type_that_rounds_too_much_is_left_out_while_another_is_there(project, monkeypatch, capsys):
    """Seen: three minutes of training ended without any model, for q8_0 alone."""
    pytest.importorskip("xllamacpp")
    params = PARAMS.replace("q8_0: 2.0e-3", "q8_0: 1.0e-9")
    monkeypatch.setitem(globals(), "PARAMS", params)
    execute(project, "required")
    out = project / "models" / "export"
    verify_files(out)
    assert [path.name for path in out.glob("*.gguf")] == ["model-f16.gguf"]
    assert "model-q8_0.gguf: NOT WRITTEN, gate" in capsys.readouterr().err
    assert "| llama_cpp_q8_0 | not written: " in (out / "MODEL_CARD.md").read_text()
    assert unwritten(project) == ["q8_0"]
    before = contents(out)
    monkeypatch.setitem(globals(), "PARAMS", params.replace("[f16, q8_0]", "[q8_0]"))
    with pytest.raises(GateError, match="leave it out"):
        execute(project, "required")
    assert contents(out) == before


def test_a_file_that_fails_is_not_written_and_the_earlier_export_stays(project, monkeypatch):
    """Without the new row order the f16 file loads, answers, and is wrong: the real stage has to notice."""
    pytest.importorskip("xllamacpp")
    execute(project, "off")
    before = contents(project / "models" / "export")
    monkeypatch.setattr(gguf_writer, "interleave", lambda weight, heads: weight)
    with pytest.raises(GateError, match="GGUF read back"):
        execute(project, "required")
    monkeypatch.setattr("athanor.export.publish.check_gguf", lambda *_: None)
    with pytest.raises(GateError, match="llama.cpp parity of f32"):
        execute(project, "required")
    assert contents(project / "models" / "export") == before
    assert [path.name for path in (project / "models").iterdir() if "export" in path.name] == ["export"]


def test_a_small_corpus_is_exported_with_the_documents_and_prompts_that_there_are(project, capsys):
    """After all training is no time to ask for eight documents: the runtimes are compared on what is there."""
    short = Document("def f(): pass", "docs", "prose", "PSF-2.0", "val", {})
    write_documents(project / "data" / "clean" / "val.parquet", [short])
    path = project / "data" / "eval" / "battery.jsonl"
    rows = [line for line in path.read_text().splitlines() if asdict(items()[0])["category"] in line]
    path.write_text("\n".join(rows[:6]) + "\n")
    execute(project, "off")
    assert "1 held-out documents and 3 held-out prompts are all there are" in capsys.readouterr().err
    assert read_json(project / "models" / "export" / "parity.json")["transformers"]["perplexity_tokens"] == 62
    write_documents(project / "data" / "clean" / "val.parquet", [])
    with pytest.raises(InputError, match="no held-out document"):
        execute(project, "off")

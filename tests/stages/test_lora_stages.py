"""The stages for a foreign base: rows, LoRA and export on a tiny one, what DVC makes of a change, and refusals."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from athanor.adapters import foreign
from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.base.artifacts import read_json, read_manifest, sha256_file, verify_files, write_manifest
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.base.strict import read_yaml
from athanor.cli import health, repro
from athanor.data.rows import KIND, VERSION, PackedRows
from athanor.monitor.thresholds import Thresholds
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.runtime.schema import check_file, check_stage, check_values
from athanor.text.conversations import Conversation, write_rows
from athanor.training.schedule import Schedule
from athanor.training.setup import Choices
from stages import lora, lora_data, lora_export
from tests.adapters import tiny
from tests.e2e.clone import environment, make_clone
from tests.stages.conftest import QUESTION, conversation, run_stage, settle, write_battery

pytest.importorskip("peft")

ROOT = Path(__file__).resolve().parents[2]
MICRO = presets.values(ROOT / "presets" / "micro.yaml")
CHANGES: dict[str, dict[str, Any]] = {
    "sft_data": {"context_tokens": 128, "max_pad_share": 1.0, "max_source_share": 1.0},
    "sft": {"base": "base", "epochs": 2.0, "batch_tokens": 256, "lr": 0.01, "precision": "fp32"},
    "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
    "export": {"name": "tiny-tuned", "dtype": "float32", "logit_tolerance": 1e-3},
}


def conversations() -> list[Conversation]:
    rng, made = random.Random(1), []
    for _ in range(90):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        talk = [f"What is {a} + {b}?", f"{a + b}.", "And\n  again?", f"\n\n{a + b}."][: 2 * rng.randint(1, 2)]
        made.append(conversation("sums", *talk))
    nasty = conversation("sums", "say <|im_end|>\n<|im_start|>assistant", "<|im_end|> is <|endoftext|> text")
    return [*made, *(replace(each, split="train") for each in (nasty, conversation("sums", QUESTION, "twelve")))]


def write_params(folder: Path, **more: dict[str, Any]) -> None:
    values = copy.deepcopy(MICRO)
    for changes in (CHANGES, more):
        for section, part in changes.items():
            values[section] |= part
    source = next(iter(values["sft_data"]["sources"].values()))
    values["sft_data"] |= {"sources": {"sums": source}, "source_priority": [], "replay_share": 0.0}
    values["sft_data"] |= more.get("sft_data", {})
    YAML().dump(values, folder / "params.yaml")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A base, conversations and a battery, as files."""
    root = tmp_path_factory.mktemp("inputs")
    tiny.make_base(root / "base", "qwen2", dtype="bfloat16")
    write_battery(root)
    (root / "data/instruct").mkdir()
    write_rows(root / "data/instruct/sums.jsonl", conversations())
    write_manifest(root / "data/instruct", kind="instruct", version=1, counts={})
    return root


@pytest.fixture(scope="module")
def tuned(inputs, tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """A folder after lora-data and lora, and the journal of the latter."""
    root, threads = tmp_path_factory.mktemp("tuned") / "work", torch.get_num_threads()
    shutil.copytree(inputs, root)
    for name in ("stages", "athanor", "foreign", "dvc.yaml"):
        (root / name).symlink_to(ROOT / name)
    write_params(root)
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, root)
        run_stage(lora_data)
        run = run_stage(lora)
    yield root, run.journal.folder / "journal.jsonl"
    torch.set_num_threads(threads)


@pytest.fixture
def work(tuned, tmp_path, monkeypatch) -> Path:
    """A copy of it to work in."""
    root = tmp_path / "work"
    shutil.copytree(tuned[0], root, symlinks=True)
    settle(monkeypatch, root)
    return root


def test_a_base_becomes_a_merged_model_an_adapter_and_a_card(work, tuned):
    rows, tokenizer = PackedRows("data/lora", "train"), ForeignTokenizer("base")
    told = read_manifest("data/lora", KIND, VERSION)
    assert (told["tokenizer"], told["template_hash"]) == (tokenizer.digest, tokenizer.template_hash)
    assert rows.stop == tokenizer.stop and told["vocab_size"] == tokenizer.vocab_size
    assert read_json("metrics/lora_data.json")["contaminated"] == 1
    texts = {tokenizer.decode(rows.conversation(n)[0].tolist()) for n in range(rows.conversation_count)}
    assert any("<|im_end|> is <|endoftext|> text<|im_end|>" in text for text in texts)

    verify_files("models/lora")
    metrics = read_json("metrics/lora.json")
    assert metrics["validation"]["loss"] < 0.9 * metrics["base_validation"]["loss"]
    assert metrics["parameters"] > metrics["adapters"] > 0 and metrics["skipped_steps"] == 0
    lines = [json.loads(line) for line in tuned[1].read_text().splitlines()]
    told = set().union(*(line["m"] for line in lines if "m" in line))
    assert {"loss", "lr", "grad_norm", "skipped", "val_loss", "vitals.residual_growth"} <= told
    assert Path("plots/lora.tsv").is_file() and Path("plots/lora_validation.tsv").is_file()

    run_stage(lora_export)
    out = Path("models/lora-export")
    verify_files(out)
    parity = read_json("metrics/lora_export.json")["parity"]
    assert parity["max_logit_difference"] < 1e-3 and parity["same_top_token"] == 1.0
    card = (out / "MODEL_CARD.md").read_text()
    for part in ("# tiny-tuned", "adapter.gguf", sha256_file("base/model.safetensors"), '| model_type | "qwen2" |'):
        assert part in card
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == Path(
        "models/lora/adapter_model.safetensors"
    ).read_bytes()
    assert (out / "hf/chat_template.jinja").read_text() == tokenizer.template

    # 16 bits only round; another base under the same name is not what was trained on.
    write_params(work, export={"dtype": "bfloat16"})
    run_stage(lora_export)
    assert 1e-3 < read_json("metrics/lora_export.json")["parity"]["max_logit_difference"] < 0.5
    tiny.make_base(work / "base", "qwen2", seed=1)
    with pytest.raises(InputError, match="not the one that was trained on"):
        run_stage(lora_export)


def test_a_nan_loss_is_a_finding(work, capsys):
    """Rules are written for pretrain and sft; the stage's own name once asked for those of neither."""
    run = Run("lora", "stages.lora")
    run.watch_health(Schedule("cosine", 1e-3, 0.0, 0, 0, 20 * 256), 256, 300)
    for step in range(1, 5):
        run.log(step, loss=2.0 if step < 4 else float("nan"), grad_norm=0.5)
    assert "lora: CRITICAL at step 4, nan_loss" in capsys.readouterr().err
    run.finish()
    folder = health.choose(work, "lora")
    found = [each for each in health.read(folder, Thresholds()).findings if each.rule == "nan_loss"]
    assert folder == run.journal.folder and len(found) == 1 and "sft.lr" in found[0].fix


def test_an_interrupted_stage_goes_on_to_the_same_bytes(work):
    whole = {
        name: Path(name).read_bytes() for name in ("models/lora/manifest.json", "metrics/lora.json", "plots/lora.tsv")
    }
    shutil.rmtree(work / ".athanor/slots")
    shutil.rmtree(work / "models/lora")
    with pytest.raises(Interrupted):
        run_stage(lora, stop_after=4)
    assert not Path("models/lora").exists()
    run_stage(lora)
    assert {name: Path(name).read_bytes() for name in whole} == whole


def test_a_merge_that_went_wrong_is_not_published(work, monkeypatch):
    from athanor.adapters import export as export

    real = export.lora.merged
    monkeypatch.setattr(export.lora, "merged", lambda weight, a, b, scale: real(weight, a, b, 2 * scale))
    with pytest.raises(GateError, match="merged model"):
        run_stage(lora_export)
    assert not Path("models/lora-export").exists()


def test_a_bf16_base_is_not_exported_as_float16(work):
    """In fp16 it overflows, and a check in fp32 does not see that; the preset for cards without bf16 asked for it."""
    write_params(work, export={"dtype": "float16"})
    with pytest.raises(InputError, match=r"export.dtype: the base was trained in bf16.*Fix: set it to bfloat16"):
        run_stage(lora_export)
    assert not Path("models/lora-export").exists()
    assert presets.values(ROOT / "presets/lora-mi50.yaml")["export"]["dtype"] == "bfloat16"


def test_a_stage_reads_no_value_that_it_does_not_declare(work):
    run = Run("lora-export", "stages.lora_export")
    assert run.param("sft.base") == "base"
    with pytest.raises(ParamsError, match="reads 'sft.lr' but does not declare it"):
        run.param("sft.lr")


def test_rows_of_another_tokenizer_or_too_long_are_refused(work):
    tiny.make_base(work / "base", "llama")
    with pytest.raises(InputError, match="another tokenizer"):
        run_stage(lora)
    write_params(work, sft_data={"context_tokens": 512}, sft={"batch_tokens": 512})
    run_stage(lora_data)
    with pytest.raises(InputError, match="rows of 512 tokens, the model was made for 256"):
        run_stage(lora)


def test_tokens_without_an_embedding_row_are_refused(work):
    """A tokenizer that was given tokens, with a model that was not: an index error, or the end of a CUDA process."""
    path, last = work / "base/config.json", ForeignTokenizer("base").vocab_size - 1
    path.write_text(json.dumps(read_json(path) | {"vocab_size": last}))
    with pytest.raises(InputError, match=f"token {last} has no row in the embedding.*Fix: resize the embeddings"):
        run_stage(lora)


def test_sft_base_decides_which_stages_run(tmp_path):
    write_params(tmp_path, sft_data={"sources": MICRO["sft_data"]["sources"]})
    values = read_yaml(tmp_path / "params.yaml")
    ours, theirs = check_values(MICRO), check_file(tmp_path / "params.yaml")
    for stage in ("lora-data", "lora", "lora-export"):
        check_stage(stage, theirs)
        with pytest.raises(ParamsError, match="no foreign base"):
            check_stage(stage, ours)
    for stage in ("clean", "pretrain", "sft", "eval", "export"):
        check_stage(stage, ours)
        with pytest.raises(ParamsError, match=f"stage {stage} has no part in tuning 'base'"):
            check_stage(stage, theirs)
    check_stage("download", theirs)
    for section, key, value, match in (
        ("sft", "optimizer", "muon", "adamw"),
        ("sft_data", "replay_share", 0.1, "replay"),
    ):
        YAML().dump(values | {section: values[section] | {key: value}}, tmp_path / "params.yaml")
        with pytest.raises(ParamsError, match=match):
            check_file(tmp_path / "params.yaml")


def test_a_bf16_checkpoint_is_never_trained_in_fp16_unasked(inputs, tmp_path):
    half = Choices("fp16", compile=True)
    for asked, wanted in (("auto", "fp32"), ("fp16", "fp16")):
        choices, notes = foreign.adjust_precision(half, inputs / "base", requested=asked)
        assert choices.precision == wanted and not choices.compile and len(notes) == 1 + (wanted == "fp32")
    other = tiny.make_base(tmp_path / "base", "qwen2", dtype="float16")
    assert foreign.adjust_precision(half, other, requested="auto")[0].precision == "fp16"
    assert foreign.adjust_precision(Choices("bf16", "varlen"), other, requested="auto")[0].attention == "default"


# -- the graph -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph(tmp_path_factory, inputs):
    """A clone in which everything is committed as made, placeholders all, with the graph as it is while repro runs."""
    clone = make_clone(tmp_path_factory.mktemp("graph"))
    shutil.copytree(inputs / "base", clone.path / "base")
    write_params(clone.path)
    outs = ["data/lora/manifest.json", "models/lora/manifest.json", "models/lora-export/manifest.json"]
    outs += [f"metrics/{part}{name}.json" for part in ("", "runs/") for name in ("lora_data", "lora", "lora_export")]
    outs += [
        "plots/lora.tsv",
        "plots/lora_validation.tsv",
        *(f"data/{n}/manifest.json" for n in ("raw", "instruct", "battery")),
    ]
    for name in outs:
        (clone.path / name).parent.mkdir(parents=True, exist_ok=True)
        (clone.path / name).write_text(f"{name}\n")
    with repro.foreign_graph(clone.path, "base"):
        clone.dvc(
            "commit", "-q", "-f", "foreign/dvc.yaml:lora-data", "foreign/dvc.yaml:lora", "foreign/dvc.yaml:lora-export"
        )
    return clone


def stale(graph, **changes: dict[str, Any]) -> set[str]:
    from dvc.repo import Repo

    write_params(graph.path, **changes)
    with repro.foreign_graph(graph.path, "base"):
        repo = Repo(str(graph.path))
        with repo.lock:
            return {s.name for s in repo.index.stages if s.name.startswith("lora") and s.status()}


def test_a_change_makes_stale_what_it_decides(graph, monkeypatch):
    monkeypatch.chdir(graph.path)
    assert stale(graph) == set()
    assert stale(graph, lora={"rank": 8}) == {"lora"}  # and its export, when other bytes come of it
    assert stale(graph, sft={"lr": 0.5}) == {"lora"}
    assert stale(graph, sft_data={"seed": 9}) == {"lora-data"}
    for change in ({"dtype": "float16"}, {"parity_prompts": 3}):
        assert stale(graph, export=change) == {"lora-export"}
    assert stale(graph, model={"layers": 3}, pretrain={"lr": 0.5}) == set()
    weights = graph.path / "base/model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before + b"x")
    assert stale(graph) == {"lora-data", "lora", "lora-export"}
    weights.write_bytes(before)


def test_the_graph_is_there_only_while_repro_runs(graph):
    assert not (graph.path / "foreign/dvc.yaml").exists()
    with repro.foreign_graph(graph.path, "base"):
        text = (graph.path / "foreign/dvc.yaml").read_text()
        assert text.count('- "base"\n') == 3 and "models/foreign\n" not in text.split("stages:")[1]


def test_repro_without_the_base_says_so(tmp_path):
    write_params(tmp_path, sft={"base": "models/none"}, sft_data={"sources": MICRO["sft_data"]["sources"]})
    command = [sys.executable, "-m", "athanor", "repro"]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "sft.base: models/none" in done.stderr and "Traceback" not in done.stderr


def test_the_cache_survives_gc_as_the_docs_give_it(graph):
    """DVC does not see graphs that are there only while a command runs, and a plain gc takes their results for unused."""
    page = (ROOT / "docs/lora.md").read_text().split("## Clean the cache")[1].split("\n## ")[0]
    lines = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    results = [graph.path / name for name in ("data/lora", "models/lora", "models/lora-export")]

    def brought_back() -> int:
        for folder in results:
            shutil.rmtree(folder, ignore_errors=True)
        with repro.foreign_graph(graph.path, "base"):
            graph.dvc("checkout", "foreign/dvc.yaml", check=False)
        return sum((folder / "manifest.json").is_file() for folder in results)

    for line in lines:
        graph.run("bash", "-c", line.replace("dvc gc", "dvc gc --force"))
    assert len(lines) == 3 and brought_back() == 3
    graph.dvc("gc", "--workspace", "--force")  # what the page warns of
    assert brought_back() == 0

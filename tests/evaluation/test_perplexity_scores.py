"""Windows, sets, history, and the command on a small model and on checkpoints; about 12 s."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from athanor.base.artifacts import manifest_digest, read_json, write_json
from athanor.base.errors import GateError, InputError
from athanor.cli import cli
from athanor.cli.evaluate import history
from athanor.cli.evaluate import main as command
from athanor.cli.evaluate.job import Job, kind_of, run_in_subprocess
from athanor.cli.evaluate.sets import document_rows, load_set, row_windows
from athanor.export.perplexity import Ours, chunk_windows, measured, scored_bytes
from athanor.model.validation import bits_per_byte
from athanor.model.weights import model_tensors
from athanor.runtime.slots import Slot
from athanor.text.documents import Document, write_documents
from athanor.training import checkpoint
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer

ROOT = Path(history.__file__).resolve().parents[3]
PROSE = "The river ran past the old mill, and nobody counted the stones any more. "


# -- windows ----------------------------------------------------------------


@pytest.mark.parametrize("context, scored", [(8, 3), (9, 4), (96, 47)])
def test_chunks_are_cut_as_llama_perplexity_cuts(context, scored):
    ids = np.arange(100, 100 + 2 * context + context - 1)
    windows = chunk_windows(ids, context, bos=1)
    assert [window.ids[0] for window in windows] == [1, 1]  # written over, not put in front
    assert windows[1].ids[1:].tolist() == ids[context + 1 : 2 * context].tolist()  # the rest is dropped
    assert [len(window.targets) for window in windows] == [scored, scored]
    assert windows[0].targets.tolist() == list(range(context // 2 + 1, context))
    assert chunk_windows(ids, context, bos=None)[0].ids[0] == 100
    assert len(chunk_windows(ids, context, bos=1, chunks=1)) == 1
    with pytest.raises(InputError, match=f"{2 * context - 1} tokens, and two contexts"):
        chunk_windows(ids[: 2 * context - 1], context, bos=1)


def test_one_newline_is_dropped_at_the_end(tokenizer):
    model, seen = Ours(make_model(tokenizer), tokenizer), []
    model.encode = lambda text: seen.append(text) or np.arange(200)
    for text in (PROSE + "\n\n", PROSE):
        model.text(text, 64)
    assert seen == [PROSE + "\n", PROSE]


def test_the_figure_is_the_printed_estimate():
    score = measured(np.array([1.0, 2.0, 3.0, 6.0]), 2, 12)
    assert score.loss == 3.0 and score.perplexity == pytest.approx(math.exp(3))
    assert score.stderr == pytest.approx(math.exp(3) * math.sqrt((12.5 - 9) / 3))
    assert score.bits_per_byte == pytest.approx(12 / math.log(2) / 12)
    for bad in (math.nan, math.inf):
        with pytest.raises(GateError, match="no finite loss"):
            measured(np.array([1.0, bad]), 1, None)
    with pytest.raises(GateError, match="no finite perplexity"):
        measured(np.array([1e4]), 1, None)


def test_bytes_are_those_of_the_scored_half(tokenizer):
    """The second half is digits, one byte to a token; the whole text's average would say more."""
    model = Ours(make_model(tokenizer), tokenizer)
    ids = model.encode(PROSE * 40)[:64].tolist() + tokenizer.encode("7" * 64)
    windows = chunk_windows(ids, 64, tokenizer.bos)
    assert scored_bytes(windows[1:], tokenizer.token_bytes) == 31
    assert scored_bytes(windows[:1], tokenizer.token_bytes) > 40


def test_nats_do_not_depend_on_what_shares_a_batch(tokenizer):
    model = Ours(make_model(tokenizer), tokenizer)
    rows = [(np.array([tokenizer.bos, *tokenizer.encode(PROSE * n)]), np.ones(10_000)) for n in (1, 9, 2, 4)]
    windows = row_windows(rows, 128)
    together, alone = model.nats(windows), [model.nats([window])[0] for window in windows]
    assert sum(map(len, together)) == sum(len(ids) - 1 for ids, _ in rows)  # every target once
    for a, b in zip(together, alone, strict=True):
        assert np.allclose(a, b, atol=1e-5)


def test_documents_on_their_own_equal_the_pipelines_bits_per_byte(tokenizer, tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": PROSE * n}) + "\n" for n in (1, 7, 3)))
    rows = document_rows(load_set(tmp_path / "t.jsonl", 10**6, 1), tokenizer)
    model = make_model(tokenizer)
    expected = bits_per_byte(model, [ids for ids, _ in rows], tokenizer.token_bytes, 128)
    windows = row_windows(rows, 128)
    found, _ = Ours(model, tokenizer).score(windows, tokenizer.token_bytes)
    assert found.bits_per_byte == pytest.approx(expected.bpb, rel=1e-6) and found.tokens == expected.tokens


# -- sets -------------------------------------------------------------------


def test_a_set_is_drawn_by_content_and_has_a_hash(tmp_path):
    texts = [f"document {number} " + PROSE for number in range(9)]
    for name, order in (("a", texts), ("b", texts[::-1])):
        documents = [Document(text, "docs", "prose", "CC0-1.0", "val", {}) for text in order]
        write_documents(tmp_path / f"{name}.parquet", documents)
    a, b = (load_set(tmp_path / f"{name}.parquet", 300, 1) for name in "ab")
    assert a == b and len(a.text.encode()) <= 300 + 2 * len(a.texts)
    assert load_set(tmp_path / "a.parquet", 301, 1).digest != a.digest
    (tmp_path / "marks.jsonl").write_text(json.dumps({"text": "a\u2581b"}) + "\n" + json.dumps({"text": "c"}) + "\n")
    assert load_set(tmp_path / "marks.jsonl", 300, 1).texts == ("c",)


def test_line_separators_inside_a_text_are_text(tmp_path):
    text = "one\u2028two\u2029three\u0085four"
    rows = [{"text": text}, {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}]
    for name, row in zip(("a.jsonl", "b.jsonl"), rows, strict=True):
        (tmp_path / name).write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_set(tmp_path / "a.jsonl", 300, 1).texts == (text,)
    assert load_set(tmp_path / "b.jsonl", 300, 1).conversations[0][0].content == text


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("none.txt", None, "file not found"),
        ("x.jsonl", "{", "x.jsonl:1: not valid JSON"),
        ("x.jsonl", '{"text": "a"}\n{"messages": []}\n', "neither all rows"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}\n', "no conversation"),
        ("x.txt", b"\xff\xfe", "no UTF-8"),
        ("x.txt", "", "no text"),
    ],
)
def test_a_bad_set_is_one_clear_error(name, content, complaint, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=complaint):
        load_set(tmp_path / name, 100, 10)


# -- history ----------------------------------------------------------------

ROW = {
    **{key: "x" for key in history.KEYS},
    **{"weights_sha256": "1", "loss": 3.0, "perplexity": math.exp(3), "stderr": 0.1, "step": 1, "stage": "pretrain"},
}


def test_rows_are_compared_only_when_the_keys_agree():
    other = {**ROW, "weights_sha256": "2", "loss": 2.9}
    assert history.previous([other, ROW], ROW) == other
    for key in history.KEYS:
        assert history.previous([{**other, key: "y"}, ROW], ROW) is None
    assert history.previous([other, {**ROW, "mask": "y", "weights_sha256": "3"}, ROW], ROW) == other


def test_rows_of_several_processes_stay_whole(tmp_path):
    path = tmp_path / history.FILE
    path.write_text('{"writer": 9, "num')  # torn by a power loss
    code = (
        "import sys; from athanor.cli.evaluate.history import append\n"
        "for n in range(40): append(sys.argv[1], {'writer': int(sys.argv[2]), 'number': n, 'filler': 'x' * 2000})"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, path, str(writer)], cwd=ROOT) for writer in (1, 2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    rows = history.read(path)
    assert len(rows) == 80 and sorted(row["number"] for row in rows if row["writer"] == 1) == list(range(40))


def test_the_plot_holds_the_last_score_of_each_checkpoint(tmp_path):
    rows = [{**ROW, "step": step, "loss": loss} for step, loss in ((10, 3.0), (2, 4.0), (10, 2.5))]
    history.write_plots(tmp_path / "p", [*rows, {**ROW, "step": None}])
    (path,) = (tmp_path / "p").iterdir()
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert lines[0] == list(history.PLOTTED)
    assert [(line[0], line[2]) for line in lines[1:]] == [("2", "4.0"), ("10", "2.5")]
    history.write_plots(tmp_path / "none", [{**ROW, "step": None}])
    assert not (tmp_path / "none").exists()


def test_a_curve_holds_only_rows_that_may_be_compared(tmp_path):
    """One slot, and every key of the comparison: dvc plots joins all points of a file with one line."""
    first = {**ROW, "slot": "a" * 16, "method": "chunks", "backend": "torch", "bits_per_byte": 2.0}
    others = [{**first, key: "y"} for key in (*history.KEYS, "slot", "stage")]
    rows = [{**row, "step": step} for row in (first, *others) for step in (1, 2)]
    history.write_plots(tmp_path, rows)
    paths = sorted(tmp_path.glob("*.tsv"))
    assert len(paths) == 1 + len(others)
    assert all([line[:2] for line in path.read_text().splitlines()[1:]] == ["1\t", "2\t"] for path in paths)
    assert any(path.name.startswith(f"pretrain-{'a' * 16}-chunks-torch-") for path in paths)


def test_the_documented_plot_command_draws_each_curve_apart(tmp_path):
    """The words of docs/evaluation.md, through DVC itself."""
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (command,) = [line.split() for line in page.split("\n") if line.startswith("    dvc plots show")]
    rows = [{**ROW, "slot": slot, "step": step, "bits_per_byte": 2.0} for slot in "ab" for step in (1, 2)]
    history.write_plots(tmp_path / "plots" / "eval_history", rows)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", *command, "-o", "out"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    drawn = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    curves = [json.loads(text.split("]")[0] + "]") for text in drawn.split('"data": {"values": ')[1:]]
    assert [[point["step"] for point in curve] for curve in curves] == [["1", "2"]] * 2


# -- the command ------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    write_tiny_tokenizer(path)
    return path


@pytest.fixture
def project(tmp_path, monkeypatch, tokenizer, tokenizer_dir):
    """models/sft, its tokenizer, documents, and a pretraining slot with two checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("ATHANOR_TRACKING", "off")
    model = make_model(tokenizer)
    shutil.copytree(tokenizer_dir, tmp_path / "models" / "tokenizer")
    save(tmp_path / "models" / "sft", model, tokenizer)
    (tmp_path / "t.txt").write_text(PROSE * 60)
    (tmp_path / "params.yaml").write_text("model: {dim: 32}\n")
    facts = {"params": {"model": model.config.to_dict(), "pretrain": {"batch_tokens": 256}}, "code": "c"}
    facts["inputs"] = {"tokenizer": tokenizer.digest}
    with Slot(tmp_path / ".athanor" / "slots" / "pretrain", facts) as slot:
        for step in (3, 7):
            tensors = {f"model.{name}": weight * (1 + step / 50) for name, weight in model_tensors(model).items()}
            checkpoint.save(slot.path, step, {**tensors, "optimizer.x": torch.zeros(3)}, {})
    return tmp_path, slot


def run(monkeypatch, *words):
    words = ("--set", "t.txt", "--tokenizer", "models/tokenizer", "--threads", "1", *words)
    return cli.call("evaluate", words)


def test_the_command_scores_apart_and_keeps_a_history(project, monkeypatch, capsys):
    root, slot = project
    assert run(monkeypatch) == 0
    assert "models/sft: chunks perplexity" in capsys.readouterr().out
    rows = history.read(root / ".athanor" / history.FILE)
    assert [row["method"] for row in rows] == ["chunks", "documents"]
    for key in (*history.KEYS, "weights_sha256", "loss", "perplexity", "stderr", "bits_per_byte", "seconds"):
        assert rows[0][key] is not None, key
    assert run(monkeypatch, "--slot", slot.path.name[:6]) == 0
    said = capsys.readouterr().out
    assert "pretrain step 7: chunks" in said and "pretrain step 3: documents" in said and "loss +" in said
    rows = history.read(root / ".athanor" / history.FILE)
    assert [(row["step"], row["tokens"]) for row in rows[2:]] == [(3, 768), (3, 768), (7, 1792), (7, 1792)]
    plots = sorted((root / "plots" / "eval_history").iterdir())  # a curve each: chunks and documents of one slot
    assert [len(path.read_text().splitlines()) for path in plots] == [3, 3] and "documents" in plots[1].name
    journals = sorted((root / ".athanor" / "runs").glob("perplexity-*"))
    end = [read_json(folder / "end.json") for folder in journals]
    assert {one["status"] for one in end} == {"FINISHED"} and "pretrain.chunks.torch.perplexity" in end[-1]["metrics"]
    steps = [
        json.loads(line)["s"] for folder in journals for line in (folder / "journal.jsonl").read_text().splitlines()
    ]
    assert {0, 3, 7} == set(steps)
    assert not list((root / ".athanor").glob(".evaluate-*"))


def test_watching_follows_a_training_until_it_ends(project, monkeypatch, capsys):
    """The slot is locked as a trainer has it, and let go once the newest checkpoint has been scored."""
    root, slot = project
    with Slot(slot.path.parent, slot.facts, held=True) as held:
        monkeypatch.setattr(command.Recorder, "add", lambda self, rows: (held.release(), print(rows[0]["step"]))[0])
        assert run(monkeypatch, "--watch", "--poll", "0.05") == 0
    assert capsys.readouterr().out.split() == ["7"]


def test_watching_a_finished_slot_ends(project, monkeypatch, capsys):
    root, slot = project
    waits = SimpleNamespace(sleep=lambda seconds: pytest.fail("it waits for a slot that nobody works in"))
    monkeypatch.setattr(command, "time", waits)
    assert run(monkeypatch, "--watch", "--slot", slot.path.name[:6]) == 0
    said = capsys.readouterr().out
    assert "pretrain step 7: chunks" in said and "step 3" not in said  # the newest, as always with --watch


def test_a_checkpoint_folder_can_be_named(project, monkeypatch, capsys):
    root, slot = project
    path = slot.path / "step_00000003"
    assert run(monkeypatch, "--model", str(path.relative_to(root))) == 0
    assert run(monkeypatch, "--slot", slot.path.name) == 0
    named, watched = (history.read(root / ".athanor" / history.FILE)[first] for first in (0, 2))
    facts = ("stage", "slot", "step", "tokens", "weights_sha256", "tokenizer_digest", "loss")
    assert {key: named[key] for key in facts} == {key: watched[key] for key in facts} and named["step"] == 3
    shutil.copytree(path, root / "copy")
    with pytest.raises(InputError, match="not a checkpoint of a slot"):
        run(monkeypatch, "--model", "copy")


@pytest.mark.parametrize("part, complaint", [("tokenizer", "another tokenizer"), ("base", "another models/base")])
def test_a_checkpoint_of_another_tokenizer_is_refused(part, complaint, project, monkeypatch, capsys, tokenizer):
    """Or of another base model, whose shape a fine-tuned checkpoint takes."""
    root, slot = project
    save(root / "models" / "base", make_model(tokenizer), tokenizer)
    inputs = {"tokenizer": tokenizer.digest, "base": manifest_digest(root / "models" / "base")}
    params = {"batch_tokens": 256}
    folders = {}
    for changed in ("", part):
        told = {"params": params, "inputs": {**inputs, changed: "0" * 64} if changed else inputs, "code": "c"}
        with Slot(root / ".athanor" / "slots" / "sft", told) as made:
            shutil.copytree(slot.path / "step_00000003", made.path / "step_00000003")
        folders[changed] = made.path
    assert run(monkeypatch, "--slot", folders[""].name) == 0 and "sft step 3: chunks" in capsys.readouterr().out
    rows = len(history.read(root / ".athanor" / history.FILE))
    assert run(monkeypatch, "--slot", folders[part].name) == 1 and complaint in capsys.readouterr().err
    with pytest.raises(InputError, match=complaint):
        run(monkeypatch, "--model", str(folders[part] / "step_00000003"))
    assert len(history.read(root / ".athanor" / history.FILE)) == rows


def test_a_damaged_checkpoint_is_told_and_the_next_one_scored(project, monkeypatch, capsys):
    root, slot = project
    (slot.path / "step_00000007" / "tensors.safetensors").write_bytes(b"torn")
    assert run(monkeypatch, "--slot", slot.path.name) == 1
    said = capsys.readouterr()
    assert "step 7" in said.err and "damaged" in said.err and "pretrain step 3: chunks" in said.out
    assert not list((root / ".athanor").glob(".evaluate-*"))


def test_errors_of_the_other_process_are_told_in_one_line(project, monkeypatch, capsys):
    with pytest.raises(InputError, match="contexts of 128 tokens, not 512"):
        run(monkeypatch, "--context", "512")
    with pytest.raises(InputError, match="no model here"):
        run(monkeypatch, "--model", "nowhere")
    with pytest.raises(GateError, match="no score in 0.1 s"):
        run(monkeypatch, "--timeout", "0.1")
    assert not history.read(project[0] / ".athanor" / history.FILE)


def test_one_that_is_killed_is_told(project, monkeypatch):
    job = Job("models/sft", kind_of("models/sft"), "torch", "t.txt", "models/tokenizer")
    monkeypatch.setenv("PYTHONMALLOC", "nonsense")  # the interpreter itself does not start
    with pytest.raises(GateError, match="its process ended with status"):
        run_in_subprocess(job, low_priority=True)


def test_a_model_of_another_tokenizer_is_refused(project, monkeypatch):
    root, _ = project
    shutil.copytree(root / "models" / "sft", root / "models" / "other")
    config = read_json(root / "models" / "other" / "config.json")
    write_json(
        root / "models" / "other" / "config.json", {**config, "facts": {**config["facts"], "tokenizer_digest": "0"}}
    )
    with pytest.raises(InputError):
        run(monkeypatch, "--model", "models/other")

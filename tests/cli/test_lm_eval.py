"""lm-evaluation-harness as a separate program: how it is called, and that our scorer agrees with it item for item."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.catalog.loading import load_export
from athanor.cli import cli, lm_eval
from athanor.evaluation import battery, likelihood, scoring
from athanor.export.huggingface import write_huggingface
from athanor.export.source import make_source
from athanor.export.vocabulary import Vocabulary
from athanor.text.documents import Document, write_documents
from tests.evaluation.tiny import make_model, write_tiny_tokenizer


def texts() -> list[str]:
    rng = random.Random(4)
    words = [
        word for word in Path(shutil.__file__).read_text(encoding="utf-8").split() if word.isascii() and len(word) < 8
    ]
    return [" ".join(rng.choices(words, k=40 + 7 * number)) for number in range(12)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def exported(request, tmp_path_factory) -> Path:
    """An export of random weights, and held-out text beside it."""
    root = tmp_path_factory.mktemp("standard")
    tokenizer = write_tiny_tokenizer(root / "tokenizer")
    vocabulary = Vocabulary.load(root / "tokenizer" / "tokenizer.model")
    model = make_model(tokenizer, context=64, qk_norm=request.param == "qwen3")
    source = make_source("tiny", model, tokenizer, vocabulary, {})
    write_huggingface(root / "models" / "export" / "hf", source, "float32")
    (root / "data" / "clean").mkdir(parents=True)
    write_documents(
        root / "data" / "clean" / "val.parquet", [Document(t, "docs", "prose", "PSF-2.0", "val", {}) for t in texts()]
    )
    return root


# -- the call ------------------------------------------------------------------


def words(tasks):
    return lm_eval.arguments(Path("m"), tasks, Path("o"), 256, 7, [Path("i")])


def test_rolling_tasks_are_called_apart_and_without_a_second_bos():
    tasks = ["hellaswag", lm_eval.TEXT, "arc_easy", "wikitext"]
    assert lm_eval.groups(tasks) == [["hellaswag", "arc_easy"], [lm_eval.TEXT, "wikitext"]]
    assert lm_eval.groups(["piqa"]) == [["piqa"]]
    for part, bos in zip(lm_eval.groups(tasks), ("True", "False"), strict=True):
        settings = words(part)[words(part).index("--model_args") + 1].split(",")
        assert f"add_bos_token={bos}" in settings
        assert {"dtype=float32", "max_length=256", "pretrained=m"} <= set(settings)
    assert words(["piqa"])[-4:] == ["--limit", "7", "--include_path", "i"]


def test_an_answer_leaves_room_for_its_question():
    """The harness keeps 256 tokens for an answer, all of the default context, and asserts."""
    assert words(["gsm8k"])[words(["gsm8k"]).index("--gen_kwargs") + 1] == "max_gen_toks=128"
    large = lm_eval.arguments(Path("m"), ["gsm8k"], Path("o"), 512, None, [])
    # Where nothing is generated, or 256 leave as many, a task's own number holds.
    for told in (words([lm_eval.TEXT]), large):
        assert "--gen_kwargs" not in told


@pytest.mark.parametrize(
    "card, device, wanted",
    [(False, "auto", "cpu"), (True, "auto", "cuda"), (True, "cuda", "cuda"), (True, "cpu", "cpu")],
)
def test_the_harness_computes_on_the_device_that_is_there(card, device, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setenv("ATHANOR_DEVICE", device)
    words = lm_eval.arguments(Path("model"), ["piqa"], Path("out"), 128, None, [])
    assert words[words.index("--device") + 1] == wanted


def test_the_standard_tasks_are_those_that_are_promised():
    assert {"hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa", "boolq", "gsm8k", "lambada_openai"} == set(
        lm_eval.STANDARD
    )


def test_a_missing_program_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("LM_EVAL", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"LM_EVAL.*cannot be run.*pip install"):
        lm_eval.program()
    monkeypatch.delenv("LM_EVAL")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="not installed"):
        lm_eval.program()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [("echo no such task >&2; exit 3", "status 3: no such task"), ("exit 0", "no message"), ("sleep 60", "more than")],
)
def test_a_program_that_fails_is_told_with_its_words(body, complaint, monkeypatch, tmp_path):
    """Also one that says all is well and leaves no results."""
    script = tmp_path / "lm_eval"
    script.write_text(f"#!/bin/sh\n{body.replace('sleep', 'exec sleep')}\n")
    script.chmod(0o755)
    monkeypatch.setenv("LM_EVAL", str(script))
    seconds = 0.3 if "sleep" in body else None
    with pytest.raises(InputError, match=complaint):
        lm_eval.harness(tmp_path, ["x"], tmp_path / "out", 8, timeout_seconds=seconds)


def test_results_become_rows_with_their_errors():
    results = {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.25, "f1_stderr,none": "N/A"}}
    assert lm_eval.table(results) == [("t", "acc", "0.5000 ± 0.1000"), ("t", "f1", "0.2500")]


# -- the local tasks -------------------------------------------------------------


def test_questions_have_their_own_answer_once_and_repeat():
    found = lm_eval.questions(texts(), 10)
    assert found == lm_eval.questions(texts(), 10) and len(found) == 10
    assert len({question.label for question in found}) > 1
    for question, text in zip(found, texts(), strict=False):
        assert len(set(question.choices)) == lm_eval.CHOICES
        assert text.startswith(question.context + " " + question.choices[question.label])
    with pytest.raises(InputError, match="only 2 documents"):
        lm_eval.questions([*texts()[:2], "short"], 10)


def test_text_with_braces_and_quotes_survives_the_task_files(tmp_path):
    odd = ['{{ a }} "b" {% c %} \\ \u00e9 ' + text for text in texts()]
    files = lm_eval.write_tasks(tmp_path, odd, 5)
    rows = [json.loads(line) for line in files[lm_eval.NEXT].read_text().splitlines()]
    assert len(rows) == 5 and rows[0]["context"].startswith('{{ a }} "b" {% c %} \\ \u00e9 ')


def test_line_separators_inside_a_text_are_text(tmp_path):
    rows = [{"doc_id": 1, "doc": "a"}, {"doc_id": 0, "doc": "b\u2028c\u2029\u0085"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "samples_t_1.jsonl").write_text(lines, encoding="utf-8")
    assert lm_eval.samples(tmp_path, "t") == rows[::-1]


def test_the_check_takes_choices_by_the_batterys_rule(exported, monkeypatch):
    """Items as the harness logs them, right by a rule written out here; each break of the battery's rule shows."""
    model, tokenizer = load_export(exported / "models" / "export" / "hf")
    rows = []
    for question in lm_eval.questions(texts(), 8):
        choices = [choice[:40] for choice in question.choices]  # whatever the Python at hand has there fits the context
        document = {"context": question.context, "choices": choices, "label": question.label}
        values = likelihood.choice_scores(model, tokenizer, question.context, choices, lm_eval.DELIMITER)
        per = [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        marks = {name: float(of.index(max(of)) == question.label) for name, of in (("acc", values), ("acc_norm", per))}
        rows.append({"doc": document, "filtered_resps": [(value, "False") for value in values], **marks})
    results = {lm_eval.NEXT: {f"{m},none": sum(row[m] for row in rows) / len(rows) for m in ("acc", "acc_norm")}}
    monkeypatch.setattr(lm_eval, "samples", lambda out, task: rows)
    assert lm_eval.choose is battery.choose is scoring.choose
    assert lm_eval.compare(model, tokenizer, Path("o"), lm_eval.NEXT, results).agrees
    for broken in (lambda v, c, normalised: len(v) - 1, lambda v, c, normalised: v.index(min(v))):
        monkeypatch.setattr(lm_eval, "choose", broken)
        assert lm_eval.compare(model, tokenizer, Path("o"), lm_eval.NEXT, results).verdict_mismatches > 0


# -- the real thing ----------------------------------------------------------------


@pytest.fixture
def harness():
    try:
        return lm_eval.program()
    except InputError:
        pytest.skip("lm-evaluation-harness is not installed: pip install 'lm_eval>=0.4.13,<0.5' or set LM_EVAL")


def test_our_scorer_and_the_harness_agree(exported, harness, tmp_path, monkeypatch, capsys):
    """Accuracy, normalised accuracy, every item's log-likelihood, and bits per byte of long texts."""
    monkeypatch.chdir(exported)
    assert cli.call("lm-eval", ["--check", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("our scorer agrees on 12 items") == 2
    model, tokenizer = load_export(exported / "models" / "export" / "hf")
    results = {}
    for path in (tmp_path / "out").rglob("results_*.json"):
        results |= read_json(path)["results"]
    # A scorer with the usual mistakes must not pass.
    with torch.no_grad():
        model.model.norm.weight[0] += 0.05
    for task in lm_eval.LOCAL:
        assert not lm_eval.compare(model, tokenizer, tmp_path / "out", task, results).agrees
    model, _ = load_export(exported / "models" / "export" / "hf")
    monkeypatch.setattr(lm_eval, "DELIMITER", "")
    assert lm_eval.compare(model, tokenizer, tmp_path / "out", lm_eval.NEXT, results).score_mismatches > 0
    monkeypatch.undo()
    model.config = replace(model.config, context_tokens=32)
    assert not lm_eval.compare(model, tokenizer, tmp_path / "out", lm_eval.TEXT, results).agrees

"""Standard tasks through lm-evaluation-harness on the exported directory.

    python -m athanor lm-eval                                   two local tasks, without a network
    python -m athanor lm-eval --check                           the same, beside our own scorer, item for item
    python -m athanor lm-eval --tasks standard [--limit 200]    HellaSwag, ARC, PIQA, OpenBookQA, BoolQ, GSM8K, LAMBADA
    python -m athanor lm-eval --tasks my_task --include DIR     any task of lm_eval, or your own

It needs `pip install 'lm_eval>=0.4.13,<0.5'`, here or elsewhere ($LM_EVAL names the program).

The local tasks are made of held-out documents. `athanor_next`: a part of a document and four continuations, one of
which is its own, the others cut the same way out of other documents. `athanor_text`: whole documents, in bits per byte.
"""

# The harness is a process of its own: it brings seventy packages, and may live in another virtual environment. What is
# set here was each measured to change the number.

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from athanor.base.artifacts import read_json, write_text
from athanor.base.errors import InputError
from athanor.catalog.loading import load_export
from athanor.evaluation.compression import rate
from athanor.evaluation.likelihood import choice_scores, rolling_logprob
from athanor.evaluation.scoring import choose
from athanor.model.transformer import Transformer
from athanor.runtime.machine import anchor, machine
from athanor.text.documents import read_documents
from athanor.tokenizer.tokenizer import Tokenizer

MODEL, TEXTS = Path("models/export/hf"), Path("data/clean/val.parquet")
NEXT, TEXT = "athanor_next", "athanor_text"
LOCAL, ROLLING = (NEXT, TEXT), (TEXT, "wikitext")
STANDARD = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa", "boolq", "gsm8k", "lambada_openai")
ITEMS = 200  # of the local tasks: a point of accuracy is then known to ± 7
DELIMITER, CHOICES, CONTEXT_WORDS, CHOICE_WORDS = " ", 4, 24, 6
ANSWER_TOKENS = 256  # of the harness, where a task says nothing; half of a small context takes their place
VARIABLE = "LM_EVAL"
INSTALL = "pip install 'lm_eval>=0.4.13,<0.5', or name its program in $LM_EVAL"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=MODEL, help="a Hugging Face directory made by export or shrink")
    parser.add_argument("--tasks", default="local", help="'local', 'standard', or lm_eval's names with commas between")
    parser.add_argument("--limit", type=int, help=f"items per task ({ITEMS} for local tasks, else all)")
    parser.add_argument("--include", type=Path, action="append", default=[], help="folder with more task files")
    parser.add_argument("--out", type=Path, help="new folder for results and samples (below .athanor/lm_eval)")
    parser.add_argument("--timeout", type=float, help="seconds, for each of at most two calls")
    parser.add_argument("--check", action="store_true", help="compare local tasks with our own scorer")


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise InputError(f"{args.limit} items", where="--limit", fix="at least 1")
    shorthands = {"local": LOCAL, "standard": STANDARD}
    tasks = [task for word in args.tasks.split(",") for task in shorthands.get(word, (word,)) if task]
    local = [task for task in tasks if task in LOCAL]
    if args.check and not local:
        raise InputError("only local tasks can be compared", where="--check", fix="--tasks local")
    program()  # before anything is read
    model, tokenizer = load_export(args.model)
    out = _result_folder(args.out)
    include = [folder.resolve() for folder in args.include]
    if local:
        texts = (document.text for document in read_documents(TEXTS))
        write_tasks(out / "tasks", texts, args.limit or ITEMS)
        include.append((out / "tasks").resolve())
    print(f"{', '.join(tasks)} on {args.model}; log and samples in {out}", flush=True)
    context = model.config.context_tokens
    results = harness(args.model.resolve(), tasks, out, context, args.limit, include, args.timeout)
    for row in table(results):
        print("{:<18} {:<18} {}".format(*row))
    if not args.check:
        return 0
    torch.set_num_threads(1)
    agreements = {task: compare(model, tokenizer, out, task, results, machine().threads) for task in local}
    for task, agreement in agreements.items():
        numbers = ", ".join(f"{name} {ours:.6f} = {theirs:.6f}" for name, (ours, theirs) in agreement.metrics.items())
        verdict = (
            "agrees"
            if agreement.agrees
            else f"DISAGREES ({agreement.score_mismatches} scores, {agreement.verdict_mismatches} verdicts)"
        )
        worst = f"worst difference {agreement.worst:.1e} {'nats' if task == NEXT else 'relative'}"
        print(f"{task}: our scorer {verdict} on {agreement.items} items: {numbers}; {worst}")
    return 0 if all(agreement.agrees for agreement in agreements.values()) else 1


def _result_folder(requested: Path | None) -> Path:
    if requested is None:
        parent = anchor() / ".athanor" / "lm_eval"
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    if requested.exists():
        raise InputError("exists", where=str(requested), fix="name a folder that does not exist")
    requested.mkdir(parents=True)
    return requested


# -- the harness -------------------------------------------------------------------------------------------------------


def program() -> list[str]:
    """How to call lm_eval: $LM_EVAL, this Python's own package, or the program on PATH; InputError without any."""
    configured = os.environ.get(VARIABLE)
    if not configured and importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    if executable := shutil.which(configured or "lm_eval"):
        return [executable]
    if configured:
        raise InputError(f"'{configured}' cannot be run", where=VARIABLE, fix=INSTALL)
    raise InputError("lm-evaluation-harness is not installed", where="athanor lm-eval", fix=INSTALL)


def arguments(
    model: Path, tasks: Sequence[str], out: Path, context_tokens: int, limit: int | None, include: Sequence[Path]
) -> list[str]:
    """The command's words for tasks of one sort; see `groups`."""
    rolling = all(task in ROLLING for task in tasks)
    # float32: as the parity checks compute. <|bos|> once: rolling tasks get it as the prefix, and would score it as text
    # where the tokenizer adds it, too.
    settings = f"pretrained={model},dtype=float32,max_length={context_tokens},add_bos_token={not rolling}"
    argv = ["run", "--model", "hf", "--model_args", settings, "--tasks", ",".join(tasks)]
    on_card = machine().device in ("auto", "cuda") and torch.cuda.is_available()
    argv += ["--device", "cuda", "--batch_size", "auto"] if on_card else ["--device", "cpu", "--batch_size", "8"]
    argv += ["--seed", "0", "--output_path", str(out), "--log_samples"]
    if not rolling and context_tokens < 2 * ANSWER_TOKENS:
        # The harness keeps its own number free for an answer, whatever the context, and asserts that some is left.
        argv += ["--gen_kwargs", f"max_gen_toks={context_tokens // 2}"]
    argv += [] if limit is None else ["--limit", str(limit)]
    return argv + [word for folder in include for word in ("--include_path", str(folder))]


def groups(tasks: Sequence[str]) -> list[list[str]]:
    """The tasks in at most two groups: rolling tasks need another setting of the tokenizer than the others."""
    separated = ([task for task in tasks if (task in ROLLING) == rolling] for rolling in (False, True))
    return [group for group in separated if group]


def harness(
    model: Path,
    tasks: Sequence[str],
    out: Path,
    context_tokens: int,
    limit: int | None = None,
    include: Sequence[Path] = (),
    timeout_seconds: float | None = None,
) -> dict[str, Any]:
    """Metrics by task. `out` must be new; it keeps results, samples and log. InputError with the log's end on failure.

    Local tasks run offline, whatever the machine allows.
    """
    command = program()
    results: dict[str, Any] = {}
    for number, group in enumerate(groups(tasks)):
        folder = out / str(number)
        folder.mkdir(parents=True)
        argv = [*command, *arguments(model, group, folder, context_tokens, limit, include)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # of this checkout; the other environment has its own packages
        if all(task in LOCAL for task in group):
            # A cache of its own: it is keyed by path, and another checkout's data may have lain there.
            cache = str(out.resolve() / "cache")
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
        log = folder / "log.txt"
        try:
            with log.open("wb") as file:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                status = subprocess.run(argv, env=environment, timeout=timeout_seconds, **streams).returncode
        except subprocess.TimeoutExpired:
            raise InputError(f"took more than {timeout_seconds:g} s", where=str(log), fix="raise --timeout") from None
        result_files = sorted(folder.rglob("results_*.json"))
        if status != 0 or not result_files:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
            fix = "hub tasks need a network; --tasks local needs none" if set(group) - set(LOCAL) else "read the log"
            last_line = lines[-1].strip()[:300]
            raise InputError(f"lm_eval ended with status {status}: {last_line}", where=str(log), fix=fix)
        results |= read_json(result_files[-1])["results"]
    return results


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    """What lm_eval logged of each item, in the order of the data."""
    [path] = out.rglob(f"samples_{task}_*.jsonl")
    with path.open(encoding="utf-8") as file:  # splitlines() would also cut at U+2028 inside a text
        return sorted(map(json.loads, file), key=lambda row: row["doc_id"])


def table(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The results as rows of task, metric and value ± standard error."""
    rows = []
    for task, metrics in sorted(results.items()):
        for key, value in sorted(metrics.items()):
            name, _, filter_name = key.partition(",")
            if filter_name and not name.endswith("_stderr") and isinstance(value, (int, float)):
                error = metrics.get(f"{name}_stderr,{filter_name}")
                error_text = f" ± {error:.4f}" if isinstance(error, (int, float)) else ""
                rows.append((task, name, f"{value:.4f}{error_text}"))
    return rows


# -- the local tasks ---------------------------------------------------------------------------------------------------

# Columns are named, not templates: a document that holds braces is no template.
_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
{rest}metadata:
  version: 1
"""
_REST = {
    NEXT: f"""\
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: "{DELIMITER}"
metric_list:
- metric: acc
- metric: acc_norm
""",
    TEXT: """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
- metric: bits_per_byte
""",
}


@dataclass(frozen=True)
class Question:
    context: str
    choices: list[str]
    label: int


def questions(texts: Sequence[str], count: int) -> list[Question]:
    """At most `count` questions from the documents that are long enough, in their order; nothing is random."""
    candidates = []
    for words in (text.split(" ") for text in texts):
        context = DELIMITER.join(words[:CONTEXT_WORDS])
        answer = DELIMITER.join(words[CONTEXT_WORDS : CONTEXT_WORDS + CHOICE_WORDS])
        long_enough = len(words) >= CONTEXT_WORDS + CHOICE_WORDS
        if long_enough and context.strip() and answer.strip() and not context[-1].isspace():
            candidates.append((context, answer))
    answers = list(dict.fromkeys(answer for _, answer in candidates))
    if len(answers) < CHOICES:
        what = f"only {len(answers)} documents are long enough for questions"
        raise InputError(what, where="held-out text", fix="add text")
    chosen = []
    for context, answer in candidates[:count]:
        seed = hashlib.sha256(context.encode()).digest()
        start, label = int.from_bytes(seed[:8], "big"), seed[8] % CHOICES
        others = [other for other in answers if other != answer]
        # Neighbours from a place of their own; distinct because the list is.
        choices = [others[(start + offset) % len(others)] for offset in range(CHOICES - 1)]
        chosen.append(Question(context, [*choices[:label], answer, *choices[label:]], label))
    return chosen


def write_tasks(folder: Path, texts: Iterable[str], count: int) -> dict[str, Path]:
    """YAML and JSONL of both tasks, at most `count` items each; the folder is for `--include_path`. Data by task."""
    texts = [text for text in texts if text.strip()]
    rows = {NEXT: list(map(asdict, questions(texts, count))), TEXT: [{"text": text} for text in texts[:count]]}
    files = {task: (folder / f"{task}.jsonl").resolve() for task in rows}
    for task, file in files.items():
        write_text(file, "".join(json.dumps(item) + "\n" for item in rows[task]))
        text = _YAML.format(task=task, file=json.dumps(str(file)), rest=_REST[task])
        write_text(folder / f"{task}.yaml", text)
    return files


# -- our scorer beside it ----------------------------------------------------------------------------------------------

TOLERANCE = 1e-4  # nats per choice; relative for whole texts; of every metric
FP32_SUM = 1e-6  # relative: it adds up a choice's log-probabilities in fp32


@dataclass
class Agreement:
    """How far our scorer and lm_eval agree on a task; `metrics` maps a metric to (ours, theirs). `worst` is the largest
    difference of an item's log-likelihood, in nats for choices and relative for texts; `score_mismatches` counts those
    larger than rounding, and `verdict_mismatches` the items that only one of the two counts as right."""

    items: int
    metrics: dict[str, tuple[float, float]]
    worst: float = 0.0
    score_mismatches: int = 0
    verdict_mismatches: int = 0

    @property
    def agrees(self) -> bool:
        close = all(abs(ours - theirs) <= TOLERANCE for ours, theirs in self.metrics.values())
        return close and self.score_mismatches == self.verdict_mismatches == 0


def compare(
    model: Transformer, tokenizer: Tokenizer, out: Path, task: str, results: dict[str, Any], threads: int = 1
) -> Agreement:
    """Score the items that lm_eval scored, from their text on."""
    rows, agreement = samples(out, task), Agreement(0, {})
    agreement.items = len(rows)
    harness_metrics = {key.partition(",")[0]: value for key, value in results[task].items()}
    if task == TEXT:
        own_scores = [rolling_logprob(model, tokenizer, row["doc"]["text"], threads=threads) for row in rows]
        logged = [float(row["filtered_resps"][0]) for row in rows]
        differences = [abs(a - b) / abs(b) for (a, _), b in zip(own_scores, logged, strict=True)]
        agreement.worst, agreement.score_mismatches = max(differences), sum(d > TOLERANCE for d in differences)
        bits = rate([-nats / math.log(2) for nats, _ in own_scores], [size for _, size in own_scores]).bpb
        agreement.metrics["bits_per_byte"] = bits, harness_metrics["bits_per_byte"]
        return agreement
    correct_counts = {"acc": 0, "acc_norm": 0}
    for row in rows:
        context, choices, label = (row["doc"][name] for name in ("context", "choices", "label"))
        scores = choice_scores(model, tokenizer, context, choices, DELIMITER, threads=threads)
        logged = [float(value) for value, _ in row["filtered_resps"]]
        differences = [abs(score - value) for score, value in zip(scores, logged, strict=True)]
        agreement.worst = max(agreement.worst, *differences)
        agreement.score_mismatches += any(
            difference > TOLERANCE + FP32_SUM * abs(value)
            for difference, value in zip(differences, logged, strict=True)
        )
        for metric in correct_counts:
            correct = choose(scores, choices, normalised=metric == "acc_norm") == label  # the battery's own rule
            agreement.verdict_mismatches += correct != bool(row[metric])
            correct_counts[metric] += correct
    agreement.metrics |= {name: (count / len(rows), harness_metrics[name]) for name, count in correct_counts.items()}
    return agreement

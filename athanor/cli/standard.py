"""Standard tasks through EleutherAI's lm-evaluation-harness, as a process of its own on the exported directory.

Two local tasks are made of held-out documents: they need no network, and our own scorer scores the same items beside it
(`compare`). `athanor_next`: a part of a document and four continuations, one of which is its own, the others cut the same
way out of other documents. `athanor_text`: whole documents, in bits per byte.

Nothing of it is imported: it brings seventy packages, and may live in another
virtual environment. What is set here was each measured to change the number.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, write_text
from athanor.base.errors import InputError
from athanor.evaluation.compression import rate
from athanor.evaluation.likelihood import choice_scores, rolling_logprob
from athanor.evaluation.scoring import choose
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer

NEXT, TEXT = "athanor_next", "athanor_text"
DELIMITER = " "
CHOICES = 4
CONTEXT_WORDS, CHOICE_WORDS = 24, 6
VARIABLE = "LM_EVAL"
STANDARD = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa", "boolq", "gsm8k", "lambada_openai")
LOCAL = (NEXT, TEXT)
ROLLING = (TEXT, "wikitext")
ANSWER_TOKENS = 256  # of the harness, where a task says nothing; half of a small context takes their place
INSTALL = "pip install 'lm_eval>=0.4.13,<0.5', or name its program in $LM_EVAL"


def program() -> list[str]:
    """How to call lm_eval: $LM_EVAL, this Python's own package, or the program on PATH; InputError without any."""
    if named := os.environ.get(VARIABLE):
        found = shutil.which(named)
        if found is None:
            raise InputError(f"'{named}' cannot be run", where=VARIABLE, fix=INSTALL)
        return [found]
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    if found := shutil.which("lm_eval"):
        return [found]
    raise InputError("lm-evaluation-harness is not installed", where="athanor lm-eval", fix=INSTALL)


def arguments(
    model: Path, tasks: Sequence[str], out: Path, *, context_tokens: int, limit: int | None, include: Sequence[Path]
) -> list[str]:
    """The command's words for tasks of one sort; see `runs`."""
    rolling = all(task in ROLLING for task in tasks)
    settings = {
        "pretrained": str(model),
        "dtype": "float32",  # as the parity checks compute
        "max_length": str(context_tokens),
        # <|bos|> once: rolling tasks get it as the prefix, and would score it as text where the tokenizer adds it, too.
        "add_bos_token": str(not rolling),
    }
    words = ["run", "--model", "hf", "--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    words += ["--tasks", ",".join(tasks), "--device", "cpu", "--batch_size", "8", "--seed", "0"]
    words += ["--output_path", str(out), "--log_samples"]
    if not rolling and context_tokens < 2 * ANSWER_TOKENS:
        # The harness keeps its own number free for an answer, whatever the context, and asserts that some is left.
        words += ["--gen_kwargs", f"max_gen_toks={context_tokens // 2}"]
    words += [] if limit is None else ["--limit", str(limit)]
    for folder in include:
        words += ["--include_path", str(folder)]
    return words


def groups(tasks: Sequence[str]) -> list[list[str]]:
    """Rolling tasks apart from the others, because they want another setting of the tokenizer."""
    parts = ([task for task in tasks if (task in ROLLING) == rolling] for rolling in (False, True))
    return [part for part in parts if part]


def run(
    model: Path,
    tasks: Sequence[str],
    out: Path,
    *,
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
    for number, part in enumerate(groups(tasks)):
        folder = out / str(number)
        folder.mkdir(parents=True)
        words = arguments(model, part, folder, context_tokens=context_tokens, limit=limit, include=include)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # of this checkout; the other environment has its own packages
        if all(task in LOCAL for task in part):
            # A cache of its own: it is keyed by path, and another checkout's data may have lain there.
            cache = str(out.resolve() / "cache")
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
        log = folder / "log.txt"
        try:
            with log.open("wb") as file:
                status = subprocess.run(
                    [*command, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                    timeout=timeout_seconds,
                ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(f"took more than {timeout_seconds:g} s", where=str(log), fix="raise --timeout") from None
        found = sorted(folder.rglob("results_*.json"))
        if status != 0 or not found:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            said = lines[-1].strip()[:300] if lines else "no message"
            fix = "hub tasks need a network; --tasks local needs none" if set(part) - set(LOCAL) else "read the log"
            raise InputError(f"lm_eval ended with status {status}: {said}", where=str(log), fix=fix)
        results |= read_json(found[-1])["results"]
    return results


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    """What lm_eval logged of each item, in the order of the data."""
    [path] = out.rglob(f"samples_{task}_*.jsonl")
    with path.open(encoding="utf-8") as file:  # splitlines() would also cut at U+2028 inside a text
        rows = [json.loads(line) for line in file]
    return sorted(rows, key=lambda row: row["doc_id"])


def table(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Rows (task, metric, value ± standard error)."""
    rows = []
    for task, metrics in sorted(results.items()):
        for key, value in sorted(metrics.items()):
            name, _, rest = key.partition(",")
            if not rest or name.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{name}_stderr,{rest}")
            shown = f" ± {error:.4f}" if isinstance(error, (int, float)) else ""
            rows.append((task, name, f"{value:.4f}{shown}"))
    return rows


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
    NEXT: """\
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: "{delimiter}"
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
    """At most `count` of them, from the documents long enough, in their order; the same for the same documents."""
    parts = []
    for text in texts:
        words = text.split(" ")
        if len(words) >= CONTEXT_WORDS + CHOICE_WORDS:
            given = DELIMITER.join(words[:CONTEXT_WORDS])
            answer = DELIMITER.join(words[CONTEXT_WORDS : CONTEXT_WORDS + CHOICE_WORDS])
            if given.strip() and answer.strip() and not given[-1].isspace():
                parts.append((given, answer))
    answers = list(dict.fromkeys(answer for _, answer in parts))
    if len(answers) < CHOICES:
        raise InputError(
            f"only {len(answers)} documents are long enough for questions", where="held-out text", fix="add text"
        )
    found = []
    for given, answer in parts[:count]:
        seed = hashlib.sha256(given.encode()).digest()
        start, label = int.from_bytes(seed[:8], "big"), seed[8] % CHOICES
        others = [other for other in answers if other != answer]
        # Neighbours from a place of their own; distinct because the list is.
        choices = [others[(start + number) % len(others)] for number in range(CHOICES - 1)]
        found.append(Question(given, [*choices[:label], answer, *choices[label:]], label))
    return found


def write_tasks(folder: Path, texts: Iterable[str], count: int) -> dict[str, Path]:
    """YAML and JSONL of both tasks, at most `count` items each; the folder is for `--include_path`. Data by task."""
    texts = [text for text in texts if text.strip()]
    rows = {
        NEXT: [asdict(question) for question in questions(texts, count)],
        TEXT: [{"text": text} for text in texts[:count]],
    }
    files = {}
    for task, items in rows.items():
        files[task] = (folder / f"{task}.jsonl").resolve()
        write_text(files[task], "".join(json.dumps(item) + "\n" for item in items))
        rest = _REST[task].replace("{delimiter}", DELIMITER)
        write_text(folder / f"{task}.yaml", _YAML.format(task=task, file=json.dumps(str(files[task])), rest=rest))
    return files


TOLERANCE = 1e-4  # nats per choice; relative for whole texts; of every metric
FP32_SUM = 1e-6  # relative: it adds up a choice's log-probabilities in fp32


@dataclass(frozen=True)
class Agreement:
    """What both say of a task, by metric: (ours, theirs). `worst`: largest difference of an item's log-likelihood,
    in nats for choices and relative for texts; `apart`: items whose log-likelihoods differ by more than rounding;
    `verdicts`: items on whose right or wrong they differ."""

    task: str
    items: int
    metrics: dict[str, tuple[float, float]]
    worst: float
    apart: int
    verdicts: int

    @property
    def good(self) -> bool:
        close = all(abs(ours - theirs) <= TOLERANCE for ours, theirs in self.metrics.values())
        return close and self.apart == self.verdicts == 0


def compare(
    model: Transformer, tokenizer: Tokenizer, out: Path, task: str, results: dict[str, Any], threads: int = 1
) -> Agreement:
    """Score the items that lm_eval scored, from their text on."""
    rows = samples(out, task)
    theirs = {key.partition(",")[0]: value for key, value in results[task].items()}
    if task == TEXT:
        ours = [rolling_logprob(model, tokenizer, row["doc"]["text"], threads=threads) for row in rows]
        logged = [float(row["filtered_resps"][0]) for row in rows]
        differences = [abs(a - b) / abs(b) for (a, _), b in zip(ours, logged, strict=True)]
        bits = rate([-nats / math.log(2) for nats, _ in ours], [size for _, size in ours]).bpb
        metrics = {"bits_per_byte": (bits, theirs["bits_per_byte"])}
        return Agreement(task, len(rows), metrics, max(differences), sum(d > TOLERANCE for d in differences), 0)
    if task != NEXT:
        raise ValueError(task)
    worst, apart, verdicts, right = 0.0, 0, 0, {"acc": 0, "acc_norm": 0}
    for row in rows:
        document = row["doc"]
        scores = choice_scores(model, tokenizer, document["context"], document["choices"], DELIMITER, threads=threads)
        logged = [float(value) for value, _ in row["filtered_resps"]]
        differences = [abs(score - value) for score, value in zip(scores, logged, strict=True)]
        allowed = [TOLERANCE + FP32_SUM * abs(value) for value in logged]
        worst = max(worst, *differences)
        apart += any(found > limit for found, limit in zip(differences, allowed, strict=True))
        for metric in right:
            taken = choose(scores, document["choices"], normalised=metric == "acc_norm")  # the battery's own rule
            correct = taken == document["label"]
            verdicts += correct != bool(row[metric])
            right[metric] += correct
    metrics = {name: (count / len(rows), theirs[name]) for name, count in right.items()}
    return Agreement(task, len(rows), metrics, worst, apart, verdicts)

"""Standard tasks through EleutherAI's lm-evaluation-harness, as a process of its own on the exported directory.

Nothing of it is imported: it brings seventy packages, and may live in another
virtual environment. What is set here was each measured to change the number.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json
from athanor.errors import InputError
from athanor.evaluation.local_tasks import NEXT, TEXT

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

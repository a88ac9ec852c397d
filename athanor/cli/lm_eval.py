"""Standard tasks through lm-evaluation-harness on the exported directory.

    python -m athanor lm-eval                                   two local tasks, without a network
    python -m athanor lm-eval --check                           the same, beside our own scorer, item for item
    python -m athanor lm-eval --tasks standard [--limit 200]    HellaSwag, ARC, PIQA, OpenBookQA, BoolQ, GSM8K, LAMBADA
    python -m athanor lm-eval --tasks my_task --include DIR     any task of lm_eval, or your own

It needs `pip install 'lm_eval>=0.4.13,<0.5'`, here or elsewhere ($LM_EVAL names the program).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from athanor.base.errors import InputError
from athanor.cli import standard
from athanor.runtime.machine import anchor, machine
from athanor.serving.loading import load_export
from athanor.text.documents import read_documents

MODEL, TEXTS = Path("models/export/hf"), Path("data/clean/val.parquet")
ITEMS = 200  # of the local tasks: a point of accuracy is then known to ± 7


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
    named = {"local": standard.LOCAL, "standard": standard.STANDARD}
    tasks = [task for word in args.tasks.split(",") for task in named.get(word, (word,)) if task]
    local = [task for task in tasks if task in standard.LOCAL]
    if args.check and not local:
        raise InputError("only local tasks can be compared", where="--check", fix="--tasks local")
    standard.program()  # before anything is read
    model, tokenizer = load_export(args.model)
    out = _folder(args.out)
    include = [folder.resolve() for folder in args.include]
    if local:
        texts = (document.text for document in read_documents(TEXTS))
        standard.write_tasks(out / "tasks", texts, args.limit or ITEMS)
        include.append((out / "tasks").resolve())
    print(f"{', '.join(tasks)} on {args.model}; log and samples in {out}", flush=True)
    results = standard.run(
        args.model.resolve(), tasks, out, context_tokens=model.config.context_tokens, limit=args.limit,
        include=include, timeout_seconds=args.timeout,
    )  # fmt: skip
    for row in standard.table(results):
        print("{:<18} {:<18} {}".format(*row))
    if not args.check:
        return 0
    torch.set_num_threads(1)
    good = True
    for task in local:
        found = standard.compare(model, tokenizer, out, task, results, threads=machine().threads)
        good = good and found.good
        numbers = ", ".join(f"{name} {ours:.6f} = {theirs:.6f}" for name, (ours, theirs) in found.metrics.items())
        kind = "nats" if task == standard.NEXT else "relative"
        said = "agrees" if found.good else f"DISAGREES ({found.apart} scores, {found.verdicts} verdicts)"
        print(f"{task}: our scorer {said} on {found.items} items: {numbers}; worst difference {found.worst:.1e} {kind}")
    return 0 if good else 1


def _folder(wanted: Path | None) -> Path:
    if wanted is not None:
        if wanted.exists():
            raise InputError("exists", where=str(wanted), fix="name a folder that does not exist")
        wanted.mkdir(parents=True)
        return wanted
    parent = anchor() / ".athanor" / "lm_eval"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="run-", dir=parent))

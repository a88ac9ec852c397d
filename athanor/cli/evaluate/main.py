"""Perplexity of a model in torch, transformers or llama.cpp, in a process of its own.

    python -m athanor evaluate                                    models/sft in torch on held-out documents
    python -m athanor evaluate --model models/export/model-q8_0.gguf
    python -m athanor evaluate --model .athanor/slots/tune/ID/checkpoint-N      a LoRA, on its base's GGUF file
    python -m athanor evaluate --set data/sft                     held-out conversations, by ids
    python -m athanor evaluate --watch [--backend llama.cpp]      every checkpoint of the trainings that go on
    python -m athanor evaluate --slot ID                          the checkpoints of one slot, once
    python -m athanor evaluate --history                          what was scored

Rows go to .athanor/eval_history.jsonl, those of checkpoints also to
plots/eval_history/, and all of them to the tracking UI.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from athanor.base.artifacts import link, read_json
from athanor.base.errors import AthanorError, InputError
from athanor.cli.cli import positive
from athanor.cli.evaluate import history
from athanor.cli.evaluate.job import ADAPTER, BACKENDS, CHECKPOINT, Job, kind_of, run_in_subprocess
from athanor.cli.slots import SlotInfo, choose, find
from athanor.runtime.evaluations import Evaluations
from athanor.runtime.machine import anchor, machine

PLOTS = Path("plots/eval_history")
STAGES = ("pretrain", "sft")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="models/sft", help="model folder, Hugging Face directory, .gguf, checkpoint")
    parser.add_argument("--backend", choices=BACKENDS, default="", help="runtime (default: what fits the model)")
    parser.add_argument(
        "--set",
        default="data/clean/val.parquet",
        help="documents (.txt, .parquet, .jsonl with text) or conversations (.jsonl with messages, a data/sft folder)",
    )
    parser.add_argument("--tokenizer", default="models/tokenizer", help="tokenizer of a model folder or checkpoint")
    parser.add_argument("--context", type=int, default=0, help="tokens in a window (default: the model's context)")
    parser.add_argument("--max-bytes", type=positive(int), default=65536, help="of documents, drawn by content")
    parser.add_argument("--max-conversations", type=positive(int), default=200, help="drawn by content")
    parser.add_argument("--threads", type=int, default=0, help="default: the machine's; 1 with --watch")
    parser.add_argument("--timeout", type=positive(float), default=600.0, help="seconds for one score")
    parser.add_argument("--watch", action="store_true", help="follow the checkpoints of trainings that go on, idly")
    parser.add_argument("--slot", default="", help="only this slot (the start of its id, from `athanor slots`)")
    parser.add_argument("--poll", type=positive(float), default=5.0, help="seconds between looks, with --watch")
    parser.add_argument("--history", action="store_true", help="show the rows so far and score nothing")


def job_of(args: argparse.Namespace, model: Path, kind: str, **extra: Any) -> Job:
    threads = args.threads or (1 if args.watch else machine().threads)
    return Job(
        model=str(model),
        kind=kind,
        backend=args.backend,
        set_path=args.set,
        tokenizer=args.tokenizer,
        context_tokens=args.context,
        max_bytes=args.max_bytes,
        max_conversations=args.max_conversations,
        threads=threads,
        timeout_seconds=args.timeout,
        **extra,
    )


class Recorder:
    """Writes rows to the history, the plots, the tracking UI and the terminal."""

    def __init__(self, root: Path, project: Path) -> None:
        self.root, self.path = root, project / ".athanor" / history.FILE
        self.tracked = Evaluations(root, project)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            before = history.previous(history.read(self.path), row)
            history.append(self.path, row)
            print(row_text(row), flush=True)
            if before is not None:
                print(f"  loss {row['loss'] - before['loss']:+.4f} against {row_name(before)}", flush=True)
        history.write_plots(self.root / PLOTS, history.read(self.path))
        self.tracked.add(rows)


def row_name(row: Mapping[str, Any]) -> str:
    step = "" if row.get("step") is None else f"{row.get('stage')} step {row['step']:,}"
    return step or str(row["model"])


def row_text(row: Mapping[str, Any]) -> str:
    error = "" if row["stderr"] is None else f" ± {row['stderr']:.2g}"
    bits = "" if row["bits_per_byte"] is None else f", {row['bits_per_byte']:.4f} bits per byte"
    return (
        f"{row_name(row)}: {row['method']} perplexity {row['perplexity']:.4f}{error}{bits}"
        f" ({row['backend']}, {row['dtype']}, {row['scored_tokens']:,} targets at context {row['context_tokens']},"
        f" {row['seconds']:g} s)"
    )


def run(args: argparse.Namespace) -> int:
    root, project = Path.cwd(), anchor()
    if args.history:
        rows = history.read(project / ".athanor" / history.FILE)
        print("\n".join(map(row_text, rows)) if rows else "nothing has been scored here")
        return 0
    recorder = Recorder(root, project)
    if args.watch or args.slot:
        return follow(args, recorder, project)
    model, kind, facts = Path(args.model), kind_of(args.model), None
    if kind == CHECKPOINT:
        from athanor.catalog.checkpoints import slot_of

        facts = checkpoint_facts(slot_of(model), model.resolve())
    if kind == ADAPTER and (step := model.name.partition("checkpoint-")[2]):
        slot = model.resolve().parent
        facts = {"stage": slot.parent.name, "slot": slot.name, "step": int(step)}
    recorder.add(run_in_subprocess(job_of(args, model, kind, about=facts), low_priority=False))
    return 0


# -- checkpoints of trainings that another process runs: the trainer is neither asked nor told anything ------------------


def follow(args: argparse.Namespace, recorder: Recorder, project: Path) -> int:
    """Score checkpoints until no training is at work (without --watch: what is there). 1 if one failed.

    A training that has not begun is waited for, but not with --slot: a slot that nobody works in gets no more.
    """
    tried: set[Path] = set()
    failed = seen_working = False
    if args.watch:
        print("waiting for checkpoints of trainings; Ctrl-C ends it", file=sys.stderr, flush=True)
    while True:
        slots = _slots(project, args)
        working = any(slot.state == "working" for slot in slots)
        seen_working = seen_working or working
        pending = [(slot, path) for slot in slots for path in _checkpoints(slot, args) if path not in tried]
        if pending:
            slot, path = pending[0]
            tried.add(path)
            facts = checkpoint_facts(slot.path, path)
            try:
                with linked_copy(slot.path, path, project) as copy:
                    job = job_of(args, copy, CHECKPOINT, slot=str(slot.path), about=facts)
                    rows = run_in_subprocess(job, low_priority=args.watch)
                recorder.add([{**row, "model": str(path.relative_to(project))} for row in rows])
            except FileNotFoundError:  # the trainer dropped it for a newer one
                pass
            except AthanorError as error:
                failed = True
                print(f"{slot.stage} step {facts['step']:,}: {error}", file=sys.stderr, flush=True)
            continue
        if not args.watch or ((seen_working or args.slot) and not working):
            if not tried:
                raise InputError("no checkpoint to score", where="athanor slots", fix="name another --slot")
            return int(failed)
        time.sleep(args.poll)


def _slots(project: Path, args: argparse.Namespace) -> list[SlotInfo]:
    slots = [slot for slot in find(project) if slot.stage in STAGES and slot.facts]
    if args.slot:
        return [choose(slots, args.slot)]
    return [slot for slot in slots if slot.state == "working"]


def _checkpoints(slot: SlotInfo, args: argparse.Namespace) -> list[Path]:
    """The checkpoints of a slot by step; while watching only the newest, so that slow scores do not fall behind."""
    from athanor.training import checkpoint

    checkpoints = checkpoint.steps(slot.path)
    return checkpoints[:1] if args.watch else checkpoints[::-1]


def checkpoint_facts(slot: Path, path: Path) -> dict[str, Any]:
    """Facts of a slot's checkpoint for the rows."""
    from athanor.training import checkpoint

    stage, step = slot.parent.name, checkpoint.step_of(path)
    params = read_json(slot / "facts.json")["params"]
    batch = params.get("batch_tokens") or params.get(stage, {}).get("batch_tokens")
    return {"stage": stage, "slot": slot.name, "step": step, "tokens": step * batch if batch else None}


@contextmanager
def linked_copy(slot: Path, path: Path, project: Path) -> Iterator[Path]:
    """Hard links to a slot's checkpoint, which the trainer may delete; a copy where links are not possible.

    It lies in a folder that is named as the slot is, and has nothing else.
    """
    from athanor.training import checkpoint

    with tempfile.TemporaryDirectory(prefix=".evaluate-", suffix=".tmp", dir=project / ".athanor") as folder:
        copy = Path(folder) / slot.parent.name / slot.name / path.name
        copy.mkdir(parents=True)
        for name in (checkpoint.TENSORS, checkpoint.STATE):
            link(path / name, copy / name)
        yield copy

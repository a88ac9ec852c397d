"""What tools/bench_quality.py compares: a recipe in a process of its own, which trains in turns and is scored.

    python -P tools/quality_contenders.py    (in a folder with job.json; PYTHONPATH is the checkout whose recipe it is)

Imports of athanor stand where they are used, and there are few: the checkout
may be that of another commit.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import gc
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # of nanochat
SCORED_TOKENS, UNSCORED = 4096, -1  # at once; an id that does not count
WARM_STEPS = 2  # in which nanochat compiles; they are taken back
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}

Pair = tuple[Any, Any]  # [B, T] each: ids, and the ids that follow
Score = Callable[[Callable[[Any], Any]], float]


def batches(documents: Sequence[np.ndarray], window: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of ids [B, T] and the ids that follow, UNSCORED where they do not count; windows as in our validation."""
    from athanor.model.validation import spans

    rows = []
    for ids in documents:
        for start, end, first in spans(len(ids) - 1, window):
            following = ids[start + 1 : end + 1].astype(np.int64)
            following[: first - start] = UNSCORED
            rows.append((ids[start:end].astype(np.int64), following))
    rows.sort(key=lambda row: len(row[0]))
    result = []
    rows_at_once = max(1, SCORED_TOKENS // window)
    for at in range(0, len(rows), rows_at_once):
        group = rows[at : at + rows_at_once]
        width = max(2, len(group[-1][0]))  # nanochat reads no row of one id
        ids_BT = np.zeros((len(group), width), np.int64)
        next_BT = np.full((len(group), width), UNSCORED, np.int64)
        for row, (ids, following) in enumerate(group):
            ids_BT[row, : len(ids)], next_BT[row, : len(ids)] = ids, following
        result.append((ids_BT, next_BT))
    return result


def bits_per_byte(
    logits_of: Callable[[Any], Any], parts: Sequence[Pair], text_bytes: int, vocab_size: int, workers: int = 1
) -> float:
    """The one score: bits of all scored ids over the bytes of the text; `logits_of` takes ids [B, T]."""
    import torch
    from torch.nn import functional as F

    def nats(part: Pair) -> float:
        ids_BT, next_BT = (torch.from_numpy(array) for array in part)
        with torch.no_grad():
            logits_NV = logits_of(ids_BT).float().flatten(0, 1)
            if logits_NV.shape[1] != vocab_size:
                raise ValueError(f"{logits_NV.shape[1]} logits for {vocab_size} ids")
            losses_N = F.cross_entropy(logits_NV, next_BT.flatten(), ignore_index=UNSCORED, reduction="none")
        return float(losses_N.double().sum())

    with ThreadPoolExecutor(workers, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        total = sum(pool.map(nats, parts) if workers > 1 else map(nats, parts))
    return total / math.log(2) / text_bytes


class Turns:
    """A contender's clocks and its conversation: a line of JSON for what it did, a line back when it may go on."""

    def __init__(self, answers: TextIO, turn_tokens: int) -> None:
        self._answers, self._turn_tokens, self._next = answers, turn_tokens, turn_tokens
        self._taken, self._since = dict.fromkeys(CLOCKS, 0.0), dict.fromkeys(CLOCKS, 0.0)

    def begin(self, **facts: Any) -> None:
        """Tell what takes part; the clocks start with the first turn."""
        self._talk(facts)
        self._go()

    def step_done(self, tokens: int) -> None:
        """Let the others have their turn, if this one was long enough."""
        if tokens >= self._next:
            self._next = tokens + self._turn_tokens
            self.wait(tokens=tokens)

    def wait(self, **told: Any) -> None:
        with self.stopped():
            self._talk({**told, **self._taken})

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside takes no time."""
        for name, clock in CLOCKS.items():
            self._taken[name] += clock() - self._since[name]
        yield
        self._go()

    def _go(self) -> None:
        self._since = {name: clock() for name, clock in CLOCKS.items()}

    def _talk(self, told: dict[str, Any]) -> None:
        self._answers.write(json.dumps(told) + "\n")
        self._answers.flush()
        if "end" in told or not sys.stdin.readline():
            os._exit(0)


def ours(job: SimpleNamespace, turns: Turns, score: Score) -> None:
    """The stage as it is, in a folder of its own; where it would validate it is scored, and after some steps it waits."""
    import stages.pretrain as stage
    from athanor.model.precision import autocast
    from athanor.runtime.run import Run

    real = stage.train

    def train(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(real).bind(*args, **kwargs)
        model, settings, hooks = (bound.arguments[name] for name in ("model", "settings", "hooks"))
        steps, bpb = 0, math.nan

        def measure(model: Any) -> float:
            def logits_of(ids_BT: Any) -> Any:
                with autocast(settings.precision, ids_BT.device):
                    return model(ids_BT)

            with turns.stopped():
                return score(logits_of)

        def should_stop() -> bool:
            nonlocal steps
            steps += 1
            turns.step_done(steps * settings.batch_tokens)
            return hooks.should_stop()

        def validate(model: Any) -> dict[str, Any]:
            nonlocal bpb
            bpb = measure(model)
            return {"all": {"bpb": bpb}}

        def on_validation(step: int, _: Any) -> None:
            if step < settings.steps:
                turns.wait(tokens=step * settings.batch_tokens, bpb=bpb)

        changes = {"validate": validate, "on_validation": on_validation, "should_stop": should_stop}
        bound.arguments["hooks"] = dataclasses.replace(hooks, on_sample=lambda step, model: None, **changes)
        turns.begin(parameters=sum(w.numel() for w in model.parameters()), numerics=settings.precision)
        result = real(*bound.args, **bound.kwargs)
        # Once more, because the loop may end with other weights than those of its last step.
        turns.wait(tokens=result.tokens, bpb=measure(model), end=True)

    stage.train = train  # type: ignore[attr-defined]
    stage.run(Run("pretrain", "stages.pretrain"))


def run_statements(script: Path, names: set[str], space: dict[str, Any]) -> None:
    """Run in `space` those top-level statements of a script that set nothing but `names`.

    With `parser` among them also those that add its arguments.
    """
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            stored = {node.name}
        else:
            found = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            stored = {part.id for part in found if isinstance(part.ctx, ast.Store)}
        argument = isinstance(node, ast.Expr) and ast.unparse(node).startswith("parser.add_argument(")
        if (stored and stored <= names) or (argument and "parser" in names):
            exec(compile(ast.Module([node], []), str(script), "exec"), space)
    if missing := sorted(names - space.keys()):
        raise SystemExit(f"{script} does not set {', '.join(missing)}: this version is put together in another way")


def nanochat(job: SimpleNamespace, turns: Turns, score: Score) -> None:
    """Its model, optimiser, rules and schedules out of the clone; the loop around them is the usual one."""
    os.environ["NANOCHAT_DTYPE"] = DTYPES[job.numerics]
    import torch

    torch.set_num_threads(job.threads)
    torch.set_flush_denormal(True)  # as our stage does
    sys.path.append(job.nanochat)
    from nanochat import common
    from nanochat.gpt import GPT, GPTConfig

    script = Path(job.nanochat) / "scripts" / "base_train.py"
    space: dict[str, Any] = {"argparse": argparse, "math": math, "torch": torch, "print0": print}
    space |= {"GPT": GPT, "GPTConfig": GPTConfig, "vocab_size": job.vocab_size}
    run_statements(script, {"parser", "build_model_meta"}, space)
    args = space["args"] = space["parser"].parse_args(job.nanochat_args.split())
    batch_tokens, T = args.total_batch_size, args.max_seq_len
    if args.device_batch_size * T != batch_tokens:
        raise SystemExit("one micro-batch for each step: --device-batch-size × --max-seq-len = --total-batch-size")
    model = space["model"] = space["build_model_meta"](args.depth)
    model.to_empty(device="cpu")
    torch.manual_seed(job.seed)
    model.init_weights()
    steps = space["num_iterations"] = job.tokens // batch_tokens
    lengths = {"get_scaling_params", "num_scaling_params", "target_tokens", "d12_ref", "D_REF", "B_REF"}
    rates = {"total_batch_size", "batch_ratio", "batch_lr_scale", "weight_decay_scaled"}
    schedules = {"get_lr_multiplier", "get_muon_momentum", "get_weight_decay"}
    run_statements(script, lengths | rates | schedules, space)
    if job.scale != "rule":
        space["batch_lr_scale"] = float(job.scale)
    rows = (bestfit_rows if job.rows == "bestfit" else windows)(job, T, batch_tokens)
    compiled = torch.compile(model, dynamic=False)

    def step(number: int) -> None:
        ids_BT, next_BT = rows(number)
        compiled(ids_BT, next_BT).backward()
        for group in space["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * space["get_lr_multiplier"](number)
            if group["kind"] == "muon":
                group["momentum"] = space["get_muon_momentum"](number)
                group["weight_decay"] = space["get_weight_decay"](number)
        space["optimizer"].step()
        model.zero_grad(set_to_none=True)

    def from_the_start(steps: int) -> None:
        model.load_state_dict(initial)
        run_statements(script, {"optimizer"}, space)
        for number in range(steps):
            step(number)

    initial, compiles = {name: value.clone() for name, value in model.state_dict().items()}, True
    try:
        from_the_start(WARM_STEPS)
    except Exception as error:
        print(f"does not compile here: {error!r}", file=sys.stderr)
        compiles = False
        torch.compiler.set_stance("force_eager")
        from_the_start(WARM_STEPS)
    from_the_start(0)
    rows = (bestfit_rows if job.rows == "bestfit" else windows)(job, T, batch_tokens)
    gc.collect()
    gc.freeze()
    gc.disable()  # its script does so, too
    numerics = str(common.COMPUTE_DTYPE)
    facts = {"parameters": sum(w.numel() for w in model.parameters()), "numerics": numerics, "compiled": compiles}
    facts["rates"] = [group["initial_lr"] for group in space["optimizer"].param_groups]
    turns.begin(**facts, weight_decay=space["weight_decay_scaled"])
    for number in range(steps):
        step(number)
        tokens, last = (number + 1) * batch_tokens, number + 1 == steps
        turns.step_done(tokens)
        if last or tokens // job.every > number * batch_tokens // job.every:
            with turns.stopped():
                bpb = score(model)
            turns.wait(tokens=tokens, bpb=bpb, **({"end": True} if last else {}))


def windows(job: SimpleNamespace, T: int, batch_tokens: int) -> Callable[[int], Pair]:
    """The rows of our sampler, in its order."""
    import torch

    from athanor.data.sampler import PretrainSampler

    sampler = PretrainSampler(job.data, T, job.seed, job.tokens // batch_tokens * batch_tokens)

    def rows(step: int) -> Pair:
        tokens_BS = torch.from_numpy(sampler.batch(step * batch_tokens, batch_tokens).tokens_BS)
        return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()

    return rows


def bestfit_rows(job: SimpleNamespace, T: int, batch_tokens: int) -> Callable[[int], Pair]:
    """The rows of nanochat's own loader, to which our documents are both the text and its ids."""
    os.environ["NANOCHAT_BASE_DIR"] = os.getcwd()  # where it would download to
    from nanochat import dataloader

    from athanor.data.shards import open_train

    stream = open_train(job.data)
    documents = [stream.document(number).tolist() for number in range(stream.documents)]

    def forever(*_: Any) -> Iterator[tuple[list[list[int]], tuple[int, int, int]]]:
        while True:
            for start in range(0, len(documents), 128):
                yield documents[start : start + 128], (0, 0, 1)

    dataloader._document_batches = forever
    tokenizer = SimpleNamespace(get_bos_token_id=lambda: documents[0][0], encode=lambda part, **_: part)
    make = dataloader.tokenizing_distributed_data_loader_bos_bestfit
    loader = make(tokenizer, batch_tokens // T, T, split="train", device="cpu")
    return lambda step: next(loader)


def work() -> None:
    """The job of this folder, from the first step to the last."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr
    job = SimpleNamespace(**json.loads(Path("job.json").read_text()))
    held_out = np.load(job.held_out)
    parts = [(held_out[f"ids{n}"], held_out[f"next{n}"]) for n in range(int(held_out["parts"]))]
    text_bytes, job.vocab_size = int(held_out["text_bytes"]), int(held_out["vocab_size"])

    def score(logits_of: Callable[[Any], Any]) -> float:
        # Side by side where the recipe keeps torch to one thread for an operation.
        workers = job.threads if torch.get_num_threads() == 1 else 1
        return bits_per_byte(logits_of, parts, text_bytes, job.vocab_size, workers)

    {"ours": ours, "nanochat": nanochat}[job.recipe](job, Turns(answers, job.turn_tokens), score)


if __name__ == "__main__":
    work()

"""Training speed beside transformers' Llama and, where its model.py is given, nanoGPT, at equal shapes and equal loss.

    python -m tools.bench_train [--shapes 1m,default,5m,30m] [--rounds 3] [--nanogpt PATH/model.py] [--losses]

Every contender runs in a process of its own, one after the other, round by
round; what counts is the ratio within a round. Text is the interpreter's own
standard library, words hashed to ids, so nothing has to be built before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from athanor.model.config import ModelConfig
from athanor.training.setup import Choices

RATE, WARMUP_STEPS, CLIP = 2e-3, 20, 1.0
STEP_TOKENS = 4096


SHAPES = {
    "1m": ModelConfig(2048, 4, 128, 4, 2, 32, 352, 128, 1e4, 1e-6, False),
    "default": ModelConfig(4096, 5, 192, 6, 2, 32, 512, 256, 1e4, 1e-6, False),
    "5m": ModelConfig(4096, 6, 256, 8, 4, 32, 704, 256, 1e4, 1e-6, False),
    "30m": ModelConfig(8192, 8, 512, 8, 4, 64, 1408, 1024, 1e4, 1e-6, False),
}
# Ours in fp32, and with products of bf16 factors (sums and all else in fp32), which pays where the processor has units for it.
OURS = ("athanor", "athanor-bf16")
CONTENDERS = (*OURS, "transformers", "transformers-compiled", "nanogpt", "nanogpt-compiled")


def words(vocab_size: int, wanted: int) -> np.ndarray:
    """Ids of the standard library's words: crc32 modulo the vocabulary."""
    ids: list[int] = []
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        ids += [zlib.crc32(word) % vocab_size for word in path.read_bytes().split()]
        if len(ids) >= wanted:
            break
    return np.asarray(ids[:wanted], np.int64)


def batches(shape: ModelConfig, steps: int) -> np.ndarray:
    """[steps, B, T + 1] ids, each id once as an input."""
    T, B = shape.context_tokens, STEP_TOKENS // shape.context_tokens
    ids = words(shape.vocab_size, steps * B * T + 1)
    if len(ids) < steps * B * T + 1:
        raise SystemExit(f"the standard library has {len(ids)} words only")
    rows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[::T]
    return rows[: steps * B].reshape(steps, B, T + 1).copy()


def rate(step: int) -> float:
    return RATE * min(1.0, (step + 1) / WARMUP_STEPS)


def ours(config: ModelConfig, seed: int, threads: int, choices: Choices) -> Callable[[np.ndarray, int], float]:
    from athanor.model.transformer import Transformer
    from athanor.training.lanes import Lanes
    from athanor.training.optimizer import OptimizerSettings
    from athanor.training.settings import LoopSettings
    from athanor.training.loop import Hooks
    from athanor.training.setup import Place, place, tuned
    from athanor.training.step import Stepper

    _, load = place(config, choices, Place("cpu", threads, "bench", seed), STEP_TOKENS)
    settings = LoopSettings(1, STEP_TOKENS, CLIP, 0.0, choices.precision, True, 0, 0, load.micro_batch_rows, threads, 1, 1e9)
    model = Transformer.fresh(config, seed)
    hooks = Hooks(validate=lambda model: {}, on_note=lambda text: print(text, file=sys.stderr))
    cache = Path(tempfile.gettempdir()) / "athanor-bench-train"
    tuned(model, choices, load, settings, hooks, cache).__enter__()
    lanes = Lanes(model, threads).__enter__()
    stepper = Stepper(lanes, OptimizerSettings(0.9, 0.97, 1e-8, 0.1), settings)

    def step(tokens_BS: np.ndarray, number: int) -> float:
        rows = SimpleNamespace(tokens_BS=tokens_BS, document_BS=np.zeros_like(tokens_BS))
        return float(stepper.step(rows, rate(number))[0][0])

    return step


def theirs(model: Any, loss_of: Callable[[Any, Any], Any], micro_rows: int) -> Callable[[np.ndarray, int], float]:
    """The usual loop: AdamW, fused; the norm clipped; a decay of matrices alone."""
    import torch

    split = [[w for w in model.parameters() if w.dim() >= 2], [w for w in model.parameters() if w.dim() < 2]]
    groups = [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.97), eps=1e-8, fused=True)

    def step(tokens_BS: np.ndarray, number: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.zero_grad(set_to_none=True)
        parts = torch.from_numpy(np.ascontiguousarray(tokens_BS)).split(micro_rows)
        losses = []
        for part in parts:
            loss = loss_of(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(sum(losses))

    return step


def llama(shape: ModelConfig, seed: int, compiled: bool, micro_rows: int) -> Callable[[np.ndarray, int], float]:
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, max_position_embeddings=shape.context_tokens, tie_word_embeddings=True,
            use_cache=False, attn_implementation="sdpa",
        )
    )
    run = torch.compile(model) if compiled else model

    def loss_of(ids: Any, following: Any) -> Any:
        return F.cross_entropy(run(input_ids=ids, use_cache=False).logits.flatten(0, 1), following.flatten())

    return theirs(model, loss_of, micro_rows)


def nanogpt(shape: ModelConfig, seed: int, compiled: bool, micro_rows: int, source: str) -> Callable[[np.ndarray, int], float]:
    """GPT-2's shape with as many layers; its width is the multiple of the heads that comes nearest in parameters."""
    import torch

    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    wanted = shape.parameter_count()

    def config(width: int) -> Any:
        return module.GPTConfig(
            block_size=shape.context_tokens, vocab_size=shape.vocab_size, n_layer=shape.layers, n_head=shape.heads,
            n_embd=width, dropout=0.0, bias=False,
        )

    widths = range(shape.heads * 8, 4 * shape.dim, shape.heads * 4)
    per_layer, fixed = 12, shape.vocab_size + shape.context_tokens
    width = min(widths, key=lambda w: abs(per_layer * shape.layers * w * w + fixed * w - wanted))
    model = module.GPT(config(width))
    run = torch.compile(model) if compiled else model
    return theirs(model, lambda ids, following: run(ids, following)[1], micro_rows)


def work(contender: str, shape: ModelConfig, seed: int, threads: int, micro_rows: int, steps: int, source: str) -> dict[str, Any]:
    """Steps of one contender in this process: its speed without the first quarter of them, and the losses."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # for everybody, or Adam's denormals decide
    started = time.perf_counter()
    if contender.startswith("athanor"):
        choices = Choices("bf16" if "bf16" in contender else "fp32", compile="compiled" in contender)
        step = ours(shape, seed, threads, choices)
    elif contender.startswith("transformers"):
        step = llama(shape, seed, contender.endswith("compiled"), micro_rows)
    else:
        step = nanogpt(shape, seed, contender.endswith("compiled"), micro_rows, source)
    losses, seconds = [], []
    for number, tokens_BS in enumerate(batches(shape, steps)):
        at = time.perf_counter()
        losses.append(step(tokens_BS, number))
        seconds.append(time.perf_counter() - at)
        if number == 0:
            ready = time.perf_counter() - started
    later = sorted(seconds[max(1, steps // 4) :])
    # The median: a neighbour's burst is not the contender's.
    return {"tokens_per_second": STEP_TOKENS / statistics.median(later), "losses": losses, "first_step_s": ready}


def ask(contender: str, shape: str, seed: int, args: argparse.Namespace, steps: int, micro_rows: int) -> dict[str, Any] | None:
    """Run `work` in a process of its own; None with a line on the terminal if it fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, "-m", "tools.bench_train", "--work", contender, "--shapes", shape, "--out", out.name]
        command += ["--seed", str(seed), "--steps", str(steps), "--micro-rows", str(micro_rows)]
        command += ["--threads", str(args.threads), "--nanogpt", args.nanogpt]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{contender}, {shape}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        return json.load(out)


def micro_rows_of(shape: ModelConfig) -> tuple[int, ...]:
    """What a contender may choose from: about 1,024 tokens at a time, or the whole step."""
    return (max(1, 1024 // shape.context_tokens), STEP_TOKENS // shape.context_tokens)


def compare(name: str, contenders: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all contenders on one shape; others get the better of two micro-batches, found in the first round."""
    import torch

    from athanor.hardware import products
    from athanor.model.flops import training_flops

    config = SHAPES[name]
    gflop = training_flops(config, config.context_tokens) / 1e9
    chosen: dict[str, int] = {}
    rows: list[dict[str, float]] = []
    for number in range(args.rounds + 1):
        torch.set_num_threads(args.threads)
        measured = products.measure(config, 1024, torch.device("cpu"), 4.0, ("fp32",))
        speeds: dict[str, float] = {"ceiling": measured["gflops"]["fp32"]["ceiling"]}
        for contender in contenders:
            if number and contender not in chosen:
                continue
            options = micro_rows_of(config) if not number and contender not in OURS else (chosen.get(contender, 0),)
            got = {rows: ask(contender, name, 1, args, args.steps, rows) for rows in options}
            fair = {rows: result["tokens_per_second"] for rows, result in got.items() if result}
            if fair:
                chosen[contender] = max(fair, key=fair.__getitem__)
                speeds[contender] = max(fair.values())
        if number:  # the first round warms caches and compilers and chooses
            rows.append(speeds)
    told: dict[str, Any] = {"parameters": config.parameter_count(), "gflop_per_token": gflop}
    others = [contender for contender in chosen if contender not in OURS]
    for contender in chosen:
        told[contender] = spread([row[contender] for row in rows])
    told["ceiling_gflops"] = spread([row["ceiling"] for row in rows])
    for one in [contender for contender in OURS if contender in chosen]:
        if one == "athanor":
            told["athanor / fp32 ceiling"] = spread([row[one] * gflop / row["ceiling"] for row in rows])
        for other in others:
            told[f"{one} / {other}"] = spread([row[one] / row[other] for row in rows])
        if others:
            told[f"{one} / fastest"] = spread([row[one] / max(row[other] for other in others) for row in rows])
    return told


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def losses(name: str, contenders: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Mean loss of the last tenth of the steps, three seeds each."""
    told = {}
    for contender in [c for c in contenders if not c.endswith("compiled")]:
        ends = []
        for seed in (1, 2, 3):
            result = ask(contender, name, seed, args, args.loss_steps, micro_rows_of(SHAPES[name])[0])
            if result:
                tail = result["losses"][-max(1, args.loss_steps // 10) :]
                ends.append(sum(tail) / len(tail))
        told[contender] = ends
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--losses", action="store_true", help="compare the loss after equal tokens, too")
    parser.add_argument("--loss-steps", type=int, default=60)
    parser.add_argument("--nanogpt", default="", help="path of nanoGPT's model.py")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", default="", help="also write what was measured to this file")
    for hidden, kind in (("--work", str), ("--out", str), ("--seed", int), ("--micro-rows", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.threads:
        from athanor.pipeline.machine import cores

        args.threads = cores()
    if args.work:
        told = work(
            args.work, SHAPES[args.shapes], args.seed, args.threads, args.micro_rows, args.steps, args.nanogpt
        )
        Path(args.out).write_text(json.dumps(told))
        return
    contenders = [c for c in args.contenders.split(",") if args.nanogpt or not c.startswith("nanogpt")]
    found: dict[str, Any] = {}
    for name in args.shapes.split(","):
        found[name] = compare(name, contenders, args)
        print(f"\n{name}: {found[name]['parameters']:,} parameters, {SHAPES[name].context_tokens} tokens a row")
        for key, value in found[name].items():
            if isinstance(value, dict):
                print(f"  {key:<34} {value['median']:>10.2f}   ({value['low']:.2f} to {value['high']:.2f})")
        if args.losses:
            found[name]["losses"] = losses(name, contenders, args)
            for contender, ends in found[name]["losses"].items():
                print(f"  loss after {args.loss_steps * STEP_TOKENS:,} tokens, {contender:<16} "
                      + "  ".join(f"{end:.3f}" for end in ends))
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

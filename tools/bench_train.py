"""Training speed beside transformers' Llama and, where its model.py is given, nanoGPT, at equal shapes and equal loss.

    python -m tools.bench_train [--shapes 1m,default,5m,30m] [--numerics bf16] [--rounds 20] [--nanogpt PATH/model.py] [--losses]

Every contender has a process of its own, and they take their steps in turns;
what counts is the ratio within a round, and beside it the one of everybody's
best step. Text is the interpreter's own standard library, words hashed to ids,
so nothing has to be built before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
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
from athanor.runtime.machine import cores
from athanor.training.setup import Choices
from tools.child import Child

RATE, WARMUP_STEPS, CLIP = 2e-3, 20, 1.0
STEP_TOKENS = 4096
MOST_STEPS, LOSS_STEPS, CEILING_EVERY = 80, 60, 5
WARM_STEPS = 4  # the first compiles, and glibc's heap grows during the next

SHAPES = {
    "1m": ModelConfig(2048, 4, 128, 4, 2, 32, 352, 128, 1e4, 1e-6, False),
    "default": ModelConfig(4096, 4, 192, 3, 3, 64, 640, 256, 1e4, 1e-6, False),
    "5m": ModelConfig(4096, 6, 256, 8, 4, 32, 704, 256, 1e4, 1e-6, False),
    "30m": ModelConfig(8192, 8, 512, 8, 4, 64, 1408, 1024, 1e4, 1e-6, False),
}
CONTENDERS = ("athanor", "transformers", "transformers-compiled", "nanogpt", "nanogpt-compiled")


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
    from athanor.training.cpu_replicas import CpuReplicas
    from athanor.training.loop import Hooks
    from athanor.training.optimizer import OptimizerSettings
    from athanor.training.settings import LoopSettings
    from athanor.training.setup import DeviceSpec, setup_device, tuned
    from athanor.training.step import Stepper

    _, load = setup_device(config, choices, DeviceSpec("cpu", threads, "bench", seed), STEP_TOKENS, "adamw")
    settings = LoopSettings(
        1, STEP_TOKENS, CLIP, 0.0, choices.precision, True, 0, 0, load.micro_batch_rows, threads, 1, 1e9
    )
    model, cache = Transformer.fresh(config, seed), Path(tempfile.gettempdir()) / "athanor-bench-train"
    hooks = Hooks(validate=lambda model: {}, on_note=lambda text: print(text, file=sys.stderr))
    (inside := tuned(model, choices, load, settings, hooks, cache)).__enter__()
    replicas = CpuReplicas(model, threads).__enter__()
    stepper = Stepper(replicas, OptimizerSettings(0.9, 0.97, 1e-8, 0.1), settings)

    def step(tokens_BS: np.ndarray, number: int) -> float:
        rows = SimpleNamespace(tokens_BS=tokens_BS, document_BS=np.zeros_like(tokens_BS))
        assert inside is not None  # a context that nobody holds ends, and lets go of what was compiled
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
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.context_tokens,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    run = torch.compile(model) if compiled else model

    def loss_of(ids: Any, following: Any) -> Any:
        return F.cross_entropy(run(input_ids=ids, use_cache=False).logits.flatten(0, 1), following.flatten())

    return theirs(model, loss_of, micro_rows)


def nanogpt(
    shape: ModelConfig, seed: int, compiled: bool, micro_rows: int, source: str
) -> Callable[[np.ndarray, int], float]:
    """GPT-2's shape with as many layers; its width is the multiple of the heads that comes nearest in parameters."""
    import torch

    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(seed)

    def config(width: int) -> Any:
        return module.GPTConfig(
            block_size=shape.context_tokens,
            vocab_size=shape.vocab_size,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=width,
            dropout=0.0,
            bias=False,
        )

    widths = range(shape.heads * 8, 4 * shape.dim, shape.heads * 4)
    fixed = shape.vocab_size + shape.context_tokens
    width = min(widths, key=lambda w: abs(12 * shape.layers * w * w + fixed * w - shape.parameter_count()))
    model = module.GPT(config(width))
    run = torch.compile(model) if compiled else model
    return theirs(model, lambda ids, following: run(ids, following)[1], micro_rows)


def work(contender: str, shape: ModelConfig, args: argparse.Namespace) -> None:
    """A contender in this process: one step for each line on stdin, answered by its seconds and loss as JSON."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr  # nanoGPT prints
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # for everybody, or Adam's denormals decide
    compiled, is_ours = "compiled" in contender, contender.startswith("athanor")
    if is_ours:
        step = ours(shape, args.seed, args.threads, Choices(args.numerics, compile=compiled))
    else:
        make, more = (llama, ()) if contender.startswith("transformers") else (nanogpt, (args.nanogpt,))
        step = make(shape, args.seed, compiled, args.micro_rows, *more)
    torch.autocast("cpu", torch.bfloat16, enabled=args.numerics == "bf16" and not is_ours).__enter__()
    batch = batches(shape, MOST_STEPS)
    for number, _ in enumerate(sys.stdin):
        at = time.perf_counter()
        loss = step(batch[number % len(batch)], number)
        answers.write(json.dumps([time.perf_counter() - at, loss]) + "\n")
        answers.flush()


class Contender(Child):
    def __init__(self, name: str, shape: str, seed: int, args: argparse.Namespace, micro_rows: int) -> None:
        command = [sys.executable, "-m", "tools.bench_train", "--work", name, "--shapes", shape, "--seed", str(seed)]
        for option in ("numerics", "threads", "nanogpt"):
            command += [f"--{option}", str(getattr(args, option))]
        super().__init__(name, tempfile.TemporaryFile("w+"), [*command, "--micro-rows", str(micro_rows)])


def micro_rows_of(shape: ModelConfig) -> tuple[int, ...]:
    """What a contender may choose from: about 1,024 tokens at a time, or the whole step."""
    return (max(1, 1024 // shape.context_tokens), STEP_TOKENS // shape.context_tokens)


def entered(names: list[str], shape: str, args: argparse.Namespace) -> list[Contender]:
    """The contenders that run here, compiled and warm; others with the better of two micro-batches."""
    ready = []
    for name in names:
        tried = []
        for rows in (0,) if name.startswith("athanor") else micro_rows_of(SHAPES[shape]):
            one = Contender(name, shape, 1, args, rows)
            try:
                tried.append((min(one.turn()[0] for _ in range(WARM_STEPS)), one))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                one.stop()
        tried.sort(key=lambda pair: pair[0])
        ready += [one for _, one in tried[:1]]
        for _, slower in tried[1:]:
            slower.stop()
    return ready


def compare(name: str, names: list[str], args: argparse.Namespace) -> dict[str, str]:
    """Rounds of one step each, in an order that changes, so that a slow minute of the machine is everybody's."""
    import torch

    from athanor.hardware.kernels import products
    from athanor.model.flops import training_flops

    config = SHAPES[name]
    gflop = training_flops(config, config.context_tokens) / 1e9
    torch.set_num_threads(args.threads)
    contenders = entered(names, name, args)
    seconds: dict[str, list[float]] = {one.name: [] for one in contenders}
    ceilings: list[float] = []
    try:
        for number in range(args.rounds):
            if number % CEILING_EVERY == 0:
                measured = products(config, 1024, torch.device("cpu"), 2.0, (args.numerics,))
                ceilings.append(measured["gflops"][args.numerics]["ceiling"])
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                seconds[contender.name].append(contender.turn()[0])
    finally:
        for contender in contenders:
            contender.stop()
    told = {one: spread([STEP_TOKENS / value for value in taken]) for one, taken in seconds.items()}
    told["ceiling_gflops"] = spread(ceilings)
    ours_here = [one for one in seconds if one.startswith("athanor")]
    others = sorted(seconds.keys() - set(ours_here), key=lambda one: statistics.median(seconds[one]))
    for one in ours_here:
        if one == "athanor":  # the best step beside the best ceiling: what neither a neighbour nor a burst decides
            told["athanor / ceiling"] = spread([STEP_TOKENS * gflop / s / max(ceilings) for s in seconds[one]])
        for other in others:
            pairs = zip(seconds[one], seconds[other], strict=True)
            best = min(seconds[other]) / min(seconds[one])
            told[f"{one} / {other}"] = spread([theirs / mine for mine, theirs in pairs], best)
        if others:
            told[f"{one} / fastest"] = told[f"{one} / {others[0]}"]
    return told


def spread(values: list[float], best: float | None = None) -> str:
    """Median and quartiles; `best`: the largest value, or what is given for it."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:>10.2f}   ({low:.2f} to {high:.2f}), best steps {max(values) if best is None else best:.2f}"


def losses(name: str, contenders: list[str], args: argparse.Namespace) -> dict[str, str]:
    """Mean loss of the last tenth of the steps, three seeds each."""
    results = {}
    for contender in [c for c in contenders if "compiled" not in c]:
        ends = []
        for seed in (1, 2, 3):
            one = Contender(contender, name, seed, args, micro_rows_of(SHAPES[name])[0])
            try:
                curve = [one.turn()[1] for _ in range(LOSS_STEPS)]
            finally:
                one.stop()
            ends.append(statistics.mean(curve[-LOSS_STEPS // 10 :]))
        key = f"loss after {LOSS_STEPS * STEP_TOKENS:,} tokens, {contender}"
        results[key] = "  ".join(f"{end:.3f}" for end in ends)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contender")
    parser.add_argument("--numerics", choices=("fp32", "bf16"), default="bf16", help="theirs are torch's autocast")
    parser.add_argument("--losses", action="store_true", help="compare the loss after equal tokens, too")
    parser.add_argument("--nanogpt", default="", help="path of nanoGPT's model.py")
    parser.add_argument("--threads", type=int, default=cores())
    for hidden, kind in (("--work", str), ("--seed", int), ("--micro-rows", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, SHAPES[args.shapes], args)
        return
    contenders = [c for c in args.contenders.split(",") if args.nanogpt or not c.startswith("nanogpt")]
    for name in args.shapes.split(","):
        told = compare(name, contenders, args) | (losses(name, contenders, args) if args.losses else {})
        print(f"\n{name}: {SHAPES[name].parameter_count():,} parameters, {SHAPES[name].context_tokens} tokens a row")
        for key, text in told.items():
            print(f"  {key:<40} {text}", flush=True)


if __name__ == "__main__":
    main()

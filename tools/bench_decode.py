"""How fast this machine decodes with the exported model: the battery in batches, and one answer beside llama.cpp.

    python tools/bench_decode.py [--checkout DIR] [--pairs N] [--sample N]

Run in a checkout after `make repro`. Two ratios, each taken in pairs of
alternating order, so that a slow drift of the machine counts for neither:

battery   ids per second of the whole battery in batches, over those of a
          sample of it, one prompt at a time on one thread and without a cache
          (greedy both)
single    ids per second of one answer through torch, over llama.cpp's own
          figure on the same weights as fp32, at one thread each and at all

Printed are the geometric mean, the least and the greatest of the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NEW_IDS = 200


def ratios(first: Callable[[], float], second: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """(first, second) by pair, the one that goes first alternating."""
    rows = []
    for number in range(pairs):
        if number % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        rows.append((a, b))
    return rows


def tell(name: str, unit: str, rows: list[tuple[float, float]]) -> None:
    found = [a / b for a, b in rows]
    mean = math.exp(sum(map(math.log, found)) / len(found))
    a, b = (sorted(row[n] for row in rows)[len(rows) // 2] for n in (0, 1))
    spread = f"{min(found):.2f} to {max(found):.2f}, {len(rows)} pairs"
    print(f"{name:<26} {mean:6.2f} ({spread})   medians {a:,.0f} and {b:,.0f} {unit}", flush=True)


def battery(export: Path, items_path: Path, pairs: int, sample: int, threads: int) -> None:
    import random

    import torch

    from athanor.decoding.folded import FusedDecoder
    from athanor.decoding.generate import generate
    from athanor.decoding.prompting import end_ids
    from athanor.serving.loading import load_export
    from athanor.text.conversations import read_items
    from athanor.tokenizer.chat import prompt_ids

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    model, tokenizer = load_export(export)
    items = [item for item in read_items(items_path) if item.kind != "likelihood"]
    prompts = [prompt_ids(tokenizer, item.prompt) for item in items]
    few = random.Random(1).sample(prompts, min(sample, len(prompts)))
    stops, limit = end_ids(tokenizer), 96

    def together(count: int) -> float:
        began = time.perf_counter()
        made = generate(FusedDecoder(model), prompts, max_new_tokens=limit, stop_ids=stops, threads=count)
        return sum(len(one.ids) + 1 for one in made) / (time.perf_counter() - began)

    @torch.inference_mode()
    def alone() -> float:
        began, count = time.perf_counter(), 0
        for prompt in few:
            ids = list(prompt)
            while len(ids) < min(len(prompt) + limit, model.config.context_tokens):
                token = int(model(torch.tensor([ids]))[0, -1].argmax())
                count += 1
                if token in stops:
                    break
                ids.append(token)
        return count / (time.perf_counter() - began)

    print(f"battery: {len(prompts)} prompts in batches, {len(few)} of them alone", flush=True)
    for count in sorted({1, threads}):
        rows = ratios(lambda: together(count), alone, pairs)  # noqa: B023
        tell(f"batched, {count} thread{'s' if count > 1 else ''} / alone", "ids/s", rows)


class LlamaCpp:
    """llama.cpp on a file, in a process of its own; `speed()` is its own figure for NEW_IDS ids after a prompt."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        code = "import sys; sys.path.insert(0, sys.argv[1]); from tools.bench_decode import llama; llama(*sys.argv[2:])"
        command = [sys.executable, "-P", "-c", code, str(ROOT), str(path), str(threads), str(context)]
        environment = os.environ | {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.speed()  # the first one reads the file

    def speed(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def llama(path: str, threads: str, context: str) -> None:
    from athanor.export.llamacpp import Client, start_server

    server = start_server(path, context_tokens=int(context), threads=int(threads), exact=True)
    client = Client(server.listening_address)
    for _ in sys.stdin:
        body = {"prompt": list(range(10, 30)), "n_predict": NEW_IDS, "temperature": 0, "ignore_eos": True}
        print(client.ask("/completion", {**body, "cache_prompt": False})["timings"]["predicted_per_second"], flush=True)
    os._exit(0)


def single(export: Path, pairs: int, threads: int) -> None:
    import torch

    from athanor.decoding.engine import Engine
    from athanor.decoding.folded import FusedDecoder
    from athanor.decoding.sampling import GREEDY
    from athanor.export.gguf_writer import write_gguf
    from athanor.export.source import make_source
    from athanor.export.vocabulary import Vocabulary
    from athanor.serving.loading import load_export
    from athanor.tokenizer.tokenizer import MODEL_FILE

    torch.set_flush_denormal(True)
    model, tokenizer = load_export(export)
    folded = FusedDecoder(model)

    def torch_speed(count: int) -> float:
        torch.set_num_threads(count)
        engine = Engine(folded, rows=1, tokens=20 + NEW_IDS, stop_ids=())
        engine.add_requests([(0, list(range(10, 30)), NEW_IDS, GREEDY)])
        times = [time.perf_counter()]
        while engine.step():
            times.append(time.perf_counter())
        return (len(times) - 1) / (times[-1] - times[0])

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model-f32.gguf"
        source: Any = make_source("bench", model, tokenizer, Vocabulary.load(export / MODEL_FILE), {})
        write_gguf(path, source, "f32")
        print(f"single: {NEW_IDS} ids after 20, {model.config.parameter_count():,} parameters, fp32", flush=True)
        for theirs in sorted({1, threads}):
            with contextlib.closing(LlamaCpp(path, theirs, model.config.context_tokens + 1)) as other:
                torch_speed(1)
                rows = ratios(lambda: torch_speed(1), other.speed, pairs * 3)  # noqa: B023
                tell(f"torch 1 / llama.cpp {theirs} thread{'s' if theirs > 1 else ''}", "ids/s", rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkout", type=Path, default=Path.cwd())
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--sample", type=int, default=60, help="prompts that are answered alone (default 60)")
    options = parser.parse_args()
    export, threads = options.checkout / "models/export/hf", len(os.sched_getaffinity(0))
    battery(export, options.checkout / "data/battery/items.jsonl", options.pairs, options.sample, threads)
    single(export, options.pairs, threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())

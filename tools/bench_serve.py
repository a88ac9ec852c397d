"""How long clients of `athanor serve` wait, alone and fifty at once.

    python tools/bench_serve.py [CHECKOUT] [--model ID ...] [--clients N] [--repeats N] [--tokens N]

Starts a server on CHECKOUT (default: the current directory) with a history of
its own, asks each model once so that it is loaded, and then, for one client
and for N (default 50) that begin in the same moment: the time to the first
text (p50, p95), tokens a second of all together, and how many failed. All
stream greedy answers of at most `--tokens` to different questions. With
several models a last line has the clients of all ask at once. Exit status 1
if a request failed or the p95 of N clients of one model is above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 2.0
NAMES = "list dictionary class loop module generator comprehension thread file set"
SUBJECTS = [f"a {name}" for name in NAMES.split()]


def question(number: int) -> str:
    return f"What is {SUBJECTS[number % len(SUBJECTS)]} in Python? Give {2 + number // len(SUBJECTS)} examples."


async def ask(client: httpx2.AsyncClient, model: str, number: int, tokens: int) -> tuple[float, int] | None:
    """Seconds to the first text and tokens made; None for a failure."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question(number)}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, made = time.perf_counter(), None, None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                row = json.loads(line[6:])
                if row.get("usage"):
                    made = row["usage"]["completion_tokens"]
                elif row.get("choices") and row["choices"][0]["delta"].get("content") and first is None:
                    first = time.perf_counter() - began
    except httpx2.HTTPError:
        return None
    return None if made is None else (time.perf_counter() - began if first is None else first, made)


async def measure(url: str, models: list[str], clients: int, tokens: int) -> tuple[float, float, float, int]:
    """p50 and p95 of the seconds to the first text, tokens a second, failures."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.perf_counter()
        made = await asyncio.gather(*(ask(client, model, n, tokens) for n in range(clients) for model in models))
        seconds = time.perf_counter() - began
    good = sorted(one for one in made if one is not None)
    waits = [first for first, _ in good] or [float("nan")]
    rate = sum(count for _, count in good) / seconds
    return waits[len(waits) // 2], waits[min(len(waits) - 1, int(0.95 * len(waits)))], rate, len(made) - len(good)


def start(checkout: Path, history: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-P", "-m", "athanor", "serve", "--port", "0", "--history", str(history)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if found := re.search(r"open (http://\S+)/ ", line):
            return server, found[1]
    raise SystemExit(f"the server did not start in {checkout}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=".", type=Path)
    parser.add_argument("--model", action="append", help="default: all that the server finds")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(options.checkout, Path(folder) / "chat.sqlite3")
        try:
            return run(url, options)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def run(url: str, options: argparse.Namespace) -> int:
    models = options.model or [one["id"] for one in httpx2.get(f"{url}/v1/models").json()["data"]]
    bad = False
    print(f"{'model':<28} {'clients':>7} {'p50 s':>7} {'p95 s':>7} {'tokens/s':>9} {'failed':>6}", flush=True)

    def line(asked: list[str], clients: int, limit: float) -> None:
        nonlocal bad
        p50, p95, rate, failed = asyncio.run(measure(url, asked, clients, options.tokens))
        bad = bad or failed > 0 or not p95 <= limit
        told = asked[0] if len(asked) == 1 else f"{len(asked)} models at once"
        print(f"{told:<28} {clients * len(asked):>7} {p50:>7.3f} {p95:>7.3f} {rate:>9.0f} {failed:>6}", flush=True)

    for model in models:
        asyncio.run(measure(url, [model], 1, 8))  # loaded
    for _ in range(options.repeats):
        for model in models:
            line([model], 1, LIMIT_SECONDS)
            line([model], options.clients, LIMIT_SECONDS)
        if len(models) > 1:
            line(models, options.clients, float("inf"))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

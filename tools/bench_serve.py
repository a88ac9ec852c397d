"""Speed of `athanor serve` against llama.cpp's server alone, on the same file.

    python -m tools.bench_serve [MODEL.gguf] [--pairs 7] [--tokens 128] [--clients 8]

MODEL (default: models/export/model-f16.gguf) is one of our GGUF files. Both servers get the same prompts as ids, greedy, with
the end tokens forbidden, in turns and from the same client. Prints tokens per second of one client and of several, the
time to the first token of a fifth turn against that of the same prompt cold, and seconds from the start of `athanor
serve` to its answer to /health. Of ratios within a pair: median, least, most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from athanor.catalog.files import tokenizer_beside
from athanor.decoding.prompting import end_ids
from athanor.export.gguf_reader import read_header
from athanor.export.llamacpp.engine import Engine, Job, child_environment
from athanor.runtime.machine import machine
from athanor.serving.answers import NEUTRAL
from athanor.serving.models import FEW_THREADS_BYTES, fit_cache
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

ROWS, CACHE_BYTES = 8, 1 << 30  # the defaults of athanor serve
TURNS = ["What is 3 + 4?", "And 5 + 6?", "Who are you?", "What is a list?", "Thank you. And a loop?"]
ANSWER = "It is a sequence of values in square brackets."


class Client:
    """Requests to `path` at one address, each on a connection of its own, as raw HTTP."""

    def __init__(self, path: str, unix: str = "", port: int = 0) -> None:
        self.path, self.unix, self.port = path, unix, port

    async def ask(self, body: dict[str, Any]) -> float:
        """Seconds to the first event of a whole streamed answer."""
        data = json.dumps(body | {"stream": True}).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        opened = (
            asyncio.open_unix_connection(self.unix) if self.unix else asyncio.open_connection("127.0.0.1", self.port)
        )
        reader, writer = await opened
        began = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readline()
        await reader.readuntil(b"data: {")
        first = time.perf_counter() - began
        await reader.read()
        writer.close()
        if b" 200 " not in status:
            raise SystemExit(f"{self.path}: {status.decode()}")
        return first


class Contest:
    def __init__(self, tokenizer: Tokenizer, context: int, tokens: int, alone: Client, served: Client) -> None:
        self.tokenizer, self.context, self.tokens = tokenizer, context, tokens
        self.ends, self.sides = sorted(end_ids(tokenizer)), (alone, served)

    def body(self, client: Client, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        if client.unix:
            return NEUTRAL | {"prompt": ids, "n_predict": tokens, "logit_bias": [[end, -100] for end in self.ends]}
        bias = {str(end): -100 for end in self.ends}
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "logit_bias": bias}

    async def rate(self, client: Client, clients: int, salt: int) -> float:
        """Tokens per second of `clients` that ask at once."""
        prompts = [self.laid_out(f"What is {salt * 100 + each}?") for each in range(clients)]
        began = time.perf_counter()
        await asyncio.gather(*(client.ask(self.body(client, ids, self.tokens)) for ids in prompts))
        return clients * self.tokens / (time.perf_counter() - began)

    def laid_out(self, *turns: str) -> list[int]:
        messages = [Message("assistant" if each % 2 else "user", text) for each, text in enumerate(turns)]
        return prompt_ids(self.tokenizer, messages)

    async def turns(self, client: Client, salt: int) -> tuple[float, float, int]:
        """Seconds to the first token of a fifth turn and of the same prompt cold, and its ids."""
        turns = [f"{salt} {TURNS[0]}"]
        filler = max(1, self.context // 14 // len(self.tokenizer.encode(ANSWER)))
        for question in TURNS[1:]:
            await client.ask(self.body(client, self.laid_out(*turns), 1))
            turns += [" ".join([ANSWER] * filler), question]
        warm = await client.ask(self.body(client, ids := self.laid_out(*turns), 1))
        cold = await client.ask(self.body(client, self.laid_out(f"{salt + 5000} {turns[0]}", *turns[1:]), 1))
        return warm, cold, len(ids)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


async def contest(path: Path, port: int, pairs: int, tokens: int, clients: int) -> None:
    header, beside = read_header(path), tokenizer_beside(path)
    if beside is None:
        raise SystemExit(f"{path}: no tokenizer in hf/ of its folder")
    context, rows, _ = fit_cache(header, ROWS, CACHE_BYTES)
    threads = 1 if path.stat().st_size < FEW_THREADS_BYTES else machine().threads
    engine = Engine(Job(str(path), context, rows, threads))
    try:
        await engine.ask("/props")
        tokenizer = Tokenizer(beside.read_bytes(), str(beside))
        alone, served = Client("/completion", unix=engine.socket), Client("/v1/completions", port=port)
        run = Contest(tokenizer, context, tokens, alone, served)
        found: dict[tuple[int, Client], list[float]] = {}
        turns: dict[Client, list[tuple[float, float, int]]] = {}
        for pair in range(pairs + 1):
            for client in run.sides if pair % 2 else run.sides[::-1]:
                for count in (1, clients):
                    found.setdefault((count, client), []).append(await run.rate(client, count, pair))
                turns.setdefault(client, []).append(await run.turns(client, pair))
        for count in (1, clients):
            one, other = found[count, alone][1:], found[count, served][1:]  # the first pair loads and warms
            print(f"{count} clients: llama.cpp alone {statistics.median(one):,.0f} tokens/s, served", end=" ")
            print(f"{statistics.median(other):,.0f}; ratio {spread([b / a for a, b in zip(one, other, strict=True)])}")
        for name, client in (("llama.cpp alone", alone), ("served", served)):
            single, several = found[1, client][1:], found[clients, client][1:]
            print(
                f"{name}: {clients} clients against one {spread([b / a for a, b in zip(single, several, strict=True)])};",
                end=" ",
            )
            warm = [warm / cold for warm, cold, _ in turns[client][1:]]
            print(f"fifth turn ({turns[client][0][2]} ids) against cold {spread(warm)}")
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/export/model-f16.gguf"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "athanor", "serve", "--model", str(args.model), "--port", "0"]
        began = time.perf_counter()
        server = subprocess.Popen(
            [*command, "--feedback", f"{folder}/feedback.jsonl"],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if line.startswith("open "))
            address = line.split()[1].rstrip("/")
            urllib.request.urlopen(f"{address}/health").read()
            print(f"athanor serve answers after {time.perf_counter() - began:.2f} s")
            asyncio.run(contest(args.model, int(address.rpartition(":")[2]), args.pairs, args.tokens, args.clients))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()

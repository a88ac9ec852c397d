"""A good client of `athanor serve` while others attack the server, and what is left of them.

    python -m tools.hostile_clients [MODEL.gguf] [--minutes 30] [--idle-minutes 1]

Serves MODEL (default: models/export/model-f16.gguf) and files with crafted GGUF headers. A good client asks question
after question, first alone, then while a process of low priority sends from many loopback addresses: streams that are
read slowly or not at all, aborts, 1,000 connections that say little or nothing, bad UTF-8, deep JSON, long histories,
wrong types, huge numbers, requests for the crafted files and paths out of the page's folder. Prints p50 and p99 of the
good client alone and attacked, and memory, open files and files on disk before and after; a minute of attack comes
first, uncounted. Exit status 1 if an answer of the good client failed, a file outside was sent, p99 rose more than
threefold, or something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from athanor.export.llamacpp.engine import child_environment

CHAT = "/v1/chat/completions"
CONNECTIONS, READERS, SECOND = 1000, 40, 1.0
SETTLE_SECONDS = 90.0  # until what was cut has timed out
GROWTH_BYTES = 16 << 20  # of all processes: what an allocator keeps
MARK = b"root:x:0:0"  # of /etc/passwd
PATHS = [
    "/page/../../../../../../etc/passwd",
    "/page/%2e%2e/%2e%2e/app.py",
    "/page/%2fetc/passwd",
    "/v1/models/..%2f..%2fetc%2fpasswd",
]
BODIES = [
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": [{"role": "user", "content": "\xff\xfe\xc0"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + b"9" * 4000 + b"}",
    b'{"messages": [{"role": "user", "content": "hi"}], "json_schema": {"type": "string", "pattern": "^(a{999}){999}$"}}',
    b'{"messages": [{"role": "user", "content": "' + b"word " * 60_000 + b'"}]}',
    b'{"messages": {"role": 1e999}}',
    json.dumps({"messages": [{"role": role, "content": "word"} for role in ("user", "assistant") * 450]}).encode(),
    b"[" * 50,
    bytes(range(256)) * 40,
]


def crafted(folder: Path) -> list[Path]:
    """Files with headers that promise what they do not hold."""
    text = struct.pack("<Q", 4) + b"name"
    heads = {
        "torn": b"GGUF\x03",
        "counts": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63),
        "string": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        "nested": b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 2**40) * 4000,
        "type": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<I", 4_000_000),
    }
    for name, head in heads.items():
        (folder / f"{name}.gguf").write_bytes(head + bytes(4096))
    return [folder / f"{name}.gguf" for name in heads]


def raw(body: bytes, path: str = CHAT, method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def question(text: str, **more: object) -> bytes:
    return raw(json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode())


# -- the others ---------------------------------------------------------------------------------------------------


def attack(port: int, seconds: float) -> None:
    os.nice(19)  # as if on machines of their own
    asyncio.run(_attack(port, time.monotonic() + seconds))


async def _attack(port: int, end: float) -> None:
    chance, seen = random.Random(0), Counter[str]()

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        source = (f"127.0.0.{chance.randrange(2, 40)}", 0)
        return await asyncio.open_connection("127.0.0.1", port, local_addr=source, limit=1 << 16)

    async def again(name: str, pause: float, act: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(90):
                    await act()
                    seen[name] += 1
            await asyncio.sleep(pause * chance.random() * 2)

    async def with_connection(act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        reader, writer = await connect()
        try:
            await act(reader, writer)
        finally:
            writer.transport.abort()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(question("What is a list?", stream=True, max_tokens=200))
        for _ in range(chance.choice([0, 30])):
            await reader.read(20)
            await asyncio.sleep(SECOND)
        await asyncio.sleep(30 * SECOND * chance.random())

    async def abort(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(question(f"What is {chance.random()}?", stream=chance.random() < 0.7, max_tokens=120))
        await asyncio.sleep(chance.random() / 4)

    async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = question("hi")
        writer.write(whole[: chance.choice([0, 0, 30, len(whole) - 3])])
        await asyncio.sleep(60 * SECOND * chance.random())

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = [
            raw(chance.choice(BODIES)),
            raw(b"", chance.choice(PATHS), "GET"),
            os.urandom(300) + b"\r\n\r\n",
        ]
        for name in ("torn", "counts", "string", "nested", "type"):
            sent.append(question("hi", model=name))
        writer.write(chance.choice(sent))
        data = await reader.read()
        seen["escaped"] += MARK in data or b"def build_app" in data
        seen[data[9:12].decode(errors="replace")] += 1

    kinds = [("slow", 1.0, slow)] * READERS + [("aborted", 1.0, abort)] * 10 + [("bodies", 1.0, body)] * 10
    kinds += [("idle", 1.0, idle)] * CONNECTIONS
    await asyncio.gather(*(again(name, pause, lambda act=act: with_connection(act)) for name, pause, act in kinds))  # type: ignore[misc]
    print("attacks:", dict(seen), flush=True)
    if seen["escaped"]:
        raise SystemExit(1)


# -- the good client ----------------------------------------------------------------------------------------------


async def good(port: int, seconds: float) -> tuple[list[float], int]:
    """Seconds of each answer to a question of its own, and how many failed."""
    took, failed, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(question(f"What is {len(took)} + 1?", max_tokens=32))
            failed += not (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        except OSError:
            failed += 1
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.05)
    return sorted(took), failed


def attacked_for(port: int, seconds: float) -> tuple[list[float], int, int]:
    """As `good`, while others attack; and the exit status of these."""
    attackers = multiprocessing.Process(target=attack, args=(port, seconds))
    attackers.start()
    took, failed = asyncio.run(good(port, seconds))
    attackers.join()
    return took, failed, attackers.exitcode or 0


def held(server: psutil.Process) -> tuple[int, int]:
    """Bytes of memory and open files of the server and its engines."""
    processes = [server, *server.children(recursive=True)]
    return sum(one.memory_info().rss for one in processes), sum(one.num_fds() for one in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/export/model-f16.gguf"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--idle-minutes", type=float, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [args.model, *crafted(folder)]
        words = [word for model in models for word in ("--model", str(model))]
        temporary = folder / "tmp"
        temporary.mkdir()
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "athanor", "serve", "--port", "0", "--feedback", f"{name}/feedback.jsonl", *words],
            stdout=subprocess.PIPE, text=True, env={**child_environment(), "TMPDIR": str(temporary)},
        )  # fmt: skip
        assert server.stdout is not None
        port = int(
            next(line for line in server.stdout if line.startswith("open ")).split()[1].rstrip("/").rpartition(":")[2]
        )
        process = psutil.Process(server.pid)
        try:
            asyncio.run(good(port, 10))
            alone, failed_alone = asyncio.run(good(port, 60 * args.idle_minutes))
            attacked_for(port, 60)  # caches and the allocator's arenas are filled once
            asyncio.run(good(port, SETTLE_SECONDS))
            before = (*held(process), sum(1 for _ in temporary.rglob("*")))
            attacked, failed, exitcode = attacked_for(port, 60 * args.minutes)
            asyncio.run(good(port, SETTLE_SECONDS))
            after = (*held(process), sum(1 for _ in temporary.rglob("*")))
        finally:
            server.terminate()
            server.wait()
    p50, p99 = ([took[int(share * (len(took) - 1))] for took in (alone, attacked)] for share in (0.5, 0.99))
    print(f"good client: {len(alone):,} answers alone, {len(attacked):,} attacked, {failed_alone + failed} failed")
    print(f"p50 {p50[0]:.3f} and {p50[1]:.3f} s; p99 {p99[0]:.3f} and {p99[1]:.3f} s, {p99[1] / p99[0]:.2f} times")
    print(
        "before and after:",
        *(f"{a:,} -> {b:,} {what}" for a, b, what in zip(before, after, ("bytes", "open files", "files"), strict=True)),
    )
    grew = after[0] - before[0] > GROWTH_BYTES or after[1] > before[1] + 2 or after[2] > before[2]
    raise SystemExit(bool(failed_alone + failed or exitcode or p99[1] > 3 * p99[0] or grew))


if __name__ == "__main__":
    main()

"""Requests to an engine over its Unix socket. Each has a connection of its own: closing it cancels the request there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from athanor.base.errors import InputError

Row = Mapping[str, Any]  # an event of llama.cpp's /completion
HEAD_BYTES = 1 << 16
READ_BYTES = 1 << 16


class Refused(InputError):
    """The engine answered with an error; `status` is that of HTTP."""

    def __init__(self, what: str, status: int) -> None:
        self.status = status
        super().__init__(what, where="llama.cpp")


class Lost(ConnectionError):
    """The connection ended before the answer did."""


@asynccontextmanager
async def _sent(
    socket: str, path: str, body: Mapping[str, Any] | None
) -> AsyncGenerator[tuple[int, asyncio.StreamReader]]:
    """The status and the open response of a GET, or of a POST of `body`."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=HEAD_BYTES)
    except OSError as error:
        raise Lost(str(error)) from None
    try:
        writer.write(head.encode() + data)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        yield int(lines[0].split(" ")[1]), _Unchunked(reader) if "transfer-encoding: chunked" in lines else reader
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Lost(str(error)) from None
    finally:
        writer.close()


class _Unchunked(asyncio.StreamReader):
    """A response in HTTP's chunks, as the bytes in them."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._chunks, self._ended = reader, False

    async def read(self, n: int = -1) -> bytes:
        if self._ended:
            return b""
        size = int((await self._chunks.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await self._chunks.readexactly(size + 2)
        self._ended = size == 0
        return data[:-2]


async def _whole(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while part := await reader.read(READ_BYTES):
        parts.append(part)
    return b"".join(parts)


def _refusal(path: str, status: int, data: bytes) -> Refused:
    text = data[:2000].decode(errors="replace")
    try:
        text = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return Refused(f"{path}: {text}", status)


async def ask(socket: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON of an answer that comes whole, of /metrics the text. Refused unless it is 200, Lost where it breaks off."""
    async with _sent(socket, path, body) as (status, reader):
        data = await _whole(reader)
        if status != 200:
            raise _refusal(path, status, data)
        try:
            return data.decode() if path == "/metrics" else json.loads(data)
        except ValueError:
            raise Lost("half an answer") from None


async def rows(socket: str, body: Mapping[str, Any]) -> AsyncGenerator[list[Row]]:
    """The rows of /completion as they come, several where they came together; the last one has `stop`.

    Closing the generator cancels the answer. Refused before the first row; Lost where the answer breaks off.
    """
    async with _sent(socket, "/completion", {**body, "stream": True}) as (status, reader):
        if status != 200:
            raise _refusal("/completion", status, await _whole(reader))
        rest, stopped = b"", False
        while part := await reader.read(READ_BYTES):
            *events, rest = (rest + part).split(b"\n\n")
            found = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
            if error := next((row["error"] for row in found if "error" in row), None):
                raise Refused(str(error.get("message", error)), int(error.get("code", 500)))
            stopped = stopped or any(row["stop"] for row in found)
            if found:
                yield found
        if not stopped:
            raise Lost("the answer breaks off")

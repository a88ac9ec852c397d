"""uvicorn's server with an end in two steps, and without patience for readers that take nothing.

At the end who is nearly done gets his answer, then what is under way is stopped.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

GRACE_SECONDS = 2.0
SEND_SECONDS = 60.0  # for a client to take some of what is there for it


class Server(uvicorn.Server):
    """Told to end, it waits for answers under way, then ends the application: pages' turns are stopped and stored,
    other streams get an error event. uvicorn itself would cut the streams off first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._untaken: dict[Any, tuple[int, float]] = {}  # connection -> bytes that wait, since when no fewer

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # each second
            self._let_go(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def _let_go(self, now: float) -> None:
        """Cut off who has taken nothing for long. A close would wait for them to take what is there, for ever."""
        before, self._untaken = self._untaken, {}
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            size = transport.get_write_buffer_size()
            last, since = before.get(connection, (size, now))
            since = now if size < last else since
            if size and now - since >= SEND_SECONDS:
                transport.abort()
            elif size:
                self._untaken[connection] = size, since

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + GRACE_SECONDS
        while self.server_state.tasks and not self.force_exit and loop.time() < end:
            await asyncio.sleep(0.05)
        if not self.force_exit:
            await self.lifespan.shutdown()
        await super().shutdown(sockets)

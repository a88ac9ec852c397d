"""uvicorn's server with an end in two steps: who is nearly done gets his answer, then what is under way is stopped."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

GRACE_SECONDS = 2.0


class Server(uvicorn.Server):
    """Told to end, it waits for answers under way, then ends the application: pages' turns are stopped and stored,
    other streams get an error event. uvicorn itself would cut the streams off first."""

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

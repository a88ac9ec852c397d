"""The server as one application: routes, the page's files, and what every request goes through first."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from athanor.serving.models import Models
from athanor.serving.openai_api import openai_router
from athanor.serving.page_api import page_router
from athanor.serving.requests import Limit, problem
from athanor.serving.retraining import Retraining
from athanor.serving.store import Store

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,250}[a-z0-9_])?", re.I)
# The page is all there is: nothing from elsewhere, nothing inline, and HTML only through the sanitiser's policy.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
FREE = ("/health", "/page/")  # without a key; so is the page itself


class AccessMiddleware:
    """Checks every request before any route: the host it names, and the key, if the server has one.

    A page elsewhere whose name was turned to this server's address (DNS
    rebinding) would otherwise be the same origin. It always sends a name, so
    `addresses` may be answered as well as the names of `hosts`.
    """

    def __init__(self, app: Any, *, key: str, hosts: tuple[str, ...], addresses: bool) -> None:
        self.app, self.key, self.hosts, self.addresses = app, key, hosts, addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if scope["path"].startswith("/page/"):  # each time: files of two versions do not fit together
                    headers["Cache-Control"] = "no-cache"
            await send(message)

        # No client needs byte ranges of the page's files, and Starlette's errors for faulty ones have another form.
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"range"]
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if (path := re.sub("/{2,}", "/", scope["path"])).startswith("/v1/"):  # addresses joined with one slash too many
            scope = {**scope, "path": path.rstrip("/")}
        if scope["method"] == "HEAD":  # as GET; the web server leaves the body out
            scope = {**scope, "method": "GET"}
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.hosts and name.lower() not in self.hosts and not (self.addresses and _is_address(name)):
            answered_names = ", ".join((*self.hosts, "addresses") if self.addresses else self.hosts)
            fix = f"add --allow-host {name if HOST_NAME.fullmatch(name) else 'NAME'} to the options of athanor serve"
            return problem(403, f"this server answers to {answered_names} only. Fix: {fix}")
        if self.key and path != "/" and not path.startswith(FREE):
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            # The bytes as sent: headers are read as Latin-1.
            key_matches = hmac.compare_digest(
                credentials.strip().encode("latin-1"), self.key.encode("utf-8", "surrogateescape")
            )
            if scheme.lower() != "bearer" or not key_matches:
                wrong = (
                    "this is not the server's API key. Fix: compare it with the key that the server was started with"
                )
                return problem(401, wrong if credentials else "an API key is needed: Authorization: Bearer KEY")
        return None


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.strip("[]")))
    return False


def build_app(
    models: Models,
    store: Store,
    *,
    key: str = "",
    hosts: tuple[str, ...] = LOOPBACK,
    addresses: bool = False,
    most_waiting: int = 256,
    version: str = "",
    retraining: Retraining | None = None,
) -> FastAPI:
    """The application. `key`: asked of every route but the page's files. `hosts`: names it answers to, () for any;
    `addresses`: and to numeric ones. `most_waiting`: requests for answers under way."""
    limit = Limit(most_waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await models.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)  # their pages load from a CDN
    app.include_router(openai_router(models, limit))
    app.include_router(page_router(store, models, limit, version=version, retraining=retraining))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(models.metrics.text(models.memory()), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def index() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", StaticFiles(directory=PAGE))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        hint = "; OpenAI's protocol is under /v1" if error.status_code == 404 else ""
        return problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}{hint}")

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}; the server's log has more")

    app.add_middleware(AccessMiddleware, key=key, hosts=hosts, addresses=addresses)
    return app


GRACE_SECONDS = 2.0
SEND_SECONDS = 60.0  # for a client to take some of what is there for it


class Server(uvicorn.Server):
    """Told to end, it waits for answers under way, then ends the application: pages' turns are stopped and stored,
    other streams get an error event. uvicorn itself would cut the streams off first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stalled: dict[
            Any, tuple[int, float]
        ] = {}  # connection -> unsent bytes, and since when they have not shrunk

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # each second
            self._drop_stalled(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def _drop_stalled(self, now: float) -> None:
        """Abort connections whose client has read nothing for long: closing them would wait for it for ever."""
        previous, self._stalled = self._stalled, {}
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            size = transport.get_write_buffer_size()
            last_size, waiting_since = previous.get(connection, (size, now))
            waiting_since = now if size < last_size else waiting_since
            if size and now - waiting_since >= SEND_SECONDS:
                transport.abort()
            elif size:
                self._stalled[connection] = size, waiting_since

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE_SECONDS
        while self.server_state.tasks and not self.force_exit and loop.time() < deadline:
            await asyncio.sleep(0.05)
        if not self.force_exit:
            await self.lifespan.shutdown()
        await super().shutdown(sockets)

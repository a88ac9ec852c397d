"""The server as one application: routes, the page's files, and what every request goes through first."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from athanor.base.errors import AthanorError
from athanor.serving.models import Models
from athanor.serving.openai_api import openai_routes
from athanor.serving.requests import Limit, problem

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
    page: Callable[[Limit], Sequence[BaseRoute]],
    *,
    key: str = "",
    hosts: tuple[str, ...] = LOOPBACK,
    addresses: bool = False,
    most_waiting: int = 256,
) -> Starlette:
    """The application. `page`: the page's own routes, under /api. `key`: asked for on every route but the page's files.
    `hosts`: names it answers to, () for any; `addresses`: and to numeric ones. `most_waiting`: answers under way."""
    # Who reaches it under another name may come through a proxy on this machine, which asks for many.
    limit = Limit(most_waiting, () if hosts == LOOPBACK else ("127.0.0.1", "::1"))
    Connection.trusted = limit.trusted

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        found = [await engine.ask("/metrics") for engine in models.engines().values()]
        return Response("".join(found), media_type="text/plain; version=0.0.4")

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    async def refused(request: Request, error: Exception) -> Response:
        return problem(getattr(error, "status", 400), str(error), getattr(error, "code", None))

    async def http_error(request: Request, error: Exception) -> Response:
        status, detail = error.status_code, error.detail  # type: ignore[attr-defined]
        hint = "; OpenAI's protocol is under /v1" if status == 404 else ""
        return problem(status, f"{request.method} {request.url.path}: {detail}{hint}")

    async def internal_error(request: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}; the server's log has more")

    own = {"/health": health, "/metrics": metrics, "/": index}
    routes = [*openai_routes(models, limit), *page(limit), *(Route(path, route) for path, route in own.items())]
    return Starlette(
        routes=[*routes, Mount("/page", StaticFiles(directory=PAGE))],
        lifespan=lifespan,
        middleware=[Middleware(AccessMiddleware, key=key, hosts=hosts, addresses=addresses)],
        exception_handlers={AthanorError: refused, HTTPException: http_error, Exception: internal_error},
    )


class Connection(H11Protocol):
    """A client's connection; one more than an address may have is closed at once. `trusted` as in Limit."""

    trusted: Collection[str] = ()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        others = sum(getattr(one, "client", None) is not None and one.client[0] == address for one in self.connections)
        if others > MOST_CONNECTIONS and address not in self.trusted:
            transport.abort()


GRACE_SECONDS = 2.0
MOST_CONNECTIONS = 64  # of one address
SEND_SECONDS = 60.0  # for a client to take some of what is there for it


class Server(uvicorn.Server):
    """At its end it waits for answers under way, then ends the application, so that streams get an error event; uvicorn
    itself would cut them off first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Connection -> unsent bytes, and since when they have not shrunk.
        self._stalled: dict[Any, tuple[int, float]] = {}

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

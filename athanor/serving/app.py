"""The server as one application: routes, the page's files, and what every request goes through first."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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

PAGE = Path(__file__).parent / "page"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ADDRESS = re.compile(r"[\d.]+|\[[\da-f:.]+\]", re.I)  # a page's name is neither
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,250}[a-z0-9_])?", re.I)
# The page is all there is: nothing from elsewhere, nothing inline, and HTML only through the sanitiser's policy.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # files of two versions do not fit together
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
FREE = ("/health", "/page/")  # without a key; so is the page itself
GRACE_SECONDS, METRICS_SECONDS = 2.0, 2.0
MOST_CONNECTIONS = 64  # of one address
OTHER_CONNECTIONS = 512  # of all, beside those of answers
SEND_SECONDS = 60.0  # for a client to take some of what is there for it
_numbers = itertools.count()


@dataclass
class AccessMiddleware:
    """Checks every request before any route: the host it names, and the key, if the server has one.

    A page elsewhere whose name was turned to this server's address (DNS
    rebinding) would otherwise be the same origin. It always sends a name, so
    `addresses` may be answered as well as the names of `hosts`.
    """

    app: Any
    key: str
    hosts: tuple[str, ...]
    addresses: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        # No client needs byte ranges of the page's files, and Starlette's errors for faulty ones have another form.
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"range"]
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if (path := re.sub("/{2,}", "/", scope["path"])).startswith("/v1/"):  # addresses joined with one slash too many
            scope = {**scope, "path": path.rstrip("/")}
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        name = re.sub(r":\d*$", "", headers.get("host", ""))
        if self.hosts and name.lower() not in self.hosts and not (self.addresses and ADDRESS.fullmatch(name)):
            answered_names = ", ".join((*self.hosts, "addresses") if self.addresses else self.hosts)
            fix = f"add --allow-host {name if HOST_NAME.fullmatch(name) else 'NAME'} to the options of athanor serve"
            return problem(403, f"this server answers to {answered_names} only. Fix: {fix}")
        if self.key and path != "/" and not path.startswith(FREE):
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            # The bytes as sent: headers are read as Latin-1.
            sent = credentials.strip().encode("latin-1")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent, self.key.encode()):
                fix = "compare it with the key that the server was started with"
                wrong = f"this is not the server's API key. Fix: {fix}"
                return problem(401, wrong if credentials else "an API key is needed: Authorization: Bearer KEY")
        return None


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
    Connection.trusted, Connection.most = limit.trusted, most_waiting + OTHER_CONNECTIONS

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        """What llama.cpp's servers tell Prometheus, each number with its model."""
        numbers = []
        for name, engine in models.engines().items():
            label = f"{{model={json.dumps(name, ensure_ascii=False)}}} "
            with contextlib.suppress(AthanorError, ConnectionError, TimeoutError):  # one that is ending
                async with asyncio.timeout(METRICS_SECONDS):
                    lines = (await engine.metrics()).splitlines()
                numbers += [line.replace(" ", label, 1) for line in lines if not line.startswith("#")]
        return Response("".join(f"{line}\n" for line in numbers), media_type="text/plain; version=0.0.4")

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            what = f"{request.method} {request.url.path[:200]}: {error.detail}"
            return problem(error.status_code, f"{what}; OpenAI's protocol is at {', '.join(protocol)}")
        if isinstance(error, AthanorError):
            return problem(getattr(error, "status", 400), str(error), getattr(error, "code", None))
        return problem(500, f"{type(error).__name__}; the server's log has more")

    routes: list[BaseRoute] = openai_routes(models, limit)
    protocol = [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
    routes += [*page(limit), Route("/health", health), Route("/metrics", metrics), Route("/", index)]
    return Starlette(
        routes=[*routes, Mount("/page", StaticFiles(directory=PAGE))],
        lifespan=lifespan,
        middleware=[Middleware(AccessMiddleware, key=key, hosts=hosts, addresses=addresses)],
        exception_handlers=dict.fromkeys((AthanorError, HTTPException, Exception), failed),
    )


class Connection(H11Protocol):
    """A client's connection; one more than an address may have is closed at once. `trusted` as in Limit.

    Beyond `most` of all addresses the oldest that waits for its client is closed, so that a new client is answered.
    """

    trusted: Collection[str] = ()
    most = OTHER_CONNECTIONS
    number = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.number = next(_numbers)
        address = self.client[0] if self.client else ""
        others = sum(getattr(one, "client", None) is not None and one.client[0] == address for one in self.connections)
        if others > MOST_CONNECTIONS and address not in self.trusted:
            transport.abort()
        elif len(self.connections) > self.most:
            waiting = [
                one
                for one in self.connections
                if isinstance(one, Connection) and one.waits and not one.transport.is_closing()
            ]
            min(waiting, key=lambda one: one.number).transport.abort()
        # A client that takes nothing is cut by the kernel: closing the connection would wait for it for ever.
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))

    @property
    def waits(self) -> bool:
        """Whether no whole request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body


class Server(uvicorn.Server):
    """At its end it ends the application a moment before uvicorn cuts off what is under way: streams get an error
    event."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def end() -> None:
            await asyncio.sleep(GRACE_SECONDS)
            await self.lifespan.shutdown()

        ending = asyncio.create_task(end())
        await super().shutdown(sockets)
        ending.cancel()

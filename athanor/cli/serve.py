"""Serve models to a chat page and to OpenAI's clients.

    python -m athanor serve [--model ID|PATH ...] [--host ADDRESS] [--port N]

Without --model: the export of this checkout, those of its DVC experiments, and
the GGUF files; the newest is the default. Then what trains now: the newest
checkpoint, and what athanor preview made. A model is loaded when it is first
asked. Nothing is opened; the address is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import logging
import os
import re
import resource
import socket
import sys
from pathlib import Path

from athanor.base.errors import InputError
from athanor.base.host import free_memory_bytes
from athanor.runtime.machine import anchor, machine
from athanor.serving.feedback import FILE, Feedback

KEY_VARIABLE = "ATHANOR_API_KEY"
SPARE_FILES = 200  # beside those of connections


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "an export, experiment or GGUF file; may be repeated (default: all that are here)"
    add("--model", action="append", default=[], help=text)
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    text = "a name by which clients reach this server; may be repeated. Without a key no other name is answered"
    add("--allow-host", action="append", default=[], metavar="NAME", help=text)
    add("--port", type=int, default=8080, help="default 8080; 0 for any that is free")
    add("--api-key-file", help=f"file with the key that clients must send (or the variable {KEY_VARIABLE})")
    add("--memory", type=float, help="GiB that all loaded models may take (default: half of what is free)")
    add("--rows", type=int, default=8, help="answers that a model makes side by side (default 8)")
    add("--cache", type=float, default=1.0, help="GiB of keys and values that a model may take (default 1)")
    text = "answers under way before clients are asked to come again (default 256)"
    add("--max-requests", type=int, default=256, help=text)
    add("--feedback", default=FILE, help=f"file of thumbs and corrections (default {FILE})")


def run(args: argparse.Namespace) -> int:
    for name in ("rows", "max_requests", "cache", "memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{value} is no number above 0", where=option, fix="athanor serve --help tells its unit")
    if not 0 <= args.port < 65536:
        raise InputError("no number of a port", where=f"--port {args.port}", fix="name one from 1 to 65535")
    import uvicorn

    from athanor.catalog.discover import unexported
    from athanor.catalog.running import Catalog
    from athanor.serving.app import HOST_NAME, LOOPBACK, OTHER_CONNECTIONS, Connection, Server, build_app
    from athanor.serving.models import GIB, Models
    from athanor.serving.page_api import page_routes
    from athanor.serving.retraining import Retraining

    root, settings = anchor(), machine()
    key = read_key(args.api_key_file)
    listeners = listen_all(args.host, args.port)  # requests wait until the models are listed
    listed = Catalog(root, args.model)
    for name in args.allow_host:
        if not HOST_NAME.fullmatch(name):
            fix = "name it as in an address, without port: my-machine.local"
            raise InputError("no name of a host", where=f"--allow-host {name}", fix=fix)
    local = is_loopback(args.host)
    hosts = tuple(dict.fromkeys([*LOOPBACK, *(name.lower() for name in (url_host(args.host), *args.allow_host))]))
    hosts = hosts if local or not key else ()
    memory = free_memory_bytes() // 2 if args.memory is None else int(args.memory * GIB)
    feedback = Feedback(root / args.feedback)
    allow_files(2 * args.max_requests + OTHER_CONNECTIONS + SPARE_FILES)  # an answer has its client's and its engine's

    # Who else could reach the server starts nothing here.
    own = local and not args.allow_host and not args.model and (root / "dvc.yaml").is_file()
    retraining = Retraining(root, feedback.path) if own else None

    def app() -> object:  # inside the event loop, to which the models belong
        models = Models(
            listed, root, memory, threads=settings.threads, rows=args.rows, cache_bytes=int(args.cache * GIB),
            accelerator=settings.device != "cpu",
        )  # fmt: skip
        return build_app(
            models,
            lambda limit: page_routes(models, feedback, limit, retraining=retraining),
            key=key,
            hosts=hosts,
            addresses=not local,
            most_waiting=args.max_requests,
        )

    lines = [
        f"  {entry.id:<24} {entry.label}{f'  (cannot be served: {entry.problem})' if entry.problem else ''}"
        for entry in listed()
    ]
    print("\n".join(["models:", *lines] if lines else ["no model yet: make repro makes one, or name one with --model"]))
    if missing_exports := unexported(root) if not args.model else []:
        print(f"experiments without an export of their own, not served: {', '.join(missing_exports)}")
        print(f"  to serve one: dvc exp apply {missing_exports[0]}, then dvc repro export")
    if not local and not key:
        print(f"anyone who reaches {args.host} can use this server: set {KEY_VARIABLE}", file=sys.stderr)
    address = f"http://{url_host(args.host)}:{listeners[0].getsockname()[1]}"
    if args.host in ("0.0.0.0", "::"):
        print("from other machines: the address below, with this machine's own in place of the loopback one")
    print(
        f"open {address}/   (OpenAI's protocol: {address}/v1; Ctrl-C stops; restart it to list new experiments)",
        flush=True,
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # each client that leaves early would be some lines
    config = uvicorn.Config(
        app, factory=True, http=Connection, log_level="error", timeout_graceful_shutdown=5, server_header=False, ws="none",
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C, told again when all has ended
        Server(config).run(sockets=listeners)
    if retraining and retraining.state()["state"] == "running":
        print("the training on corrections continues; athanor stop ends it", file=sys.stderr)
    return 0


def read_key(path: str | None) -> str:
    """The API key from a file, else from the environment, else none. InputError for an empty, missing or odd one."""
    key = _key_text(path)
    if key and not re.fullmatch("[!-~]+", key):  # all that every client sends alike in a header
        origin = KEY_VARIABLE if path is None else path
        raise InputError("a key has ASCII letters, digits and signs, no blanks", where=origin, fix="take another key")
    return key


def _key_text(path: str | None) -> str:
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    file = Path(path)
    if not file.is_file():
        raise InputError("there is no such file", where=path, fix="write the key into it, in one line")
    key = file.read_text(encoding="utf-8").strip()
    if not key:
        raise InputError("no key in this file", where=path, fix="write the key into it, in one line")
    return key


def allow_files(count: int) -> None:
    """Let this process open so many files, as far as it may: 256 or 1,024 are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_host(host: str) -> str:
    """The host of an address to open: an IPv6 address in brackets, any address as this machine's own."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def listen_all(host: str, port: int) -> list[socket.socket]:
    """That of the host; beside 127.0.0.1 also ::1 where it is free, which some clients take `localhost` for."""
    first = listen(host, port)
    if host == "127.0.0.1":
        with contextlib.suppress(InputError, OSError):
            return [first, listen("::1", first.getsockname()[1])]
    return [first]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. InputError if the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # by name: else asyncio leaves Nagle's delays on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        option = f"--port {port + 1 if 0 < port < 65535 else 8081}"
        fix = f'athanor serve {option} (make serve SERVE="{option}"), or stop what listens there'
        if error.errno == errno.EADDRNOTAVAIL:
            fix = "name an address of this machine, or 0.0.0.0 for all of them"
        raise InputError(f"cannot listen: {error.strerror or error}", where=f"{host}:{port}", fix=fix) from None
    return listener

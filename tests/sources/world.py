"""Sources of files, and servers of this machine, for tests of what is fetched and read."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from athanor.base.strict import build
from athanor.sources import select
from athanor.sources.datapath import Host
from athanor.sources.params import FilesSource
from athanor.text import globs
from athanor.text.documents import Document

ROOMY = Host(2, "processes", 1e15, 1e12, 1e5, 65530, 1e12)


def source(*globs: object, **changes: Any) -> FilesSource:
    values = {"type": "files", "name": "mine", "globs": list(map(str, globs))}
    return build(FilesSource, values | changes, "download.sources[0]")


def read(*patterns: object, **changes: Any) -> list[Document]:
    made = source(*patterns, **changes)
    return list(select.documents(made, globs.find(made.globs), 0.5))


def json_lines(path: Path, rows_: Iterable[Any]) -> Path:
    """Write a file of one value on each line, texts as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows_))
    return path


def chat(*texts: str) -> dict[str, Any]:
    """A row of what user and assistant say in turn."""
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """A server of this machine; its address."""
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.handle_error = lambda *_: None  # a client that was killed is no news
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()

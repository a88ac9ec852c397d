"""A process that holds one model and answers; the server speaks to it over pipes.

A process of its own, because loading may fail in ways that end a process,
because closing it gives all of the memory back, and because the server then
needs no torch and starts at once.

One JSON line each way. First comes the specification {"path", "backend",
"device", "threads", "rows", "cache_bytes"}; the reply is [{"type": "ready",
"info": ...}] or [{"type": "failed", "message": ...}]. Then
{"op": "answer", "id", "messages", "max_new_tokens", "sampling", "stop"} and
{"op": "cancel", "id"}; lists of events (docs/serving.md) with their id come
back. The end of the input ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from typing import Any

from athanor.base.errors import AthanorError
from athanor.serving.backends.base import Request
from athanor.text.conversations import Message

BACKENDS = {"torch": "torch_backend", "llama.cpp": "llamacpp_backend", "transformers": "transformers_backend"}


class Replies:
    """Lines to the server. One thread writes, so that no answer waits for a pipe; what has gathered goes together."""

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(descriptor, "w", encoding="utf-8")
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self.thread.start()

    def send(self, event: dict[str, Any]) -> None:
        self.events.put(event)

    def close(self) -> None:
        """Return when everything is written."""
        self.events.put(None)
        self.thread.join()

    def _run(self) -> None:
        while True:
            batch = [self.events.get()]
            while not self.events.empty():
                batch.append(self.events.get())
            lines = [event for event in batch if event is not None]
            try:
                if lines:
                    print(json.dumps(lines), file=self.file, flush=True)
            except OSError:  # the server has gone
                os._exit(1)
            if None in batch:
                return


def main() -> int:
    # Libraries print; what they print must not look like a reply.
    replies = Replies(os.dup(1))
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    try:
        backend = importlib.import_module(f"athanor.serving.backends.{BACKENDS[spec['backend']]}").open_backend(spec)
    except AthanorError as error:
        replies.send({"type": "failed", "message": str(error)})
        replies.close()
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        replies.send({"type": "failed", "message": f"{type(error).__name__}: {error}"})
        replies.close()
        return 1
    replies.send({"type": "ready", "info": backend.info})
    while True:
        line = json.loads(lines.get())
        number = line["id"]
        if line["op"] == "cancel":
            backend.cancel(number)
            continue
        messages = tuple(Message(message["role"], message["content"]) for message in line["messages"])
        request = Request(number, messages, line["max_new_tokens"], line["sampling"], tuple(line["stop"]))
        backend.submit(request, lambda event, number=number: replies.send({"id": number, **event}))


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Also while the model loads: a server that has gone must not leave a process behind that loads for minutes."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

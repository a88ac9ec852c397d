"""llama.cpp's server for one model, in a process of its own: it may crash or stop answering without taking others along.

    python -P -m athanor.export.llamacpp.child

The first line of its input is a job (`engine.Job` as JSON). It starts the server on a Unix socket and writes {"ready": …}
or {"failed": "…"}. Each later line, {"id", "score": [arguments of Scorer.score]}, gets {"id", "row": …} for each position
and then {"id"}, or {"id", "failed": "…"}: log-probabilities of given tokens, which the server does not offer. It ends with
its input and then removes the folder of the socket, which its owner can no longer do if it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError
from athanor.export.llamacpp.scoring import Scorer
from athanor.export.llamacpp.server import start_server


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def write(**row: Any) -> None:
        print(json.dumps(row), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    path = job.pop("path")
    try:
        server = start_server(path, **job)
    except ImportError as error:
        write(failed=f"xllamacpp cannot be imported: {error}", missing=True)
        return
    except (RuntimeError, ValueError, OSError) as error:
        write(failed=str(error) or type(error).__name__)
        return
    scorer, scored = None, ("context_tokens", "threads", "exact", "accelerator", "lora")
    with contextlib.suppress(BrokenPipeError):  # its owner was killed
        write(ready={"address": server.listening_address, "pid": os.getpid()})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if scorer is None:
                    scorer = Scorer(path, **{name: job[name] for name in scored})
                for row in scorer.score(*request["score"]):
                    write(id=request["id"], row=row)
                write(id=request["id"])
            except AthanorError as error:
                write(id=request["id"], failed=str(error))
    socket = Path(job["socket"])
    with contextlib.suppress(OSError):
        for file in (socket, socket.parent / "log"):
            file.unlink(missing_ok=True)
        socket.parent.rmdir()


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)  # the server's threads have no clean end

"""llama.cpp's server for one model, in a process of its own: it may crash or stop answering without taking others along.

    python -P -m athanor.llamacpp.child

The first line of its input is a job (`process.Job` as JSON). It starts the server on a Unix socket and writes {"ready": …}
or {"failed": "…"}. Each later line, {"id", "score": [ids], "top": k}, gets {"id", "scored": […]} or {"id", "failed": "…"}:
log-probabilities of given tokens, which the server does not offer. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from athanor.base.errors import AthanorError
from athanor.export.llamacpp import start_server


def write(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    path = job.pop("path")
    try:
        server = start_server(path, **job)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        write(failed=str(error) or type(error).__name__)
        return
    write(ready={"address": server.listening_address, "pid": os.getpid()})
    scorer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if scorer is None:
                from athanor.llamacpp.scoring import Scorer

                scorer = Scorer(path, job["context_tokens"])
            write(id=request["id"], scored=scorer.score(request["score"], request["top"]))
        except AthanorError as error:
            write(id=request["id"], failed=str(error))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the server's threads have no clean end

"""Ask llama.cpp in the xllamacpp package for ids and for the nats of targets, in a process of its own.

    python -m athanor.evaluation.perplexity.worker JOB.json RESULT.json

Its server tells log probabilities of the next id alone, so each target is a
request of its own; the ids before it are in the server's cache by then. Exit
status 3: xllamacpp cannot be imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from athanor.export.llamacpp_worker import NOT_INSTALLED, Client, serve

FORCED = 1000.0


def nats(client: Client, ids: Sequence[int], targets: Sequence[int], vocab_size: int) -> list[float]:
    """The target is forced by a bias: the log probability told of the chosen id is from before it.

    An end token may be chosen and not told; then the whole vocabulary is asked for, which takes a hundred times longer.
    """
    found = []
    for place in targets:
        print(".", end="", file=sys.stderr, flush=True)  # alive: who started this watches the log grow
        wanted = ids[place]
        rows = _next(client, ids[:place], {"n_probs": 1, "logit_bias": [[wanted, FORCED]]})[:1]
        if [row["id"] for row in rows] != [wanted]:
            rows = _next(client, ids[:place], {"n_probs": vocab_size})[0]["top_logprobs"]
        # It takes the logarithm of an fp32 probability, which is 0 below 1e-45.
        found.append(-next(row["logprob"] for row in rows if row["id"] == wanted))
    return found


def _next(client: Client, prompt: Sequence[int], more: Mapping[str, Any]) -> list[dict[str, Any]]:
    body = {"prompt": list(prompt), "n_predict": 1, "temperature": 0, "cache_prompt": True, **more}
    return client.post("/completion", body)["completion_probabilities"]


def answer(job: Mapping[str, Any], client: Client) -> dict[str, Any]:
    return {
        "texts": [client.tokens(text, False) for text in job["texts"]],
        "nats": [nats(client, row["ids"], row["targets"], job["vocab_size"]) for row in job["windows"]],
    }


def main(job_path: str, result_path: str) -> int:
    try:
        import xllamacpp
    except ImportError as error:
        print(f"xllamacpp cannot be imported: {error}", file=sys.stderr)
        return NOT_INSTALLED
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    signal.alarm(int(job["timeout_seconds"]) + 5)  # also when the parent was killed and nobody waits any more
    server = serve(job)
    result = {**answer(job, Client(server.listening_address)), "build": str(xllamacpp.BUILD_INFO)}
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the server's threads have no clean end

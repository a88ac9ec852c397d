"""Ask llama.cpp, in a process of its own: it may abort or hang, and must not take the stage with it.

    python -P llamacpp_worker.py JOB.json RESULT.json

Only the standard library and xllamacpp, whose server runs inside this process
and is spoken to over HTTP. Exit status 3: xllamacpp cannot be imported.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

NOT_INSTALLED = 3


class Client:
    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {text[:500].decode(errors='replace')}")
        return json.loads(text)

    def tokens(self, text: str, symbols: bool) -> list[int]:
        """Ids with what the file adds at the ends (BOS); `symbols`: control symbols are parsed out of the text."""
        return self.post("/tokenize", {"content": text, "parse_special": symbols, "add_special": True})["tokens"]

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """As the chat endpoint does it."""
        return self.tokens(self.post("/apply-template", {"messages": messages})["prompt"], True)

    def greedy(self, ids: Sequence[int], limit: int, top: int, cache: bool = False) -> dict[str, Any]:
        """Ids made, whether an end token stopped them, and the `top` log probabilities at each step.

        cache: keys and values of the request before may be used where the ids begin alike.
        """
        answer = self.post(
            "/completion",
            {
                "prompt": list(ids),
                "n_predict": limit,
                "temperature": 0,
                "return_tokens": True,
                "cache_prompt": cache,
                "n_probs": top,
            },
        )
        steps = [[(row["id"], row["logprob"]) for row in s["top_logprobs"]] for s in answer["completion_probabilities"]]
        return {"ids": answer["tokens"], "ended": answer["stop_type"] == "eos", "top": steps}


def serve(job: Mapping[str, Any]) -> Any:
    """Start the server. `exact`: fp32 cache and no flash attention, otherwise llama.cpp's own defaults."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.n_threads_http = job["context"], 1, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # idle threads sleep
    params.n_gpu_layers, params.fit_params, params.warmup, params.ui = 0, False, False, False
    params.cache_ram_mib, params.verbosity = 0, 1
    if job["exact"]:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def answer(job: Mapping[str, Any], client: Client) -> dict[str, Any]:
    return {
        "texts": [client.tokens(text, False) for text in job["texts"]],
        "conversations": [client.chat_tokens(messages) for messages in job["conversations"]],
        "greedy": [client.greedy(ids, limit, 1) for ids, limit in zip(job["prompts"], job["limits"], strict=True)],
        # Prefixes of one window follow each other. The exact mode computes each afresh, as the model did.
        "windows": [client.greedy(ids, 1, job["vocab_size"], not job["exact"])["top"][0] for ids in job["windows"]],
    }


def main(job_path: str, result_path: str) -> int:
    try:
        import xllamacpp  # noqa: F401
    except ImportError as error:
        print(f"xllamacpp cannot be imported: {error}", file=sys.stderr)
        return NOT_INSTALLED
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    signal.alarm(int(job["timeout_seconds"]) + 5)  # also when the parent was killed and nobody waits any more
    server = serve(job)
    result = answer(job, Client(server.listening_address))
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the server's threads have no clean end

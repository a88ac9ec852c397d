"""llama.cpp, by way of the package xllamacpp: start its server, ask it over HTTP, end it.

Serving keeps a server inside the process of its worker (`start_server`, `Client`). Export and evaluation give a file
and a list of questions to `ask`, which runs this module in a process of its own, as llama.cpp may abort or hang:

    python -P -m athanor.export.llamacpp JOB.json RESULT.json
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from athanor.base.errors import GateError, InputError

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install xllamacpp"
NOT_INSTALLED = 3  # exit status
ATTEMPTS = 4
STALLS = 6  # so many stalls would fill the time allowed
FORCING_BIAS = 1000.0
# Waiting threads must sleep: spinning ones slow a shared machine down by a factor of ten.
QUIET_ENVIRONMENT = {"LC_ALL": "C", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}


class NotInstalled(InputError):
    """The package xllamacpp cannot be imported."""


class Refused(InputError):
    """The server answered with an error; `status` is that of HTTP."""

    def __init__(self, what: str, status: int) -> None:
        self.status = status
        super().__init__(what, where="llama.cpp")


def start_server(
    path: str | Path,
    *,
    context_tokens: int,
    threads: int,
    rows: int = 1,
    exact: bool = False,
    accelerator: bool = False,
    key: str = "",
    socket: str = "",
    lora: Sequence[str] = (),
    template: str = "",
) -> Any:
    """A server for `rows` answers side by side; it ends when nobody refers to it any more. ImportError without xllamacpp.

    exact: fp32 cache and no flash attention, otherwise llama.cpp's own defaults. accelerator: it may use one.
    key: asked of every request, since others on this machine could speak to the port, too. socket: the path of a Unix
    socket in place of a port; a file that an earlier server left there makes the start fail. lora: GGUF files of adapters.
    template: for chats, in place of the file's.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(Path(path).resolve())
    # One token more: llama.cpp wants room for the token that it makes after a full window.
    params.n_ctx, params.n_parallel = (context_tokens + 1) * rows, rows
    params.n_threads_http = 2 * rows + 2  # reading, asking and cancelling must not wait for each other
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # idle threads sleep
    params.fit_params, params.warmup, params.ui, params.ctx_shift = False, False, False, False
    params.cont_batching, params.kv_unified = True, False
    params.cache_ram_mib, params.verbosity = 0, 1
    if key:
        params.api_keys = [key]
    if socket:
        params.hostnames = [socket]
        params.endpoint_slots = params.endpoint_metrics = True
    if template:
        params.chat_template = template
    adapters = []
    for adapter in lora:
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = adapter, 1.0
        adapters.append(info)
    if adapters:
        params.lora_adapters = adapters
    if not accelerator:
        params.n_gpu_layers = 0
    if exact:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


class Client:
    """One connection to a server; for one thread at a time."""

    def __init__(self, address: str, key: str = "") -> None:
        parts = urlsplit(address)
        self.connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        """The response to a GET, or to a POST of `body`; Refused with llama.cpp's own words unless it is 200."""
        data = None if body is None else json.dumps(body)
        self.connection.request("GET" if body is None else "POST", path, data, self._headers)
        response = self.connection.getresponse()
        if response.status != 200:
            text = response.read()[:2000].decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise Refused(f"{path}: {text}", response.status)
        return response

    def close(self) -> None:
        self.connection.close()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self.send(path, body).read())

    def tokens(self, text: str, symbols: bool = False) -> list[int]:
        """Ids with what the file adds at the ends (BOS); `symbols`: control symbols are parsed out of the text."""
        return self.ask("/tokenize", {"content": text, "parse_special": symbols, "add_special": True})["tokens"]

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation as the chat endpoint renders it."""
        return self.tokens(self.ask("/apply-template", {"messages": messages})["prompt"], True)

    def _completion(self, ids: Sequence[int], limit: int, cache: bool, options: Mapping[str, Any]) -> dict[str, Any]:
        """cache: keys and values of the request before may be used where the ids begin alike."""
        body = {"prompt": list(ids), "n_predict": limit, "temperature": 0, "cache_prompt": cache, **options}
        return self.ask("/completion", body)

    def greedy(self, ids: Sequence[int], limit: int) -> tuple[list[int], bool]:
        """Ids made, and whether an end token stopped them."""
        answer = self._completion(ids, limit, False, {"return_tokens": True})
        return answer["tokens"], answer["stop_type"] == "eos"

    @functools.cached_property
    def _whole_character(self) -> int:
        return self.tokens("a")[-1]

    def next_logprobs(self, ids: Sequence[int], vocab_size: int, cache: bool) -> list[tuple[int, float]]:
        """Log probabilities of all ids that may follow, as (id, log probability).

        Nothing is reported for a chosen id that ends no character or is an end token, so one that does is forced.
        """
        options = {"n_probs": vocab_size, "logit_bias": [[self._whole_character, FORCING_BIAS]]}
        answer = self._completion(ids, 1, cache, options)
        return [(row["id"], row["logprob"]) for row in answer["completion_probabilities"][0]["top_logprobs"]]

    def nats(self, ids: Sequence[int], targets: Sequence[int], vocab_size: int) -> list[float]:
        """Nats of the ids at the positions `targets`. The server gives the next id alone, so each costs a request.

        The target is forced by a bias: the log probability reported for it is from before the bias. Where nothing is
        reported (see `next_logprobs`), the whole vocabulary is asked for, which takes a hundred times longer.
        """
        nats = []
        for target in targets:
            options = {"n_probs": 1, "logit_bias": [[ids[target], FORCING_BIAS]]}
            probabilities = self._completion(ids[:target], 1, True, options).get("completion_probabilities", [])[:1]
            rows = [(row["id"], row["logprob"]) for row in probabilities]
            if [number for number, _ in rows] != [ids[target]]:
                rows = self.next_logprobs(ids[:target], vocab_size, True)
            # It takes the logarithm of an fp32 probability, which is 0 below 1e-45.
            nats.append(-dict(rows)[ids[target]])
        return nats


def ask(
    path: str | Path,
    questions: Mapping[str, Sequence[Sequence[Any]]],
    *,
    context_tokens: int,
    exact: bool,
    threads: int,
    timeout_seconds: float,
) -> dict[str, list[Any]]:
    """Answers of llama.cpp about a GGUF file. `questions`: a method of `Client` -> the arguments of each of its calls.

    NotInstalled without xllamacpp, GateError if it crashes or takes too long. Now and then its server never answers
    (seen twice in some forty exports on a busy machine, where all of it takes seconds), so one that stands still is
    started again.
    """
    job = {
        "server": {"path": str(path), "context_tokens": context_tokens, "threads": threads, "exact": exact},
        "questions": {name: [list(call) for call in calls] for name, calls in questions.items()},
        "timeout_seconds": timeout_seconds,
    }
    with tempfile.TemporaryDirectory(prefix="athanor-llamacpp-") as folder:
        job_path, result_path, log_path = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "athanor.export.llamacpp", str(job_path), str(result_path)]
        status = _run(command, log_path, timeout_seconds)
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        log_tail = " / ".join(line.strip(". ") for line in lines[-3:])[-400:] or "no message"
        if status == NOT_INSTALLED:
            raise NotInstalled(log_tail, where="llama.cpp", fix=INSTALL)
        if status != 0:
            what = f"gave no answer in {timeout_seconds:g} s" if status is None else f"ended with status {status}"
            raise GateError(
                "llama.cpp",
                f"llama.cpp {what}: {log_tail}",
                where=Path(path).name,
                fix="allow more time on a slow machine (export.llama_cpp_timeout_seconds, athanor evaluate --timeout),"
                " otherwise the file is broken",
            )
        return json.loads(result_path.read_text(encoding="utf-8"))


def _run(command: Sequence[str], log_path: Path, timeout_seconds: float) -> int | None:
    """Exit status of the command, started again where it neither writes nor computes; None if it did not end in time.

    By its processor time, too: on a busy machine an import alone took 50 s, in which nothing is written.
    """
    deadline = time.monotonic() + timeout_seconds
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for _ in range(ATTEMPTS):
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET_ENVIRONMENT | {"PYTHONPATH": python_path},
            )
        try:
            seen: object = None
            grew_at = time.monotonic()
            while process.poll() is None and time.monotonic() < min(deadline, grew_at + timeout_seconds / STALLS):
                time.sleep(0.02)
                if (now := (log_path.stat().st_size, _processor_seconds(process.pid))) != seen:
                    seen, grew_at = now, time.monotonic()
        finally:
            status = process.poll()
            process.kill()
            process.wait()
        if status is not None or time.monotonic() > deadline:
            return status
    return None


def _processor_seconds(pid: int) -> float:
    """Of a process, and 0 once it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return round(times.user + times.system, 1)


class _ReportingClient(Client):
    """Prints a dot for each request: the process that started this one watches the log grow."""

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        print(".", end="", file=sys.stderr, flush=True)
        return super().send(path, body)


def main(job_path: str, result_path: str) -> int:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    signal.alarm(int(job["timeout_seconds"]) + 5)  # also when the parent was killed and nobody waits any more
    try:
        server = start_server(**job["server"])
    except ImportError as error:
        print(f"xllamacpp cannot be imported: {error}", file=sys.stderr)
        return NOT_INSTALLED
    client = _ReportingClient(server.listening_address)
    answers = {name: [getattr(client, name)(*call) for call in calls] for name, calls in job["questions"].items()}
    Path(result_path).write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the server's threads have no clean end

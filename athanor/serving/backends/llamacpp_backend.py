"""GGUF files through llama.cpp: its server inside the worker's process, spoken to over HTTP by ids.

Of our own files the prompt is laid out here, with the tokenizer that training
used: llama.cpp's template would parse control symbols out of a user's text.
Foreign files get the template they carry. No torch is imported.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from athanor.artifacts import read_json
from athanor.corpus.conversations import Message
from athanor.errors import AthanorError, InputError
from athanor.serving.answers import Stops, reserve
from athanor.serving.backends.base import Emit, Request
from athanor.serving.backends.shared import settings
from athanor.serving.discover import gguf_problem, tokenizer_beside
from athanor.serving.gguf_header import read_header
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.prompting import end_ids, fit
from athanor.tokenizer.tokenizer import Tokenizer

INSTALL = "pip install xllamacpp"
CACHE_BYTES = 1 << 30  # of keys and values, where nothing else is asked for
ELEMENT_BYTES = 2  # of a key or value in fp16, llama.cpp's default
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# The order of athanor.decoding.generate.Sampling; its penalty has no equal here.
SAMPLERS = ("temperature", "top_k", "top_p", "min_p")
HALF = "\ufffd"


def open_backend(spec: dict[str, Any]) -> LlamaCpp:
    """Load the file; InputError if llama.cpp is missing or refuses it, or if it is ours and does not fit this code."""
    return LlamaCpp(spec)


class Refused(InputError):
    """The server inside answered with an error; `status` is that of HTTP."""

    def __init__(self, what: str, status: int) -> None:
        self.status = status
        super().__init__(what, where="llama.cpp")


class LlamaCpp:
    """One GGUF file; `rows` answers side by side."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        path = Path(spec["path"])
        problem = gguf_problem(path)
        if problem:
            raise InputError(problem, where=str(path))
        header, beside = read_header(path), tokenizer_beside(path)
        ours = beside is not None and "athanor.template_hash" in header
        self.tokenizer = Tokenizer(beside.read_bytes(), str(beside)) if beside and ours else None
        context, rows = room(header, int(spec.get("rows") or 1), int(spec.get("cache_bytes") or CACHE_BYTES))
        self._key = secrets.token_hex(16)  # others on this machine could speak to the port, too
        device = str(spec.get("device") or "auto")
        self._server = _serve(path, context, rows, int(spec.get("threads") or 1), device, self._key)
        parts = urlsplit(self._server.listening_address)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        props, facts = self._ask("GET", "/props"), self._ask("GET", "/v1/models")["data"][0]["meta"]
        # It rounds what it is asked for, and no model sees further than it was trained to.
        self.context = min(context, int(props["default_generation_settings"]["n_ctx"]))
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self.info = {
            "backend": "llama.cpp",
            "template": "athanor" if self.tokenizer else "foreign",
            "template_hash": header.get("athanor.template_hash"),
            "context_tokens": self.context,
            "parameters": int(facts["n_params"]),
            "rows": rows,
            "defaults": self._defaults(path, props["default_generation_settings"]["params"]),
        }

    def _defaults(self, path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if self.tokenizer is None:
            named = {name: round(theirs[name], 6) for name in SAMPLERS}
            return {**named, "repetition_penalty": 1.0, "max_new_tokens": self.context}
        # generation_config.json has no sampling settings: our exports are greedy, as evaluated.
        limit = max(1, self.context // 2)
        for folder in (path.parent / "hf", path.parent):
            if (folder / "generation_config.json").is_file():
                values = read_json(folder / "generation_config.json")
                named = {name: values.get(name, GREEDY[name]) for name in GREEDY} if values.get("do_sample") else GREEDY
                return {**named, "max_new_tokens": int(values.get("max_new_tokens", limit))}
        return {**GREEDY, "max_new_tokens": limit}

    def submit(self, request: Request, emit: Emit) -> None:
        job = _Job(self, request, emit)
        with self._lock:
            self._jobs[request.id] = job
        threading.Thread(target=job.run, name=f"answer-{request.id}", daemon=True).start()

    def cancel(self, request_id: int) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
        if job:
            job.cancel()

    def close(self) -> None:
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        self._server = None  # llama.cpp ends when nobody refers to it

    def done(self, request_id: int) -> None:
        with self._lock:
            self._jobs.pop(request_id, None)

    # -- prompts --------------------------------------------------------------

    def prompt(self, messages: list[Message]) -> list[int]:
        if self.tokenizer is not None:
            return prompt_ids(self.tokenizer, messages)
        text = self._ask("POST", "/apply-template", {"messages": [asdict(message) for message in messages]})["prompt"]
        body = {"content": text, "parse_special": True, "add_special": True}
        return list(self._ask("POST", "/tokenize", body)["tokens"])

    # -- HTTP -----------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address)

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """The response; Refused with llama.cpp's own words unless it is 200."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read()[:2000].decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise Refused(f"{path}: {text}", response.status)
        return response

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(self.connect()) as connection:
            return json.loads(self.send(connection, method, path, body).read())


class _Job:
    """One answer, in a thread of its own; closing its connection makes llama.cpp stop."""

    def __init__(self, backend: LlamaCpp, request: Request, emit: Emit) -> None:
        self.backend, self.request, self.emit = backend, request, emit
        self.cancelled = threading.Event()
        self.connection: http.client.HTTPConnection | None = None
        self.tokens = 0
        self.ended = False

    def cancel(self) -> None:
        self.cancelled.set()
        sock = self.connection.sock if self.connection else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self._answer()
        except Refused as error:
            self._fail("request" if error.status < 500 else "model", str(error))
        except AthanorError as error:
            self._fail("request", str(error))
        except Exception as error:  # an answer that ends without a last event would be waited for without end
            self._fail("model", f"llama.cpp broke off the answer ({type(error).__name__}: {error})")
        finally:
            self.backend.done(self.request.id)

    def _fail(self, kind: str, message: str) -> None:
        if self.cancelled.is_set():  # its connection was closed on purpose
            self.emit({"type": "end", "reason": "stopped", "tokens": self.tokens, "seconds": 0.0})
        else:
            self.emit({"type": "error", "kind": kind, "message": message})

    def _answer(self) -> None:
        backend, request = self.backend, self.request
        chosen = settings(request.sampling, backend.info["defaults"])
        if chosen.pop("repetition_penalty") != 1:
            raise InputError(
                "llama.cpp also punishes the words of the question, digits and punctuation",
                where="repetition_penalty",
                fix="leave it at 1 here, or ask the model's exact weights (backend torch)",
            )
        limit = request.max_new_tokens or backend.info["defaults"]["max_new_tokens"]
        kept, forgotten = fit(
            request.messages,
            lambda messages: len(backend.prompt(messages)),
            context_tokens=backend.context,
            reserve_tokens=reserve(backend.context, limit),
        )
        ids = backend.prompt(kept)
        self.emit({"type": "start", "prompt_tokens": len(ids), "forgotten": forgotten})
        body = {
            **chosen,
            "prompt": ids,
            "n_predict": min(limit, backend.context - len(ids)),
            "samplers": SAMPLERS,
            "seed": int(request.sampling.get("seed", secrets.randbits(31))) & 0x7FFFFFFF,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
        }
        began, stops = time.monotonic(), Stops(request.stop)
        reason = "stopped"
        with contextlib.closing(backend.connect()) as connection:
            connection.connect()
            self.connection = connection
            if not self.cancelled.is_set():
                try:
                    reason = self._read(backend.send(connection, "POST", "/completion", body), stops)
                except (OSError, http.client.HTTPException, ValueError):
                    if not self.cancelled.is_set():
                        raise
        self._say(stops.rest())
        seconds = round(time.monotonic() - began, 3)
        self.emit({"type": "end", "reason": reason, "tokens": self.tokens, "seconds": seconds})

    def _read(self, response: http.client.HTTPResponse, stops: Stops) -> str:
        """Pass the text on; why the answer ended."""
        ends = set(end_ids(self.backend.tokenizer)) if self.backend.tokenizer else set()
        for row in _rows(response):
            if "error" in row:
                raise Refused(str(row["error"].get("message", row["error"])), int(row["error"].get("code", 500)))
            made = int(row["tokens_predicted"])
            if row["stop"]:
                made -= row["stop_type"] == "eos"
                # It keeps the bytes of an unfinished character to itself, where our own decoder marks them.
                if made > self.tokens and row["stop_type"] == "limit":
                    self.tokens = made
                    self._say(stops.add(HALF))
                return "stop" if row["stop_type"] == "eos" else "length"
            if ends.intersection(row["tokens"]):
                return "stop"
            self.tokens = made
            self._say(stops.add(row["content"]))
            if stops.found:
                return "stop"
        if not self.cancelled.is_set():
            raise OSError("the stream ended early")
        return "stopped"

    def _say(self, text: str) -> None:
        if text:
            self.emit({"type": "text", "text": text, "tokens": self.tokens})


def _rows(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in response:
        for name in (b"data: ", b"error: "):
            if line.startswith(name):
                row = json.loads(line[len(name) :])
                yield row if name == b"data: " or "error" in row else {"error": row}


def room(header: Mapping[str, Any], rows: int, cache_bytes: int) -> tuple[int, int]:
    """Tokens of context and answers side by side whose keys and values fit into `cache_bytes`.

    Fewer answers before a shorter context; one answer gets at least 512 tokens.
    """
    arch = header["general.architecture"]

    def value(name: str, default: Any = None) -> int:
        found = header.get(f"{arch}.{name}", default)
        if found is None:
            raise InputError(f"it does not say its {name}", where="GGUF file", fix="convert the model again")
        return int(max(found) if isinstance(found, list) else found)

    heads = value("attention.head_count")
    width = value("embedding_length") // max(heads, 1)
    keys, values = value("attention.key_length", width), value("attention.value_length", width)
    each = value("block_count") * value("attention.head_count_kv", heads) * (keys + values) * ELEMENT_BYTES
    context = value("context_length")
    rows = max(1, min(rows, cache_bytes // max(1, each * context)))
    return min(context, max(512, cache_bytes // max(1, each * rows))), rows


def _serve(path: Path, context: int, rows: int, threads: int, device: str, key: str) -> Any:
    try:
        import xllamacpp
    except ImportError:
        raise InputError("the package xllamacpp cannot be imported", where="backend", fix=INSTALL) from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path.resolve())
    # Reading, asking and cancelling must not wait for each other.
    params.n_ctx, params.n_parallel, params.n_threads_http = (context + 1) * rows, rows, 2 * rows + 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # idle threads sleep
    params.fit_params, params.warmup, params.ui, params.ctx_shift = False, False, False, False
    params.cont_batching, params.kv_unified = True, False
    params.cache_ram_mib, params.verbosity, params.api_keys = 0, 1, [key]
    if device == "cpu":
        params.n_gpu_layers = 0
    with tempfile.TemporaryFile() as log:
        try:
            with _stderr_to(log.fileno()):
                return xllamacpp.Server(params)
        except RuntimeError as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            # Its exception says nothing of the reason; its log does.
            reasons = (line.partition("error")[2].partition(": ")[2] for line in lines if "error" in line)
            told = next(reasons, str(error))
            fix = "fetch or export it again"
            raise InputError(f"llama.cpp cannot load it ({told.strip()[:300]})", where=str(path), fix=fix) from None


@contextlib.contextmanager
def _stderr_to(handle: int) -> Iterator[None]:
    """What C++ writes to the second stream goes to `handle`."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(handle, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError
from athanor.decoding.prompting import end_ids
from athanor.export.gguf_reader import read_header
from athanor.export.llamacpp import INSTALL, Client, Refused, start_server
from athanor.serving.backends.base import (
    GREEDY,
    UNFINISHED_CHARACTER,
    Answer,
    Emit,
    Prompt,
    Request,
    fit_prompt,
    prepare,
    refuse_steering,
    settings,
    split_begun,
    text_prompt,
)
from athanor.serving.backends.grammar import checked
from athanor.serving.files import gguf_problem, tokenizer_beside
from athanor.text.conversations import Message
from athanor.tokenizer.tokenizer import Tokenizer

CACHE_BYTES = 1 << 30  # of keys and values, where nothing else is asked for
ELEMENT_BYTES = 2  # of a key or value in fp16, llama.cpp's default
# The order of athanor.decoding.sampling; its penalty has no equal here.
SAMPLERS = ("temperature", "top_k", "top_p", "min_p")


def open_backend(spec: dict[str, Any]) -> LlamaCpp:
    """Load the file; InputError if llama.cpp is missing or refuses it, or if it is ours and does not fit this code."""
    return LlamaCpp(spec)


class LlamaCpp:
    """One GGUF file; `rows` answers side by side."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        path = Path(spec["path"])
        problem = gguf_problem(path)
        if problem:
            raise InputError(problem, where=str(path))
        header, tokenizer_path = read_header(path), tokenizer_beside(path)
        ours = tokenizer_path is not None and "athanor.template_hash" in header
        self.tokenizer = (
            Tokenizer(tokenizer_path.read_bytes(), str(tokenizer_path)) if tokenizer_path and ours else None
        )
        context, rows = fit_cache(header, int(spec.get("rows") or 1), int(spec.get("cache_bytes") or CACHE_BYTES))
        self._key = secrets.token_hex(16)
        device = str(spec.get("device") or "auto")
        self._server = _serve(
            path,
            context_tokens=context,
            rows=rows,
            threads=int(spec.get("threads") or 1),
            accelerator=device != "cpu",
            key=self._key,
        )
        with self.connected() as client:
            shipped = client.ask("/props")["default_generation_settings"]
            facts = client.ask("/v1/models")["data"][0]["meta"]
        self.vocab_size = int(facts["n_vocab"])
        # It rounds what it is asked for, and no model sees further than it was trained to.
        self.context = min(context, int(shipped["n_ctx"]))
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self.info: dict[str, Any] = {
            "backend": "llama.cpp",
            "template": "athanor" if self.tokenizer else "foreign",
            "template_hash": header.get("athanor.template_hash"),
            "context_tokens": self.context,
            "parameters": int(facts["n_params"]),
            "rows": rows,
            "defaults": self._defaults(path, shipped["params"]),
        }

    def _defaults(self, path: Path, shipped: Mapping[str, Any]) -> dict[str, Any]:
        if self.tokenizer is None:
            sampling = {name: round(shipped[name], 6) for name in SAMPLERS}
            return {**sampling, "repetition_penalty": 1.0, "max_new_tokens": self.context}
        # generation_config.json has no sampling settings: our exports are greedy, as evaluated.
        limit = max(1, self.context // 2)
        for folder in (path.parent / "hf", path.parent):
            if (folder / "generation_config.json").is_file():
                values = read_json(folder / "generation_config.json")
                sampling = (
                    {name: values.get(name, GREEDY[name]) for name in GREEDY} if values.get("do_sample") else GREEDY
                )
                return {**sampling, "max_new_tokens": int(values.get("max_new_tokens", limit))}
        return {**GREEDY, "max_new_tokens": limit}

    def connected(self) -> contextlib.closing[Client]:
        return contextlib.closing(Client(self._server.listening_address, self._key))

    def submit(self, request: Request, emit: Emit) -> None:
        job = _Job(self, Answer(request, emit))
        with self._lock:
            self._jobs[request.id] = job
        threading.Thread(target=self._run, args=(job,), name=f"answer-{request.id}", daemon=True).start()

    def _run(self, job: _Job) -> None:
        job.run()
        with self._lock:
            self._jobs.pop(job.answer.request.id, None)

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


class _Job:
    """One answer, in a thread of its own; closing its connection makes llama.cpp stop."""

    def __init__(self, backend: LlamaCpp, answer: Answer) -> None:
        self.backend, self.answer = backend, answer
        self.cancelled = threading.Event()
        self.client: Client | None = None
        self.likely: int | None = answer.request.steering.get("top_logprobs")

    def cancel(self) -> None:
        self.cancelled.set()
        sock = self.client.connection.sock if self.client else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            with self.backend.connected() as client:
                client.connection.connect()
                self.client = client
                self.answer.end(self._answer(client))
        except Exception as error:  # an answer that ends without a last event would be waited for without end
            if self.cancelled.is_set():  # its connection was closed on purpose
                self.answer.end("stopped")
            elif isinstance(error, AthanorError):
                ours = not isinstance(error, Refused) or error.status < 500
                self.answer.fail("request" if ours else "model", str(error))
            else:
                self.answer.fail("model", f"llama.cpp broke off the answer ({type(error).__name__}: {error})")

    def _prompt(self, client: Client, limit: int) -> Prompt:
        backend, messages, text = self.backend, self.answer.request.messages, self.answer.request.prompt
        if backend.tokenizer is not None:
            return prepare(backend.tokenizer, messages, text, context_tokens=backend.context, max_new_tokens=limit)
        if text is not None:
            ids = client.tokens(text) if isinstance(text, str) else list(text)
            return text_prompt(ids, backend.vocab_size, backend.context, limit)
        question, begun = split_begun(messages)

        begun_ids = client.ask("/tokenize", {"content": begun, "add_special": False})["tokens"] if begun else []

        def ids_of(candidate: Sequence[Message]) -> list[int]:
            return client.chat_tokens([asdict(message) for message in candidate]) + begun_ids

        return fit_prompt(question, ids_of, backend.context, limit)

    def _answer(self, client: Client) -> str:
        """Make the answer; returns why it ended."""
        request, defaults = self.answer.request, self.backend.info["defaults"]
        refuse_steering(request, "llama.cpp", but=("json_schema", "top_logprobs"))
        chosen = settings(request.sampling, defaults)
        if chosen.pop("repetition_penalty") != 1:
            raise InputError(
                "llama.cpp also punishes the words of the question, digits and punctuation",
                where="repetition_penalty",
                fix="leave it at 1 here, or ask the model's exact weights (backend torch)",
            )
        prompt = self._prompt(client, request.max_new_tokens or defaults["max_new_tokens"])
        self.answer.start(prompt)
        body = {
            **chosen,
            "prompt": prompt.ids,
            "n_predict": prompt.max_new_tokens,
            "samplers": SAMPLERS,
            "seed": int(request.sampling.get("seed", secrets.randbits(31))) & 0x7FFFFFFF,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            **{name: checked(schema) for name, schema in request.steering.items() if name == "json_schema"},
            "n_probs": 0 if self.likely is None else max(1, self.likely),
        }
        return "stopped" if self.cancelled.is_set() else self._read(client.send("/completion", body))

    def _read(self, response: http.client.HTTPResponse) -> str:
        """Pass the text on; returns why the answer ended."""
        answer, ends = self.answer, set(end_ids(self.backend.tokenizer)) if self.backend.tokenizer else set()
        for row in _rows(response):
            if self.cancelled.is_set():  # what had arrived before can still be read
                return "stopped"
            if "error" in row:
                raise Refused(str(row["error"].get("message", row["error"])), int(row["error"].get("code", 500)))
            generated = int(row["tokens_predicted"])
            if row["stop"]:
                generated -= row["stop_type"] == "eos"
                # It keeps the bytes of an unfinished character to itself, where our own decoder marks them.
                if generated > answer.tokens and row["stop_type"] == "limit":
                    answer.tokens = generated
                    answer.add(UNFINISHED_CHARACTER)
                return "stop" if row["stop_type"] == "eos" else "length"
            if ends.intersection(row["tokens"]):
                return "stop"
            answer.tokens = generated
            answer.logprobs += [
                {**_token_row(one), "top_logprobs": [_token_row(top) for top in one["top_logprobs"][: self.likely]]}
                for one in row.get("completion_probabilities", ())
            ]
            answer.add(row["content"])
            if answer.stops.found:
                return "stop"
        raise OSError("the stream ended early")


def _rows(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in response:
        for name in (b"data: ", b"error: "):
            if line.startswith(name):
                row = json.loads(line[len(name) :])
                yield row if name == b"data: " or "error" in row else {"error": row}


def _token_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": row["token"], "logprob": round(row["logprob"], 6), "bytes": row["bytes"]}


def fit_cache(header: Mapping[str, Any], rows: int, cache_bytes: int) -> tuple[int, int]:
    """Tokens of context and answers side by side whose keys and values fit into `cache_bytes`.

    Fewer answers before a shorter context; one answer gets at least 512 tokens.
    """
    arch = header["general.architecture"]

    def header_number(name: str, default: Any = None) -> int:
        number = header.get(f"{arch}.{name}", default)
        if number is None:
            raise InputError(f"it does not say its {name}", where="GGUF file", fix="convert the model again")
        return int(max(number) if isinstance(number, list) else number)

    heads = header_number("attention.head_count")
    width = header_number("embedding_length") // max(heads, 1)
    keys, values = header_number("attention.key_length", width), header_number("attention.value_length", width)
    token_bytes = (
        header_number("block_count") * header_number("attention.head_count_kv", heads) * (keys + values) * ELEMENT_BYTES
    )
    context = header_number("context_length")
    rows = max(1, min(rows, cache_bytes // max(1, token_bytes * context)))
    return min(context, max(512, cache_bytes // max(1, token_bytes * rows))), rows


def _serve(path: Path, **options: Any) -> Any:
    """`start_server`; its failure is an InputError with the reason from llama.cpp's log."""
    with tempfile.TemporaryFile() as log:
        try:
            with _stderr_to(log.fileno()):
                return start_server(path, **options)
        except ImportError:
            raise InputError("the package xllamacpp cannot be imported", where="backend", fix=INSTALL) from None
        except RuntimeError as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            # Its exception says nothing of the reason; its log does.
            reasons = (line.partition("error")[2].partition(": ")[2] for line in lines if "error" in line)
            reason = next(reasons, str(error)).strip()[:300]
            fix = "fetch or export it again"
            raise InputError(f"llama.cpp cannot load it ({reason})", where=str(path), fix=fix) from None


@contextlib.contextmanager
def _stderr_to(handle: int) -> Iterator[None]:
    """Redirect file descriptor 2, to which C++ writes its messages, to `handle`."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    os.dup2(handle, 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)

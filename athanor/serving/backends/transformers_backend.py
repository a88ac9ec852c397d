"""Foreign Hugging Face directories through transformers: their own tokenizer and template, one answer at a time.

Only local files in safetensors are read, and none of their code is run. The
penalty on repetition is transformers' own, which these models were tuned with:
it also counts the words of the question.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from athanor.base.errors import AthanorError, InputError
from athanor.model.device import limit_memory
from athanor.serving.backends.base import (
    GREEDY,
    UNFINISHED_CHARACTER,
    Answer,
    Emit,
    Prompt,
    Request,
    fit_prompt,
    refuse_steering,
    settings,
    split_begun,
    text_prompt,
)
from athanor.text.conversations import Message


def open_backend(spec: dict[str, Any]) -> HuggingFace:
    """Load the directory; InputError if a file is missing, broken or a pickle, or if there is no chat template."""
    return HuggingFace(spec)


class HuggingFace:
    """One directory."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        folder = Path(spec["path"])
        self.device = _device(str(spec.get("device") or "auto"))
        self.model, self.tokenizer = _load(folder, self.device)
        generation_config = self.model.generation_config
        text_config = self.model.config.get_text_config()
        self.context = int(getattr(text_config, "max_position_embeddings", 0) or 2048)
        ends = (
            generation_config.eos_token_id
            if generation_config.eos_token_id is not None
            else self.tokenizer.eos_token_id
        )
        self.ends = set() if ends is None else set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}
        self.info: dict[str, Any] = {
            "backend": "transformers",
            "template": "foreign",
            "template_hash": None,
            "context_tokens": self.context,
            "parameters": int(self.model.num_parameters()),
            "rows": 1,
            "defaults": _sampling_defaults(generation_config, max(1, self.context // 2)),
        }
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(self, request: Request, emit: Emit) -> None:
        job = self._jobs[request.id] = _Job(self, request, emit)
        self._waiting.put(job)

    def cancel(self, request_id: int) -> None:
        job = self._jobs.get(request_id)
        if job:
            job.cancel()

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.cancel()
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                if job.begin():
                    job.run()
            except AthanorError as error:
                job.fail("request", str(error))
            except Exception as error:  # a template or a model of others; the next answer may do better
                job.fail("model", f"transformers broke off the answer ({type(error).__name__}: {error})")
            finally:
                self._jobs.pop(job.request.id, None)

    def prompt(self, request: Request, limit: int) -> Prompt:
        if (text := request.prompt) is not None:
            ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else list(text)
            return text_prompt(ids, self.model.config.get_text_config().vocab_size, self.context, limit)
        question, begun = split_begun(request.messages)
        return fit_prompt(question, partial(self._ids, begun=begun), self.context, limit)

    def _ids(self, messages: Sequence[Message], begun: str) -> list[int]:
        """The ids of the template's prompt, and of the text that the answer begins with."""
        from jinja2 import TemplateError

        rows = [asdict(message) for message in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:  # many know no system message, or insist on turns
            raise InputError(f"the model's chat template refuses these messages ({error})", where="messages") from None
        begun_ids = self.tokenizer(begun, add_special_tokens=False)["input_ids"] if begun else []
        return [int(number) for number in [*rendered["input_ids"], *begun_ids]]


class _Job(Answer):
    """One answer. A job that is cancelled while it waits ends at once."""

    def __init__(self, backend: HuggingFace, request: Request, emit: Emit) -> None:
        super().__init__(request, emit)
        self.backend, self.pieces = backend, _Pieces(backend.tokenizer)
        self.cancelled, self.started, self.reason = False, False, "length"
        self._state_lock = threading.Lock()

    def cancel(self) -> None:
        with self._state_lock:
            self.cancelled = True
            not_started = not self.started
        if not_started:
            self.end("stopped")

    def begin(self) -> bool:
        with self._state_lock:
            self.started = not self.cancelled
            return self.started

    @torch.inference_mode()
    def run(self) -> None:
        backend, request, defaults = self.backend, self.request, self.backend.info["defaults"]
        refuse_steering(request, "transformers")
        chosen = settings(request.sampling, defaults)
        limit = request.max_new_tokens or defaults["max_new_tokens"]
        prompt = backend.prompt(request, limit)
        self.start(prompt)
        ids_1T = torch.tensor([prompt.ids], device=backend.device)
        if "seed" in request.sampling:
            torch.manual_seed(int(request.sampling["seed"]))
        else:
            torch.seed()
        backend.model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            generation_config=_settings(backend, chosen, prompt.max_new_tokens),
            streamer=_Streamer(self),
            stopping_criteria=[lambda ids_BT, scores, **_: torch.full((1,), self._should_stop(), device=ids_BT.device)],
        )
        self.add(self.pieces.rest())
        self.end("stop" if self.stops.found else self.reason)

    def token(self, number: int) -> None:
        """The next id that was made."""
        if number in self.backend.ends:
            self.reason = "stop"
            return
        self.tokens += 1
        self.add(self.pieces.add(number))

    def _should_stop(self) -> bool:
        if self.stops.found:
            self.reason = "stop"
        elif self.cancelled and self.reason != "stop":
            self.reason = "stopped"
        return self.reason != "length"


class _Streamer:
    """What `generate` hands its ids to: first the prompt, then one at a time.

    Its own TextIteratorStreamer keeps a word back until the next one begins, and counts no tokens.
    """

    def __init__(self, job: _Job) -> None:
        self.job, self.prompt = job, True

    def put(self, ids: torch.Tensor) -> None:
        if self.prompt:
            self.prompt = False
        else:
            self.job.token(int(ids.reshape(-1)[0]))

    def end(self) -> None:
        pass


class _Pieces:
    """Text of ids as they come: the new part of the last few ids decoded together, never half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # ids[:shown] are out; decoding begins at `start`, as spaces depend on what stands before.
        self.shown, self.start = 0, 0

    def add(self, number: int) -> str:
        self.ids.append(number)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED_CHARACTER):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def rest(self) -> str:
        """The bytes of a character that was never finished, as U+FFFD."""
        text = self._new_text()
        self.start = self.shown = len(self.ids)
        return text

    def _new_text(self) -> str:
        shown_text = self._decode(self.ids[self.start : self.shown])
        return self._decode(self.ids[self.start :])[len(shown_text) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _settings(backend: HuggingFace, chosen: Mapping[str, Any], limit: int) -> Any:
    from transformers import GenerationConfig

    draws = chosen["temperature"] > 0
    filters = {"top_k": int(chosen["top_k"]), "top_p": chosen["top_p"], "min_p": float(chosen["min_p"])}
    return GenerationConfig(
        max_new_tokens=limit,
        do_sample=draws,
        repetition_penalty=float(chosen["repetition_penalty"]),
        eos_token_id=sorted(backend.ends) or None,
        pad_token_id=min(backend.ends, default=0),
        **({"temperature": float(chosen["temperature"]), **filters} if draws else {}),
    )


def _load(folder: Path, device: torch.device) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise InputError("transformers is not installed", where="backend", fix="pip install transformers") from None
    from safetensors import SafetensorError

    if not (folder / "config.json").is_file():
        fix = "name a directory with config.json and *.safetensors"
        raise InputError("config.json is missing", where=str(folder), fix=fix)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    local_only = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **local_only)
        if not tokenizer.chat_template:
            fix = "put a chat_template.jinja into the directory, or take the model's chat version"
            raise InputError("the model has no chat template: it continues text and was not made to answer", fix=fix)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            # Sixteen bits are slow on processors.
            dtype=torch.float32 if device.type == "cpu" else "auto",
            use_safetensors=True,  # never a pickle, which could run any code
            output_loading_info=True,
            **local_only,
        )
    except InputError as error:
        raise InputError(error.what, where=str(folder), fix=error.fix) from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        fix = "fetch it again; it needs config.json, a tokenizer and *.safetensors"
        raise InputError(f"transformers cannot load it ({reason})", where=str(folder), fix=fix) from None
    # transformers invents missing weights; all it does is log.
    for kind in ("missing_keys", "mismatched_keys"):
        if loading[kind]:
            names = ", ".join(sorted(map(str, loading[kind]))[:3])
            raise InputError(f"{kind.replace('_', ' ')}: {names}", where=str(folder), fix="fetch it again")
    return model.to(device).eval(), tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        limit_memory(device)
        return device
    raise InputError(f"there is no device '{name}'", where="device", fix="use auto, cpu or cuda")


def _sampling_defaults(generation_config: Any, limit: int) -> dict[str, Any]:
    """A generation_config's settings, each of its usual type; without sampling only its penalty counts."""
    defaults = {**GREEDY, "max_new_tokens": limit, **({"temperature": 1.0} if generation_config.do_sample else {})}
    honoured = defaults if generation_config.do_sample else ("repetition_penalty", "max_new_tokens")
    declared = {name: getattr(generation_config, name) for name in honoured}
    return {**defaults, **{name: type(defaults[name])(value) for name, value in declared.items() if value is not None}}

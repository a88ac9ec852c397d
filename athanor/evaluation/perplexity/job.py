"""One score, from a job in plain JSON to rows of the history: which model, in which runtime, on what."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json, sha256_file
from athanor.errors import InputError
from athanor.evaluation.perplexity.backends import ByIds, Evaluator, HuggingFace, Ours
from athanor.evaluation.perplexity.binary import FIX, PROGRAM, Binary, find
from athanor.evaluation.perplexity.gguf_file import read_facts
from athanor.evaluation.perplexity.server import Server
from athanor.evaluation.perplexity.sets import (
    CONVERSATIONS,
    EvalSet,
    conversation_ids,
    document_rows,
    load_set,
    row_windows,
)
from athanor.evaluation.perplexity.windows import Measured, scored_bytes, summary
from athanor.export.source import Source
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

LLAMA_CPP = "llama.cpp"
BACKENDS = ("torch", "transformers", LLAMA_CPP, "llama-perplexity", "xllamacpp")
ARTIFACT, CHECKPOINT, DIRECTORY, GGUF = "artifact", "checkpoint", "directory", "gguf"


@dataclass(frozen=True)
class Job:
    """model: a model artifact, a checkpoint folder, a Hugging Face directory, or a .gguf.

    backend: one of BACKENDS, "" for what fits the model. context_tokens 0: the model's own.
    slot: the slot of a checkpoint that lies elsewhere. about: facts for the rows (stage, slot, step, tokens).
    """

    model: str
    kind: str
    backend: str
    set_path: str
    tokenizer: str
    context_tokens: int = 0
    max_bytes: int = 65536
    max_conversations: int = 200
    threads: int = 1
    gpu_layers: int = 0
    timeout_seconds: float = 600.0
    slot: str = ""
    about: Mapping[str, Any] | None = None


def kind_of(path: str | Path) -> str:
    """What lies at a path; InputError if it is nothing that can be scored."""
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return GGUF
    if (path / "state.json").is_file() and (path / "tensors.safetensors").is_file():
        return CHECKPOINT
    if (path / "config.json").is_file():
        content = read_json(path / "config.json")
        return ARTIFACT if isinstance(content, dict) and set(content) == {"model", "facts"} else DIRECTORY
    raise InputError(
        "no model here",
        where=str(path),
        fix="name a folder such as models/sft, a Hugging Face directory, a checkpoint folder or a .gguf file",
    )


def run(job: Job) -> list[dict[str, Any]]:
    """Every row of one job: documents by chunks (and, by ids in torch, each on its own), or conversations."""
    chosen = load_set(job.set_path, job.max_bytes, job.max_conversations)
    with tempfile.TemporaryDirectory(prefix="athanor-evaluate-") as folder:
        with _opened(job, chosen, Path(folder)) as (evaluator, facts, tokenizer):
            context = job.context_tokens or evaluator.context_tokens
            if context > evaluator.context_tokens:
                made = f"the model was made for contexts of {evaluator.context_tokens} tokens, not {context}"
                raise InputError(made, where="--context", fix="use no more")
            rows = []
            for method, mask, score in _methods(evaluator, chosen, tokenizer, context):
                started = time.monotonic()
                measured, more = score()
                row = _row(job, chosen, evaluator, facts, method, mask, context, measured)
                rows.append({**row, **more, "seconds": round(time.monotonic() - started, 2)})
    return rows


def _methods(evaluator: Evaluator, chosen: EvalSet, tokenizer: Tokenizer | None, context: int) -> Iterator[tuple]:
    def rows_score(rows: list) -> Measured:
        windows = row_windows(rows, context)
        size = scored_bytes(windows, tokenizer.token_bytes) if tokenizer else None
        return summary(evaluator.nats(windows), len(windows), size)

    if chosen.kind == CONVERSATIONS:
        if not isinstance(evaluator, ByIds):
            evaluator.nats([])  # says why not
        if tokenizer is None:
            raise InputError("conversations are rendered by our tokenizer, and this model brings another", where="--set")
        yield CONVERSATIONS, "assistant", lambda: (rows_score(conversation_ids(chosen, tokenizer)), {})
        return

    def chunks() -> tuple[Measured, dict[str, Any]]:
        found = evaluator.text(chosen.text, context)
        return found.measured, dict(found.facts)

    yield "chunks", "second half", chunks
    if isinstance(evaluator, (Ours, HuggingFace)) and tokenizer is not None:
        yield "documents", "all", lambda: (rows_score(document_rows(chosen, tokenizer)), {})


def _row(
    job: Job,
    chosen: EvalSet,
    evaluator: Evaluator,
    facts: Mapping[str, Any],
    method: str,
    mask: str,
    context: int,
    measured: Measured,
) -> dict[str, Any]:
    return {
        "time_ms": int(time.time() * 1000),
        "model": job.model,
        "model_kind": job.kind,
        **{key: None for key in ("stage", "slot", "step", "tokens")},
        **(job.about or {}),
        **facts,
        "set": job.set_path,
        "set_kind": chosen.kind,
        "set_sha256": chosen.digest,
        "method": method,
        "mask": mask,
        "context_tokens": context,
        "backend": evaluator.name,
        "dtype": evaluator.dtype,
        "exact": getattr(evaluator, "exact", True),
        "loss": measured.loss,
        "perplexity": measured.perplexity,
        "stderr": measured.stderr,
        "bits_per_byte": measured.bits_per_byte,
        "scored_tokens": measured.tokens,
        "windows": measured.windows,
        "attempts": 1,
    }


@contextlib.contextmanager
def _opened(job: Job, chosen: EvalSet, scratch: Path) -> Iterator[tuple[Evaluator, dict[str, Any], Tokenizer | None]]:
    """The model in its runtime, facts on it for the rows, and our tokenizer if it is the model's."""
    default = {GGUF: LLAMA_CPP, DIRECTORY: "transformers"}.get(job.kind, "torch")
    backend = job.backend or default
    if job.kind in (ARTIFACT, CHECKPOINT):
        source, weights = _source(job)
        facts = _facts(weights, source.tokenizer.digest, source.template_hash)
        yield _from_source(job, source, backend, chosen, scratch), facts, source.tokenizer
    elif job.kind == DIRECTORY:
        yield _directory(job, backend)
    else:
        if backend in ("torch", "transformers"):
            raise InputError(f"{backend} does not read GGUF files", where=job.model, fix="name the model's folder")
        told = read_facts(job.model)
        path = Path(job.tokenizer)
        tokenizer = Tokenizer.load(path) if (path / MODEL_FILE).is_file() else None
        if tokenizer is not None and tokenizer.digest != told.tokenizer_digest:
            tokenizer = None
        facts = _facts(sha256_file(job.model), told.tokenizer_digest, told.template_hash)
        yield _llama_cpp(job, Path(job.model), backend, chosen, exact=told.dtype == "f32"), facts, tokenizer


def _facts(weights: str, tokenizer: str | None, template: str | None) -> dict[str, Any]:
    return {"weights_sha256": weights, "tokenizer_digest": tokenizer, "template_hash": template}


def _directory(job: Job, backend: str) -> tuple[Evaluator, dict[str, Any], Tokenizer | None]:
    folder = Path(job.model)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputError("no .safetensors file in it", where=job.model, fix="dvc repro export")
    own = folder / "athanor.json"
    told = read_json(own) if own.is_file() else {}
    tokenizer = Tokenizer((folder / MODEL_FILE).read_bytes()) if told and (folder / MODEL_FILE).is_file() else None
    digest = told.get("tokenizer_digest") or sha256_file(folder / "tokenizer.json")
    facts = _facts(sha256_file(weights[0]), digest, told.get("template_hash"))
    if backend == "torch":
        from athanor.serving.loading import load_export

        model, tokenizer = load_export(folder)
        return Ours(model, tokenizer, dtype=_stored(folder)), facts, tokenizer
    if backend != "transformers":
        raise InputError(f"{backend} does not read this directory", where=job.model, fix="name the .gguf file")
    return HuggingFace(folder), facts, tokenizer


def _stored(folder: Path) -> str:
    return str(read_json(folder / "config.json").get("dtype", "float32"))


def _from_source(job: Job, source: Source, backend: str, chosen: EvalSet, scratch: Path) -> Evaluator:
    from athanor.export.gguf import write_gguf
    from athanor.export.huggingface import write_huggingface
    from athanor.export.parity import rebuilt

    if backend == "torch":
        return Ours(rebuilt(source, "float32"), source.tokenizer)
    if backend == "transformers":
        write_huggingface(scratch / "hf", source, "float32")
        return HuggingFace(scratch / "hf")
    write_gguf(scratch / "model-f32.gguf", source, "f32")
    return _llama_cpp(job, scratch / "model-f32.gguf", backend, chosen, exact=True)


def _llama_cpp(job: Job, path: Path, backend: str, chosen: EvalSet, *, exact: bool) -> Evaluator:
    how = {"exact": exact, "threads": job.threads, "timeout_seconds": job.timeout_seconds}
    program = None if backend == "xllamacpp" or (backend == LLAMA_CPP and chosen.kind == CONVERSATIONS) else find()
    if backend == PROGRAM and program is None:
        raise InputError("the program is not found", where=PROGRAM, fix=f"{FIX}, or use --backend xllamacpp")
    return Server(path, **how) if program is None else Binary(program, path, gpu_layers=job.gpu_layers, **how)


def _source(job: Job) -> tuple[Source, str]:
    """A model of ours ready for every runtime, and the hash of its weights."""
    from athanor.export.shrink import checkpoint_source, slot_of
    from athanor.export.source import load_source
    from athanor.training.weights import WEIGHTS

    folder = Path(job.model)
    if job.kind == ARTIFACT:
        return load_source(folder, job.tokenizer, "evaluated", {}), sha256_file(folder / WEIGHTS)
    return checkpoint_source(folder, Path(job.slot) if job.slot else slot_of(folder), Path(job.tokenizer))

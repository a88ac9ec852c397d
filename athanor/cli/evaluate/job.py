"""One score, from a job in plain JSON to rows of the history: which model, in which runtime, on what.

A score runs in a process of its own (`run_in_subprocess`): it may take memory, hang or crash, and nothing else notices.

    python -m athanor.cli.evaluate.job JOB.json RESULT.json low|usual
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import read_json, sha256_file
from athanor.base.errors import AthanorError, GateError, InputError
from athanor.runtime.machine import step_back

if TYPE_CHECKING:
    from athanor.cli.evaluate.sets import EvalSet
    from athanor.export.perplexity import Scorer, Window
    from athanor.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
SPARE_SECONDS = 5
BACKENDS = ("torch", "transformers", "llama.cpp")
ARTIFACT, CHECKPOINT, DIRECTORY, GGUF, ADAPTER = "artifact", "checkpoint", "directory", "gguf", "adapter"
ADAPTER_CONTEXT = 512  # tokens, as llama-perplexity takes: other models were made for more than a set may have


@dataclass(frozen=True)
class Job:
    """model: a model artifact, a checkpoint folder, a Hugging Face directory, a LoRA of peft, or a .gguf.

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
    if (path / "adapter_config.json").is_file():
        return ADAPTER
    if (path / "config.json").is_file():
        content = read_json(path / "config.json")
        return ARTIFACT if isinstance(content, dict) and set(content) == {"model", "facts"} else DIRECTORY
    raise InputError(
        "no model here",
        where=str(path),
        fix="name a folder such as models/sft, a Hugging Face directory, a checkpoint folder or a .gguf file",
    )


def run_in_subprocess(job: Job, *, low_priority: bool) -> list[dict[str, Any]]:
    """Run a job in another process, for at most `job.timeout_seconds`; returns its rows or raises its error."""
    with tempfile.TemporaryDirectory(prefix="athanor-evaluate-") as folder:
        job_path, result_path, log_path = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-m", "athanor.cli.evaluate.job", str(job_path), str(result_path)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "low" if low_priority else "usual"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | threads | {"PYTHONPATH": python_path, "TMPDIR": folder},
                start_new_session=True,
            )
        try:
            status = process.wait(job.timeout_seconds)
        except subprocess.TimeoutExpired:
            what = f"no score in {job.timeout_seconds:g} s"
            raise GateError("evaluation", what, where=job.model, fix="raise --timeout") from None
        finally:  # also on a signal: with all that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if result_path.is_file():
            result = json.loads(result_path.read_text(encoding="utf-8"))
            if status == 0:
                return result["rows"]
            raise InputError(result["error"])
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        log_end = " / ".join(line.strip() for line in lines[-3:])[-400:] or "no message"
        raise GateError("evaluation", f"its process ended with status {status}: {log_end}", where=job.model)


def main(job_path: str, result_path: str, priority: str) -> int:
    if priority == "low":
        step_back()  # before the imports, which are work as well
    import torch

    job = Job(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    signal.alarm(int(job.timeout_seconds) + SPARE_SECONDS)  # also when the parent was killed and nobody waits
    torch.set_num_threads(job.threads)
    try:
        result: dict[str, Any] = {"rows": run(job)}
        status = 0
    except AthanorError as error:
        result, status = {"error": str(error)}, 1
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return status


def run(job: Job) -> list[dict[str, Any]]:
    """Every row of one job: documents by chunks (and, in torch and transformers, each on its own), or conversations."""
    from athanor.cli.evaluate.sets import load_set

    data = load_set(job.set_path, job.max_bytes, job.max_conversations)
    with tempfile.TemporaryDirectory(prefix="athanor-evaluate-") as folder:
        scorer, facts, tokenizer = _open_model(job, Path(folder))
        context = job.context_tokens or scorer.context_tokens
        if context > scorer.context_tokens:
            what = f"the model was made for contexts of {scorer.context_tokens} tokens, not {context}"
            raise InputError(what, where="--context", fix="use no more")
        rows = []
        for method, mask, windows, token_bytes in _scoring_methods(scorer, data, tokenizer, context):
            started = time.monotonic()
            measured, _ = scorer.score(windows, token_bytes)
            rows.append(
                {
                    "time_ms": int(time.time() * 1000),
                    "model": job.model,
                    "model_kind": job.kind,
                    **{key: None for key in ("stage", "slot", "step", "tokens")},
                    **(job.about or {}),
                    **facts,
                    "set": job.set_path,
                    "set_kind": data.kind,
                    "set_sha256": data.digest,
                    "method": method,
                    "mask": mask,
                    "context_tokens": context,
                    "backend": scorer.name,
                    "dtype": scorer.dtype,
                    "exact": scorer.exact,
                    "loss": measured.loss,
                    "perplexity": measured.perplexity,
                    "stderr": measured.stderr,
                    "bits_per_byte": measured.bits_per_byte,
                    "scored_tokens": measured.tokens,
                    "windows": measured.windows,
                    "seconds": round(time.monotonic() - started, 2),
                }
            )
    return rows


def _scoring_methods(
    scorer: Scorer, data: EvalSet, tokenizer: Tokenizer | None, context: int
) -> Iterator[tuple[str, str, list[Window], Any]]:
    """(method, mask, windows, bytes of each token) of every way to score the data."""
    from athanor.cli.evaluate.sets import CONVERSATIONS, conversation_ids, document_rows, row_windows
    from athanor.export.perplexity import LlamaCpp, chunk_windows

    if data.kind == CONVERSATIONS:
        if tokenizer is None:
            raise InputError(
                "conversations are rendered by our tokenizer, and this model brings another", where="--set"
            )
        windows = row_windows(conversation_ids(data, tokenizer), context)
        yield CONVERSATIONS, "assistant", windows, tokenizer.token_bytes
        return
    yield "chunks", "second half", chunk_windows(scorer.encode(data.text), context, scorer.bos), scorer.token_bytes
    if tokenizer is not None and not isinstance(scorer, LlamaCpp):  # to which each target is a request
        windows = row_windows(document_rows(data, tokenizer), context)
        yield "documents", "all", windows, tokenizer.token_bytes


def _open_model(job: Job, scratch: Path) -> tuple[Scorer, dict[str, Any], Tokenizer | None]:
    """The model in its runtime, facts about it for the rows, and our tokenizer if the model was trained with it."""
    from athanor.catalog.checkpoints import checkpoint_source, slot_of
    from athanor.export.gguf_writer import write_gguf
    from athanor.export.huggingface import write_huggingface
    from athanor.export.parity import rebuilt
    from athanor.export.perplexity import HuggingFace, LlamaCpp, Ours
    from athanor.export.source import load_source
    from athanor.model.weights import WEIGHTS
    from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

    path = Path(job.model)
    default = {GGUF: "llama.cpp", DIRECTORY: "transformers"}.get(job.kind, "torch")
    backend = job.backend or default
    llama_cpp = {"threads": job.threads, "timeout_seconds": job.timeout_seconds}
    if job.kind == GGUF:
        if backend != "llama.cpp":
            raise InputError(f"{backend} does not read GGUF files", where=job.model, fix="name the model's folder")
        scorer = LlamaCpp(path, exact=False, **llama_cpp)
        scorer.exact = scorer.dtype == "f32"
        digest, template = (scorer.header.get(f"athanor.{key}") for key in ("tokenizer_digest", "template_hash"))
        folder = Path(job.tokenizer)
        tokenizer = Tokenizer.load(folder) if (folder / MODEL_FILE).is_file() else None
        if tokenizer is not None and tokenizer.digest != digest:
            tokenizer = None
        return scorer, _facts(sha256_file(path), digest, template), tokenizer
    if job.kind == ADAPTER:
        from athanor.tuning.export import base_gguf, write_adapter

        base = read_json(path / "adapter_config.json")["base_model_name_or_path"]
        if (gguf := base_gguf(Path(base))) is None:
            raise InputError("its base has no GGUF file", where=base, fix="convert_hf_to_gguf.py makes base.gguf there")
        write_adapter(scratch / "adapter.gguf", path, gguf)
        scorer = LlamaCpp(gguf, exact=False, lora=[scratch / "adapter.gguf"], **llama_cpp)
        scorer.context_tokens = min(scorer.context_tokens, ADAPTER_CONTEXT)
        return scorer, _facts(sha256_file(path / "adapter_model.safetensors"), None, None), None
    if job.kind == DIRECTORY:
        weights = sorted(path.glob("*.safetensors"))
        if not weights:
            raise InputError("no .safetensors file in it", where=job.model, fix="dvc repro export")
        export = read_json(path / "athanor.json") if (path / "athanor.json").is_file() else {}
        digest = export.get("tokenizer_digest") or sha256_file(path / "tokenizer.json")
        facts = _facts(sha256_file(weights[0]), digest, export.get("template_hash"))
        if backend == "torch":
            from athanor.catalog.loading import load_export

            model, tokenizer = load_export(path)
            dtype = str(read_json(path / "config.json").get("dtype", "float32"))
            return Ours(model, tokenizer, dtype=dtype), facts, tokenizer
        if backend == "llama.cpp":
            raise InputError(f"{backend} does not read this directory", where=job.model, fix="name the .gguf file")
        tokenizer = Tokenizer((path / MODEL_FILE).read_bytes()) if export and (path / MODEL_FILE).is_file() else None
        return HuggingFace(path), facts, tokenizer
    if job.kind == ARTIFACT:
        source, digest = load_source(path, job.tokenizer, "evaluated", {}), sha256_file(path / WEIGHTS)
    else:
        slot = Path(job.slot) if job.slot else slot_of(path)
        source, digest = checkpoint_source(path, slot, Path(job.tokenizer))
    facts = _facts(digest, source.tokenizer.digest, source.template_hash)
    if backend == "torch":
        return Ours(rebuilt(source, "float32"), source.tokenizer), facts, source.tokenizer
    if backend == "transformers":
        write_huggingface(scratch / "hf", source, "float32")
        return HuggingFace(scratch / "hf"), facts, source.tokenizer
    write_gguf(scratch / "model-f32.gguf", source, "f32")
    return LlamaCpp(scratch / "model-f32.gguf", exact=True, **llama_cpp), facts, source.tokenizer


def _facts(weights: str, tokenizer: str | None, template: str | None) -> dict[str, Any]:
    return {"weights_sha256": weights, "tokenizer_digest": tokenizer, "template_hash": template}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

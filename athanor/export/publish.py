"""Write every exported file into a folder and check them all; the caller publishes the folder only after that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.export import kquants
from athanor.export.gguf_check import check_gguf, stored_types
from athanor.export.gguf_writer import K_TYPES, gguf_name, write_gguf
from athanor.export.huggingface import write_huggingface
from athanor.export.llamacpp.engine import NotInstalled
from athanor.export.params import ExportParams
from athanor.export.parity import Limits, check_llama_cpp, check_transformers, expect, rebuilt
from athanor.export.perplexity import TooCoarse
from athanor.export.probes import Probe
from athanor.export.source import Source
from athanor.tokenizer.tokenizer import ROLE_PIECES, STOP

HF_DIR = "hf"
MODELFILE = "Modelfile"
PREFERRED = ("f16", "q8_0", "f32")  # the smallest that rounds next to nothing; else the first K type there is
# No <|bos|>: the runner adds it, as tokenizer.ggml.add_bos_token says, and would warn of two.
OLLAMA_TEMPLATE = "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}" + STOP + "{{ end }}" + ROLE_PIECES["assistant"]
RERUN_HINT = "then: dvc repro -s -f export"  # a program is no dependency that DVC knows of


def write_files(folder: Path, source: Source, params: ExportParams) -> None:
    """The Hugging Face directory, the GGUF files, each read back and compared, and Ollama's Modelfile.

    K types need llama.cpp's quantiser: without it they are an InputError
    where llama.cpp is required, else left out (`check_files` says so).
    """
    write_huggingface(folder / HF_DIR, source, params.dtype)
    k_types = [name for name in params.gguf_types if name in K_TYPES]
    quantiser = kquants.find() if k_types else None
    if k_types and quantiser is None and params.llama_cpp == "required":
        raise InputError(
            f"{k_types[0]} cannot be made: {kquants.MISSING}",
            where="export.gguf_types",
            fix="build llama.cpp, drop the type, or set export.llama_cpp to if_installed",
        )
    for file_type in params.gguf_types:
        path = folder / gguf_name(file_type)
        if file_type not in K_TYPES:
            write_gguf(path, source, file_type)
        elif quantiser is not None:
            with exact_file(folder, source) as exact:
                kquants.write_quantised(path, exact, source, file_type, quantiser, params.llama_cpp_timeout_seconds)
        else:
            continue
        check_gguf(path, source, file_type)
    write_modelfile(folder, source)


@contextmanager
def exact_file(folder: Path, source: Source) -> Iterator[Path]:
    """The f32 file: the published one, or one that is gone afterwards."""
    path = folder / gguf_name("f32")
    if path.exists():
        yield path
        return
    write_gguf(path, source, "f32")
    try:
        yield path
    finally:
        path.unlink()


def check_files(
    folder: Path,
    source: Source,
    probe: Probe,
    params: ExportParams,
    *,
    threads: int,
    note: Callable[[str], None],
    workers: int = 1,
) -> dict[str, Any]:
    """Facts by runtime, or the reason why llama.cpp was not asked; GateError where a runtime disagrees. A file whose
    rounding costs too much is left out.

    `workers` files are given to llama.cpp at a time, each with `threads` of its own.
    """
    limits = Limits(params.logit_tolerance, params.margin_logits, params.kl_limit)
    expected = stored = expect(source, rebuilt(source, "float32"), probe, params.parity_new_tokens)
    if params.dtype != "float32":
        stored = expect(source, rebuilt(source, params.dtype), probe, params.parity_new_tokens)
    parity: dict[str, Any] = {
        "transformers": check_transformers(folder / HF_DIR, probe, stored, limits, expected.logits)
    }
    for file_type in (name for name in params.gguf_types if not (folder / gguf_name(name)).exists()):
        note(f"{gguf_name(file_type)}: NOT WRITTEN, {kquants.MISSING}; {RERUN_HINT}")
        parity[f"llama_cpp_{file_type}"] = f"not written: {kquants.MISSING}"
    if params.llama_cpp == "off":
        note("llama.cpp: NOT CHECKED, export.llama_cpp is off")
        return parity | {"llama_cpp": "not checked: export.llama_cpp is off"}

    # f32 proves order and meaning of everything to 1e-4; a smaller file differs from it by rounding alone.
    written = [name for name in params.gguf_types if name != "f32" and (folder / gguf_name(name)).exists()]

    def check(file_type: str) -> dict[str, Any]:
        return check_llama_cpp(
            folder / gguf_name(file_type),
            file_type,
            source,
            probe,
            expected,
            limits,
            threads=threads,
            timeout_seconds=params.llama_cpp_timeout_seconds,
            # One will do where every probability has to agree to `logit_tolerance`.
            positions=1 if file_type == "f32" else params.parity_positions,
        )

    try:
        with exact_file(folder, source), ThreadPoolExecutor(workers) as pool:
            checks = {name: pool.submit(check, name) for name in ("f32", *written)}
        for file_type, made in checks.items():
            try:
                facts = made.result()
            except TooCoarse as error:
                parity[f"llama_cpp_{file_type}"] = leave_out(folder, file_type, error, source, note)
                continue
            if file_type in K_TYPES:
                facts |= _k_type_facts(folder / gguf_name(file_type), source, note)
            parity[f"llama_cpp_{file_type}"] = facts
    except NotInstalled as reason:
        if params.llama_cpp == "required":
            raise InputError(
                f"llama.cpp cannot be asked: {reason.what}",
                where="export.llama_cpp",
                fix="pip install xllamacpp, or set export.llama_cpp to if_installed",
            ) from None
        note(f"llama.cpp: NOT CHECKED, the package xllamacpp cannot be imported (pip install xllamacpp); {RERUN_HINT}")
        parity["llama_cpp"] = "not checked: xllamacpp is not installed"
    return parity


def leave_out(folder: Path, file_type: str, error: TooCoarse, source: Source, note: Callable[[str], None]) -> str:
    """Remove a GGUF file that is too coarse, and say so; the fact for parity. `error` where no other file remains."""
    (folder / gguf_name(file_type)).unlink()
    if not any(folder.glob("*.gguf")):
        raise error
    write_modelfile(folder, source)
    note(f"{gguf_name(file_type)}: NOT WRITTEN, {error}")
    return f"not written: {error.gate} is above its limit"  # without figures, whose last digits differ by machine


def _k_type_facts(path: Path, source: Source, note: Callable[[str], None]) -> dict[str, Any]:
    """Facts of a K-type file: its tensors by type, and how many matrices the type could not pack."""
    count = kquants.unpackable_matrices(source)
    if count:
        note(f"{path.name}: {count} matrices have rows that are no multiple of {kquants.BLOCK}; larger types hold them")
    return {"tensors": stored_types(path), "fallback_tensors": count}


def modelfile(source: Source, file_name: str) -> str:
    """Ollama's Modelfile for one of the GGUF files: the layout as a Go template, the stops, and greedy decoding.

    Every setting that Ollama has an opinion of its own about is stated: it
    would sample, and punish the repetition of any word of the question.
    """
    pieces = source.vocabulary.pieces
    lines = [
        f"# ollama create {source.name} -f {MODELFILE}",
        f"FROM ./{file_name}",
        f'TEMPLATE """{OLLAMA_TEMPLATE}"""',
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
        f"PARAMETER num_ctx {source.config.context_tokens}",
        *(f'PARAMETER stop "{pieces[number].text}"' for number in source.controls.values()),
    ]
    return "\n".join(lines) + "\n"


def write_modelfile(folder: Path, source: Source) -> None:
    """For the file in `folder` that loses least for its size; nothing where no GGUF was written."""
    existing = sorted(path.name for path in folder.glob("*.gguf"))
    names = [gguf_name(file_type) for file_type in PREFERRED if gguf_name(file_type) in existing] + existing
    if names:
        write_text(folder / MODELFILE, modelfile(source, names[0]))

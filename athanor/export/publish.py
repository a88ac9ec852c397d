"""Write every exported file into a folder and check them all; the caller publishes the folder only after that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from athanor.errors import InputError
from athanor.export.gguf import check_gguf, write_gguf
from athanor.export.huggingface import write_huggingface
from athanor.export.llamacpp import NotInstalled
from athanor.export.parity import Limits, check_llama_cpp, check_transformers, expect, rebuilt
from athanor.export.probes import Probe
from athanor.export.source import Source
from athanor.params.export import ExportParams

HF_DIR = "hf"


def gguf_name(file_type: str) -> str:
    return f"model-{file_type}.gguf"


def write_files(folder: Path, source: Source, params: ExportParams) -> None:
    """The Hugging Face directory and the GGUF files, each GGUF read back and compared."""
    write_huggingface(folder / HF_DIR, source, params.dtype)
    for file_type in params.gguf_types:
        path = folder / gguf_name(file_type)
        write_gguf(path, source, file_type)
        check_gguf(path, source, file_type)


def check_files(
    folder: Path,
    source: Source,
    probe: Probe,
    params: ExportParams,
    *,
    threads: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Facts by runtime, or the reason why llama.cpp was not asked; GateError where a runtime disagrees."""
    limits = Limits(params.logit_tolerance, params.margin_logits)
    expected = expect(source, rebuilt(source, params.dtype), probe, params.parity_new_tokens)
    parity: dict[str, Any] = {"transformers": check_transformers(folder / HF_DIR, probe, expected, limits)}
    if params.llama_cpp == "off":
        note("llama.cpp: NOT CHECKED, export.llama_cpp is off")
        return parity | {"llama_cpp": "not checked: export.llama_cpp is off"}

    if params.dtype != "float32":
        expected = expect(source, rebuilt(source, "float32"), probe, params.parity_new_tokens)
    # f32 proves order and meaning of everything to 1e-4; a smaller file differs from it by rounding alone.
    exact = folder / gguf_name("f32")
    scratch = not exact.exists()
    if scratch:
        write_gguf(exact, source, "f32")
    try:
        for file_type in ("f32", *(name for name in params.gguf_types if name != "f32")):
            parity[f"llama_cpp_{file_type}"] = check_llama_cpp(
                folder / gguf_name(file_type),
                file_type,
                source,
                probe,
                expected,
                limits,
                threads=threads,
                timeout_seconds=params.llama_cpp_timeout_seconds,
            )
    except NotInstalled as reason:
        if params.llama_cpp == "required":
            raise InputError(
                f"llama.cpp cannot be asked: {reason}",
                where="export.llama_cpp",
                fix="pip install xllamacpp, or set export.llama_cpp to if_installed",
            ) from None
        note("llama.cpp: NOT CHECKED, the package xllamacpp cannot be imported (pip install xllamacpp)")
        parity["llama_cpp"] = "not checked: xllamacpp is not installed"
    finally:
        if scratch:
            exact.unlink()
    return parity

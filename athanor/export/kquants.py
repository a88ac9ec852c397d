"""K-quants: llama.cpp's own quantiser packs the weights, and the file around them is ours.

There is no second implementation of the K types' search for scales. Its
output is written again with the keys of every other file, so that the lineage
does not depend on what the quantiser copies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from athanor.base.errors import GateError, InputError
from athanor.export.gguf_writer import metadata, write_encoded
from athanor.export.source import Source

BLOCK = 256  # numbers that a K type packs together
QUANTISER = "llama-quantize"
VARIABLE = "LLAMA_CPP_BIN"
FOLDER = Path(".athanor/llama.cpp/bin")  # below the project's root, from which stages run
MISSING = f"there is no {QUANTISER} in ${VARIABLE}, on PATH or in {FOLDER}"


def find(name: str = QUANTISER) -> Path | None:
    """A program of llama.cpp: in the folder that $LLAMA_CPP_BIN names, then on PATH, then in `FOLDER`; None without it.

    InputError when the variable names no folder: a mistyped one must not end in another build's program.
    """
    env_folder = os.environ.get(VARIABLE)
    if env_folder and not Path(env_folder).is_dir():
        raise InputError(
            f"'{env_folder}' is no folder", where=VARIABLE, fix="name the folder with llama-quantize, or unset"
        )
    for folder in (env_folder, os.environ.get("PATH", os.defpath), str(FOLDER)):
        program = shutil.which(name, path=folder) if folder else None
        if program:
            return Path(program).resolve()
    return None


def write_quantised(
    path: str | Path, exact: str | Path, source: Source, file_type: str, quantiser: Path, timeout_seconds: float
) -> None:
    """Make a K-quant of the f32 file `exact`; GateError if the quantiser fails. Equal files make equal bytes."""
    with tempfile.TemporaryDirectory(prefix="athanor-quantize-") as folder:
        quantised = Path(folder) / "model.gguf"
        # One thread: the result is the same for any number, the models are small and the machine is shared.
        command = [str(quantiser), str(exact), str(quantised), file_type.upper(), "1"]
        environment = os.environ | {"LC_ALL": "C"}
        try:
            completed = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=timeout_seconds
            )
            status, output = (
                f"ended with status {completed.returncode}",
                (completed.stdout + completed.stderr).decode(errors="replace"),
            )
        except subprocess.TimeoutExpired:
            status, output = f"did not end in {timeout_seconds:g} s", ""
        if status != "ended with status 0" or not quantised.is_file():
            tail = " / ".join(line.strip() for line in output.strip().splitlines()[-3:]) or "no message"
            raise GateError(
                "K-quants",
                f"{quantiser} {status}: {tail}",
                where=Path(path).name,
                fix=f"drop {file_type} from export.gguf_types, or raise export.llama_cpp_timeout_seconds",
            )
        stored = {t.name: (np.array(t.data), t.tensor_type) for t in GGUFReader(quantised).tensors}
    write_encoded(path, source.architecture, metadata(source, file_type), stored)


def unpackable_matrices(source: Source) -> int:
    """How many matrices have rows that no K type can pack: the quantiser gives them a plain type with more bits."""
    return sum(weight.ndim == 2 and weight.shape[1] % BLOCK != 0 for weight in source.weights.values())

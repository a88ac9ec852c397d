"""Where llama.cpp's own programs are (llama-quantize, llama-perplexity, llama-server); none is built here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from athanor.errors import InputError

VARIABLE = "LLAMA_CPP_BIN"
FOLDER = Path(".athanor/llama.cpp/bin")  # below the project's root, from which stages and commands run


def find(name: str) -> Path | None:
    """The program `name`: in the folder that $LLAMA_CPP_BIN names, then on PATH, then in `FOLDER`; None without it.

    InputError when the variable names no folder: a mistyped one must not end in another build's program.
    """
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise InputError(f"'{named}' is no folder", where=VARIABLE, fix="name the folder with llama-quantize, or unset")
    for folder in (named, os.environ.get("PATH", os.defpath), str(FOLDER)):
        found = shutil.which(name, path=folder) if folder else None
        if found:
            return Path(found).resolve()
    return None


def missing(name: str) -> str:
    """What to tell somebody who lacks the program."""
    return f"there is no {name} in ${VARIABLE}, on PATH or in {FOLDER}"

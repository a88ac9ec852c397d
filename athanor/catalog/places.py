"""Where a checkout keeps models: its base model, exports, checkpoints of its trainings, and directories made of these.

Without torch: what lists models looks here, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from athanor.base.artifacts import MANIFEST, read_json
from athanor.base.errors import AthanorError

BASE, TOKENIZER = "models/base", "models/tokenizer"
EXPORT, HF_DIR, CARD = "models/export", "hf", "MODEL_CARD.md"
# An export and the weights it is made from; the first that is there is what a page begins with.
WEIGHTS_OF = {
    EXPORT: "models/sft",
    "models/tune-export": "models/tune",
    "models/dpo-export": "models/dpo",
    "models/grpo-export": "models/grpo",
}
STAGES = ("pretrain", "sft")  # whose checkpoints can be served
PREVIEWS, ORIGIN = ".athanor/previews", "checkpoint.json"  # the latter in a directory made of a checkpoint
STATE, TENSORS, ANCHORS = "state.json", "tensors.safetensors", "anchors"
MAX_BYTES = 64 << 20  # of a file that says what a checkpoint is


def is_base(folder: Path) -> bool:
    """Whether a folder is a checkout's base model, as pretraining wrote it; its tokenizer lies beside it."""
    return os.path.realpath(folder).endswith(f"/{BASE}") and (folder / MANIFEST).is_file()


def tokenizer_folder(base: Path) -> Path:
    return base.with_name(Path(TOKENIZER).name)


def whole_checkpoints(slot: Path) -> Iterator[Path]:
    """Checkpoints of a slot, newest first, without those that are torn as far as that shows without reading them."""
    found = (path for folder in (slot / ANCHORS, slot) for path in folder.glob("step_*") if path.name[5:].isdecimal())
    paths = {int(path.name[5:]): path for path in found if _bounded(path / STATE) and (path / TENSORS).is_file()}
    for step in sorted(paths.keys() - {0}, reverse=True):  # at step 0 nothing is learned
        path = paths[step]
        try:
            with safe_open(path / TENSORS, "np"):  # looks whether it has its length
                read_json(path / STATE)
        except (AthanorError, OSError, SafetensorError):
            continue
        yield path


def slot_folder(checkpoint: Path) -> Path:
    """The slot of a checkpoint; those from further back lie one folder deeper."""
    return checkpoint.parents[1 if checkpoint.parent.name == ANCHORS else 0]


def is_checkpoint(path: Path) -> bool:
    return (path / STATE).is_file()


def origin(path: Path) -> dict[str, Any]:
    """Of a checkpoint, or of a directory made of one: `stage`, `step`, and of how many steps its cooldown was (`cooled`)."""
    if is_checkpoint(path):
        return {"stage": slot_folder(path).parent.name, "step": int(path.name[5:])}
    return read_json(path / ORIGIN) if _bounded(path / ORIGIN) else {}


def _bounded(path: Path) -> bool:
    """Whether a file is there and small enough to be read."""
    return path.is_file() and path.stat().st_size <= MAX_BYTES

"""Models that are not done: the newest checkpoint of each stage that trains now, and what `athanor preview` has made.

A checkpoint is listed without being copied, so the training may drop it for a newer one before anybody asks it. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.runtime.locks import locked
from athanor.serving.discover import TORCH, AvailableModel
from athanor.serving.experiments import is_base
from athanor.serving.files import WEIGHTS

STAGES = ("pretrain", "sft")
PREVIEWS, ORIGIN = ".athanor/previews", "checkpoint.json"  # the latter in a directory made of a checkpoint
GONE = "is gone: a training keeps its two newest checkpoints. Fix: choose the newest of the list"
UNDONE = "undone"  # the `source` of such a model
STATE, TENSORS, ANCHORS = "state.json", "tensors.safetensors", "anchors"
AT_WORK = "still training"
CONTINUES = "none"  # in place of the name of a template: the model goes on with a text


def running(root: Path) -> list[AvailableModel]:
    """Newest first."""
    slots = (path for stage in STAGES for path in (root / ".athanor" / "slots" / stage).glob("[!.]*"))
    newest = (next(whole_checkpoints(slot), None) for slot in slots if locked(slot / "lock"))
    made = (path.parent for path in (root / PREVIEWS).glob(f"[!.]*/{ORIGIN}"))
    models = []
    for path in filter(None, (*newest, *made)):
        # Dropped just now, or damaged.
        with suppress(AthanorError, OSError, AttributeError, KeyError, TypeError, ValueError):
            models.append(_model(path))
    return sorted(models, key=lambda model: -model.created)


def gone(model: AvailableModel) -> str:
    """Why such a model cannot be served any more; "" while it is there."""
    return "" if Path(model.path).is_dir() else f"{model.path} {GONE}"


def whole_checkpoints(slot: Path) -> Iterator[Path]:
    """Checkpoints of a slot, newest first, without those that are torn as far as that shows without reading them."""
    found = (path for folder in (slot / ANCHORS, slot) for path in folder.glob("step_*"))
    paths = {int(path.name[5:]): path for path in found if path.name[5:].isdecimal() and (path / TENSORS).is_file()}
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
    return read_json(path / ORIGIN) if (path / ORIGIN).is_file() else {}


def template_of(path: Path) -> dict[str, str]:
    """{"template": CONTINUES} where it is known that nobody has taught the model to answer."""
    return {"template": CONTINUES} if is_base(path) or origin(path).get("stage") == "pretrain" else {}


def _model(path: Path) -> AvailableModel:
    about, at_work = origin(path), is_checkpoint(path)
    state = AT_WORK if at_work else f"cooled down in {about['cooled']:,} steps" if "cooled" in about else "as it was"
    base = "; a base model: it goes on with your text" if template_of(path) else ""
    name = f"{about['stage']}-{slot_folder(path).name[:8]}-{path.name}" if at_work else path.name
    stat = (path / (TENSORS if at_work else WEIGHTS)).stat()
    size = stat.st_size // (3 if at_work else 1)  # the rest is the optimiser
    label = f"{about['stage']} step {about['step']:,} ({state}{base})"
    return AvailableModel(name, label, str(path), TORCH, UNDONE, stat.st_mtime, size)

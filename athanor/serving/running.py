"""List models still in training: the newest checkpoint of each training that runs, and what `athanor preview` has made.

A checkpoint is listed without being copied, so the training may drop it for a newer one before anybody asks it. No torch.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from athanor.export.places import (
    ORIGIN,
    PREVIEWS,
    STAGES,
    TENSORS,
    is_base,
    is_checkpoint,
    origin,
    slot_folder,
    whole_checkpoints,
)
from athanor.runtime.locks import locked
from athanor.serving.discover import CHECKPOINT, EXPORTED, ODD, AvailableModel
from athanor.serving.files import WEIGHTS

UNDONE = "undone"  # the `source` of such a model
CONTINUES = "none"  # in place of the name of a template: the model goes on with a text


def running(root: Path) -> list[AvailableModel]:
    """Newest first."""
    slots = (path for stage in STAGES for path in (root / ".athanor" / "slots" / stage).glob("[!.]*"))
    newest = (next(whole_checkpoints(slot), None) for slot in slots if locked(slot / "lock"))
    made = (path.parent for path in (root / PREVIEWS).glob(f"[!.]*/{ORIGIN}"))
    models = []
    for path in filter(None, (*newest, *made)):
        with suppress(*ODD):  # dropped just now, or damaged
            models.append(_model(path))
    return sorted(models, key=lambda model: -model.created)


def template_of(path: Path) -> dict[str, str]:
    """{"template": CONTINUES} where it is known that nobody has taught the model to answer."""
    return {"template": CONTINUES} if is_base(path) or origin(path).get("stage") == "pretrain" else {}


def _model(path: Path) -> AvailableModel:
    about, at_work = origin(path), is_checkpoint(path)
    state = "still training" if at_work else f"cooled down in {about['cooled']:,} steps" if "cooled" in about else "raw"
    base = "; a base model: it goes on with your text" if template_of(path) else ""
    name = f"{about['stage']}-{slot_folder(path).name[:8]}-{path.name}" if at_work else path.name
    created = (path / (TENSORS if at_work else WEIGHTS)).stat().st_mtime
    label = f"{about['stage']} step {about['step']:,} ({state}{base})"
    return AvailableModel(name, label, str(path), CHECKPOINT if at_work else EXPORTED, UNDONE, created)

"""What a running server lists: the models of its checkout as they come and go, then those still in training.

Of a training that runs that is the newest checkpoint, and what `athanor preview` has made. A checkpoint is listed without
being copied, so the training may drop it for a newer one before anybody asks it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from athanor.base.errors import InputError
from athanor.catalog.discover import ODD, AvailableModel, described, discover
from athanor.catalog.places import (
    HF_DIR,
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

UNDONE = "undone"  # the `source` of such a model
CONTINUES = "none"  # in place of the name of a template: the model continues a text


class Catalog:
    """The models to serve, looked at again once a file of theirs was made, replaced or removed.

    Without a change a call costs one stat for each folder of models, and a look at the trainings. With `requested`
    (`--model`) it is about these alone.
    """

    def __init__(self, root: Path, requested: Sequence[str] = ()) -> None:
        self.root, self.requested = root.resolve(), requested
        self._found = discover(self.root, requested)
        self._seen: list[tuple[int, int]] = []

    def __call__(self) -> list[AvailableModel]:
        if (states := self._states()) != self._seen:
            self._seen = states  # from before: what changes meanwhile is seen by the next call
            with suppress(InputError):  # what --model names is gone: perhaps it is made again right now
                self._found = discover(self.root, self.requested)
        return [*self._found, *([] if self.requested else running(self.root))]

    def _states(self) -> list[tuple[int, int]]:
        own = (*self.root.glob("models/*"), *self.root.glob(f"models/*/{HF_DIR}"))
        places = {*own, *(Path(model.path) for model in self._found)}
        found = [path.stat() for path in sorted(places) if path.exists()]
        return [(stat.st_ino, stat.st_mtime_ns) for stat in found]  # a file that is replaced changes that of its folder


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


def continues(path: Path) -> bool:
    """Whether nobody has taught the model to answer, so that it continues a text."""
    return is_base(path) or origin(path).get("stage") == "pretrain"


def _model(path: Path) -> AvailableModel:
    about, at_work = origin(path), is_checkpoint(path)
    state = "still training" if at_work else f"cooled down in {about['cooled']:,} steps" if "cooled" in about else "raw"
    base = "; a base model: it continues your text" if continues(path) else ""
    label = f"{about['stage']} step {about['step']:,} ({state}{base})"
    if not at_work:
        return replace(described(path, UNDONE, ""), id=path.name, label=label)
    name = f"{about['stage']}-{slot_folder(path).name[:8]}-{path.name}"
    return AvailableModel(name, label, str(path), UNDONE, (path / TENSORS).stat().st_mtime)

"""What every training stage tells the run, the progress bar and the journal, and asks them: the loop's hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from athanor.training.loop import Hooks


class Named(Protocol):
    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str: ...


def hooks(
    run: Run,
    bar: Progress,
    sampler: Named,
    batch_tokens: int,
    *,
    validate: Callable[[Any], dict[str, Any]],
    scalars: Callable[[dict[str, Any]], dict[str, float | None]],
    before_first_step: Callable[[Any], None],
    on_sample: Callable[[int, Any], None] = lambda step, model: None,
) -> Hooks:
    """Hooks of a stage. `scalars` takes from a validation's scores what is logged of it."""

    def on_replay(row: dict[str, float]) -> None:
        run.log(int(row["step"]), **{key: value for key, value in row.items() if key != "step"})

    def on_step(row: dict[str, float]) -> None:
        on_replay(row)
        bar.update(batch_tokens, f"loss {row['loss']:.3f}")

    def on_validation(step: int, scores: dict[str, Any]) -> None:
        # What is not finite comes as None, because checkpoints are JSON; the journal has a word for it.
        run.log(step, **{name: math.nan if value is None else value for name, value in scalars(scores).items()})

    return Hooks(
        validate=run.lasting("validation", validate),
        before_first_step=before_first_step,
        on_resume=bar.resume_at,
        on_replay=on_replay,
        on_step=on_step,
        on_validation=on_validation,
        on_sample=run.lasting("samples", on_sample),
        on_rollback=lambda step, facts: run.rewind(step, bar, batch_tokens, **facts),
        on_event=lambda name, facts: run.journal.event(name, **facts),
        name_document=sampler.document_name,
        on_note=run.note,
        should_stop=run.stop_requested,
        should_save=run.save_requested,
        code=run.code,
    )

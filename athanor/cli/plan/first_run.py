"""How long a stage will take that never ran on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from athanor.cli.plan.forecast import Forecast
from athanor.cli.plan.simulate import Step
from athanor.cli.plan.training import Training
from athanor.sizing import speeds
from athanor.sizing.data import conversation_tokens, eval_tokens


def before_first_run(
    found: Forecast, step: Step, built: Mapping[str, Any], training: Training | None, measured: speeds.Speeds | None
) -> Forecast:
    """The forecast of a stage that never ran here, from steps that were timed (`athanor recipe`, `athanor plan --measure`)."""
    if found.seconds is not None or not built or measured is None or found.runs:
        return found
    sources = built["download"].sources
    if step.stage in speeds.STAGES and any(source.type not in ("python", "files") for source in sources):
        return found  # a network and a corpus of which nothing is known
    model = built["model"]
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    tokens = eval_tokens(built) if step.stage == "eval" else found.tokens
    if step.stage == "sft" and tokens is None and training is not None:
        tokens = int(built["sft"].epochs * conversation_tokens(built))
    seconds = speeds.first_run(step.stage, measured, config, tokens)
    return dataclasses.replace(found, seconds=seconds)

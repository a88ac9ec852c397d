"""What the stages that train will do: tokens, operations, and the step that an unfinished slot is at.

Imports no torch: a plan must come at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json
from athanor.commands import slots
from athanor.commands.plan.simulate import Step
from athanor.errors import InputError
from athanor.model.flops import training_flops
from athanor.pipeline.closure import file_digests, stage_module
from athanor.pipeline.facts import flatten
from athanor.pipeline.schema import filled
from athanor.pipeline.slots import Code, question
from athanor.training.schedule import Schedule, whole_steps

STAGES = ("pretrain", "sft")


@dataclass(frozen=True)
class Training:
    """`trunk_steps` is how far a run shares its way with runs of another length. Tokens are None when not known."""

    tokens: int | None
    batch_tokens: int
    flops_per_token: float
    parameters: int
    trunk_steps: int = 0

    @property
    def steps(self) -> int:
        return (self.tokens or 0) // self.batch_tokens

    @property
    def flops(self) -> float:
        return (self.tokens or 0) * self.flops_per_token


def training_of(step: Step, root: Path, built: Mapping[str, Any]) -> Training | None:
    """The training that a stage of this pipeline will do; None for any other stage."""
    if step.stage not in STAGES or not built:
        return None
    params, model = built[step.stage], built["model"]
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    tokens = params.tokens if step.stage == "pretrain" else _sft_tokens(step, root, params.epochs)
    if tokens is not None:
        tokens = whole_steps(tokens, params.batch_tokens)
    trunk = 0
    if step.stage == "pretrain" and params.schedule == "wsd":
        cooldown = int(tokens * params.cooldown_fraction)
        schedule = Schedule("wsd", params.lr, 0.0, params.warmup_tokens, cooldown, tokens)
        trunk = min(schedule.cooldown_start, tokens - params.batch_tokens) // params.batch_tokens
    flops = training_flops(config, config.context_tokens)
    return Training(tokens, params.batch_tokens, flops, config.parameter_count(), trunk)


def _sft_tokens(step: Step, root: Path, epochs: float) -> int | None:
    """From the packed rows in the workspace; None when they will be others."""
    path = root / "data" / "sft" / "manifest.json"
    if step.inputs.get("data/sft") is None or not path.is_file():
        return None
    manifest = read_json(path)
    return int(epochs * manifest["counts"]["train"]["rows"] * manifest["context_tokens"])


def progress(step: Step, root: Path, anchor: Path, training: Training) -> int | None:
    """The step from which the stage will go on; None when it starts from nothing.

    A slot fits when its parameters, the digests of its inputs and the code that
    worked in it are those of the planned run. Digests are taken from a slot whose run read
    inputs with the hashes that DVC has for the planned ones.
    """
    code = _code(step, root)
    at = [
        number
        for slot in _fitting(step, anchor)
        if slot.code is not None and slot.code.code.files == code.files
        for number in _steps(slot.path)
        if number <= (training.trunk_steps if slot.state == "trunk" or slot.facts.get("part") else training.steps)
    ]
    return max(at, default=None)


def questions(step: Step, root: Path, anchor: Path) -> list[str]:
    """What the stage will ask instead of going on, because its code has changed."""
    if step.stage not in STAGES or not step.command:
        return []
    code, fitting = _code(step, root), [slot for slot in _fitting(step, anchor) if slot.code and slot.code.code.files]
    asked = [(slot.id, question(slot.path, code, "part" in slot.facts)) for slot in fitting]
    return [f"{step.stage} will stop and ask: slot {name} {text} (athanor slots adopt, drop)" for name, text in asked if text]


def _code(step: Step, root: Path) -> Code:
    module = stage_module(step.command)
    return Code(module, file_digests(root, module))


def _fitting(step: Step, anchor: Path) -> list[slots.Found]:
    """The slots of the planned run's parameters and inputs, whatever code worked in them."""
    found = [slot for slot in slots.find(anchor) if slot.stage == step.stage]
    digests = next((slot.facts.get("inputs") for slot in found if _read_the_same(slot, step, anchor)), None)
    planned = dict(flatten(filled(step.params)))
    same = [slot for slot in found if slot.facts.get("inputs") == digests and _fits(slot.facts, step.stage, planned)]
    return same if digests is not None else []


def _read_the_same(slot: slots.Found, step: Step, anchor: Path) -> bool:
    try:
        run = read_json(slot.path / "run.json")["run"]
        inputs = read_json(anchor / ".athanor" / "runs" / run / "meta.json")["inputs"]
    except InputError:
        return False
    return bool(inputs) and all(step.inputs.get(path) == value for path, value in inputs.items())


def _fits(facts: Mapping[str, Any], stage: str, planned: Mapping[str, Any]) -> bool:
    """Whether each parameter of a slot is as planned; null in the plan (the tokenizer's vocabulary) fits any."""
    for leaf, value in flatten(facts.get("params", {})):
        name = leaf if leaf in planned else f"{stage}.{leaf}"
        if name not in planned or planned[name] not in (None, value):
            return False
    return True


def _steps(path: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in path.glob("step_*") if folder.name[5:].isdigit()]

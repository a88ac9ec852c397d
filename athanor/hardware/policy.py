"""What to choose for a machine, given what was measured on it. Pure functions from numbers to a decision with its reason.

`resolve` decides every `auto` at once. The measurements are parts of a profile (athanor/hardware/profile.py); a part
that was not measured is None, and then the choice is the safe one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from athanor.base.errors import InputError
from athanor.hardware import profile as profiles
from athanor.model.config import ModelConfig
from athanor.model.device import CPU_MICRO_BATCHES, MICRO_BATCH_TOKENS
from athanor.model.gpu_family import Architecture, memory_share
from athanor.model.kernels import cpu_attention_fits
from athanor.training.activations import ACCELERATOR
from athanor.training.attention import DEFAULT, VARLEN
from athanor.training.cpu_replicas import replica_count
from athanor.training.memory import USABLE, StepFootprint, training_bytes
from athanor.training.setup import Choices

AUTO = "auto"
HALF_GAIN = 1.5  # matrix products of a half format against fp32, for it to be worth its rounding
CPU_STEP_GAIN = 1.3  # of whole training steps: on a CPU the products are not the bottleneck of a small model
KERNEL_GAIN = 1.03  # a kernel other than the usual one has to be faster by this much
COMPILATIONS = 3  # rows with and without documents, and once more from the cache in the process that trains


class Decision(NamedTuple):
    value: Any
    why: str


def precision(
    architecture: Architecture,
    gflops: Mapping[str, float] | None,
    steps: Mapping[str, float] | None,
    stable: Mapping[str, bool] | None,
) -> Decision:
    """bf16, fp16 or fp32.

    `gflops`: of matrix products by format. `steps`: tokens per second of
    whole training steps by format. `stable`: formats in which a short
    training with loss scaling stayed finite.
    """
    gflops, steps, stable = gflops or {}, steps or {}, stable or {}
    if architecture.device == "cpu":
        if "bf16" not in architecture.native:
            return Decision("fp32", f"{architecture.name} has no bf16 units")
        gain = _ratio(steps, "bf16")
        if gain is None:
            return Decision("fp32", "steps in bf16 were not measured")
        if gain >= CPU_STEP_GAIN:
            return Decision("bf16", f"a training step is {gain:.2f} times as fast as in fp32")
        return Decision("fp32", f"a training step in bf16 is {gain:.2f} times as fast, less than {CPU_STEP_GAIN:g}")
    reasons = []
    for name in ("bf16", "fp16"):
        if name not in architecture.native:
            reasons.append(f"{name} is emulated or wrong on {architecture.name}")
            continue
        gain = _ratio(gflops, name)
        if gain is None:
            reasons.append(f"{name} was not measured")
        elif gain < HALF_GAIN:
            reasons.append(f"{name} is {gain:.2f} times as fast as fp32, less than {HALF_GAIN:g}")
        elif name == "fp16" and not stable.get("fp16", False):
            reasons.append("the trial in fp16 was not stable")
        else:
            return Decision(name, "; ".join([*reasons, f"{name} products are {gain:.1f} times as fast as fp32"]))
    return Decision("fp32", "; ".join(reasons))


def precision_of(architecture: Architecture, profile: Mapping[str, Any]) -> Decision:
    """`precision` by what a profile has."""
    gflops = {name: row["ceiling"] for name, row in profile.get("products", {}).get("gflops", {}).items()}
    return precision(architecture, gflops, profile.get("steps"), profile.get("stable"))


def _ratio(values: Mapping[str, float], name: str) -> float | None:
    return values[name] / values["fp32"] if values.get(name) and values.get("fp32") else None


def attention(architecture: Architecture, measured: Mapping[str, Any] | None) -> Decision:
    """A kernel's name, or two: of rows with one document, and of those with several; or the default dispatch.

    `measured`: {"default", "default_documents": names of what torch takes by itself, "kernels": {name: {"works", "why",
    "plain_seconds", and, where it takes their mask, "documents_seconds"}}}.
    InputError on a GPU on which only the math kernel works.
    """
    if measured is None:
        return Decision(DEFAULT, "not measured")
    kernels = measured["kernels"]
    works = [name for name, row in kernels.items() if row["works"]]
    if architecture.device == "cuda" and architecture.fused_attention and not set(works) - {"math"}:
        reasons = "; ".join(f"{name}: {row['why']}" for name, row in kernels.items() if not row["works"])
        fix = "install a torch built for this GPU, or set attention: math to accept a slow one"
        if "gfx11" in architecture.name:
            fix = f"export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1; {fix}"
        raise InputError(
            f"no fused attention kernel works on {architecture.name} ({reasons})", where="machine.attention", fix=fix
        )
    if not works:
        return Decision(DEFAULT, "no kernel agreed with the reference")
    fused = [name for name in works if name != VARLEN and (name != "math" or architecture.device != "cuda")]
    takers = [name for name in fused if "documents_seconds" in kernels[name]]
    # A micro-batch of rows of one document each is rare.
    by_mask = min((kernels[name]["documents_seconds"] for name in takers), default=math.inf)
    gain = by_mask / kernels.get(VARLEN, {}).get("documents_seconds", math.inf)
    if gain >= KERNEL_GAIN:
        return Decision(VARLEN, f"rows with several documents are {gain:.2f} times as fast as with a mask")
    if not takers:
        # Told to use fused ones alone, torch would refuse such rows.
        return Decision(DEFAULT, "rows with several documents need the math kernel here")

    def seconds(pair: tuple[str, str]) -> float:
        plain, documents = pair
        return kernels[plain].get("plain_seconds", math.inf) + kernels[documents].get("documents_seconds", math.inf)

    # Told two kernels, torch takes the first that can: a first one that takes masks has all rows.
    pairs = [(name, other) for name in fused for other in ([name] if name in takers else takers)]
    best, usual = min(pairs, key=seconds), (measured["default"], measured["default_documents"])
    best_name, usual_name = (" and ".join(dict.fromkeys(pair)) for pair in (best, usual))
    if not {*usual} <= {*works}:
        return Decision(",".join(dict.fromkeys(best)), f"torch's own choice, {usual_name}, does not work here")
    gain = seconds(usual) / seconds(best)
    if gain < KERNEL_GAIN:
        return Decision(DEFAULT, f"{best_name}: no faster than torch's own choice, {usual_name}")
    return Decision(",".join(dict.fromkeys(best)), f"{gain:.2f} times as fast as torch's own choice, {usual_name}")


def compiled(measured: Mapping[str, Any] | None, *, blocks_per_step: float, steps: int) -> Decision:
    """Whether compiling pays within `steps`, each of which runs `blocks_per_step` blocks one after the other.

    `measured`: {"works", "why", "cold_seconds", "eager_seconds", "compiled_seconds"} of one block.
    """
    if measured is None:
        return Decision(False, "not measured")
    if not measured["works"]:
        return Decision(False, measured["why"])
    needed = break_even(measured, blocks_per_step)
    if math.isinf(needed):
        return Decision(False, "compiled blocks are not faster")
    if steps > needed:
        return Decision(True, f"pays from step {needed:,.0f} on")
    return Decision(False, f"would pay from step {needed:,.0f} on, there are {steps:,}")


def break_even(measured: Mapping[str, Any], blocks_per_step: float) -> float:
    """Steps after which the time spent on compiling is won back; infinite when it never is."""
    gain = (measured["eager_seconds"] - measured["compiled_seconds"]) * blocks_per_step
    return COMPILATIONS * measured["cold_seconds"] / gain if gain > 0 else math.inf


def _micro_batch(
    config: ModelConfig, architecture: Architecture, batch_tokens: int, fits: Callable[[int], bool]
) -> Decision:
    """Tokens of a micro-batch, 0 for the trainer's rule: on an accelerator half as many rows until they fit.

    The rule's 16,384 tokens keep a card busy; a batch has as many or few more. On a CPU bytes shall not depend on how
    much memory a machine has.
    """
    rows = most = max(1, min(MICRO_BATCH_TOKENS[architecture.device], batch_tokens) // config.context_tokens)
    while architecture.device != "cpu" and rows > 1 and not fits(rows):
        rows //= 2
    if rows == most:
        return Decision(0, "the trainer's rule")
    return Decision(rows * config.context_tokens, f"{2 * rows} rows do not fit")


def checkpointing(fits_plain: bool, fits_recomputing: bool) -> Decision:
    """Whether to compute activations again: only where training does not fit without."""
    if fits_plain:
        return Decision(False, "everything fits")
    if fits_recomputing:
        return Decision(True, "activations do not fit otherwise")
    return Decision(False, "it would not fit with it either")


@dataclass(frozen=True)
class Requested:
    """What parameters and machine settings say, autos included; `replicas` run side by side on `threads`."""

    precision: str
    attention: str
    compile: str
    checkpointing: str
    micro_batch_tokens: int
    batch_tokens: int
    steps: int
    replicas: int = 1
    threads: int = 1
    optimizer: str = "adamw"

    @classmethod
    def of(cls, local: Any, config: ModelConfig, device: torch.device, steps: int, **params: Any) -> Requested:
        """From the machine settings, and `params` of the stage: precision, batch_tokens, optimizer."""
        names = ("attention", "compile", "checkpointing", "micro_batch_tokens", "threads")
        settings = {name: getattr(local, name) for name in names}
        return cls(**settings, steps=steps, replicas=replica_count(config, device), **params)

    def explicit(self) -> dict[str, Any]:
        """What is set and not left to choose, by the names of `Choices`."""
        names = ("precision", "attention", "compile", "checkpointing", "micro_batch_tokens")
        values = {name: getattr(self, name) for name in names}
        return {k: {"on": True, "off": False}.get(v, v) for k, v in values.items() if v not in (AUTO, 0)}


@dataclass(frozen=True)
class Record:
    """The decisions for one run on one device, with reasons by the names of `Choices`.

    needed_bytes: the estimate of `footprint`; free_bytes: what might be used then, None where nobody can tell.
    profile: eight letters of the measurement that it rests on.
    """

    device: str
    choices: Choices
    why: Mapping[str, str]
    needed_bytes: int = 0
    free_bytes: int | None = None
    profile: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Record:
        """The inverse of dataclasses.asdict."""
        return cls(**{**values, "choices": Choices(**values["choices"])})


def footprint(config: ModelConfig, choices: Choices, requested: Requested, architecture: Architecture) -> StepFootprint:
    """The step that these choices make, as `setup_device` will see it."""
    tokens = choices.micro_batch_tokens or MICRO_BATCH_TOKENS[architecture.device]
    if architecture.device == "cpu" and not choices.micro_batch_tokens:
        tokens = min(tokens, requested.batch_tokens // CPU_MICRO_BATCHES)
    rows = max(1, min(tokens, requested.batch_tokens) // config.context_tokens)
    micro_batches = -(-requested.batch_tokens // (rows * config.context_tokens))
    replicas = min(requested.replicas, micro_batches)
    return StepFootprint(
        rows,
        config.context_tokens,
        choices.precision,
        replicas,
        min(replicas, requested.threads),
        accumulates=micro_batches > replicas,
        checkpointing=choices.checkpointing,
        optimizer=requested.optimizer,
        math_attention=architecture.device == "cuda"
        and (choices.attention == "math" or not architecture.fused_attention),
    )


def needed_bytes(config: ModelConfig, choices: Choices, requested: Requested, architecture: Architecture) -> int:
    """The estimate of a training by these choices; the host's own kernels count on its processor alone."""
    device = torch.device("cpu") if architecture.device == "cpu" else ACCELERATOR
    return training_bytes(config, footprint(config, choices, requested, architecture), device)


def resolve(
    requested: Requested,
    architecture: Architecture,
    config: ModelConfig,
    profile: Mapping[str, Any] | None,
    free_bytes: int | None,
) -> Record:
    """Every `auto` decided for memory of `free_bytes`. A part that the profile lacks gets its safe default."""
    measurements = profile or {}
    share = memory_share(architecture)
    shared = "memory of its own" if share == 1.0 else "the GPU shares memory with the processor"
    decisions = {
        "memory_fraction": Decision(share, shared),
        **{name: Decision(value, "as set") for name, value in requested.explicit().items()},
    }
    if "precision" not in decisions:
        decisions["precision"] = precision_of(architecture, measurements)
    number_format = decisions["precision"].value
    if "attention" not in decisions:
        use_cpu_kernel = cpu_attention_fits(architecture.device, number_format, config.context_tokens)
        kernel = attention(architecture, measurements.get("attention")) if not use_cpu_kernel else None
        decisions["attention"] = kernel or Decision(DEFAULT, "rows so short are worked by hand on a CPU")
    base = Choices(number_format, decisions["attention"].value)

    def fits(rows: int, recompute: bool) -> bool:
        tried = dataclasses.replace(base, checkpointing=recompute, micro_batch_tokens=rows * config.context_tokens)
        return free_bytes is None or needed_bytes(config, tried, requested, architecture) <= free_bytes * USABLE

    if "checkpointing" not in decisions:
        decisions["checkpointing"] = checkpointing(fits(1, False), fits(1, True))
    recompute = decisions["checkpointing"].value
    if "micro_batch_tokens" not in decisions:
        decisions["micro_batch_tokens"] = _micro_batch(
            config, architecture, requested.batch_tokens, lambda rows: fits(rows, recompute)
        )
    if "compile" not in decisions:
        tokens = decisions["micro_batch_tokens"].value or MICRO_BATCH_TOKENS[architecture.device]
        rows = measurements.get("rows", tokens / config.context_tokens)
        parallel = min(requested.replicas, requested.threads)
        blocks = config.layers * requested.batch_tokens / config.context_tokens / rows / max(1, parallel)
        decisions["compile"] = compiled(measurements.get("compile"), blocks_per_step=blocks, steps=requested.steps)
    # In the order of the fields.
    decisions = {field.name: decisions[field.name] for field in dataclasses.fields(Choices)}
    choices = Choices(**{name: decision.value for name, decision in decisions.items()})
    return Record(
        architecture.device,
        choices,
        {name: decision.why for name, decision in decisions.items()},
        needed_bytes(config, choices, requested, architecture),
        free_bytes,
        None if profile is None else profiles.short_digest(profile),
    )

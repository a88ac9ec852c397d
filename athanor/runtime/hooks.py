"""What training stages add to the loop: hooks that report to the run, samples of the model, and the run's speed.

All of it watches and touches no result: it lives on the infrastructure side, so that a change in generation does not
train again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from athanor.hardware import profile
from athanor.hardware.peaks import measured_tflops, peak_tflops
from athanor.runtime.machine import anchor
from athanor.runtime.memory_snapshot import leave_snapshot
from athanor.runtime.progress import Mean, Progress
from athanor.runtime.run import Run
from athanor.training.loop import Hooks


class DocumentNamer(Protocol):
    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str: ...


def hooks(
    run: Run,
    bar: Progress,
    sampler: DocumentNamer,
    batch_tokens: int,
    *,
    validate: Callable[[Any], dict[str, Any]],
    scalars: Callable[[dict[str, Any]], dict[str, float | None]],
    before_first_step: Callable[[Any], None],
    on_sample: Callable[[int, Any], None] = lambda step, model: None,
    bases: Mapping[str, float] = {},
) -> Hooks:
    """Hooks of a stage. `scalars` takes from a validation's scores what is logged of it; `bases`: see there."""

    loss = Mean()  # one batch says little

    def on_replay(row: dict[str, float]) -> None:
        run.log(int(row["step"]), **{key: value for key, value in row.items() if key != "step"})

    def on_step(row: dict[str, float]) -> None:
        on_replay({**row, **shares(row, bases)})
        bar.update(batch_tokens, f"loss {loss.add(row['loss']):.3f}")

    def on_validation(step: int, scores: dict[str, Any]) -> None:
        # What is not finite comes as None, because checkpoints are JSON; the journal has a word for it.
        run.log(step, **{name: math.nan if value is None else value for name, value in scalars(scores).items()})

    return Hooks(
        validate=run.long_operation("validation", validate),
        before_first_step=before_first_step,
        on_resume=bar.resume_at,
        on_replay=on_replay,
        on_step=on_step,
        on_validation=on_validation,
        on_sample=run.long_operation("samples", on_sample),
        on_rollback=lambda step, facts: run.rewind(step, bar, batch_tokens, **facts),
        on_event=lambda name, facts: run.journal.event(name, **facts),
        on_out_of_memory=lambda step, tensors: leave_snapshot(run, f"step-{step:08d}", tensors),
        name_document=sampler.document_name,
        on_note=run.note,
        should_stop=run.stop_requested,
        should_save=run.save_requested,
        code=run.code,
    )


def text_sampler(tokenizer_folder: str | Path, prompts: Sequence[str], tokens: int = 48) -> Callable[[Any], list[str]]:
    """A function that continues each prompt greedily with the model it is given.

    Greedy on purpose: it draws no random number, so training goes on with the
    state it had.
    """
    import torch

    from athanor.decoding.generate import generate
    from athanor.decoding.sampling import Sampling
    from athanor.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    starts = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in prompts]

    def sample(model: Any) -> list[str]:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                completions = generate(
                    model, starts, max_new_tokens=tokens, stop_ids=(tokenizer.eos,), sampling=Sampling(temperature=0.0)
                )
        finally:
            model.train(training)
        return [prompt + tokenizer.decode(answer.ids) for prompt, answer in zip(prompts, completions, strict=True)]

    return sample


def with_rates(timings: Mapping[str, Any], device: Any, precision: str) -> dict[str, Any]:
    """The timings of a training, with their share of this machine's peak."""
    return {**timings, **rates(timings, device_name(device), precision, profile.read(anchor()), tf32())}


def rates(
    timings: Mapping[str, Any], name: str, precision: str, measured: Mapping[str, Any] | None, tf32: bool = False
) -> dict[str, Any]:
    """The model's TFLOPS, and their share of the data sheet's peak (mfu) and of this machine's measured ceiling.

    A share whose base is not known is left out. `name`: what torch calls the accelerator, "" for a CPU.
    """
    if "model_gflops" not in timings:
        return {}
    metrics: dict[str, Any] = {"model_tflops": timings["model_gflops"] / 1000, "precision": precision}
    metrics |= shares(timings, _bases(name, precision, measured, tf32))
    return metrics | ({"accelerator": name} if name else {})


def bases(device: Any, precision: str) -> dict[str, float]:
    """GFLOPS that a training is compared with, by the name of the share: of the data sheet and of this machine's ceiling."""
    return _bases(device_name(device), precision, profile.read(anchor()), tf32())


def _bases(name: str, precision: str, measured: Mapping[str, Any] | None, tf32: bool) -> dict[str, float]:
    tflops = {"mfu": peak_tflops(name, precision, tf32=tf32), "of_ceiling": measured_tflops(measured, precision)}
    return {share: 1000 * base for share, base in tflops.items() if base}


def shares(speeds: Mapping[str, Any], bases: Mapping[str, float]) -> dict[str, float]:
    """Shares of these bases; hfu is mfu with what checkpointing computes twice (Chowdhery et al. 2022, arXiv:2204.02311)."""
    found = {name: speeds["model_gflops"] / base for name, base in bases.items() if "model_gflops" in speeds}
    if "hardware_gflops" in speeds and "mfu" in bases:
        found["hfu"] = speeds["hardware_gflops"] / bases["mfu"]
    return found


def device_name(device: Any) -> str:
    if device.type != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


def tf32() -> bool:
    """Whether products of fp32 matrices may go through tensor cores."""
    import torch

    return torch.get_float32_matmul_precision() != "highest"

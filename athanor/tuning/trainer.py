"""One way to train for the three side graphs: transformers' Trainer (TRL's are its children) in a slot of ours.

Checkpoints are the Trainer's own, in the slot; a kill costs the steps since the last one. The resumed run continues with
the same rows and rates, but its bytes are not promised: the libraries draw answers and order sums as they do.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from athanor.base.artifacts import (
    fsync_tree,
    manifest_digest,
    new_dir,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from athanor.base.errors import Interrupted, ParamsError
from athanor.model.device import prepare
from athanor.training.schedule import Schedule
from athanor.tuning.model import base_digest, libraries, load_model, load_tokenizer, lora_config, precision_of
from athanor.tuning.params import SideParams, TrainerParams
from athanor.tuning.rows import Template

KIND, VERSION, COMPLETE, BEFORE = "side", 1, "complete", "before.json"
# TRL's and transformers' names of readings, and ours.
READINGS = {
    "learning_rate": "lr",
    "reward": "policy.reward",
    "reward_std": "policy.reward_std",
    "frac_reward_zero_std": "policy.tied_groups",
    "kl": "policy.kl",
    "entropy": "policy.entropy",
    "clip_ratio/region_mean": "policy.clip_share",
    "completions/mean_length": "policy.answer_tokens",
    "completions/min_length": "policy.answer_tokens_min",
    "completions/max_length": "policy.answer_tokens_max",
    "completions/clipped_ratio": "policy.cut_answers",
    "completions/mean_terminated_length": "policy.ended_tokens",
    "completions/min_terminated_length": "policy.ended_tokens_min",
    "completions/max_terminated_length": "policy.ended_tokens_max",
    "sampling/sampling_logp_difference/mean": "policy.sampler_difference",
    "sampling/importance_sampling_ratio/min": "policy.sampler_ratio_min",
    "rewards/format/mean": "policy.format_share",
    "rewards/chosen": "policy.chosen",
    "rewards/rejected": "policy.rejected",
    "rewards/margins": "policy.margin",
    "rewards/accuracies": "policy.accuracy",
    "eval_loss": "val_loss",
    "eval_reward": "val_reward",
}

IRRELEVANT = re.compile("^(epoch|total_flos)$|runtime|per_second|preparation")


def readings(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a Trainer's log by our names; of its validation and of rewards the others keep theirs."""
    return {
        READINGS.get(name, name.replace("/", ".")): float(value)
        for name, value in logs.items()
        if isinstance(value, int | float) and not IRRELEVANT.search(name)
    }


def arguments(
    settings: TrainerParams, side: SideParams, rows_per_step: int, steps: int, folder: Path, device: str
) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments, DPOConfig and GRPOConfig alike. `device`: its type."""
    precision = precision_of(side)
    share, rest = divmod(rows_per_step, world_size())
    if rest:
        fix = f"a multiple of {world_size()}, or another launch.processes in machine.yaml"
        raise ParamsError(
            f"{rows_per_step} rows of a step for {world_size()} processes", where="rows_per_step", fix=fix
        )
    at_once = max(n for n in range(1, settings.rows_at_once + 1) if share % n == 0 or n == 1)  # a divisor
    return {
        "output_dir": str(folder),
        "seed": settings.seed,
        "learning_rate": settings.lr,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": math.ceil(settings.warmup_fraction * steps),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.grad_clip,
        "max_steps": steps,
        "per_device_train_batch_size": at_once,
        "per_device_eval_batch_size": 1,  # each row counts the same, however many are in a pass
        "gradient_accumulation_steps": max(1, share // at_once),
        "activation_checkpointing": side.checkpointing,
        "activation_checkpointing_kwargs": {"use_reentrant": False} if side.checkpointing else None,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device == "cuda",
        "save_steps": max(1, steps // settings.saves),
        "eval_strategy": "steps",
        "eval_steps": max(1, steps // settings.saves),
        "save_total_limit": 2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Run(Protocol):
    """What a training asks of its stage's run."""

    main: bool

    def log(self, step: int, **values: float) -> None: ...
    def stop_requested(self) -> bool: ...
    def save_requested(self) -> bool: ...
    def metrics(self, values: dict[str, Any]) -> None: ...
    def plot(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def progress(self, total: float | None, desc: str = "", unit: str = "") -> Any: ...
    def slot(self, params: Mapping[str, Any], inputs: Mapping[str, str]) -> Any: ...
    def watch_health(
        self,
        schedule: Any,
        batch_tokens: int,
        vocab_size: int,
        cooldown_data: bool = False,
        precision: str | None = None,
    ) -> None: ...


def watcher(run: Run, bar: Any, observers: Sequence[Callable[[int, Path], None]]) -> Any:
    """The callback that writes our journal, asks the health rules, and stops and saves on our signals."""
    import torch
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        stopped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            bar.resume_at(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "train_runtime" not in logs:
                run.log(state.global_step, **readings(logs))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            bar.update(1)
            asked = torch.tensor([run.save_requested(), run.stop_requested()], dtype=torch.int32, device=args.device)
            if world_size() > 1:  # a signal may reach one process a step before the others, which would wait for it
                torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
            save, stop = asked.tolist()
            control.should_save = control.should_save or bool(save)
            if stop and state.global_step < state.max_steps:
                self.stopped = control.should_save = control.should_training_stop = True
                control.should_evaluate = False
            return control

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero:
                fsync_tree(folder)  # on the disk before the mark, which a power failure may keep
                (folder / COMPLETE).touch()
                for observe in observers:
                    observe(state.global_step, folder)

    return Watcher()


def score_apart(step: int, folder: Path) -> None:
    """Score a checkpoint in a process of its own; the rows come to `athanor evaluate --history`."""
    command = [*"nice -n 19".split(), sys.executable, *"-m athanor evaluate --threads 1 --model".split(), str(folder)]
    with open(".athanor/score_checkpoints.log", "ab") as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint; torn ones, which a kill left, are removed."""
    complete: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        if (path / COMPLETE).is_file():
            complete[int(path.name.partition("-")[2])] = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    return str(complete[max(complete)]) if complete else None


def train(
    run: Run,
    stage: str,
    side: SideParams,
    settings: TrainerParams,
    rows_per_step: int,
    local: Any,
    make: Callable[[dict[str, Any], Any, Any, Any, Any], Any],
    on_save: Callable[[int, Path], None] | None = None,
    version: int = 1,
) -> None:
    """Train on data/<stage> in a slot, and write the weights (an adapter, or all of them) to models/<stage>.

    `make(arguments, model, tokenizer, data, lora)` makes the Trainer, `local` is the machine's settings, `version`
    that of the data, `on_save` gets step and folder of each checkpoint. Where checkpoints are scored apart, nothing is
    validated in here. Interrupted after a stop, with all saved.
    """
    libraries("transformers", "peft", "datasets", *(["trl"] if stage != "tune" else []))
    from datasets import load_dataset
    from transformers import PrinterCallback, set_seed

    data, out = Path("data") / stage, Path("models") / stage
    counts = read_manifest(data, f"{stage}-data", version)["counts"]
    epochs, per_epoch = getattr(settings, "epochs", 1.0), math.ceil(counts["train"] / rows_per_step)
    steps = getattr(settings, "steps", max(1, math.floor(epochs * per_epoch)))
    device = prepare(local.device, local.threads)
    parents = {"base": base_digest(side.base), "data": manifest_digest(data)}
    recipe = {"side": {**dataclasses.asdict(side), "base": ""}, stage: dataclasses.asdict(settings)}
    slot = run.slot(recipe, parents)
    with slot, run.progress(steps, stage, "steps") as bar:
        set_seed(settings.seed)  # of the LoRA's first weights
        tokenizer = Template(load_tokenizer(side.base), side.base).tokenizer
        causal = load_model(side, getattr(settings, "context_tokens", 0))
        files = {split: str(path) for split in ("train", "val") for path in data.glob(f"{split}.*")}
        rows = load_dataset("json" if files["train"].endswith("jsonl") else "parquet", data_files=files)
        options = arguments(settings, side, rows_per_step, steps, slot.path, device.type)
        trainer = make(options, causal, tokenizer, rows, lora_config(side, causal))
        schedule = Schedule("cosine", settings.lr, 0.0, math.ceil(settings.warmup_fraction * steps), 0, steps)
        run.watch_health(schedule, 1, trainer.model.config.vocab_size, precision=precision_of(side))
        apart = score_apart if local.score_checkpoints == "on" else None
        watch = watcher(run, bar, list(filter(None, (on_save, apart))))
        trainer.add_callback(watch)
        trainer.remove_callback(PrinterCallback)
        if apart:
            trainer.args.eval_strategy = "no"
        validated = lambda: {} if apart else readings(trainer.evaluate())  # noqa: E731
        resume, before = last_checkpoint(slot.path), slot.path / BEFORE
        if not before.is_file():
            write_json(before, validated())
        trainer.train(resume_from_checkpoint=resume)
        if watch.stopped:
            raise Interrupted("stopped; the same command resumes from its checkpoint")
        after = validated()
        if not run.main:
            return
        with new_dir(out) as folder:
            trainer.model.save_pretrained(folder)
            if (adapter := folder / "adapter_config.json").is_file():  # peft writes sets in any order
                config = read_json(adapter)
                write_json(adapter, config | {"target_modules": sorted(config["target_modules"])})
            facts = {"method": side.method, "base": side.base, "recipe": recipe}
            write_manifest(folder, kind=KIND, version=VERSION, counts={"steps": steps}, parents=parents, **facts)
        slot.mark_done()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    run.plot(stage, [{"step": row["step"], "loss": row["loss"]} for row in losses])
    run.metrics({"steps": steps, "before": read_json(before), "after": after})

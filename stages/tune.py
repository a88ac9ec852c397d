"""Tune a base on conversations or plain text: a LoRA, a QLoRA, or all of its weights."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.model.device import prepare
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning import model, trainer
from athanor.tuning.params import SideParams, TuneParams

DATA, OUT = Path("data/tune"), Path("models/tune")


def run(run: Run) -> None:
    side, params = run.params("side", SideParams), run.params("tune", TuneParams)
    model.libraries("transformers", "peft", "datasets")
    rows = read_manifest(DATA, "tune-data", 1)
    parents = {"base": model.base_digest(side.base), "data": manifest_digest(DATA)}
    recipe = {"side": {**dataclasses.asdict(side), "base": ""}, "tune": dataclasses.asdict(params)}
    local = machine()
    device = prepare(local.device, local.threads)
    steps = max(1, math.floor(params.epochs * math.ceil(rows["counts"]["train"] / params.rows_per_step)))

    def build(folder: Path) -> Any:
        from datasets import load_dataset
        from peft import get_peft_model, prepare_model_for_kbit_training
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

        set_seed(params.seed)  # of the LoRA's first weights
        tokenizer, causal = model.load_tokenizer(side.base), model.load_model(side, params.context_tokens)
        if side.quantise != "none":
            causal = prepare_model_for_kbit_training(causal, use_gradient_checkpointing=side.checkpointing)
        if (lora := model.lora_config(side, causal)) is not None:
            causal = get_peft_model(causal, lora)
        if side.checkpointing:
            causal.enable_input_require_grads()
        data = load_dataset("parquet", data_files={s: str(DATA / f"{s}.parquet") for s in ("train", "val")})
        settings = trainer.arguments(params, side, params.rows_per_step, steps, folder, device.type)
        return Trainer(
            causal,
            TrainingArguments(**settings, train_sampling_strategy="group_by_length"),
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            train_dataset=data["train"],
            eval_dataset=data["val"],
        )

    on_save = trainer.score_apart if local.score_checkpoints == "on" else None
    trainer.train(run, "tune", OUT, side, params, recipe, parents, steps, build, on_save)


if __name__ == "__main__":
    stage_main("tune", run, several=True)

"""Tune a base on conversations or plain text: a LoRA, a QLoRA, or all of its weights."""

from __future__ import annotations

from typing import Any

from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning import trainer
from athanor.tuning.params import SideParams, TuneParams


def run(run: Run) -> None:
    side, params = run.params("side", SideParams), run.params("tune", TuneParams)

    def make(settings: dict[str, Any], causal: Any, tokenizer: Any, data: Any, lora: Any) -> Any:
        from peft import get_peft_model, prepare_model_for_kbit_training
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        if side.quantise != "none":
            causal = prepare_model_for_kbit_training(causal, use_gradient_checkpointing=side.checkpointing)
        if lora is not None:
            causal = get_peft_model(causal, lora)
        if side.checkpointing:
            causal.enable_input_require_grads()
        return Trainer(
            causal,
            TrainingArguments(**settings, train_sampling_strategy="group_by_length"),
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            train_dataset=data["train"],
            eval_dataset=data["val"],
        )

    trainer.train(run, "tune", side, params, params.rows_per_step, machine(), make)


if __name__ == "__main__":
    stage_main("tune", run, several=True)

"""Train a base by preferences, by TRL: the better answer of a pair becomes likelier than the worse one."""

from __future__ import annotations

from typing import Any

from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning import trainer
from athanor.tuning.params import DpoParams, SideParams


def run(run: Run) -> None:
    side, params = run.params("side", SideParams), run.params("dpo", DpoParams)

    def make(settings: dict[str, Any], causal: Any, tokenizer: Any, data: Any, lora: Any) -> Any:
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(
            causal,  # the reference: itself without its LoRA, or a copy of the base that TRL makes
            args=DPOConfig(**settings, beta=params.beta, loss_type=[params.loss], max_length=None),
            train_dataset=data["train"],
            eval_dataset=data["val"],
            processing_class=tokenizer,
            peft_config=lora,
        )

    trainer.train(run, "dpo", side, params, params.pairs_per_step, machine(), make)


if __name__ == "__main__":
    stage_main("dpo", run, several=True)

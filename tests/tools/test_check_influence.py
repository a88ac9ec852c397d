"""A fact that one conversation teaches, and training without it."""

from __future__ import annotations

from pathlib import Path

from athanor.base.strict import build
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.sft_params import SftParams
from tests.origins.test_influence import ODD, root, write_model  # noqa: F401
from tools.check_influence import check, trained_without

PARAMS = {"base": "scratch", "seed": 1, "epochs": 40.0, "batch_tokens": 256, "lr": 0.01, "schedule": "cosine",
          "warmup_fraction": 0.1, "cooldown_fraction": 0.3, "optimizer": "adamw", "beta2": 0.95, "weight_decay": 0.0,
          "precision": "fp32", "validations_per_epoch": 0.0, "validation_max_conversations": 5, "select": "last",
          "min_stop_rate": 0.0}  # fmt: skip


def test_without_the_only_conversation_that_teaches_a_fact_it_is_not_learned(root: Path) -> None:  # noqa: F811
    params = build(SftParams, PARAMS, "sft")
    write_model(root, "sft", trained_without([], params), Tokenizer.load(root / "models/tokenizer"))
    ((question, answer, (plain, random, top)),) = check([ODD[0]], params, 1, 1)
    assert (question, answer) == ODD and plain.said == random.said == answer
    assert top.said != answer and top.log_p < plain.log_p - 10 < random.log_p - 8

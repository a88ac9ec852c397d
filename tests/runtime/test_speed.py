"""Shares of what a machine could do. Below 1 s."""

from __future__ import annotations

import json

import pytest
import torch

from athanor.hardware import profile
from athanor.runtime.hooks import rates, with_rates

PROFILE = {"schema": profile.SCHEMA, "products": {"gflops": {"fp32": {"ceiling": 1e6}}}}
TIMINGS = {"model_gflops": 500_000.0, "tokens_per_second": 1e5}


def test_shares_of_the_data_sheet_and_of_the_measured_ceiling():
    measured = {"products": {"gflops": {"bf16": {"ceiling": 625_000.0}}}}
    told = rates(TIMINGS, "NVIDIA H100 80GB HBM3", "bf16", measured)
    assert told["model_tflops"] == 500.0 and told["accelerator"] == "NVIDIA H100 80GB HBM3"
    assert told["mfu"] == pytest.approx(500 / 989.4) and told["of_ceiling"] == pytest.approx(0.8)


def test_what_is_not_known_is_left_out():
    assert set(rates(TIMINGS, "Some Card 9000", "bf16", None)) == {"model_tflops", "precision", "accelerator"}
    assert set(rates(TIMINGS, "", "fp32", {"products": {"gflops": {"bf16": {}}}})) == {"model_tflops", "precision"}
    assert rates({}, "NVIDIA H100 80GB HBM3", "bf16", None) == {}  # nothing was left to train


def test_a_run_is_told_with_the_profile_of_its_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    (tmp_path / ".athanor").mkdir()
    profile = tmp_path / ".athanor" / "hardware.json"
    for text, share in (('{"broken', None), (json.dumps(PROFILE), 0.5)):
        profile.write_text(text)
        told = with_rates(TIMINGS, torch.device("cpu"), "fp32")
        assert told["tokens_per_second"] == 1e5 and told.get("of_ceiling") == share and "mfu" not in told

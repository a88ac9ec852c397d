"""Names as torch reports them, to the rates of the data sheets. Below 1 s."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from athanor.hardware import kernels
from athanor.hardware.peaks import measured_tflops, peak_tflops, peaks
from athanor.model.config import ModelConfig
from athanor.sizing import devices

with open(Path(__file__).with_name("cards.tsv"), encoding="utf-8", newline="") as file:
    CARDS = list(csv.reader(file, delimiter="\t"))[1:]


@pytest.mark.parametrize(("name", "bf16", "fp32", "device"), CARDS)
def test_dense_rates_and_the_device_of_recipes_by_name(name, bf16, fp32, device):
    """A name that has no rate is no card of the table, or could be two."""
    assert [str(peak_tflops(name, kind) or "") for kind in ("bf16", "fp32")] == [bf16, fp32]
    found = devices.known(name)
    assert (found.name if found else "") == device


def test_the_table_is_plausible():
    """No sparse figures, no swapped columns."""
    for peak in peaks():
        assert peak.source
        rates = [rate for rate in (peak.fp32, peak.tf32, peak.bf16, peak.fp16) if rate is not None]
        assert rates == sorted(rates) and peak.fp32 <= 170
        assert peak.bf16 is None or peak.fp16 in (peak.bf16, 2 * peak.bf16)
    assert peak_tflops("NVIDIA A100-SXM4-40GB", "fp32", tf32=True) == 156.0
    assert peak_tflops("AMD Instinct MI50", "fp32", tf32=True) == 13.3
    assert peak_tflops("NVIDIA A100-SXM4-40GB", "fp8") is None


def test_the_measured_ceiling_is_read_from_any_profile():
    profile = {"products": {"gflops": {"fp32": {"ceiling": 130.0}, "bf16": {"ceiling": None}}}}
    assert measured_tflops(profile, "fp32") == 0.13
    for other in (None, {}, {"products": None}, {"products": {"gflops": {"bf16": 3}}}, profile):
        assert measured_tflops(other, "bf16") is None


def test_what_is_measured_is_what_is_read():
    config = ModelConfig(64, 1, 16, 2, 1, 8, 32, 16, 1e4, 1e-6, False)
    found = {"products": kernels.products(config, 64, torch.device("cpu"), 0.05, ("fp32",))}
    assert measured_tflops(found, "fp32") == found["products"]["gflops"]["fp32"]["ceiling"] / 1000 > 0

"""Names as torch reports them, to the rates of the data sheets. Below 1 s."""

from __future__ import annotations

import pytest
import torch

from athanor.hardware import kernels
from athanor.hardware.peaks import find, measured_tflops, peak_tflops, peaks
from athanor.model.config import ModelConfig


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA H100 NVL", 835.0, 60.0),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A40", 149.7, 37.4),
        ("NVIDIA RTX A6000", 154.8, 38.7),
        ("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8, 125.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA B300", 2250.0, 75.0),
        ("NVIDIA H20", 148.0, 44.0),
        ("Tesla T4", None, 8.1),
        ("Tesla V100-PCIE-32GB", None, 14.0),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("NVIDIA GeForce RTX 2080 Ti", None, 13.4),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2, 34.1),
        ("NVIDIA GeForce RTX 3080", 59.5, 29.8),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1),
        ("NVIDIA GeForce RTX 5080", 112.6, 56.3),
        ("AMD Instinct MI50/MI60", None, 13.3),
        ("AMD Instinct MI250X", 191.5, 47.9),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("AMD Instinct MI355X", 2516.6, 157.3),
        ("AMD Radeon RX 7900 XTX", 122.8, 61.4),
        ("Radeon 8060S Graphics", 59.4, 29.7),
    ],
)
def test_dense_rates_by_device_name(name, bf16, fp32):
    assert (peak_tflops(name, "bf16"), peak_tflops(name, "fp32")) == (bf16, fp32)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10G",
        "Quadro RTX 6000",
        "NVIDIA T400",
    ],
)
def test_an_unknown_card_has_no_peak(name):
    assert find(name) is None and peak_tflops(name, "bf16") is None


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

"""What the makers' data sheets promise: dense matrix-multiply rates of accelerators, in TFLOPS.

Dense, not "with sparsity": sheets of NVIDIA's data-centre cards since 2020
print doubled figures. Consumer cards multiply 16-bit numbers at half rate when
they add up in fp32, which training does; that is the figure here. `fp32` is with AMD's
matrix cores where they take fp32, and without NVIDIA's tensor cores, which do
not (`tf32` is what they make of it). A card that is not in the table has no
peak: its model FLOPs utilisation is not known, and the machine's own measured
ceiling is the only comparison. The same for cards in laptops, whose rate
depends on the power they are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peak:
    """`pattern` must be found in the device's name, without regard to case; None: the card has no such unit."""

    pattern: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    source: str


_A100 = "NVIDIA A100 data sheet (2021)"
_HOPPER = "NVIDIA H100 data sheet (2023), H200 data sheet (2024): sparse figures halved"
_BLACKWELL = "NVIDIA Blackwell architecture brief, HGX B200 data sheet (2024)"
_ADA_PRO = "NVIDIA L4, L40S data sheets (2023): sparse figures halved"
_TURING = "NVIDIA Turing architecture whitepaper (2018), appendix: fp16 with fp32 accumulation"
_AMPERE = "NVIDIA Ampere GA102 whitepaper (2021), appendix: dense, fp32 accumulation"
_ADA = "NVIDIA Ada architecture whitepaper (2022), appendix: dense, fp32 accumulation"
_RTX50 = "NVIDIA RTX Blackwell architecture whitepaper (2025), appendix: dense, fp32 accumulation"
_RTX50_DERIVED = "derived: fp32 rate of the data sheet; the 16-bit rate with fp32 accumulation equals twice tf32's"
_MI50 = "AMD Radeon Instinct MI50 data sheet (2018): no matrix cores"
_CDNA = "AMD Instinct MI100 (2020), MI200 series (2021) data sheets; MI250X per graphics die, half of the card"
_CDNA3 = "AMD Instinct MI300X (2023), MI325X (2024) data sheets"
_CDNA4 = "AMD Instinct MI355X data sheet (2025)"
_RDNA3 = "AMD Radeon RX 7900 series pages (2022): twice the fp32 rate, dual issue"
_STRIX = "AMD Ryzen AI Max+ 395: 40 units · 512 fp16 operations per clock · 2.9 GHz"

# The first match counts, so longer names come before those they contain.
PEAKS = (
    # device                                 fp32   tf32   bf16   fp16
    Peak(r"A100", 19.5, 156.0, 312.0, 312.0, _A100),
    Peak(r"H200 NVL", 60.0, 417.5, 835.5, 835.5, _HOPPER),
    Peak(r"GH200|H200", 66.9, 494.7, 989.4, 989.4, _HOPPER),
    Peak(r"H100 NVL", 60.0, 417.5, 835.0, 835.0, _HOPPER),
    Peak(r"H100 PCIe", 51.2, 378.0, 756.0, 756.0, _HOPPER),
    Peak(r"H100", 66.9, 494.7, 989.4, 989.4, _HOPPER),
    Peak(r"\bB200", 75.0, 1100.0, 2250.0, 2250.0, _BLACKWELL),
    Peak(r"\bL40S", 91.6, 183.0, 362.0, 362.0, _ADA_PRO),
    Peak(r"\bL4\b", 30.3, 60.0, 121.0, 121.0, _ADA_PRO),
    Peak(r"RTX 2080 Ti", 13.4, None, None, 53.8, _TURING),
    Peak(r"RTX 2080 SUPER", 11.2, None, None, 44.6, _TURING),
    Peak(r"RTX 2080", 10.1, None, None, 40.3, _TURING),
    Peak(r"RTX 2070 SUPER", 9.1, None, None, 36.3, _TURING),
    Peak(r"RTX 2070", 7.5, None, None, 29.9, _TURING),
    Peak(r"RTX 2060 SUPER", 7.2, None, None, 28.7, _TURING),
    Peak(r"RTX 2060", 6.5, None, None, 25.8, _TURING),
    Peak(r"RTX 3090 Ti", 40.0, 40.0, 80.0, 80.0, _AMPERE),
    Peak(r"RTX 3090", 35.6, 35.6, 71.2, 71.2, _AMPERE),
    Peak(r"RTX 3080 Ti", 34.1, 34.1, 68.2, 68.2, _AMPERE),
    Peak(r"RTX 3080", 29.8, 29.8, 59.5, 59.5, _AMPERE),
    Peak(r"RTX 3070 Ti", 21.7, 21.7, 43.5, 43.5, _AMPERE),
    Peak(r"RTX 3070", 20.3, 20.3, 40.6, 40.6, _AMPERE),
    Peak(r"RTX 3060 Ti", 16.2, 16.2, 32.4, 32.4, _AMPERE),
    Peak(r"RTX 3060", 12.7, 12.7, 25.5, 25.5, _AMPERE),
    Peak(r"RTX 4090(?! D)", 82.6, 82.6, 165.2, 165.2, _ADA),
    Peak(r"RTX 4080 SUPER", 52.2, 52.2, 104.4, 104.4, _ADA),
    Peak(r"RTX 4080", 48.7, 48.7, 97.5, 97.5, _ADA),
    Peak(r"RTX 4070 Ti SUPER", 44.1, 44.1, 88.2, 88.2, _ADA),
    Peak(r"RTX 4070 Ti", 40.1, 40.1, 80.2, 80.2, _ADA),
    Peak(r"RTX 4070 SUPER", 35.5, 35.5, 71.0, 71.0, _ADA),
    Peak(r"RTX 4070", 29.1, 29.1, 58.3, 58.3, _ADA),
    Peak(r"RTX 4060 Ti", 22.1, 22.1, 44.1, 44.1, _ADA),
    Peak(r"RTX 4060", 15.1, 15.1, 30.2, 30.2, _ADA),
    Peak(r"RTX 5090(?! D)", 104.8, 104.8, 209.5, 209.5, _RTX50),
    Peak(r"RTX 5080", 56.3, 56.3, 112.6, 112.6, _RTX50),
    Peak(r"RTX 5070 Ti", 43.9, 43.9, 87.9, 87.9, _RTX50),
    Peak(r"RTX 5070", 30.9, 30.9, 61.7, 61.7, _RTX50),
    Peak(r"RTX 5060 Ti", 23.7, 23.7, 47.4, 47.4, _RTX50_DERIVED),
    Peak(r"RTX 5060", 19.2, 19.2, 38.4, 38.4, _RTX50_DERIVED),
    Peak(r"MI50\b|Vega 20", 13.3, None, None, 26.5, _MI50),
    Peak(r"MI100\b", 46.1, None, 92.3, 184.6, _CDNA),
    Peak(r"MI250X", 47.9, None, 191.5, 191.5, _CDNA),
    Peak(r"MI210\b", 45.3, None, 181.0, 181.0, _CDNA),
    Peak(r"MI300X", 163.4, 653.7, 1307.4, 1307.4, _CDNA3),
    Peak(r"MI325X", 163.4, 653.7, 1307.4, 1307.4, _CDNA3),
    Peak(r"MI355X", 157.3, None, 2516.6, 2516.6, _CDNA4),
    Peak(r"RX 7900 XTX", 61.4, None, 122.8, 122.8, _RDNA3),
    Peak(r"RX 7900 XT\b", 51.5, None, 103.0, 103.0, _RDNA3),
    Peak(r"RX 7900 GRE", 46.0, None, 91.9, 91.9, _RDNA3),
    Peak(r"Radeon 8060S|Strix Halo|gfx1151", 29.7, None, 59.4, 59.4, _STRIX),
)


def find(device_name: str) -> Peak | None:
    """The sheet of a device by the name torch gives it; None for a card that is not in the table."""
    if re.search(r"laptop|max-q|mobile", device_name, re.IGNORECASE):
        return None
    return next((peak for peak in PEAKS if re.search(peak.pattern, device_name, re.IGNORECASE)), None)


def peak_tflops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """The promised rate for `precision` (fp32, bf16, fp16); with `tf32`, fp32 products go the faster way."""
    peak = find(device_name)
    if peak is None:
        return None
    return getattr(peak, "tf32" if precision == "fp32" and tf32 and peak.tf32 else precision, None)


def measured_tflops(profile: Mapping[str, Any] | None, precision: str) -> float | None:
    """This machine's own matrix-multiply ceiling from its hardware profile; None where it was not measured."""
    value: Any = profile
    for key in ("products", "gflops", precision, "ceiling"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value / 1000 if isinstance(value, (int, float)) and value > 0 else None

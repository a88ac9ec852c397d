"""What the makers' data sheets promise: dense matrix-multiply rates of accelerators, in TFLOPS.

Dense, not "with sparsity": sheets of NVIDIA's data-centre cards since 2020
print doubled figures. Consumer cards multiply 16-bit numbers at half rate when
they add up in fp32, which training does; that is the figure here. `fp32` is with AMD's
matrix cores where they take fp32, and without NVIDIA's tensor cores, which do
not (`tf32` is what they make of it). A card that is not in the table has no
peak: its model FLOPs utilisation is not known, and the machine's own measured
ceiling is the only comparison. The same for cards in laptops, whose rate
depends on the power they are allowed.

The table is peaks.tsv beside this file. The first match counts, so longer names come before those they contain.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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


def _number(text: str) -> float | None:
    return float(text) if text else None


@functools.cache
def peaks() -> tuple[Peak, ...]:
    """The table beside this file, in which the first pattern that fits counts."""
    with open(Path(__file__).with_suffix(".tsv"), encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return tuple(Peak(pattern, *map(_number, numbers), source=source) for pattern, *numbers, source in rows)


def find(device_name: str) -> Peak | None:
    """The sheet of a device by the name torch gives it; None for a card that is not in the table."""
    if re.search(r"laptop|max-q|mobile", device_name, re.IGNORECASE):
        return None
    return next((peak for peak in peaks() if re.search(peak.pattern, device_name, re.IGNORECASE)), None)


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

"""Checking settings, for the runtimes that are not ours. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.errors import InputError

LEAST_HEAT = 1e-6  # as athanor.decoding.sampling has it: below it logits overflow, which can end a GPU's process
RANGES = {
    "temperature": (0, 100),
    "top_k": (0, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


def settings(given: Mapping[str, float], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of an answer: what was given, else the model's defaults. InputError for an impossible one."""
    found = {name: given.get(name, defaults.get(name)) for name in RANGES}
    for name, value in found.items():
        low, high = RANGES[name]
        open_below = name == "top_p"
        faint = name == "temperature" and 0 < value < LEAST_HEAT
        if not low <= value <= high or (open_below and value == low) or faint:
            fix = f"use {'more than ' if open_below else ''}{low} to {high}"
            fix += f", if not 0 then {LEAST_HEAT:g} at least" if faint else ""
            raise InputError(f"{value} is impossible", where=name, fix=fix)
    return found

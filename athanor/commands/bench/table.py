"""A hardware profile for a person to read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from athanor.hardware import policy
from athanor.hardware.products import LAYOUTS
from athanor.pipeline.progress import duration
from athanor.training.attention import KERNELS
from athanor.training.precision import AUTOCAST
from athanor.training.setup import Choices

_GIB = 2**30


def report(profile: Mapping[str, Any], choices: Choices, why: Mapping[str, str]) -> str:
    """The whole table, choices last."""
    about = profile["fingerprint"]
    lines = [f"{about['device']}, {about['threads']} threads, {profile['architecture']}, torch {about['torch']}"]
    lines += _products(profile) + _steps(profile) + _attention(profile.get("attention"))
    lines += _compile(profile) + _storage(profile)
    lines += ["", f"What auto comes to (measured in {duration(profile['seconds'])})"]
    for name, value in dataclasses.asdict(choices).items():
        word = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        shown = "by the trainer's rule" if name == "micro_batch_tokens" and not value else word
        lines.append(f"  {name:<19} {shown!s:<22} {why[name]}")
    return "\n".join(lines)


def _ordered(rows: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, Any]]:
    """Rows in the usual order of their names; a file sorts them."""
    return [(name, rows[name]) for name in names if name in rows]


def _products(profile: Mapping[str, Any]) -> list[str]:
    rows = profile["products"]
    lines = ["", f"Matrix products of this model, {rows['tokens']} tokens: GFLOPS"]
    lines.append(f"  {'':<6}" + "".join(f"{name.replace('_', ' '):>17}" for name in LAYOUTS) + f"{'all':>17}")
    for name, row in _ordered(rows["gflops"], AUTOCAST):
        lines.append(f"  {name:<6}" + "".join(f"{row[key]:>17,.1f}" for key in (*LAYOUTS, "ceiling")))
    return lines


def _steps(profile: Mapping[str, Any]) -> list[str]:
    lines = ["", "Training steps of two of its blocks and the output layer: tokens per second"]
    lines += [f"  {name:<6}{speed:>17,.0f}" for name, speed in _ordered(profile["steps"], AUTOCAST)]
    for name, fine in profile["stable"].items():
        lines.append(f"  {name} {'stays finite' if fine else 'does not stay finite'}")
    if rows := profile.get("micro_batch"):
        told = ", ".join(f"{row['rows']}: {row['tokens_per_second']:,.0f}" for row in rows)
        lines.append(f"  by rows of a micro-batch: {told}")
    return lines


def _attention(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return ["", "Attention: rows so short are worked by hand on a CPU; machine.attention: a kernel's name for torch's"]
    default = measured["default"]
    title = f"Attention in {measured['precision']}, forward and backward of {measured['rows']} rows: milliseconds"
    lines = ["", title, f"  {'':<10}{'one document':>14}{'several':>12}{'error':>10}"]
    for name, row in _ordered(measured["kernels"], KERNELS):
        if not row["works"]:
            lines.append(f"  {name:<10}not here ({row['why'][:90]})")
            continue
        several = f"{1e3 * row['documents_seconds']:.2f}" if "documents_seconds" in row else "no mask"
        marks = "  torch's own choice" if name == default else ""
        lines.append(f"  {name:<10}{1e3 * row['plain_seconds']:>14.2f}{several:>12}{row['plain_error']:>10.0e}{marks}")
    if measured["default_documents"] != default:
        lines.append(f"  for several documents in a row torch takes {measured['default_documents']}")
    return lines


def _compile(profile: Mapping[str, Any]) -> list[str]:
    row = profile["compile"]
    if not row["works"]:
        return ["", f"Compiled blocks: not available ({row['why']})"]
    gain = row["eager_seconds"] / row["compiled_seconds"]
    blocks = policy.break_even(row, 1.0)
    after = "never pays" if math.isinf(blocks) else f"pays after {blocks:,.0f} blocks"
    return [
        "",
        f"Compiled blocks: {gain:.2f} times as fast ({1e3 * row['eager_seconds']:.2f} to"
        f" {1e3 * row['compiled_seconds']:.2f} ms), {row['cold_seconds']:.0f} s to compile, {after}",
    ]


def _storage(profile: Mapping[str, Any]) -> list[str]:
    loader, disk, memory = profile["loader"], profile["checkpoint"], profile["memory"]
    rate = f"{loader['tokens_per_second']:,.0f} tokens per second" if loader["works"] else f"skipped ({loader['why']})"
    speed = disk["bytes_per_second"]
    written = f"{speed / 1e6:,.0f} MB/s with fsync" if speed else f"failed ({disk['why']})"
    total, free = memory["total_bytes"], memory["free_bytes"]
    rows = ((free, "free"), (total, "in all"))
    amounts = [f"{value / _GIB:.1f} GiB {word}" for value, word in rows if value is not None]
    return ["", f"Loader      {rate}", f"Checkpoints {written}", f"Memory      {', '.join(amounts) or 'unknown'}"]

"""The points of a learning-rate probe and their parabola as an SVG of its own: no script, no font, no other file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 55
STYLE = (
    "text{font:13px sans-serif;fill:#333}.axis{stroke:#888}.grid{stroke:#ddd}.fit{fill:none;stroke:#c60;stroke-width:2}"
    ".range{fill:#c60;fill-opacity:.12}.point{fill:#069}.bad{stroke:#b00;stroke-width:2}"
    ".now{stroke:#069;stroke-dasharray:4 4}"
)


def svg(told: Mapping[str, Any], rate: float) -> str:
    """`told` is metrics/probe_lr.json; `rate` is marked as pretrain.lr. Diverged rates are crosses at the top."""
    points = told["points"]
    good = [point for point in points if point["bpb"] is not None]
    rates = [point["lr"] for point in points]
    left, right = math.log(min(rates)), math.log(max(rates))
    pad = 0.05 * (right - left) or 1.0
    low, high = (min(p["bpb"] for p in good), max(p["bpb"] for p in good)) if good else (0.0, 1.0)
    margin = 0.1 * (high - low) or 0.1

    def x(lr: float) -> float:
        share = (math.log(lr) - left + pad) / (right - left + 2 * pad)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(bpb: float) -> float:
        share = (bpb - low + margin) / (high - low + 2 * margin)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    base = HEIGHT - BOTTOM
    parts = [_text(WIDTH / 2, 22, f"Learning rate: {told['tokens']:,} tokens at each point", "middle")]
    if told["inside"]:
        start, end = x(told["lowest"]), x(told["highest"])
        size = f'width="{end - start:.1f}" height="{base - TOP}"'
        parts.append(f'<rect class="range" x="{start:.1f}" y="{TOP}" {size}/>')
        parts.append(_text(x(told["optimum"]), TOP + 14, f"{told['optimum']:.3g}", "middle"))
    for place in range(5):
        value = low + (high - low) * place / 4
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.3f}", "end"))
    for lr in rates:
        parts.append(_text(x(lr), base + 18, f"{lr:g}", "middle"))
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}"/>')
    if left - pad <= math.log(rate) <= right + pad:
        parts.append(f'<line class="now" x1="{x(rate):.1f}" x2="{x(rate):.1f}" y1="{TOP}" y2="{base}"/>')
    if told["parabola"]["a"]:
        parts.append(_parabola(told, x, y, high + margin))
    for point in points:
        at = x(point["lr"])
        if point["bpb"] is None:
            parts.append(f'<path class="bad" d="M{at - 5:.1f} {TOP + 25}l10 10m0 -10l-10 10"/>')
        else:
            parts.append(f'<circle class="point" cx="{at:.1f}" cy="{y(point["bpb"]):.1f}" r="4"/>')
    words = "learning rate (dashed: pretrain.lr; shaded: as good as the optimum)"
    parts.append(_text(WIDTH / 2, HEIGHT - 12, words, "middle"))
    parts.append(_text(LEFT, TOP - 8, "bits per byte", "middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _parabola(told: Mapping[str, Any], x: Any, y: Any, highest: float) -> str:
    """The curve over the range of the points, as far as it is inside the picture."""
    rates, best, fit = [point["lr"] for point in told["points"]], told["best"]["lr"], told["parabola"]
    shape = []
    for number in range(101):
        lr = min(rates) * (max(rates) / min(rates)) ** (number / 100)
        at = math.log(lr / best)
        value = fit["a"] * at * at + fit["b"] * at + fit["c"]
        if value <= highest:
            shape.append(f"{x(lr):.1f} {y(value):.1f}")
    return f'<path class="fit" d="M{"L".join(shape)}"/>' if shape else ""


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

"""Measure the learning rate: short runs of the pretrain recipe at several rates, and their optimum (docs/probe.md).

athanor probe lr [--force]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, write_text
from athanor.base.strict import read_yaml
from athanor.cli import side
from athanor.cli.render import fill_template
from athanor.runtime import dvc_lock
from athanor.runtime.closure import PROBES
from athanor.runtime.facts import flatten
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.sizing.optimiser import Recipe, check

LEFT, RIGHT, TOP, BOTTOM = 70, 620, 40, 345  # of the picture's frame, see templates/probe.svg.j2
STAGE_FILE = Path(PROBES) / "lr.yaml"
STAGE = "probe-lr"
METRICS, CHART = Path("metrics/probe_lr.json"), Path("plots/probe_lr.svg")
FAR_RATIO = 2.0  # times the optimum, up or down, before plan speaks of it
# A probe says the same about these, whatever they are.
NOT_PROBED = ("lr", "sample_every_tokens", "sample_prompts", "validation_every_tokens")


def recipe_of(built: Mapping[str, Any]) -> Recipe:
    """The pretrain recipe of a params file; the model's size is not known before its tokenizer's vocabulary is."""
    params, model = built["pretrain"], built["model"]
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    names = [field.name for field in dataclasses.fields(Recipe) if field.name != "parameters"]
    return Recipe(**{name: getattr(params, name) for name in names}, parameters=config.parameter_count())


def warnings(root: Path, built: Mapping[str, Any]) -> list[str]:
    """What is out of line in the pretrain recipe, for `athanor plan`."""
    warning = far_from_probe(root, built)
    return [*(f"recipe: {line}" for line in check(recipe_of(built))), *([warning] if warning else [])]


def far_from_probe(root: Path, built: Mapping[str, Any]) -> str:
    """What a current probe of this recipe says against pretrain.lr; "" where the rate is near the optimum."""
    if not (root / METRICS).is_file() or not _current(root):
        return ""
    probed, lr = read_json(root / METRICS), built["pretrain"].lr
    if not probed["inside"] or 1 / FAR_RATIO <= lr / probed["optimum"] <= FAR_RATIO:
        return ""
    ratio = lr / probed["optimum"]
    ratio_text = f"{max(ratio, 1 / ratio):.1f} times {'above' if ratio > 1 else 'below'}"
    return f"pretrain.lr {lr:g} is {ratio_text} the optimum that athanor probe lr found, {probed['optimum']:.3g}"


def _current(root: Path) -> bool:
    """Whether the probe was made with the recipe and the data of now, as far as DVC's files tell without hashing."""
    if not (root / side.LOCK).is_file() or not (root / "dvc.lock").is_file():
        return False
    locked = dvc_lock.stages(root / side.LOCK).get(STAGE, {})
    probed = dict(flatten(locked.get("params", {}).get(PARAMS.name, {})))
    values = read_yaml(root / PARAMS)
    current = dict(flatten({section: values.get(section) for section in ("model", "pretrain", "probe_lr")}))
    skipped = tuple(f"pretrain.{name}" for name in NOT_PROBED)
    if any(
        probed.get(name) != current.get(name) for name in probed.keys() | current.keys() if not name.startswith(skipped)
    ):
        return False
    outputs = dvc_lock.outputs(root / dvc_lock.LOCK)
    data = {dep["path"]: dep.get("md5") for dep in locked.get("deps", []) if dep["path"] in outputs}
    return all(outputs[path] == md5 for path, md5 in data.items())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("lr",), help="the learning rate")
    parser.add_argument("--force", action="store_true", help="even if nothing has changed")


def run(args: argparse.Namespace) -> int:
    """Run the side stage by DVC, then show what it found."""
    root = Path.cwd()
    built = check_file(PARAMS)
    status = side.repro(root, STAGE_FILE, STAGE, args.force)
    if status:
        print("\nthe probe did not finish: the message is above. Rates that were done are kept.", file=sys.stderr)
        return status
    probed = read_json(root / METRICS)
    write_text(root / CHART, chart(probed, built["pretrain"].lr))
    print(report(probed, built["pretrain"].lr, built["pretrain"].tokens), end="")
    return 0


def report(probed: Mapping[str, Any], run_lr: float, run_tokens: int) -> str:
    """The points, the optimum and what to do about it."""
    return fill_template("probe.txt.j2", found=probed, rate=run_lr, run_tokens=run_tokens, chart=CHART.as_posix())


def chart(probed: Mapping[str, Any], run_lr: float) -> str:
    """`found` is metrics/probe_lr.json; `rate` is marked as pretrain.lr. Diverged rates are crosses at the top."""
    rates = [point["lr"] for point in probed["points"]]
    scores = [point["bpb"] for point in probed["points"] if point["bpb"] is not None] or [0.0, 1.0]
    log_min, log_max, low, high = math.log(min(rates)), math.log(max(rates)), min(scores), max(scores)
    pad, margin = 0.05 * (log_max - log_min) or 1.0, 0.1 * (high - low) or 0.1

    def x(lr: float) -> float:
        return LEFT + (math.log(lr) - log_min + pad) / (log_max - log_min + 2 * pad) * (RIGHT - LEFT)

    def y(bpb: float) -> float:
        return BOTTOM - (bpb - low + margin) / (high - low + 2 * margin) * (BOTTOM - TOP)

    curve, fit = [], probed["parabola"]
    for number in range(101 if fit["a"] else 0):
        lr = min(rates) * (max(rates) / min(rates)) ** (number / 100)
        log_ratio = math.log(lr / probed["best"]["lr"])
        value = fit["a"] * log_ratio * log_ratio + fit["b"] * log_ratio + fit["c"]
        if value <= high + margin:
            curve.append((x(lr), y(value)))
    inside = log_min - pad <= math.log(run_lr) <= log_max + pad
    grid = [low + (high - low) * line / 4 for line in range(5)]
    return (
        fill_template("probe.svg.j2", found=probed, rate=run_lr if inside else None, x=x, y=y, curve=curve, grid=grid)
        + "\n"
    )

"""One dial: from the hours you have (or tokens, parameters, disk) to a recipe for this machine or another.

    athanor recipe --hours 0.25                     for this machine, which is measured for a quarter of a minute
    athanor recipe --hours 8 --device "rtx 4090" --from plasma-1.1 --save night

The text and the conversations are those of params.yaml, or of the preset that --from names; sources of the hub are cut to
what the recipe reads. What follows from published laws and our measurements: shape, context, tokens, batch, rates, epochs of
fine-tuning. --write puts the lines into params.yaml; --save NAME keeps them as presets/NAME.yaml, for `athanor preset use`.
docs/recipe.md says what the forecast was worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_text
from athanor.base.errors import ParamsError, suggest
from athanor.base.strict import read_yaml
from athanor.cli.cli import positive
from athanor.cli.render import fill_template, size
from athanor.model.config import ModelConfig
from athanor.runtime import presets
from athanor.runtime.dvc_view import edited_yaml
from athanor.runtime.machine import machine
from athanor.runtime.progress import duration
from athanor.runtime.schema import check_values
from athanor.sizing import devices
from athanor.sizing.data import Data, data_of
from athanor.sizing.lines import Key, lines_of
from athanor.sizing.solve import Recipe, Speed, Wish, choose
from athanor.training.memory import Parts, StepFootprint, parts
from athanor.training.pretrain_params import PretrainParams

PARAMS, FOLDER = Path("params.yaml"), Path("presets")
GB = 1e9
TEXT_ENDS = 0.8  # of the hours: a recipe that takes less is bounded by its text
BUSY = 0.5  # of each core, used by others while steps are timed
SEVERAL = (2, 4, 8)  # devices whose share of the memory is told
# What a forecast may be off: two runs here stayed within 3 %; published runs of one card differ by a factor of two.
ERRORS = {True: "± 20 %", False: "as others reached: within a factor of 1.5"}
AT_LEAST = "at least: its row of the table is a bound (docs/recipe.md)"


def options(parser: argparse.ArgumentParser) -> None:
    number = positive(float)
    parser.add_argument("--hours", type=number, help="for all stages together")
    parser.add_argument("--tokens", type=number, help="of pretraining; 2e9 is fine")
    parser.add_argument("--params", type=number, help="parameters at most; 1e8 is fine")
    parser.add_argument("--disk", type=number, metavar="GB", help="that text and checkpoints may take")
    parser.add_argument("--device", metavar="NAME", help=f"another device: {', '.join(devices.names())}")
    parser.add_argument("--count", type=positive(int), default=1, metavar="N", help="how many of --device")
    parser.add_argument(
        "--from", dest="base", metavar="PRESET", help="whose text and conversations; default: params.yaml"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--write", action="store_true", help="put the lines into params.yaml")
    output.add_argument("--save", metavar="NAME", help="keep them as presets/NAME.yaml")
    output.add_argument("--json", action="store_true", help="for scripts")


def run(args: argparse.Namespace) -> int:
    if args.write and args.base:
        fix = "--save NAME, then athanor preset use NAME"
        raise ParamsError("--write edits params.yaml, and --from begins with another file", where="--write", fix=fix)
    values = _values(args.base)
    built = check_values(values)
    wish = Wish(
        args.hours, *(value and int(value) for value in (args.tokens, args.params, args.disk and args.disk * GB))
    )
    data = data_of(Path.cwd(), built)
    if args.device:
        speed: Speed = devices.find(args.device, args.count)
        recipe = choose(wish, data, speed)
    else:
        recipe, speed = _measured(wish, data, built["pretrain"])
    lines = lines_of(recipe, values, data)
    check_values(_with(values, lines))
    facts = _facts(recipe, speed, data, wish)
    if args.json:
        print(
            json.dumps({**facts, "lines": {".".join(map(str, key)): value for key, value in lines.items()}}, indent=2)
        )
        return 0
    error = AT_LEAST if getattr(speed, "counted", "")[:5] == "bound" else ERRORS[not args.device]
    text = fill_template("recipe.txt.j2", **facts, recipe=recipe, lines=_nested(lines), duration=duration, error=error)
    print(text, end="")
    if args.save:
        path = FOLDER / f"{args.save}.yaml"
        write_text(path, _preset(args, facts, lines))
        print(f"\nkept as {path}: athanor preset use {args.save}")
    elif args.write:
        write_text(PARAMS, edited_yaml(PARAMS.read_text(encoding="utf-8"), lines))
        print("\nwritten to params.yaml; `athanor plan` says what would run, `athanor repro` runs it")
    else:
        print(
            "\n--write puts these lines into params.yaml" if not args.base else "\n--save NAME keeps them as a preset"
        )
    return 0


def _values(base: str | None) -> dict[str, Any]:
    if base is None:
        return read_yaml(PARAMS)
    if base not in (known := presets.names(FOLDER)):
        raise ParamsError(f"no preset '{base}'", where="--from", fix=suggest(base, known))
    return presets.values(FOLDER / f"{base}.yaml")


def _measured(wish: Wish, data: Data, pretrain: PretrainParams) -> tuple[Recipe, Speed]:
    """The recipe for this machine: choose, measure the shape that was chosen, until it is a measured one."""
    from athanor.sizing.shapes import LADDER
    from athanor.sizing.speed import Measured

    print("measuring training steps on this machine", file=sys.stderr)
    speed = Measured(machine(), pretrain)
    first = LADDER[1] if speed.on_cpu else LADDER[6]
    speed.measure(first.config(data.vocab_size or 16_384, 256), 2048)
    while not speed.is_measured((recipe := choose(wish, data, speed)).config):
        speed.measure(recipe.config, recipe.batch_tokens)
    speed.keep()
    if speed.load > BUSY:
        busy = f"others compute here, {speed.load:.1f} processes for each core"
        print(f"{busy}: on an idle machine the recipe is another one", file=sys.stderr)
    return recipe, speed


def _facts(recipe: Recipe, speed: Speed, data: Data, wish: Wish) -> dict[str, Any]:
    one, shared = memory_of(speed, recipe.config, recipe.batch_tokens)
    hours = recipe.total_seconds / 3600
    return {
        "device": speed.name,
        "parameters": recipe.config.parameter_count(),
        "tokens": recipe.tokens,
        "sft_tokens": int(recipe.sft_epochs * data.sft_tokens),
        "tokens_per_second": recipe.tokens / (recipe.seconds["pretrain"]),
        "passes": recipe.tokens / data.unique_tokens,
        "seconds": recipe.seconds,
        "hours": hours,
        "text_ends": wish.hours is not None and hours < TEXT_ENDS * wish.hours,
        "bits_per_byte": recipe.bits_per_byte,
        "law": data.law.source,
        "memory_bytes": dataclasses.asdict(one),
        "memory_total": one.total,
        "memory_shared": {count: several.total for count, several in shared.items()},
        "memory": memory_lines(one, shared),
        "disk_bytes": recipe.disk_bytes,
        "watts": speed.watts,
        "kwh": hours * speed.watts / 1000,
    }


def memory_of(speed: Speed, config: ModelConfig, batch_tokens: int) -> tuple[Parts, dict[int, Parts]]:
    """What a training step takes by its parts: of this device, and of each of several accelerators that share the model."""
    footprint: StepFootprint = speed.footprint(config, batch_tokens)
    several = SEVERAL if speed.device.type != "cpu" else ()
    one, *shared = (parts(config, footprint, speed.device, shards=count) for count in (1, *several))
    return one, dict(zip(several, shared, strict=True))


def memory_lines(one: Parts, shared: Mapping[int, Parts]) -> list[str]:
    named = ", ".join(f"{name} {size(value)}" for name, value in dataclasses.asdict(one).items() if value)
    each = ", ".join(f"{size(several.total)} on each of {count}" for count, several in shared.items())
    return [f"{size(one.total)}: {named}", *([f"shared (fsdp): {each}"] if each else [])]


def _nested(lines: Mapping[Key, Any]) -> str:
    """Lines as YAML; entries of lists by their number are left to the preset's text, which has them whole."""
    from dvc.utils.serialize import dumps_yaml

    nested: dict[str, Any] = {}
    for key, value in lines.items():
        if not any(isinstance(part, int) for part in key):
            inner: Any = nested
            for part in key[:-1]:
                inner = inner.setdefault(part, {})
            inner[key[-1]] = value
    return str(dumps_yaml(nested))


def _with(values: Mapping[str, Any], lines: Mapping[Key, Any]) -> dict[str, Any]:
    copy = json.loads(json.dumps(values))
    for (*path, last), value in lines.items():
        inner = copy
        for part in path:
            inner = inner[part]
        inner[last] = value
    return copy


def _preset(args: argparse.Namespace, facts: Mapping[str, Any], lines: Mapping[Key, Any]) -> str:
    """An overlay on the preset of --from (or the default): entries of lists are named, with what differs."""
    from dvc.utils.serialize import dumps_yaml

    base = args.base or presets.DEFAULT
    values: Any = presets.values(FOLDER / f"{base}.yaml")
    overlay: dict[str, Any] = {} if base == presets.DEFAULT else {"base": base}
    for key, value in lines.items():
        number = next((index for index, part in enumerate(key) if isinstance(part, int)), None)
        inner: Any = overlay
        for part in key[: -1 if number is None else number - 1]:
            inner = inner.setdefault(part, {})
        if number is None:
            inner[key[-1]] = value
            continue
        entries = inner.setdefault(key[number - 1], [{"name": entry["name"]} for entry in values[key[0]][key[1]]])
        entries[key[number]][key[-1]] = value
    wish = " ".join(
        f"--{name} {getattr(args, name):g}" for name in ("hours", "tokens", "params", "disk") if getattr(args, name)
    )
    device = f" --device '{args.device}'" if args.device else ""
    head = (
        f"# By the hour: {facts['parameters']:,} parameters on {facts['tokens']:,} tokens, "
        f"{duration(3600 * facts['hours'])} on {facts['device']}.\n"
        f"# By athanor recipe {wish}{device} --from {base}; docs/recipe.md says what its forecast is worth.\n"
    )
    return head + str(dumps_yaml(overlay))

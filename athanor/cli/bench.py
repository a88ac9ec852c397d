"""Measurements of this machine.

    python -m athanor bench hardware [--again] [--json]

`hardware` measures what training by the model and batch of params.yaml can
expect here and stores it in .athanor/hardware.json, where every `auto` of
the machine settings finds it. A profile of the same machine, torch and model
is shown as it is; --again measures anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from athanor.base.strict import load_section
from athanor.cli.render import fill_template
from athanor.hardware import measure, policy, profile
from athanor.hardware.kernels import LAYOUTS
from athanor.hardware.policy import Record, Requested, resolve
from athanor.model import gpu_family
from athanor.model.device import prepare
from athanor.model.precision import AUTOCAST
from athanor.runtime.machine import anchor, machine
from athanor.runtime.progress import duration
from athanor.tokenizer_training.params import TokenizerParams
from athanor.training.attention import KERNELS
from athanor.training.memory import available_bytes
from athanor.training.model_params import ModelParams
from athanor.training.pretrain_params import PretrainParams
from athanor.training.setup import check_batch
from athanor.training.vocabulary import load_vocabulary

PARAMS = Path("params.yaml")


def options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="hardware")
    hardware = kinds.add_parser("hardware", help="for the model of params.yaml: formats, kernels, compiler, disk")
    hardware.add_argument("--again", action="store_true", help="measure although there is a profile")
    hardware.add_argument("--json", action="store_true", help="the profile itself")


def run(args: argparse.Namespace) -> int:
    profile, text = _hardware(args.again)
    print(json.dumps(profile, indent=2) if args.json else text)
    return 0


def _hardware(remeasure: bool) -> tuple[dict[str, object], str]:
    local, root = machine(), anchor()
    pretrain = load_section(PARAMS, "pretrain", PretrainParams)
    config = load_section(PARAMS, "model", ModelParams).config(vocabulary_size())
    check_batch(config, pretrain.batch_tokens, "pretrain")
    device = prepare(local.device, local.threads)
    free = available_bytes(device)
    measured_profile = None if remeasure else profile.load(root, profile.fingerprint(config, device, local.threads))
    if measured_profile is None:
        measured_profile = measure.measure(
            config,
            device,
            local.threads,
            precision=pretrain.precision,
            batch_tokens=pretrain.batch_tokens,
            root=root,
            bounds=measure.Bounds(compile=0.0) if local.compile == "off" else measure.Bounds(),
            report=lambda part: print(f"measuring: {part}", file=sys.stderr, flush=True),
        )
        profile.save(root, measured_profile)
    params = {name: getattr(pretrain, name) for name in ("precision", "batch_tokens", "optimizer")}
    requested = Requested.of(local, config, device, pretrain.tokens // pretrain.batch_tokens, **params)
    record = resolve(requested, gpu_family.identify(device), config, measured_profile, free)
    return measured_profile, report(measured_profile, record)


def vocabulary_size() -> int:
    """The size of the trained tokenizer's vocabulary, or the configured size when none is trained."""
    trained = Path("models/tokenizer")
    if (trained / "manifest.json").is_file():
        return load_vocabulary(trained).size
    return load_section(PARAMS, "tokenizer", TokenizerParams).vocab_size


def report(profile: Mapping[str, Any], record: Record) -> str:
    """The profile as text for a person, with the choices at the end."""
    compiled = profile["compile"]
    return fill_template(
        "bench.txt.j2",
        profile=profile,
        choices=dataclasses.asdict(record.choices),
        why=record.why,
        duration=duration(profile["seconds"]),
        break_even=policy.break_even(compiled, 1.0) if compiled["works"] else math.inf,
        layouts=LAYOUTS,
        precisions=AUTOCAST,
        kernels=KERNELS,
    ).rstrip("\n")

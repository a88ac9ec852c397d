"""Every section of params.yaml and its schema, to check the whole file before the first costly stage.

Lives on the infrastructure side on purpose: stages depend only on the sections
they read, so a new evaluation parameter does not make the download stale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from athanor.base.errors import ParamsError, suggest
from athanor.base.host import free_memory_bytes
from athanor.base.strict import build, read_yaml
from athanor.runtime.redact import redact
from athanor.tokenizer_training.params import MEMORY_FACTOR
from athanor.training.sft_params import SCRATCH


def schemas() -> dict[str, type]:
    """Section name to dataclass, in the order of params.yaml."""
    from athanor.chat_data.params import SftDataParams
    from athanor.classifiers.params import ClassifiersParams
    from athanor.cleaning.params import CleanParams
    from athanor.data.mixture_params import MixtureParams
    from athanor.evaluation.params import EvalParams
    from athanor.export.params import ExportParams
    from athanor.rewards.params import GrpoDataParams
    from athanor.sharding.params import ShardParams
    from athanor.sources.battery_params import BatteryParams
    from athanor.sources.instruct_params import InstructParams
    from athanor.sources.params import DownloadParams
    from athanor.synthesis.params import SyntheticParams
    from athanor.tokenizer_training.params import TokenizerParams
    from athanor.training.model_params import ModelParams
    from athanor.training.pretrain_params import PretrainParams
    from athanor.training.probe_params import ProbeLrParams
    from athanor.training.sft_params import SftParams
    from athanor.tuning.pair_params import DpoDataParams
    from athanor.tuning.params import DpoParams, GrpoParams, SideParams, TuneParams

    return {
        "download": DownloadParams,
        "instruct": InstructParams,
        "battery": BatteryParams,
        "classifiers": ClassifiersParams,
        "clean": CleanParams,
        "mixture": MixtureParams,
        "tokenizer": TokenizerParams,
        "shard": ShardParams,
        "sft_data": SftDataParams,
        "model": ModelParams,
        "pretrain": PretrainParams,
        "probe_lr": ProbeLrParams,
        "sft": SftParams,
        "side": SideParams,
        "tune": TuneParams,
        "grpo_data": GrpoDataParams,
        "grpo": GrpoParams,
        "dpo_data": DpoDataParams,
        "dpo": DpoParams,
        "eval": EvalParams,
        "export": ExportParams,
        "synthetic": SyntheticParams,
    }


def check_file(path: str | Path) -> dict[str, Any]:
    """Validate a whole params file; returns its sections built. ParamsError names the first bad key."""
    return check_values(read_yaml(path))


def check_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """`check_file` for what such a file holds."""
    known = schemas()
    for section in data:
        if section not in known:
            raise ParamsError("unknown section", where=str(section), fix=suggest(section, known))
    missing = [name for name in known if name not in data]
    if missing:
        raise ParamsError("section is missing", where=missing[0], fix="copy it from presets/default.yaml")
    built = {name: build(schema, data[name], name) for name, schema in known.items()}
    check_together(built)
    return built


def filled(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as in a params file, completed by the defaults of the keys that it leaves out."""
    known = schemas()
    present = {name: value for name, value in sections.items() if name in known and isinstance(value, Mapping)}
    return {
        **sections,
        **{name: dataclasses.asdict(build(known[name], value, name)) for name, value in present.items()},
    }


def check_together(sections: Mapping[str, Any]) -> None:
    """ParamsError when sections do not fit each other; a stage would find it, but after hours of others."""
    mixture, sft = sections["mixture"], sections["sft"]
    if sft.base != SCRATCH:
        fix = "set it to scratch; to tune another model name it in side.base: athanor side tune"
        raise ParamsError(f"'{sft.base}' is not what the pipeline trains", where="sft.base", fix=fix)
    source_names = sections["download"].names
    published = []  # what goes into every document, or into the model card
    for section in ("download", "instruct", "dpo_data"):
        for number, source in enumerate(sections[section].sources):
            where = f"{section}.sources[{number}]"
            for index, file in enumerate(getattr(source, "urls", ())):
                fix = "fetch the file by hand and use a source of type files"
                place = f"{where}.urls[{index}]"
                published.append((place, file, fix) if isinstance(file, str) else (f"{place}.url", file.url, fix))
            fix = "name the licence, or an address that everybody may have"
            published.append((f"{where}.license", getattr(source, "license", ""), fix))
    for where, text, fix in published:
        if redact(text) != text:
            raise ParamsError("holds a signature, key or password", where=where, fix=fix)
    _check_same_names(
        "mixture.sources", mixture.sources, "download.sources", source_names, "add it, with share 0 to leave it out"
    )
    for name in sections["clean"].source_priority:
        if name not in source_names:
            fix = f"use some of: {', '.join(sorted(source_names))}"
            raise ParamsError(f"no source is named '{name}'", where="clean.source_priority", fix=fix)
    chats = [source.name for source in sections["instruct"].sources]
    _check_same_names(
        "sft_data.sources",
        sections["sft_data"].sources,
        "instruct.sources",
        chats,
        "add it, with repeats 0 to leave it out",
    )
    sections["sft_data"].check_named("sft_data")
    if mixture.cooldown is not None and sections["pretrain"].schedule != "wsd":
        fix = "set pretrain.schedule to wsd, or mixture.cooldown to null"
        raise ParamsError(
            f"schedule {sections['pretrain'].schedule} has no cooldown", where="mixture.cooldown", fix=fix
        )


def memory_notes(sections: Mapping[str, Any]) -> list[str]:
    """Warnings about what will not fit the memory that is free now, before hours are spent on other stages."""
    sample, free = sections["tokenizer"].sample_bytes, free_memory_bytes()
    if (needed := MEMORY_FACTOR * sample) <= free:
        return []
    return [
        f"train-tokenizer will want up to {needed / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB are free:"
        f" lower tokenizer.sample_bytes (now {sample}), unless there is less text"
    ]


def _check_same_names(where: str, named: Iterable[str], other: str, expected: Iterable[str], fix_missing: str) -> None:
    for name in sorted(set(expected) - set(named)):
        raise ParamsError(f"'{name}' of {other} is missing", where=where, fix=fix_missing)
    for name in sorted(set(named) - set(expected)):
        fix = suggest(name, expected, f"remove it, or add it to {other}", cutoff=0.6)
        raise ParamsError(f"{other} has no '{name}'", where=f"{where}.{name}", fix=fix)

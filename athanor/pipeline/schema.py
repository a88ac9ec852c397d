"""Every section of params.yaml and its schema, to check the whole file before the first costly stage.

Lives on the infrastructure side on purpose: stages depend only on the sections
they read, so a new evaluation parameter does not make the download stale.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from athanor.errors import ParamsError
from athanor.params.strict import build, read_yaml


def schemas() -> dict[str, type]:
    """Section name to dataclass, in the order of params.yaml."""
    from athanor.params.battery import BatteryParams
    from athanor.params.classifiers import ClassifiersParams
    from athanor.params.clean import CleanParams
    from athanor.params.download import DownloadParams
    from athanor.params.eval import EvalParams
    from athanor.params.export import ExportParams
    from athanor.params.instruct import InstructParams
    from athanor.params.mixture import MixtureParams
    from athanor.params.model import ModelParams
    from athanor.params.pretrain import PretrainParams
    from athanor.params.sft import SftParams
    from athanor.params.sft_data import SftDataParams
    from athanor.params.shard import ShardParams
    from athanor.params.tokenizer import TokenizerParams

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
        "sft": SftParams,
        "eval": EvalParams,
        "export": ExportParams,
    }


def check_file(path: str | Path) -> dict[str, Any]:
    """Validate a whole params file; returns its sections built. ParamsError names the first bad key."""
    data = read_yaml(path)
    known = schemas()
    for section in data:
        if section not in known:
            near = difflib.get_close_matches(str(section), known, n=1, cutoff=0.0)
            raise ParamsError("unknown section", where=str(section), fix=f"did you mean '{near[0]}'?")
    missing = [name for name in known if name not in data]
    if missing:
        raise ParamsError("section is missing", where=missing[0], fix="copy it from presets/")
    return {name: build(schema, data[name], name) for name, schema in known.items()}

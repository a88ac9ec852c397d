"""Sections that do not fit each other are refused with the whole file, before the first stage runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from athanor.base.errors import ParamsError
from athanor.base.strict import read_yaml
from athanor.runtime.schema import check_file
from tests.runtime.view import ROOT


def _add(section: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[section]["sources"].__setitem__(name, value)


def _cosine(data: dict[str, Any]) -> None:
    data["mixture"]["cooldown"] = {"sources": {"python-code": {"share": 1.0, "max_epochs": 1.0}}}
    data["pretrain"]["schedule"] = "cosine"


SHARE = {"share": 1.0, "max_epochs": 1.0}
CHAT = {"max_copies": 1, "repeats": 1, "max_supervised_tokens": None}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_add("mixture", "python-doc", SHARE), "mixture.sources.python-doc.*download.sources has no.*'python-docs'"),
        (_add("sft_data", "stories", CHAT), "sft_data.sources.stories.*remove it, or add it to instruct.sources"),
        (
            lambda data: data["mixture"]["sources"].pop("python-code"),
            "mixture.sources: 'python-code' of download.sources",
        ),
        (lambda data: data["sft_data"]["sources"].pop("identity"), "sft_data.sources: 'identity' of instruct.sources"),
        (
            lambda data: data["clean"]["source_priority"].append("wiki"),
            "clean.source_priority: no source is named 'wiki'",
        ),
        (
            lambda data: data["sft_data"]["source_priority"].append("stories"),
            "sft_data.source_priority: 'stories' is not a source.*identity",
        ),
        (_cosine, "mixture.cooldown: schedule cosine has no cooldown.*wsd"),
    ],
)
def test_sections_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    data = read_yaml(ROOT / "params.yaml")
    with open(tmp_path / "params.yaml", "w", encoding="utf-8") as file:
        YAML().dump(data, file)
    check_file(tmp_path / "params.yaml")
    change(data)
    with open(tmp_path / "params.yaml", "w", encoding="utf-8") as file:
        YAML().dump(data, file)
    with pytest.raises(ParamsError, match=told):
        check_file(tmp_path / "params.yaml")

"""Refuse a battery that answers without thought pass, before anything is downloaded or trained."""

from __future__ import annotations

from pathlib import Path

from athanor.base.errors import ParamsError
from athanor.base.strict import build, read_yaml
from athanor.evaluation.floors import check_floors
from athanor.runtime.facts import Graph
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import battery_items


def check_battery(root: Path, battery: BatteryParams) -> None:
    """Raise GateError for a category that such answers pass, ParamsError for one that holds too few items.

    It takes some seconds, so the items that download recorded are not checked again: they were before it ran.
    """
    if "download" in Graph(root).stages and not _checked_before(root, battery):
        check_floors(battery_items(battery))


def _checked_before(root: Path, battery: BatteryParams) -> bool:
    lock = root / "dvc.lock"
    try:
        recorded = read_yaml(lock)["stages"]["download"]["params"]["params.yaml"]["battery"]
        params = build(BatteryParams, recorded, "battery")
    except (ParamsError, KeyError, TypeError):
        return False
    mtimes = [path.stat().st_mtime for path in (root / "battery").glob("*")]
    return params == battery and max(mtimes, default=0.0) <= lock.stat().st_mtime

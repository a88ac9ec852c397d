"""What MLflow's pages show of runs: names that sort their charts, the columns of the list, the description of a parent."""

from __future__ import annotations

import contextlib
import getpass
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError
from athanor.runtime import presets
from athanor.runtime.facts import git, leaves, overrides, params_at
from athanor.runtime.headlines import headlines
from athanor.runtime.journal import Record, rows
from athanor.runtime.store import delivery

Point = tuple[str, float, int, int]

HEALTH = ("", "ok", "info", "warning", "critical")  # of a run that the health monitor watched, better first
VIEW = "athanor"  # of the list of runs: `viewStateShareKey` in its address
FIXED = ("0", "attributes.`Run Name`", "runDateAndNestInfo", "duration")  # the list begins with them in any case
COLUMNS = {  # of the list, and how wide they are
    "tags.`health`": 80,
    "tags.`athanor.changed`": 260,  # what tells the runs of a sweep apart
    "metrics.`eval.accuracy`": 110,
    "metrics.`eval.sft_bpb`": 180,
    "metrics.`sft.loss`": 110,
}
NOTE, NOTE_DIGEST = "mlflow.note.content", "mlflow.athanor.note"  # MLflow shows no tags of its own
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
VIEW_STATE = json.dumps({"selectedColumns": list(COLUMNS), "columnOrder": [*FIXED, *COLUMNS], "columnWidths": COLUMNS})
# Names of the journal and MLflow's. What stands before a slash is a section of charts there, and they are sorted: the
# losses come first. `system/` has a page of its own.
NAMES = (
    (r"loss", "loss/train"),
    (r"val_loss", "loss/val"),
    (r"val_bpb\.all", "loss/val_bits_per_byte"),
    (r"disk\.free_bytes", "system/disk_available_megabytes"),
    (r"memory\.host_bytes", "system/process_memory_megabytes"),
    (r"memory\.bytes", "system/peak_memory_megabytes"),
    (r"((?:loss|val_bpb|val_loss)\..+)", r"sources/\1"),
    (r"(grad_norm|lr|skipped)", r"optimizer/\1"),
    (r"(tokens|tokens_per_second|cpu\.wait_share|model_gflops|hardware_gflops|mfu|hfu|of_ceiling)", r"speed/\1"),
    (r"health\.(.+)", r"monitor/\1"),
    (r"(time|vitals)\.(.+)", r"\1/\2"),
)
CURVES = {"loss": "train_loss", "val_loss": "val_loss", "val_bpb.all": "bpb"}  # a parent has them, too
CURVE_POINTS = 200
SCORES = {
    "eval.accuracy": ("Battery, share of right answers", "{:.1%}"),
    "eval.sft_bpb": ("Bits per byte of held-out text, chat model", "{:.3f}"),
    "eval.base_bpb": ("Bits per byte of held-out text, base model", "{:.3f}"),
    "sft.loss": ("Loss of held-out answers", "{:.3f}"),
    "pretrain.parameters": ("Parameters", "{:,.0f}"),
}
CHANGES = 12  # that a description names


def shown(name: str, value: float) -> tuple[str, float]:
    """A number of the journal as MLflow shows it."""
    for pattern, replacement in NAMES:
        if match := re.fullmatch(pattern, name):
            renamed = match.expand(replacement)
            return renamed, value / 1e6 if renamed.endswith("_megabytes") else value
    return name, value


def points(data: bytes, stage: str, state: dict[str, Any]) -> tuple[list[Point], list[Point], str]:
    """Of whole journal lines: (name, value, time, step) for a run, those for its parent, and the health they tell.

    A parent has some points of a curve, as many as the plan of the training says; `state` remembers which.
    """
    found: list[Point] = []
    curves: list[Point] = []
    health = {""}
    for row in rows(data):
        numbers = dict(row.get("m", {}))
        if row.get("event") == "training":
            tokens, batch_tokens = (row.get("schedule") or {}).get("total_tokens"), row.get("batch_tokens")
            state["stride"] = 1 + int((tokens or 0) / (batch_tokens or 1) / CURVE_POINTS)
            health |= {"ok"}
        elif row.get("event") == "finding":
            numbers, row["s"] = {f"health.{row['rule']}": HEALTH.index(row["level"])}, row["step"]
            health |= {"ok", row["level"]} - {"info"}  # information is no trouble
        for name, number in numbers.items():
            shown_name, value = shown(name, float(number))
            found.append((key(shown_name), value, row["t"], row["s"]))
            # Of held-out losses there are few.
            if name in CURVES and (name != "loss" or row["s"] % state.get("stride", 1) == 0):
                curves.append((f"{prefix(stage)}.{CURVES[name]}", value, row["t"], row["s"]))
    return found, curves, max(health, key=HEALTH.index)


def description(
    root: Path, tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float], health: str
) -> str:
    """Markdown for a parent run: its scores, where it comes from, and what to do with it."""
    rows = [(label, form.format(metrics[name])) for name, (label, form) in SCORES.items() if name in metrics]
    rows += [("Health", health)] if health else []
    experiment, branch = tags.get("athanor.experiment", ""), tags["athanor.key"].partition("@")[0]
    commit = tags.get("mlflow.source.git.commit", "")
    page = _commit_page(root, commit)
    of_commit = f", commit {f'[{commit[:7]}]({page})' if page else f'`{commit[:7]}`'}" if commit else ""
    edited = tags.get("athanor.dirty") == "True" and not experiment  # which edits params.yaml, and has a commit
    preset, changed = _changes(root, tags, params)
    again = _again(root, tags, params, preset)
    of_preset = f" Parameters: preset `{preset}`{f' with {changed}' if changed else ''}." if preset else ""
    parts = [
        f"{f'Experiment **{experiment}**' if experiment else f'Branch {branch}'}{of_commit}"
        f"{', with edits that were not committed' if edited else ''}.{of_preset}",
        "\n".join(["| | |", "|---|---|", *(f"| {label} | {score} |" for label, score in rows)]) if rows else "",
        f"To make it again: {again}.",
    ]
    if "athanor.made_by.export" in tags:
        place = f"in `models/export` after `dvc exp apply {experiment}`" if experiment else "in `models/export`"
        parts.append(
            f"The exported model lies {place}. `athanor summary` shows all scores, `athanor serve` talks to it, "
            f"`athanor promote{f' {experiment}' if experiment else ''}` registers it here."
        )
    return "\n\n".join(filter(None, parts))


def _again(root: Path, tags: Mapping[str, str], params: Mapping[str, str], preset: str) -> str:
    """Commands that make a run again: its parameters against its commit, for DVC gives an experiment's name away again."""
    commit, experiment = tags.get("mlflow.source.git.commit", ""), tags.get("athanor.experiment", "")
    steps, options = [f"git checkout {commit[:7]}"] if commit else [], ""
    if experiment and tags.get("athanor.dirty") == "True":  # code that only the experiment has
        steps += [f"dvc exp apply {experiment}"]
    else:
        there = params_at(root, commit)
        if preset and (not there or sum(there.get(name) != value for name, value in params.items()) > CHANGES):
            steps, there = [*steps, f"athanor preset use {preset}"], _presets(root / "presets")[preset]
        options = overrides(there, params) if there else None
    run = f"dvc exp run {options}" if options else "athanor repro"
    return f"`{' && '.join([*steps, run])}`{', with these parameters' if options is None else ''}"


def changed(root: Path, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
    """What differs from the nearest preset, for a column of the list."""
    return re.sub(r"`| \([^)]* there\)", "", _changes(root, tags, params)[1])


def makers(tags: Mapping[str, str]) -> dict[str, str]:
    """Stage to the run that made its outputs."""
    return {name.removeprefix("athanor.made_by."): run for name, run in tags.items() if ".made_by." in name}


def restored(root: Path, tags: Mapping[str, str], own: Collection[str]) -> tuple[list[Point], list[str]]:
    """Headlines and health by runs of this checkout that are not `own`: their outputs came from DVC's cache."""
    found: list[Point] = []
    healths = []
    for stage, run in ((stage, run) for stage, run in makers(tags).items() if run not in own):
        folder = root / ".athanor" / "runs" / run
        try:
            end = Record(folder / "end.json")
        except AthanorError:  # it was made elsewhere
            continue
        healths.append(delivery(folder).get("health", ""))
        scores = headlines(stage, end.get("metrics", {}))
        found += [(f"{prefix(stage)}.{name}", value, end["ended_ms"], 0) for name, value in scores.items()]
    return found, healths


def _commit_page(root: Path, commit: str) -> str:
    """The address of a commit where `origin` is a web server's repository. What may be a password is left out."""
    remote = r"(?:https?://|ssh://|)(?:[^@/]*@)?([\w-]+(?:\.[\w-]+)+)(?::\d+)?[:/](.+?)(?:\.git)?/?"
    match = re.fullmatch(remote, git(root, "remote", "get-url", "origin"))
    return f"https://{match[1]}/{match[2]}/commit/{commit}" if match else ""


def params_of(root: Path, runs: Iterable[str]) -> dict[str, str]:
    """Parameters of runs of this checkout: the stages that were not run again have theirs, too."""
    found: dict[str, str] = {}
    for run in runs:
        try:
            meta = Record(root / ".athanor" / "runs" / run / "meta.json")
            found |= {name: str(value) for name, value in meta["params"].items()}
        except AthanorError:  # it was made elsewhere
            continue
    return found


@lru_cache(maxsize=8)
def _presets(folder: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name in presets.names(folder):
        with contextlib.suppress(AthanorError):  # a broken one must not hold up what is shipped
            found[name] = leaves(presets.values(folder / f"{name}.yaml"))
    return found


def _changes(root: Path, tags: Mapping[str, str], params: Mapping[str, str]) -> tuple[str, str]:
    """The preset that is nearest to some parameters ("" without presets), and what differs from it.

    An experiment's own settings come first: they tell the runs of a sweep apart. Lists of sources come last.
    """
    sections = {name.partition(".")[0] for name in params}
    distances = {
        name: (
            sum(values.get(key) != value for key, value in params.items()),
            sum(key not in params and key.partition(".")[0] in sections for key in values),
            name != presets.DEFAULT,
        )
        for name, values in _presets(root / "presets").items()
    }
    if not distances:
        return "", ""
    nearest = min(distances, key=lambda name: distances[name])
    there = _presets(root / "presets")[nearest]
    commit = tags.get("mlflow.source.git.commit", "") if tags.get("athanor.experiment") else ""
    before = params_at(root, commit) if commit else {}
    own = [key for key, value in params.items() if before and before.get(key) != value]
    rest = [key for key, value in params.items() if key not in own and there.get(key) != value]
    keys = own + sorted(rest, key=lambda key: ".sources." in key)
    changes = [
        f"`{key}` {params[key]} ({there[key]} there)"
        if there.get(key, params[key]) != params[key]
        else f"`{key}` {params[key]}"
        for key in keys
    ]
    more = [f"{len(keys) - CHANGES} more"] if len(keys) > CHANGES else []
    return nearest, ", ".join([*changes[:CHANGES], *more])


def parent_tags(meta: dict[str, Any]) -> dict[str, Any]:
    source = f"dvc exp run -n {meta['experiment']}" if meta["experiment"] else "dvc repro"
    names = ("experiment", "dirty") if meta["experiment"] else ("dirty",)
    return {"athanor.key": meta["key"], **_tags(meta, source, names)}


def child_tags(meta: dict[str, Any], parent: str) -> dict[str, Any]:
    hardware = meta["hardware"]
    return {
        "mlflow.parentRunId": parent,
        **_tags(meta, f"dvc.yaml:{meta['stage']}", ("run", "stage", "experiment", "dirty")),
        **{f"athanor.{name}": hardware[name] for name in ("host", "cpu")},
        **{f"athanor.version.{name}": version for name, version in hardware["versions"].items()},
        **{f"athanor.made_by.{stage}": maker for stage, maker in meta["made_by"].items()},
    }


def _tags(meta: dict[str, Any], source: str, names: Iterable[str]) -> dict[str, Any]:
    tags = {f"athanor.{name}": meta[name] for name in names} | {"mlflow.source.git.commit": meta["commit"]}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        tags |= {"mlflow.user": getpass.getuser()}
    return tags | {"mlflow.source.name": source, "mlflow.source.type": "LOCAL"}


def prefix(stage: str) -> str:
    return stage.replace("-", "_")


def key(name: str) -> str:
    """A name MLflow accepts: letters, digits, and _ - . space : /, and no path that stands for another."""
    name = re.sub(r"[^\w\-. :/]", "_", name)[:250]
    path = posixpath.normpath(name)
    return name if path == name and not path.startswith(("..", "/")) and path != "." else re.sub(r"[/.]", "_", name)

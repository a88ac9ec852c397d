"""Two experiments or revisions side by side: parameters, scores with errors, code, tracking runs.

    python -m athanor compare [A [B]] [--all | --json]

A and B are names of experiments, Git revisions or `workspace`; without them the last commit is compared with the workspace.
Nothing is checked out: Git has params.yaml and dvc.lock, and DVC's cache the metrics that the lock names. Those that the
cache lacks are fetched from the DVC remote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.base.strict import read_yaml
from athanor.cli.render import fill_template
from athanor.runtime import dvc_lock, dvc_view
from athanor.runtime.facts import flatten, git
from athanor.runtime.headlines import HEADLINES
from athanor.runtime.redact import redact
from athanor.runtime.sharing import cache_folder
from athanor.runtime.store import delivery

WORKSPACE = "workspace"
TRACKED = ("params.yaml", dvc_lock.LOCK)
CODE = ("athanor", "stages")
CLEAN, BATTERY = "data/clean", "data/battery"
METRICS, LEAVES = Path("metrics"), Path("metrics/runs")
# A mapping with "stderr" holds its value under one of these names.
VALUE_KEYS = ("bpb", "score", "rate", "loss", "difference")
# They follow from the value, not worth a line of their own.
DERIVED = "correct count margin_stderrs low high wins losses p discordance resolves".split()
NOISE = 2.0  # standard errors of a difference
DIRECTION = {"bpb": -1, "loss": -1, "score": 1}  # of a rate nobody can say it here
ELSEWHERE = "made in another checkout: its journal is not here"
UI = "http://127.0.0.1:5000"
# By their names in MLflow, whose last part is that of the tables.
HEADLINE_ROWS = {
    f"{stage}.{path.rpartition('.')[0]}": f"{stage}.{name}"
    for stage in HEADLINES
    for name, path in HEADLINES[stage].items()
}
CATEGORIES, MAX_CATEGORIES = ("eval.battery.", "eval.gold."), 10


@dataclass(frozen=True)
class Side:
    """One revision's parameters and results. rev is "" for the workspace."""

    name: str
    rev: str
    params: dict[str, Any]
    metrics: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    lock: dict[str, Any]
    held_out_rows: tuple[str, ...] = ()


def resolve(root: Path, name: str) -> str:
    """The commit of a revision or an experiment, "" for the workspace."""
    if name == WORKSPACE:
        return ""
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return commit or _experiment(root, name)


def _experiment(root: Path, name: str) -> str:
    if not git(root, "rev-parse", "--verify", "--quiet", "HEAD"):
        raise InputError("there is no commit yet", where=str(root), fix='git add -A && git commit -m "First run"')
    commit, names = dvc_view.experiment(root, name)
    if not commit:
        known = git(root, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags").splitlines()
        fix = f"{suggest(name, [WORKSPACE, 'HEAD', *known, *names], cutoff=0.7)} See dvc exp show".strip()
        raise InputError("no experiment or revision of this name", where=name, fix=fix)
    return commit


def load(root: Path, name: str) -> Side:
    rev = resolve(root, name)
    if not rev:
        return _read(root, root, name, rev)
    with tempfile.TemporaryDirectory() as scratch:
        for path in TRACKED:
            if text := git(root, "show", f"{rev}:./{path}"):
                (Path(scratch) / path).write_text(text, encoding="utf-8")
        return _read(root, Path(scratch), name, rev)


def _read(root: Path, folder: Path, name: str, rev: str) -> Side:
    if not (folder / "params.yaml").is_file():
        raise InputError("no params.yaml there", where=name, fix="compare revisions of this pipeline")
    lock = dvc_lock.outputs(folder / dvc_lock.LOCK)
    files = {path: root / path for path in lock if Path(path).parent in (METRICS, LEAVES)}
    cache = cache_folder(root) / "files/md5"
    if rev:
        files = {path: cache / lock[path][:2] / lock[path][2:] for path in files}
        if missing := {f"{path} of {name}": lock[path] for path, file in files.items() if not file.is_file()}:
            dvc_view.fetch(root, missing)
    found = {Path(path): read_json(file) for path, file in sorted(files.items()) if file.is_file()}
    leaves = {path.stem: facts for path, facts in found.items() if path.parent == LEAVES}
    if not leaves:
        fix = 'git add params.yaml dvc.lock metrics && git commit -m "First run" (it commits the result of now)'
        if names := git(root, "for-each-ref", "--format=%(refname:lstrip=4)", f"refs/exps/{rev[:2]}/{rev[2:]}").split():
            fix = f"to compare with an experiment of it: athanor compare {' or '.join(names)}; else {fix}"
        raise InputError("no results there", where=name, fix=fix if rev else "dvc repro, or dvc pull in a clone")
    metrics = {path.stem: facts for path, facts in found.items() if path.parent == METRICS}
    params, lock_stages = read_yaml(folder / "params.yaml"), dvc_lock.stages(folder / dvc_lock.LOCK)
    return Side(name, rev, params, metrics, leaves, lock_stages, _held_out_rows(cache, lock.get("data/sft", "")))


def _held_out_rows(cache: Path, md5: str) -> tuple[str, ...]:
    """A digest of the validation rows of data/sft, which stay when only the rows to train on change; none if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = json.loads((cache / md5[:2] / md5[2:]).read_text(encoding="utf-8"))
        if files := sorted((row["relpath"], row["md5"]) for row in listed if row["relpath"].startswith("val_")):
            return (str(files),)
    return ()


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Leaves that differ, old and new; None where a side lacks one."""
    old, new = dict(flatten(a)), dict(flatten(b))
    return {name: (old.get(name), new.get(name)) for name in (old | new) if old.get(name) != new.get(name)}


def values_with_stderr(value: Any, prefix: str = "") -> Iterator[tuple[str, str, float, float | None, Sequence[float]]]:
    """Name, kind, value, standard error and single items (none: not known) of everything that has an error."""
    if not isinstance(value, Mapping):
        return
    kind = next((kind for kind in VALUE_KEYS if kind in value), "")
    if "stderr" in value and kind:
        yield prefix, kind, value[kind], value["stderr"], value.get("each", ())
        return
    for key, item in value.items():
        yield from values_with_stderr(item, f"{prefix}.{key}" if prefix else key)


def measures(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for everything that both sides measured, whatever they measured it on."""
    values_b = {name: values for name, _, *values in values_with_stderr(b)}
    return [
        compare_values(name, kind, values_a, values_b[name])
        for name, kind, *values_a in values_with_stderr(a)
        if name in values_b
    ]


def compare_values(name: str, kind: str, side_a: Sequence[Any], side_b: Sequence[Any]) -> dict[str, Any]:
    """A row that compares one number of both sides (value, error, items); beyond_noise is None without an error.

    With the items of both it is that of their differences if the true one is 0, with the factor (within 0.05) of the t test at 5 %:
    of two items none passes. Without items, errors are added as if independent.
    """
    (a, a_stderr, items_a), (b, b_stderr, items_b) = side_a, side_b
    changes = [y - x for x, y in zip(items_a, items_b, strict=True)] if len(items_a) == len(items_b) else []
    total = sum(changes)
    noise = None if a_stderr is None or b_stderr is None else NOISE * math.hypot(a_stderr, b_stderr)
    if noise is not None and total:
        counted = {*map(abs, changes)} <= {0, 1}  # right or wrong: no t distribution
        noise = (NOISE - (not counted) / len(changes)) * abs(b - a) * math.hypot(*changes) / abs(total)
    beyond = False if a == b else None if noise is None else abs(b - a) > noise
    better = (b - a) * DIRECTION[kind] > 0 if beyond and kind in DIRECTION else None
    row: dict[str, Any] = {"name": name, "a": a, "b": b, "a_stderr": a_stderr, "b_stderr": b_stderr}
    row |= {"label": HEADLINE_ROWS.get(name, name), "paired": bool(total), "difference": b - a, "noise": noise}
    return row | {"beyond_noise": beyond, "better": better}


def first_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that answer which is better: the headlines, and the categories that differ by most of their noise."""
    differing = {row["name"]: row for row in rows if row["difference"]}
    headlines = [differing.pop(name) for name in HEADLINE_ROWS if name in differing]
    categories = [row for row in differing.values() if row["name"].startswith(CATEGORIES) and row["beyond_noise"]]
    return headlines + sorted(categories, key=lambda row: row["noise"] / abs(row["difference"]))[:MAX_CATEGORIES]


def other_metrics(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    with_error = {name for side in (a, b) for name, *_ in values_with_stderr(side.metrics)}
    redundant = {f"{name}.{leaf}" for name in with_error for leaf in (*VALUE_KEYS, "stderr", *DERIVED)}
    pairs = {name: pair for name, pair in changed(a.metrics, b.metrics).items() if ".each." not in name}
    return {name: pair for name, pair in pairs.items() if name not in redundant and not name.startswith("eval.taught.")}


def warnings(a: Side, b: Side) -> list[str]:
    """Reasons why the numbers of the two sides may not mean what they seem to."""
    lines = []
    for side in (a, b):
        stale = {
            leaf
            for stage in stages_behind_scores(side.lock)
            for section, value in side.lock[stage].get("params", {}).get("params.yaml", {}).items()
            for leaf in changed({section: value}, {section: side.params.get(section)})
        }
        if stale:
            names = ", ".join(sorted(stale))
            lines.append(f"{side.name}: the results are older than the parameters ({names}); run dvc repro")
        if behind := _behind(side.lock):
            what = "read what was made anew since: their numbers are of an earlier run"
            lines.append(f"{side.name}: {', '.join(behind)} {what}; run dvc repro")
    for subject, path in (("bits per byte", CLEAN), ("the battery", BATTERY)):
        if _inputs(a, path) != _inputs(b, path):
            lines.append(f"{subject}: measured on other held-out items ({path} differs)")
    if a.params.get("eval") != b.params.get("eval"):
        lines.append("the section eval differs: part of the difference is the way of measuring")
    return lines


def stages_behind_scores(lock: Mapping[str, Any]) -> set[str]:
    """`eval` and the stages that it rests on; a model that was never exported has the same scores."""
    reached, frontier = set(), {"eval"} & lock.keys()
    outs = [(stage, Path(out["path"])) for stage, entry in lock.items() for out in entry.get("outs", ())]
    while frontier:
        reached |= frontier
        deps = [Path(dep["path"]) for stage in reached for dep in lock[stage].get("deps", ())]
        frontier = {stage for stage, out in outs if any(_overlap(out, dep) for dep in deps)} - reached
    return reached


def _behind(lock: Mapping[str, Any]) -> list[str]:
    """Stages behind the scores whose recorded inputs are no longer what the lock says was made, and what rests on them."""
    made = {out["path"]: (stage, out.get("md5")) for stage, entry in lock.items() for out in entry.get("outs", ())}
    behind: list[str] = []
    order = [stage for stage in lock if stage in stages_behind_scores(lock)]
    for _ in order:
        for stage in order:
            inputs = [
                (*made[dep["path"]], dep.get("md5")) for dep in lock[stage].get("deps", ()) if dep["path"] in made
            ]
            if stage not in behind and any(was != now or maker in behind for maker, now, was in inputs):
                behind.append(stage)
    return behind


def judged(rows: list[dict[str, Any]], a: Side, b: Side) -> list[dict[str, Any]]:
    """The rows, without a judgement where the two sides measured other held-out items, or none can tell that they did not."""
    items = [_held_out(a), _held_out(b)]

    def same(name: str) -> bool:
        subject = next((beginning for beginning in items[0] if name.startswith(beginning)), "")
        return not subject or bool(items[0][subject] & items[1][subject])

    unknown = {"beyond_noise": None, "better": None, "noise": None}
    return [{**row, **({} if (equal := same(row["name"])) else unknown), "same_items": equal} for row in rows]


def _held_out(side: Side) -> dict[str, set[str]]:
    """What each kind of measure was taken on: digests, of which one in common makes two sides comparable."""
    text, battery = (set(map(str, _inputs(side, path).items())) for path in (CLEAN, BATTERY))
    chosen = side.lock.get("eval", {}).get("params", {}).get("params.yaml", {}).get("eval", {})
    sample = str([chosen.get(name) for name in ("bpb_max_bytes_per_source", "seed")])
    stages = {
        stage: {dep["path"]: dep.get("md5", "") for dep in row.get("deps", ())} for stage, row in side.lock.items()
    }
    shards, rows = stages.get("pretrain", {}).get("data/shards"), stages.get("sft", {}).get("data/sft")
    return {
        "eval.bpb.": {f"{item} {sample}" for item in text},
        "eval.": {str(sorted(battery))} if battery else set(),
        "pretrain.": text | {str(shards)} - {"None"},
        "sft.": {str(rows), *side.held_out_rows} - {"None", ""},
    }


def _overlap(a: Path, b: Path) -> bool:
    return a.is_relative_to(b) or b.is_relative_to(a)


def _inputs(side: Side, path: str) -> dict[str, str]:
    deps = side.lock.get("eval", {}).get("deps", [])
    hashes = {dep["path"]: dep.get("md5", "") for dep in deps if Path(dep["path"]).is_relative_to(path)}
    held_out = f"{path}/val.parquet"
    return {held_out: hashes[held_out]} if held_out in hashes else hashes


def code_differences(root: Path, a: Side, b: Side) -> dict[str, list[str]]:
    """Files that differ between the two, and the stages that ran other code (comments do not count)."""
    sides = [side.rev for side in (a, b) if side.rev]
    files = set(git(root, "diff", "--name-only", *sides, "--", *CODE).splitlines()) if a.rev != b.rev else set()
    if files and "" in (a.rev, b.rev):
        files |= set(git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE).splitlines())
    digests = [{name: leaf.get("code") for name, leaf in side.leaves.items()} for side in (a, b)]
    stages = [name for name in digests[0] if name in digests[1] and digests[0][name] != digests[1][name]]
    return {"files": sorted(files), "stages": stages}


def tracked_run(root: Path, run: str) -> dict[str, str]:
    """The MLflow run of a journal, as link, or why there is none."""
    folder = root / ".athanor" / "runs" / run
    if not folder.is_dir():
        return {"run": run, "why": ELSEWHERE}
    state = delivery(folder)
    if "mlflow_run" not in state:
        return {"run": run, "why": "not in MLflow yet; fix: athanor ship --wait 60"}
    base = re.sub(r"//[^/]*@", "//", state["uri"]).rstrip("/") if state["uri"].startswith("http") else UI
    experiment = f"experiments/{state['store'].partition('@')[0]}/" if "store" in state else ""
    # Without the query the UI opens in its GenAI mode, which hides these runs.
    link = f"{base}/#/{experiment}runs/{state['mlflow_run']}?workflowType=machine_learning"
    return {"run": run, "mlflow_run": state["mlflow_run"], "link": link}


def compare(root: Path, left: str, right: str) -> dict[str, Any]:
    """Everything about the two sides, ready for JSON."""
    a, b = load(root, left), load(root, right)
    read = (dvc_lock.inputs(side.lock) for side in (a, b))
    run_ids = {key: {stage: leaf["run"] for stage, leaf in side.leaves.items()} for key, side in (("a", a), ("b", b))}
    differing = [name for name in run_ids["a"] | run_ids["b"] if run_ids["a"].get(name) != run_ids["b"].get(name)]
    return {
        "a": {"name": a.name, "commit": a.rev},
        "b": {"name": b.name, "commit": b.rev},
        "params": changed(a.params, b.params),
        "inputs": [path for path in changed(*read) if not path.startswith(CODE)],
        "code": code_differences(root, a, b),
        "measures": judged(measures(a.metrics, b.metrics), a, b),
        "taught": [side.metrics.get("eval", {}).get("taught", {}) for side in (a, b)],
        "metrics": other_metrics(a, b),
        "warnings": warnings(a, b),
        "runs": {
            name: {key: tracked_run(root, runs[name]) for key, runs in run_ids.items() if name in runs}
            for name in differing
        },
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", nargs="?", default="HEAD", help="experiment, revision or workspace (default: HEAD)")
    parser.add_argument("b", nargs="?", default=WORKSPACE, help="the same (default: workspace)")
    parser.add_argument("--all", action="store_true", help="every measure, other metrics, the runs in MLflow")
    parser.add_argument("--json", action="store_true", help="everything, for scripts")


def run(args: argparse.Namespace) -> int:
    root = Path.cwd()
    if not git(root, "rev-parse", "--git-dir"):
        raise AthanorError("not inside a Git repository", where=str(root), fix="run it in the checkout")
    comparison = compare(root, args.a, args.b)
    if args.json:
        sys.stdout.write(json.dumps(redact(comparison), indent=2) + "\n")
        return 0
    first = first_rows(comparison["measures"])
    sys.stdout.write(redact(fill_template("compare.txt.j2", **comparison, first=first, all=args.all)))
    return 0

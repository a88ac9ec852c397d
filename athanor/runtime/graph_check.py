"""What dvc.yaml may not say, because it would make a cached result false or useless.

Part of `python -m athanor deps`, which shows what these rules find beside the
code dependencies that are missing or superfluous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.runtime.closure import graphs, is_code, stage_module

TEMPLATING = ("foreach", "matrix")


def problems(root: Path) -> list[str]:
    """Broken rules of dvc.yaml, and of side stages' files, in words; empty when there are none."""
    main, *sides = graphs(root)
    found = _problems(read_yaml(main))
    for path in sides:
        graph, name = read_yaml(path), path.relative_to(root).as_posix()
        found += [f"{name}: {text}" for text in _problems(graph)]
        found += [
            f"{name}: {stage}: works in {declared.get('wdir', path.parent.name)}. Fix: wdir: .."
            for stage, declared in graph["stages"].items()
            if declared.get("wdir") != ".."
        ]
    return found


def _problems(graph: Mapping[str, Any]) -> list[str]:
    stages: dict[str, Any] = graph["stages"]
    found = [f"{where}: ${{}} hides a parameter in the graph. Fix: write the value" for where in templated(graph)]
    if "vars" in graph:
        found.append("vars: templating hides a parameter in the graph. Fix: write the values")
    needed = {dep for stage in stages.values() for dep in stage.get("deps", [])}
    for name, stage in stages.items():
        found += [f"{name}: {key} hides stages. Fix: write each of them" for key in TEMPLATING if key in stage]
        if not any(key in stage for key in TEMPLATING):
            found += [f"{name}: {text}" for text in (*command(stage), *code(stage), *outputs(stage, needed))]
    return found


def templated(value: Any, where: str = "") -> Iterator[str]:
    """Keys of every text that holds `${`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from templated(str(key), where)
            yield from templated(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from templated(item, where)
    elif isinstance(value, str) and "${" in value:
        yield where


def command(stage: Mapping[str, Any]) -> Iterator[str]:
    try:
        stage_module(str(stage["cmd"]))
    except AthanorError as error:
        yield f"{error.what}. Fix: {error.fix}"


def code(stage: Mapping[str, Any]) -> Iterator[str]:
    """Of code, a stage depends on files and on folders of the library: more would make it stale by what it does not use."""
    for dep in stage.get("deps", []):
        parts = PurePosixPath(dep).parts  # nothing for the repository itself
        if not parts or (is_code(dep) and len(parts) < 2 and not dep.endswith(".py")):
            yield f"depends on all code, {dep}. Fix: name its folders (athanor deps --fix)"


def outputs(stage: Mapping[str, Any], needed: set[str]) -> Iterator[str]:
    """Every output is used by a stage or declared terminal, and kept in the cache.

    Metrics and plots are for people and need no consumer; they may stay out of
    the cache, because DVC's run-cache keeps them, and no other output may.
    """
    outs = {path: options for kind in ("outs", "metrics", "plots") for path, options in entries(stage.get(kind, []))}
    made = dict(entries(stage.get("outs", [])))
    terminal = list((stage.get("meta") or {}).get("terminal", []))
    for path, options in outs.items():
        if options.get("persist"):
            yield f"{path} persists, so a new run would start from an old result. Fix: remove persist"
    for path, options in made.items():
        if options.get("cache") is False:
            yield f"{path} is an uncached output, which switches the run-cache off. Fix: make it a metric, or cache it"
        used = any(path == dep or PurePosixPath(path) in PurePosixPath(dep).parents for dep in needed)
        if used and path in terminal:
            yield f"{path} is declared terminal and has a consumer. Fix: remove it from meta.terminal"
        if not used and path not in terminal:
            yield f"{path} has no consumer. Fix: remove the output, or name it in meta: {{terminal: [{path}]}}"
    for path in terminal:
        if path not in made:
            yield f"{path} is declared terminal and is no output. Fix: remove it from meta.terminal"


def entries(declared: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and options of outputs, which DVC lets one write as a path or as a path with options."""
    for entry in declared:
        if isinstance(entry, Mapping):
            yield from ((str(path), options or {}) for path, options in entry.items())
        else:
            yield str(entry), {}

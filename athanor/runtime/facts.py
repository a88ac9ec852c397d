"""Facts about where a run happens: Git, DVC, hardware, versions. None of them may enter an output."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, read_json
from athanor.base.errors import AthanorError
from athanor.base.host import memory_bytes, processor
from athanor.base.strict import read_yaml
from athanor.runtime import dvc_lock
from athanor.runtime.closure import entries, graphs
from athanor.runtime.machine import cores
from athanor.runtime.redact import redact
from athanor.text.globs import check_name

# Names of variables begin so.
VARIABLES = re.compile("AMD|ATHANOR|CU[BD]|DVC|GPU|HIP|HSA|KMP|LD_|MIO|MKL|MPI|NCCL|NV|OMP|PYT|RCCL|ROC|TORCH|TRITON")
# Versions of drivers, names of cards.
DRIVERS = (
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/gpus/*/information",
    "sys/module/amdgpu/version",
    "sys/class/kfd/kfd/topology/nodes/*/name",
)
PACKAGES = ("torch", "numpy", "dvc", "mlflow", "sentencepiece", "pyarrow", "datasets", "transformers", "peft")


def git(root: Path, *args: str) -> str:
    """Output of a Git command, or "" outside a repository."""
    try:
        process = subprocess.run(["git", "-C", str(root), *args], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.decode(errors="backslashreplace").strip() if process.returncode == 0 else ""


def provenance(root: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Hardware, commit, branch, experiment and the key that groups the runs of one configuration.

    The key is (experiment or branch)@commit/params: stable across resumes and
    computed without stored state.
    """
    commit = git(root, "rev-parse", "HEAD")
    branch = git(root, "symbolic-ref", "--short", "-q", "HEAD") or "detached"
    experiment = os.environ.get("DVC_EXP_NAME", "")
    baseline = os.environ.get("DVC_EXP_BASELINE_REV") or commit or "uncommitted"
    files = ["*.py", "*.c", "dvc.yaml"] + ([] if experiment else ["params.yaml"])  # in one, -S edits params.yaml
    dirty = git(root, "status", "--porcelain", "--untracked-files=no", "--", *files)
    return {
        "commit": commit,
        "branch": branch,
        "experiment": experiment,
        "dirty": bool(dirty),
        "key": f"{experiment or branch}@{baseline[:7]}/{params_digest(params)[:8]}",
        "hardware": hardware(),
        "snapshot": snapshot(),
    }


def packages() -> dict[str, str]:
    """Versions of all installed packages, by the names of their folders: reading their metadata takes 80 ms."""
    folders = (folder for path in reversed(sys.path) for folder in Path(path).glob("*.dist-info"))
    return dict(sorted(dict(folder.stem.rsplit("-", 1) for folder in folders).items()))


def snapshot() -> dict[str, Any]:
    """Every installed package, drivers, runtimes and environment variables, to find what differs from an earlier run.

    CUDA is left alone, because it reads the environment when it starts.
    """
    torch = sys.modules.get("torch")
    files = (file for pattern in DRIVERS for file in Path("/").glob(pattern) if os.access(file, os.R_OK))
    return {
        "packages": packages(),
        "drivers": {str(file): file.read_text(errors="replace").strip() for file in files},
        "runtimes": [torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()] if torch else [],
        "kernel": platform.release(),
        "environment": redact({name: os.environ[name] for name in sorted(os.environ) if VARIABLES.match(name)}),
    }


def hardware() -> dict[str, Any]:
    """Host, CPU, memory, and versions of the packages that decide results, without importing them."""
    installed = packages()
    return {
        "host": platform.node(),
        "cpu": processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }


def leaf(root: Path, stage: str) -> Path:
    """The file about a stage's last run in this checkout: its id, timings, host and other things that vary."""
    return root / "metrics" / "runs" / f"{stage.replace('-', '_')}.json"


def newest_ms(paths: Iterable[Path]) -> float:
    """The time of the latest change of any of these files, or of those below these folders."""
    files = (file for path in paths for file in (path, *path.rglob("*")) if file.is_file() and file.suffix != ".pyc")
    return max((file.stat().st_ctime * 1000 for file in files), default=0.0)


def flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves of nested mappings and lists as dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{number}")
    else:
        yield prefix, value


def leaves(values: Any) -> dict[str, str]:
    return {name: str(value) for name, value in flatten(values)}


@functools.lru_cache(maxsize=64)
def params_at(root: Path, rev: str) -> dict[str, str]:
    """The leaves of params.yaml in a commit; none where there is no such file."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return leaves(YAML(typ="safe").load(git(root, "show", f"{rev}:./params.yaml")) or {})
    except YAMLError:  # with marks of a conflict, say
        return {}


def overrides(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Options of `dvc exp run` that make the parameters of `before` those of `after`; None where `-S` cannot."""
    sections = {name.partition(".")[0] for name in after}
    if any(name not in after for name in before if name.partition(".")[0] in sections):
        return None
    options = []
    for name, value in after.items():
        if value != before.get(name):
            # A list does not grow by `+`, and Hydra's grammar has no escapes but for quotes.
            grows = name not in before and re.search(r"\.\d+(\.|$)", name)
            if grows or not re.fullmatch(r"[\w.-]+", name, re.ASCII) or re.search(r'["\\\n$]', value):
                return None
            word = "null" if value == "None" else value if re.fullmatch(r"[\w.+-]+", value, re.ASCII) else f'"{value}"'
            options.append(f"-S {shlex.quote(f'{name}={word}' if name in before else f'+{name}={word}')}")
    return " ".join(options)


class Graph:
    """dvc.yaml and dvc.lock as a stage sees them. A side stage is known by name, and not one of `stages`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        main, *sides = (read_yaml(path)["stages"] if path.is_file() else {} for path in graphs(root))
        self.stages: dict[str, Any] = main
        self._all_stages = {name: stage for stages in (main, *sides) for name, stage in stages.items()}

    def sections(self, stage: str) -> list[str] | None:
        """Sections of params.yaml that a stage declares; None when the graph does not know the stage."""
        if stage not in self._all_stages:
            return None
        return [str(name) for name in self._all_stages[stage].get("params", [])]

    def outputs(self, stage: str) -> list[str]:
        return _paths(self.stages[stage], "outs")

    def dependencies(self, stage: str) -> list[str]:
        return [str(dep) for dep in self._all_stages.get(stage, {}).get("deps", [])]

    def maker(self, path: Path) -> str:
        """The stage that makes `path`, as an output or within one; "" for other files."""
        outs = {out: name for name in self.stages for out in self.outputs(name)}
        return next((outs[str(parent)] for parent in (path, *path.parents) if str(parent) in outs), "")

    def results(self, stage: str) -> list[str]:
        """Everything that a stage writes and DVC removes before it starts it; nothing for a stage it does not know."""
        return _paths(self._all_stages.get(stage, {}), "outs", "metrics", "plots")

    def uncached(self, stage: str) -> list[str]:
        """What a stage writes and DVC does not keep."""
        kinds = (self.stages[stage].get(kind, []) for kind in ("outs", "metrics", "plots"))
        return [path for kind in kinds for path, settings in entries(kind) if settings.get("cache") is False]

    def upstream(self, stage: str) -> list[str]:
        """Every stage that `stage` depends on, directly or not, in dvc.yaml order."""
        upstream: set[str] = set()
        queue = [stage] if stage in self._all_stages else []
        while queue:
            for dep in self.dependencies(queue.pop()):
                maker = self.maker(Path(dep))
                if maker and maker not in upstream:
                    upstream.add(maker)
                    queue.append(maker)
        return [name for name in self.stages if name in upstream]

    def makers(self, stage: str) -> dict[str, str]:
        """For each upstream stage the run that made its outputs in the workspace, cached or not."""
        leaves = {name: leaf(self.root, name) for name in self.upstream(stage)}
        return {name: read_json(path)["run"] for name, path in leaves.items() if path.is_file()}

    def input_hashes(self, stage: str) -> dict[str, str]:
        """DVC's hash of every data dependency of a stage, from the lock entries of the stages before it."""
        locked = dvc_lock.outputs(self.root / dvc_lock.LOCK) if stage in self._all_stages else {}
        return {dep: locked[dep] for dep in self.dependencies(stage) if dep in locked}


def check_names(root: Path) -> None:
    """InputError for a name that DVC could not write down, in a folder that a stage reads and none makes."""
    try:
        graph = Graph(root)
    except AthanorError:  # DVC reports it
        return
    read = {dep for stage in graph.stages for dep in graph.dependencies(stage) if not graph.maker(Path(dep))}
    for dep in sorted(read):
        for folder, folders, names in os.walk(root / dep):
            for name in (*folders, *names):
                check_name(Path(os.path.relpath(folder, root), name))


def _paths(stage: Mapping[str, Any], *kinds: str) -> list[str]:
    return [path for kind in kinds for path, _ in entries(stage.get(kind, []))]


def params_digest(values: Any) -> str:
    """Hash of parameters as plain JSON: what YAML they were written in does not count."""
    return digest(_plain(values))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON's own types, what is none of them as text."""
    return {
        key: value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
        for key, value in values.items()
    }

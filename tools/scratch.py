"""Scratch directories for tools that run stages or DVC: a copy of the code with micro parameters, and its results.

`Scratch` holds one copy of the code and a folder for each run of a stage; `micro_clone` is a Git checkout of its own.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML

from athanor.base.artifacts import sha256_file, write_text
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import read_yaml
from athanor.runtime import presets
from athanor.runtime.facts import Graph
from athanor.runtime.schema import check_values

CODE = ("athanor", "stages", "battery", "corpus", "recipes", "tools", "dvc.yaml")
MICRO = Path("presets/micro.yaml")
ROWS, GROUP_ROWS, ROW_BYTES = 600, 20, 3000


def environment(**more: str) -> dict[str, str]:
    """The user's environment less what would steer stages, and with checkpoints as often as the machine file allows."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_", "ATHANOR_", "PYTHONPATH"))}
    drill = {"ATHANOR_TRACKING": "off", "ATHANOR_SAVE_EVERY_SECONDS": "1", "ATHANOR_DEVICE": "cpu"}
    drill["ATHANOR_MIN_FREE_GIB"] = "0"  # a full disk is to be met, not seen coming
    return clean | drill | {"HF_HUB_OFFLINE": "1"} | more


def micro_clone(root: Path, path: Path, env: Mapping[str, str]) -> None:
    """The files that Git knows or would add, committed in a repository of its own with micro parameters, without results."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (root / name).is_file() and name != "dvc.lock" and not name.startswith(("metrics/", "plots/")):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, path / name)
    (path / "params.yaml").write_text(presets.complete(root / MICRO))
    me = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run(["git", *me, *words], cwd=path, env=env, check=True)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every output, metric and plot of a pipeline, without the leaf files of timings."""
    files = [file for top in ("data", "models", "metrics", "plots") for file in sorted((folder / top).rglob("*"))]
    names = {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}
    return {name: sha256_file(file) for name, file in names.items() if not name.startswith("metrics/runs/")}


class Scratch:
    """A directory to run stages in. The code is a copy, so that an edit meanwhile does not end up in half of the runs."""

    def __init__(self, root: Path, base: Path) -> None:
        self.base, self.params = base, presets.values(root / MICRO)
        self.code = base / "code"
        check_values(self.params)
        self.code.mkdir(parents=True)
        for name in CODE:
            source = root / name
            if not source.exists():
                raise InputError("not found", where=str(source), fix="run this at the root of the repository")
            if source.is_dir():
                shutil.copytree(source, self.code / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.code / name)
        self.graph = Graph(self.code)
        self.inputs: Path | None = None

    def write_params(self, folder: Path, values: Mapping[str, Any]) -> None:
        out = io.StringIO()
        YAML(typ="safe", pure=True).dump(dict(values), out)
        write_text(folder / "params.yaml", out.getvalue())

    def build_inputs(self, stages: list[str]) -> None:
        """Run what the stages need and do not share with a drilled run, each as its own process, once."""
        needed = {maker for stage in stages for maker in self.graph.upstream(stage)}
        self.inputs = self.folder(self.base / "inputs", self.params)
        for stage in self.graph.stages:
            if stage in needed:
                self.fresh(stage, self.inputs)

    def use_inputs(self, built: Path, stages: list[str]) -> None:
        """Take the inputs from a directory where the pipeline has run."""
        for stage in stages:
            for name in self._data(stage):
                if not (built / name).exists():
                    fix = f"build it there (dvc repro {stage}), or leave --inputs out"
                    raise InputError("not found", where=str(built / name), fix=fix)
        self.inputs = built.resolve()

    def folder(self, path: Path, params: Mapping[str, Any], stage: str = "") -> Path:
        """A directory a stage can run in: its parameters, and links to the code and to the inputs of `stage`."""
        path.mkdir(parents=True)
        for name in CODE:
            (path / name).symlink_to(self.code / name)
        self.write_params(path, params)
        for name in self._data(stage) if stage else ():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).symlink_to(self.inputs / name)
        if stage == "download":
            write_dataset(path / "set")
        return path

    def _data(self, stage: str) -> list[str]:
        made = {out for name in self.graph.upstream(stage) for out in self.graph.outputs(name)}
        return [dep for dep in self.graph.stages[stage].get("deps", []) if dep in made]

    def command(self, stage: str) -> list[str]:
        return [sys.executable, *self.graph.stages[stage]["cmd"].split()[1:]]

    def fresh(self, stage: str, folder: Path) -> None:
        """Run a stage the usual way, as a process of its own; AthanorError when it fails."""
        done = subprocess.run(
            self.command(stage),
            cwd=folder,
            env=environment(DVC_ROOT=str(folder)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise AthanorError(f"a run without kills failed ({last[0]})", where=f"stage {stage}", fix="mend that first")

    def results(self, stage: str) -> list[str]:
        """Outputs, metrics and plots that a stage declares, without the leaf file of timings."""
        entry = self.graph.stages[stage]
        listed = [item for key in ("outs", "metrics", "plots") for item in entry.get(key, [])]
        names = [item if isinstance(item, str) else next(iter(item)) for item in listed]
        return [name for name in names if not name.startswith("metrics/runs/")]


def drill_params(stage: str, values: Mapping[str, Any], longer: int) -> dict[str, Any]:
    """Parameters for a drilled run: `longer` times the training, or a download from a resumable source."""
    changed: dict[str, Any] = json.loads(json.dumps(values))
    if stage == "pretrain":
        changed["pretrain"]["tokens"] *= longer
    elif stage == "sft":
        changed[stage]["epochs"] *= longer
    else:
        source = read_yaml(Path(__file__).with_name("drill") / "source.yaml")
        changed["download"]["sources"] = [source]
        chats = changed["instruct"]["sources"]
        changed["instruct"]["sources"] = [chat for chat in chats if chat["type"] in ("exercises", "identity")]
        # The sections that name these sources have to agree.
        changed["mixture"] |= {"sources": {"set": {"share": 1.0, "max_epochs": 1.0}}, "cooldown": None}
        changed["clean"]["source_priority"] = []
        named = {chat["name"] for chat in changed["instruct"]["sources"]}
        kept = {name: chat for name, chat in changed["sft_data"]["sources"].items() if name in named}
        changed["sft_data"] |= {"sources": kept, "source_priority": [], "filter_exceptions": {}}
    return changed


def write_dataset(folder: Path) -> None:
    """Two Parquet files of small row groups: random words, which do not compress well, and some rows that are too short."""
    folder.mkdir()
    draw = random.Random(1)
    for number in range(2):
        rows = []
        for row in range(ROWS // 2):
            words = draw.randbytes(ROW_BYTES // 2 if row % 9 else 20).hex()
            rows.append(" ".join(words[at : at + 7] for at in range(0, len(words), 7)))
        pq.write_table(pa.table({"text": rows}), folder / f"{number}.parquet", row_group_size=GROUP_ROWS)

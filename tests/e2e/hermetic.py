"""A stage in a directory that holds what it declares and nothing else.

In the directory are the stage's dependencies exactly as dvc.yaml names them
(one file of an output when only that file is named), and infrastructure, which
no stage declares: `athanor/runtime`, empty package files, and the library
modules that `athanor/runtime` imports (computed from the imports). There is no
.git, no .dvc, no other stage in dvc.yaml; sections of params.yaml that the
stage does not declare have another preset's values.

What this cannot see: a stage that uses a library module which it does not
declare but its infrastructure imports (`params.py` of other stages by way of
runtime/schema, `decoding/generate` by way of runtime/hooks). The
static closure in test_closure.py sees it when the stage imports the module or
takes a name of it from a module of the runtime; only a value that its function
computes with it and returns could enter an output unseen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import sha256_file
from athanor.base.strict import read_yaml
from athanor.runtime import closure, presets
from athanor.runtime.closure import entries
from tests.e2e import param_reads
from tests.e2e.clone import environment

OTHER_PRESET = "plasma-1.2"  # it differs from micro in every section


class Hermetic:
    """One run of one stage's real command, with inputs from a built clone."""

    def __init__(self, built: Path, stage: str, folder: Path, params: Mapping[str, Any] | None = None) -> None:
        """`params` replaces sections of the clone's."""
        self.built, self.stage = built, stage
        self.work, self.home, self.tmp = folder / "work", folder / "home", folder / "tmp"
        self.start, self.reads_folder = folder / "start", folder / "reads"
        for path in (self.work, self.home, self.tmp, self.start, self.reads_folder):
            path.mkdir(parents=True)
        self.declared = read_yaml(built / "dvc.yaml")["stages"][stage]
        self.deps: list[str] = self.declared["deps"]
        self.outs = [path for kind in ("outs", "metrics", "plots") for path, _ in entries(self.declared.get(kind, []))]
        self.params = self._params(params or {})
        for name in (*self.deps, *self.infrastructure()):
            self._copy(name)
        (self.work / "params.yaml").write_text(json.dumps(self.params))
        (self.work / "dvc.yaml").write_text(json.dumps({"stages": {stage: self.declared}}))
        shutil.copyfile(param_reads.__file__, self.start / "sitecustomize.py")

    def _params(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        own = {**read_yaml(self.built / "params.yaml"), **changed}
        other = presets.values(self.built / "presets" / f"{OTHER_PRESET}.yaml")
        same = [name for name in own if own[name] == other[name]]
        assert not same, f"{same}: reading them undeclared would not show, choose another preset"
        declared = set(self.declared["params"])
        return fitting({name: (own if name in declared else other)[name] for name in own}, declared)

    def infrastructure(self) -> set[str]:
        """Files that the stage reaches only through athanor/runtime, and the empty files of all packages in use."""
        module = closure.stage_module(self.declared["cmd"])
        own = set(closure.closure(self.built, module))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(closure, "CUT", "nothing")
            everything = set(closure.closure(self.built, module))
        folders = {folder for file in everything for folder in Path(file).parents if folder != Path(".")}
        empty = {(folder / "__init__.py").as_posix() for folder in folders} - everything
        beside = {
            file.with_suffix(".tsv").as_posix() for file in map(Path, everything - own)
        }  # tables that modules read
        return (everything - own) | empty | {name for name in beside if (self.built / name).is_file()}

    def _copy(self, name: str) -> None:
        source, target = self.built / name, self.work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)

    def run(self) -> subprocess.CompletedProcess[str]:
        """The command as dvc.yaml has it, in a shell as DVC starts it."""
        self.before = dict(digests(self.work))
        settings = {"ATHANOR_TRACKING": "off", "PYTHONDONTWRITEBYTECODE": "1", param_reads.FOLDER: self.reads_folder}
        private = {"HOME": self.home, "TMPDIR": self.tmp, "PYTHONPATH": self.start}
        env = environment(**{name: str(value) for name, value in {**settings, **private}.items()})
        env = {key: value for key, value in env.items() if not key.startswith(("HF_", "XDG_", "GIT_"))}
        done = subprocess.run(
            self.declared["cmd"], shell=True, cwd=self.work, env=env, capture_output=True, text=True, timeout=600
        )
        self.after = dict(digests(self.work))
        return done

    @cached_property
    def reads(self) -> set[str]:
        """Class.field of every parameter that the run read."""
        return {name for path in self.reads_folder.iterdir() for name in json.loads(path.read_text())}

    def touched(self) -> list[str]:
        """Inputs that the run changed or removed."""
        return [name for name, value in self.before.items() if self.after.get(name) != value]

    def strays(self) -> list[str]:
        """What the run left that is no declared output: here, in the home directory or among temporary files."""
        around = {parent.as_posix() for out in self.outs for parent in Path(out).parents}
        inside = tuple(f"{out}/" for out in (*self.outs, ".athanor"))
        new = self.after.keys() - self.before.keys() - {*self.outs, *around, ".athanor"}
        elsewhere = [
            str(path) for folder in (self.home, self.tmp) for path in folder.rglob("*") if not is_of_a_compiler(path)
        ]
        return [name for name in sorted(new) if not name.startswith(inside)] + elsewhere

    def missing(self) -> list[str]:
        return [out for out in self.outs if not (self.work / out).exists()]

    def differing(self) -> list[str]:
        """Files of outputs that the clone has otherwise, or not at all; metrics/runs/ holds times and hosts."""
        repeated = [out for out in self.outs if not out.startswith("metrics/runs/")]
        here, there = (dict(pair for out in repeated for pair in files(root, out)) for root in (self.work, self.built))
        return sorted(file for file in here.keys() | there.keys() if here.get(file) != there.get(file))


def fitting(values: dict[str, Any], declared: set[str]) -> dict[str, Any]:
    """The sections with the undeclared ones changed to name the sources that the declared ones name."""
    local = {"type": "files", "globs": ["corpus/*"]}
    local |= {
        "kind": "web",
        "license": "MIT",
        "text_column": "text",
        "select": None,
        "max_document_bytes": 9,
        "min_chars": 9,
    }
    local |= {"min_documents": 9, "min_bytes": 9}
    if "mixture" in declared and "download" not in declared:
        sources = [{**local, "name": name} for name in values["mixture"]["sources"]]
        values["download"] = {**values["download"], "sources": sources}
    if "sft_data" in declared and "instruct" not in declared:
        sources = [{"type": "identity", "name": n, "repeats": 9, "min_rows": 9} for n in values["sft_data"]["sources"]]
        values["instruct"] = {**values["instruct"], "sources": sources}
    if "mixture" not in declared:
        names = [
            n
            for s in values["download"]["sources"]
            for n in (s.get("name"), s.get("prose_name"), s.get("code_name"))
            if n
        ]
        share = {"share": 0.9, "max_epochs": 9.0}
        values["mixture"] = {**values["mixture"], "cooldown": None, "sources": dict.fromkeys(names, share)}
    if "sft_data" not in declared:
        names = [source["name"] for source in values["instruct"]["sources"]]
        rare = {"max_copies": 9, "repeats": 9, "max_supervised_tokens": 9}
        values["sft_data"] = {**values["sft_data"], "sources": dict.fromkeys(names, rare), "source_priority": []}
        values["sft_data"]["filter_exceptions"] = {}
    if "clean" not in declared:
        values["clean"] = {**values["clean"], "source_priority": []}
        values["sft_data"]["filter_exceptions"] = {}
    return values


def is_of_a_compiler(path: Path) -> bool:
    """Our compiled C and the folders it lies in, or the empty folder that torch makes for its own, used or not."""
    empty = path.name.startswith("torchinductor_") and path.is_dir() and not list(path.iterdir())
    folders = path.is_dir() and (path.match("home/.cache") or path.match("home/.cache/athanor"))
    return empty or folders or path.match("home/.cache/athanor/elementwise-*.so")


def digests(root: Path) -> Iterator[tuple[str, str]]:
    """Relative path and digest of everything below; directories have the digest ""."""
    for path in sorted(root.rglob("*")):
        yield path.relative_to(root).as_posix(), sha256_file(path) if path.is_file() else ""


def files(root: Path, out: str) -> Iterator[tuple[str, str]]:
    """Relative path and digest of an output's files."""
    base = root / out
    for path in sorted(base.rglob("*")) if base.is_dir() else [base]:
        if path.is_file():
            yield path.relative_to(root).as_posix(), sha256_file(path)

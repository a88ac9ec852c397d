"""A small working directory with clean documents, for the tokenizer, shard and SFT data stages."""

from __future__ import annotations

import ast
import functools
import inspect
import shutil
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import new_dir, write_manifest
from athanor.runtime.run import Run
from athanor.text.documents import Document, write_documents, write_shards
from tests.e2e.clone import ROOT

SHARD_BYTES = 30_000


def mix(**sources: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Sources of a mixture by name: share, and epochs at most."""
    return {name: {"share": share, "max_epochs": epochs} for name, (share, epochs) in sources.items()}


TEXT_PARAMS: dict[str, Any] = {
    "mixture": {"seed": 1, "sources": mix(code=(0.6, 2.0), prose=(0.4, 3.0))},
    "tokenizer": {"vocab_size": 768, "sample_bytes": 100_000, "check_bytes": 20_000},
    "shard": {"train_tokens": 30_000, "shard_tokens": 12_000},
}


@functools.cache
def text_documents() -> tuple[Document, ...]:
    """Functions and docstrings of a few standard library modules; every tenth is held out."""
    import argparse
    import json.decoder
    import string
    import textwrap

    documents: dict[str, Document] = {}
    for module in (argparse, json.decoder, string, textwrap):
        lines = inspect.getsource(module).splitlines(keepends=True)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                code = "".join(lines[node.lineno - 1 : node.end_lineno])
                for kind, text in (("code", code), ("prose", ast.get_docstring(node))):
                    text = text and text[:4000]
                    if text and len(text) > 40 and text not in documents:
                        split = "val" if len(documents) % 10 == 0 else "train"
                        documents[text] = Document(text, kind, kind, "PSF-2.0", split)
    return tuple(documents.values())


def write_clean(folder: Path, documents: Iterable[Document]) -> None:
    """data/clean as the clean stage writes it, several shards for a source, without the scores."""
    documents = list(documents)
    counts: dict[str, dict[str, dict[str, int]]] = {"train": {}, "val": {}}
    for document in documents:
        row = counts[document.split].setdefault(document.source, {"documents": 0, "bytes": 0})
        row["documents"] += 1
        row["bytes"] += len(document.text.encode())
    with new_dir(folder / "data" / "clean") as clean:
        for source in counts["train"]:
            chosen = [d for d in documents if (d.split, d.source) == ("train", source)]
            write_shards(clean / "train" / source, chosen, SHARD_BYTES)
        write_documents(clean / "val.parquet", [d for d in documents if d.split == "val"])
        write_manifest(clean, kind="clean", version=1, counts=counts)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of its own with the code, which a slot's fingerprint covers."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("athanor", "stages"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def text_world(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/clean."""
    monkeypatch.setenv("ATHANOR_THREADS", "1")
    write_clean(workdir, text_documents())
    return workdir


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tokenizer_world` keeps the tokenizer it trains once for all tests."""
    return tmp_path_factory.mktemp("trained") / "tokenizer"


@pytest.fixture
def tokenizer_world(text_world: Path, trained_folder: Path, run_text_stage: Callable[..., None]) -> Path:
    """`text_world` with models/tokenizer, made by the stage itself."""
    if not trained_folder.exists():
        from stages import train_tokenizer

        run_text_stage(train_tokenizer)
        shutil.copytree("models/tokenizer", trained_folder)
    else:
        shutil.copytree(trained_folder, "models/tokenizer")
    return text_world


@pytest.fixture
def run_text_stage() -> Callable[..., None]:
    """Run a stage's body in the current directory with TEXT_PARAMS, changed by `section={...}` arguments."""

    def run(stage: types.ModuleType, **changes: dict[str, Any]) -> None:
        params = {name: {**values, **changes.get(name, {})} for name, values in TEXT_PARAMS.items()}
        YAML().dump({**changes, **params}, Path("params.yaml"))
        name = stage.__name__.split(".")[-1]
        stage.run(Run(name.replace("_", "-"), f"stages.{name}"))

    return run

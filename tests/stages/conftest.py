"""A small working directory with clean documents, for the tokenizer, shard and SFT data stages."""

from __future__ import annotations

import ast
import functools
import inspect
import shutil
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.strict import read_yaml
from athanor.runtime.run import Run
from athanor.text.conversations import Conversation, Item, Message, write_rows
from athanor.text.documents import Document, split_of, write_documents, write_shards

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 30_000
QUESTION = "How many green apples did the old farmer sell at the market on the third Sunday in May?"
ITEM = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))
PARAMS = read_yaml(Path(__file__).with_name("params.yaml"))


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


def write_battery(root: Path, items: Iterable[Item] = (ITEM,)) -> None:
    with new_dir(root / "data" / "battery") as folder:
        write_rows(folder / "items.jsonl", items)
        write_manifest(folder, kind="battery", version=1, counts={})


def conversation(source: str, *texts: str) -> Conversation:
    roles = ("user", "assistant") * (len(texts) // 2)
    return Conversation(tuple(map(Message, roles, texts)), source, "CC0-1.0", split_of(texts[0], 0.2), texts[0])


def settle(patch: pytest.MonkeyPatch, root: Path) -> None:
    """A stage's working directory, on a small machine; it becomes the current one."""
    patch.delenv("DVC_ROOT", raising=False)
    patch.setenv("ATHANOR_THREADS", "1")
    patch.setenv("ATHANOR_DEVICE", "cpu")
    patch.chdir(root)
    for name in ("athanor", "stages"):  # the digest of the code is in fingerprints of slots and in leaf files
        if not (root / name).exists():
            (root / name).symlink_to(ROOT / name)


def run_stage(stage: types.ModuleType, params: dict[str, Any] | None = None, stop_after: int | None = None) -> Run:
    """A stage's body in the current directory, with a params.yaml of these sections; asked to stop at the n-th look."""
    if params is not None:
        YAML().dump(params, Path("params.yaml"))
    name = stage.__name__.split(".")[-1].replace("_", "-").replace("evaluate", "eval")
    run, asked = Run(name, stage.__name__), []
    if stop_after is not None:
        run.stop_requested = lambda: asked.append(1) or len(asked) >= stop_after
    try:
        stage.run(run)
    except BaseException as error:
        run.fail("KILLED", str(error))
        raise
    run.finish()
    return run


def run_text_stage(stage: types.ModuleType, **changes: dict[str, Any]) -> None:
    """`run_stage` with sections of PARAMS, changed by `section={...}` arguments."""
    params = {name: PARAMS[name] | changes.get(name, {}) for name in ("mixture", "tokenizer", "shard")}
    run_stage(stage, changes | params)


@pytest.fixture
def text_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/clean; it becomes the current one."""
    settle(monkeypatch, tmp_path)
    write_clean(tmp_path, text_documents())
    return tmp_path


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tokenizer_world` keeps the tokenizer it trains once for all tests."""
    return tmp_path_factory.mktemp("trained") / "tokenizer"


@pytest.fixture
def tokenizer_world(text_world: Path, trained_folder: Path) -> Path:
    """`text_world` with models/tokenizer, made by the stage itself."""
    if not trained_folder.exists():
        from stages import train_tokenizer

        run_text_stage(train_tokenizer)
        shutil.copytree("models/tokenizer", trained_folder)
    else:
        shutil.copytree(trained_folder, "models/tokenizer")
    return text_world

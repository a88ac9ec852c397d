"""Each stage runs on what it declares, makes what it declares with the bytes known, and its parameters are all read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.corpus.documents import read_documents
from athanor.params.model import ModelParams
from athanor.params.strict import read_yaml
from athanor.pipeline.schema import schemas
from tests.e2e.clone import ROOT, Clone
from tests.e2e.hermetic import Hermetic

STAGES = list(read_yaml(ROOT / "dvc.yaml")["stages"])


@pytest.fixture(scope="module")
def executed(micro: Clone, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hermetic]:
    """Runs a stage once, however many tests look at it."""

    @cache
    def run(stage: str) -> Hermetic:
        hermetic = Hermetic(micro.path, stage, tmp_path_factory.mktemp(stage))
        return succeed(hermetic)

    return run


def succeed(hermetic: Hermetic) -> Hermetic:
    done = hermetic.run()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return hermetic


@pytest.mark.parametrize("stage", STAGES)
def test_stage_needs_what_it_declares_and_makes_what_it_declares(executed, stage):
    run = executed(stage)
    assert run.missing() == [], "declared outputs that were not made"
    assert run.strays() == [], "files that are no declared output"
    assert run.touched() == [], "inputs that the stage changed"
    assert run.differing() == [], "outputs with other bytes than in the built clone"


def test_a_parameter_that_no_stage_reads_is_named(executed, micro, tmp_path):
    reads = {name for stage in STAGES for name in executed(stage).reads}
    reads |= {name for run in other_sources(micro, tmp_path) for name in run.reads}
    # The model's shape is copied into a ModelConfig; reading that one is reading the parameter.
    reads |= {f"ModelParams.{field}" for field in fields_of(ModelParams) if f"ModelConfig.{field}" in reads}
    used = {cls for schema in schemas().values() for cls in classes(schema)}
    known = {f"{cls.__name__}.{field}" for cls in used for field in fields_of(cls)}
    assert len(known) > 130
    unread = sorted(known - reads)
    assert not unread, f"no stage reads {', '.join(unread)}. Fix: use them, or remove them from params.yaml"


def other_sources(micro: Clone, folder: Path) -> list[Hermetic]:
    """download and clean with the kinds of source and of text that micro has not, from files below corpus/."""
    document = {"license": "CC0-1.0", "text_column": "text", "max_document_bytes": 100_000}
    document |= {"min_chars": 1, "min_documents": 1, "min_bytes": 1}
    hub = {"config": None, "split": "train", "revision": None, "checkpoint_documents": 7}
    hub |= {"skip_documents": 1, "max_documents": 30, "max_bytes": 100_000}
    chats = {"type": "messages", "column": "messages", "max_rows": 9, "min_rows": 1, "license": "CC0-1.0"}
    here = {"files": "corpus/chats/a.jsonl", "hub_id": None, "hub_config": None, "revision": None, "hub_split": "train"}
    # A folder in the place of a hub data set: the same fields are read, and no network is needed.
    there = {**here, "files": None, "hub_id": "./corpus/chats", "revision": "0" * 40}
    params = {
        "download": {
            "val_fraction": 0.3,
            "sources": [
                {"type": "files", "name": "a", "kind": "web", "globs": ["corpus/a.parquet"], **document},
                {"type": "files", "name": "b", "kind": "qa", "globs": ["corpus/b.parquet"], **document},
                {"type": "huggingface", "name": "c", "kind": "math", "dataset": "./corpus/set", **hub, **document},
            ],
        },
        "instruct": {
            "seed": 1,
            "val_fraction": 0.2,
            "sources": [{"name": "here", **chats, **here}, {"name": "there", **chats, **there}],
        },
    }
    download = Hermetic(micro.path, "download", folder / "download", params)
    corpus = download.work / "corpus"
    texts = [document.text for document in read_documents(micro.path / "data" / "clean" / "val.parquet")]
    for number, name in enumerate(("a.parquet", "b.parquet", "set/a.parquet")):
        (corpus / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts[number::3]}), corpus / name)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (corpus / "chats").mkdir()
    (corpus / "chats" / "a.jsonl").write_text(json.dumps(row) + "\n")
    succeed(download)
    clean = Hermetic(micro.path, "clean", folder / "clean")
    shutil.rmtree(clean.work / "data" / "raw")
    shutil.copytree(download.work / "data" / "raw", clean.work / "data" / "raw")
    return [download, succeed(clean)]


def classes(schema: Any) -> Iterator[type]:
    """The dataclasses that a type is made of, at any depth."""
    if dataclasses.is_dataclass(schema):
        yield schema
        schema = types.SimpleNamespace(**typing.get_type_hints(schema))
        inner: Any = vars(schema).values()
    else:
        inner = typing.get_args(schema)
    for part in inner:
        yield from classes(part)


def fields_of(cls: type) -> list[str]:
    """Its fields, less the tag that chose the class: `type: Literal["python"]` did its work at building."""
    hints = typing.get_type_hints(cls)
    literals = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}
    tags = [name for name, values in literals.items() if len(values) == 1]
    return [field.name for field in dataclasses.fields(cls) if field.name not in tags]

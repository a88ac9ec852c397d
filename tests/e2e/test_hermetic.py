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

from athanor.base.strict import read_yaml
from athanor.runtime.schema import schemas
from athanor.sources.params import RemoteSource
from athanor.text.documents import read_documents
from athanor.training.model_params import ModelParams
from tests.e2e.clone import STAGES, Clone, served
from tests.e2e.hermetic import Hermetic

OTHER = Path(__file__).with_name("other_sources.yaml")


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
    # These are read by side stages, which have tests of their own.
    # Those of a remote source need a store: test_sources_remote.py.
    side = ("probe_lr", "synthetic", "side", "tune", "grpo_data", "grpo", "dpo_data", "dpo")
    used = {cls for section, schema in schemas().items() if section not in side for cls in classes(schema)}
    known = {f"{cls.__name__}.{field}" for cls in used if cls is not RemoteSource for field in fields_of(cls)}
    assert len(known) > 130
    unread = sorted(known - reads)
    assert not unread, f"no stage reads {', '.join(unread)}. Fix: use them, or remove them from params.yaml"


def other_sources(micro: Clone, folder: Path) -> list[Hermetic]:
    """download and clean with the kinds of source and of text that micro has not, from files below corpus/."""
    texts = [document.text for document in read_documents(micro.path / "data" / "clean" / "val.parquet")]
    (folder / "served").mkdir()
    (folder / "served" / "d.jsonl").write_text("".join(json.dumps({"text": talk(text)}) + "\n" for text in texts[5::6]))
    with served(folder / "served") as address:
        (folder / "params.yaml").write_text(OTHER.read_text().replace("ADDRESS", address))
        params = read_yaml(folder / "params.yaml")
        params["battery"] = {**read_yaml(micro.path / "params.yaml")["battery"], **params["battery"]}
        download = Hermetic(micro.path, "download", folder / "download", params)
        write_corpus(download.work / "corpus", texts)
        succeed(download)
    clean = Hermetic(micro.path, "clean", folder / "clean")
    shutil.rmtree(clean.work / "data" / "raw")
    for folder_read in ("data/raw", "corpus/ready"):  # of a ready corpus the texts are read where they lie
        shutil.copytree(download.work / folder_read, clean.work / folder_read, dirs_exist_ok=True)
    params = read_yaml(micro.path / "params.yaml")
    sources = params["mixture"]["sources"]
    mixture = {"seed": 1, "sources": sources, "cooldown": {"sources": {"python-code": sources["python-code"]}}}
    shard = Hermetic(micro.path, "shard", folder / "shard", {"mixture": mixture})
    # The labels mean nothing, and so does the classifier: the gates are as wide as can be.
    quality = {"source": "python-docs", "meta_key": "part", "high_from": 1.0, "low_below": 1.0}
    toxicity = {"globs": ["corpus/*.jsonl"], "text_column": "text", "label_column": "toxic", "toxic_from": 1.0}
    toxicity |= {"clean_below": 1.0}
    wide = {"min_auroc": 0.5, "max_length_correlation": 1.0, "quality_labels": quality, "toxicity_labels": toxicity}
    label = Hermetic(micro.path, "train-classifiers", folder / "label", {"classifiers": params["classifiers"] | wide})
    rows = [{"text": text + " darn" * (number % 2), "toxic": number % 2} for number, text in enumerate(texts * 9)]
    (label.work / "corpus" / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [download, succeed(clean), succeed(shard), succeed(label)]


def talk(text: str) -> str:
    return f"User: Please tell me something about this.\n\nAssistant: {text}\n\nUser: Thank you, that was all I need."


def write_corpus(corpus: Path, texts: list[str]) -> None:
    """The local files that `other_params` names."""
    for number, name in enumerate(("a.parquet", "b.parquet", "set/a.parquet", "filled/a.parquet", "ready/0.parquet")):
        (corpus / name).parent.mkdir(exist_ok=True, parents=True)
        columns = {"text": texts[number::6]}
        constant = {"score": 1.0, "lang": "en", "license": "MIT"}
        columns |= {key: [value] * len(columns["text"]) for key, value in constant.items()}
        pq.write_table(pa.table(columns), corpus / name)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (corpus / "chats").mkdir()
    (corpus / "chats" / "a.jsonl").write_text(json.dumps(row) + "\n")


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

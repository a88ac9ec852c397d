"""A small corpus in which every thing happens that can happen to a document, made by the real stages."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import write_manifest
from athanor.cli import cli
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.text.conversations import Item, Message, write_rows
from athanor.text.documents import Document, write_shards
from tests.cleaning.world import write_scorer

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "How many <b>green</b> apples did the old farmer sell at the market on the third Sunday in May?"
ITEM = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))
WORDS = """the of and a to in is was that it with as on be at by river garden window letter kettle morning table
brother kitchen winter summer street music paper finger mountain island bridge silver copper engine market cotton
butter""".split()
EVIL = '<script>alert(1)</script> "><img src=x onerror=alert(2)> \x1b[31mred\x1b[0m \u202eback </pre></details>'


SHORT = "<script>alert(1)</script> \x1b[31mred"  # too few words


def prose(seed: int) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(10))


def raw() -> dict[str, list[Document]]:
    def document(text: str, split: str = "train", source: str = "books", licence: str = "MIT", **meta) -> Document:
        return Document(text, source, "prose", licence, split, meta)

    books = [document(prose(n), part=n) for n in range(30)]
    books += [document(prose(100 + n), "val", part=n) for n in range(4)]
    books += [document(f"{prose(300 + n)}\n{EVIL}", title=EVIL) for n in range(3)]  # 34, 35, 36
    books += [
        document(SHORT, title=EVIL),  # 37
        document("word " * 900_000),  # too long: it was never scored
        document(prose(3), part="again"),  # 39
        document(prose(4) + "\nThe end."),  # the longer one stays: 4 goes
        document(prose(100), part="exact copy of val"),
        document(prose(101) + "\nThe end."),  # 42, near copy of val
        document(f"{prose(50)}\n{QUESTION}\n{prose(51)}"),  # 43
        document(
            prose(52).replace("\n", "\r\n") + "\r\nWrite to ann.lee@garden-river.net today.", licence="MIT <&>"
        ),  # 44
    ]
    books += [document(prose(60 + n // 2), a=n % 3) for n in (0, 1, 3, 2)]  # of each pair one stays, first or last
    web = [document(prose(200 + n), source="web", licence="unknown") for n in range(12)]
    return {"books": books, "web": [*web, document(prose(5), source="web")]}


def params() -> dict:
    values = dict(presets.values(ROOT / "presets" / "micro.yaml"))
    shares = {"books": {"share": 0.7, "max_epochs": 3.0}, "web": {"share": 0.3, "max_epochs": 3.0}}
    values["mixture"] = {
        "seed": 1,
        "sources": shares,
        "cooldown": {"sources": {"web": {"share": 1.0, "max_epochs": 1.0}}},
    }
    values["tokenizer"] = {**values["tokenizer"], "vocab_size": 512, "sample_bytes": 12_000, "check_bytes": 1_000}
    values["shard"] = {"train_tokens": None, "cooldown_tokens": None, "shard_tokens": 3_000, "share_tolerance": 0.3}
    return values


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """data/raw written here; clean, train-tokenizer and shard as the stages make them."""
    from stages import clean, shard, train_tokenizer

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("world")
        patch.chdir(folder)
        patch.delenv("DVC_ROOT", raising=False)
        patch.setenv("ATHANOR_TRACKING", "off")
        patch.setenv("ATHANOR_WORKERS", "1")
        for name in ("athanor", "stages"):
            Path(name).symlink_to(ROOT / name)
        for name, documents in raw().items():
            write_shards(f"data/raw/{name}", documents, 9_000)
        counts = {name: {"left_out": {"licence_not_allowed": 7}} for name in raw()}
        write_manifest("data/raw", kind="raw", version=1, counts=counts, sources={"books": {"revision": "abc"}})
        Path("data/battery").mkdir()
        write_rows("data/battery/items.jsonl", [ITEM])
        write_manifest("data/battery", kind="battery", version=1, counts={"facts": 1})
        write_scorer(Path("models/classifiers"))
        with open("params.yaml", "w", encoding="utf-8") as file:
            YAML().dump(params(), file)
        for stage in (clean, train_tokenizer, shard):
            name = stage.__name__.split(".")[-1]
            run = Run(name.replace("_", "-"), stage.__name__)
            stage.run(run)
            run.finish()
    return folder


@pytest.fixture
def world(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("ATHANOR_TRACKING", "off")
    return made


@pytest.fixture
def athanor(monkeypatch, capsys):
    """Runs `athanor data ...`; status, what it printed, and its error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["athanor", "data", *words])
        status = cli.main()
        told = capsys.readouterr()
        return status, told.out, told.err

    return run

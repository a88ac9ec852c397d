"""What people bring first is small, or odd: it is trained on, or refused before any training with what to change.

The stages themselves, one after another in one process, with the micro preset and short trainings. A test ends with
the export, or with an error of a stage before `pretrain`.
"""

from __future__ import annotations

import importlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.cli import cli
from athanor.runtime import presets
from athanor.text.documents import read_sources
from athanor.tokenizer.tokenizer import Tokenizer
from tests.cli.any_text import CORPORA
from tests.e2e.clone import ROOT, STAGES
from tests.stages.conftest import run_stage, settle

PROSE = [text for text in topics.values() if len(text) > 1500]
SETTINGS: dict[str, dict[str, Any]] = {
    "pretrain": {"tokens": 16384, "warmup_tokens": 2048},
    "sft": {"epochs": 0.1},
    "shard": {"train_tokens": 60000},
    "export": {"llama_cpp": "off", "gguf_types": ["f16"]},
}


class Project:
    """A directory with the micro preset in which `corpus/own` is the only source of documents."""

    def __init__(self, folder: Path) -> None:
        for name in ("battery", "dvc.yaml"):
            (folder / name).symlink_to(ROOT / name)
        self.corpus = folder / "corpus" / "own"
        self.corpus.mkdir(parents=True)
        self.params = presets.values(ROOT / "presets" / "micro.yaml")
        self.source = {"type": "files", "name": "own", "globs": ["corpus/own/**/*"]}
        self.params["download"]["sources"] = [self.source]
        self.params["mixture"]["sources"] = {"own": {"share": 1.0, "max_epochs": 4.0}}
        for section, values in SETTINGS.items():
            self.params[section] |= values

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.corpus / name).write_text(text, encoding="utf-8")

    def run(self) -> Iterator[str]:
        """Run one stage after another; yields the name of each that is done."""
        Path("params.yaml").write_text(json.dumps(self.params))
        for stage in STAGES:
            run_stage(importlib.import_module(STAGES[stage].split()[-1]))
            yield stage


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    settle(monkeypatch, tmp_path)
    monkeypatch.setenv("ATHANOR_WORKERS", "1")
    return Project(tmp_path)


def german(count: int) -> dict[str, str]:
    """German function words between words made of syllables: as varied as text, and as foreign to the rules."""
    rng = random.Random(1)
    small = "der die das und nicht mit auf ein eine ist von zu im den dem sich auch als noch nach bei wie über".split()
    parts = "haus garten wald ver be ge stell fahr zeit ung lich schaft tisch buch berg land schreib heit sonn".split()

    def sentence() -> str:
        words = ["".join(rng.sample(parts, rng.randint(1, 3))) for _ in range(rng.randint(5, 9))]
        return " ".join(f"{rng.choice(small)} {word}" for word in words).capitalize() + "."

    return {f"{n}.txt": "\n\n".join(" ".join(sentence() for _ in range(6)) for _ in range(5)) for n in range(count)}


def novel() -> str:
    return "\n\n\n".join(f"CHAPTER {number}\n\n{text}" for number, text in enumerate(PROSE))[:250_000]


REFUSED: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "one document": (lambda: {"one.md": PROSE[0][:5000]}, "nothing can be held out.*a hundred kilobytes"),
    "ten tiny ones": (
        lambda: {f"{n}.md": f"The lamp number {n} stands in the cellar beside the stove.\n" for n in range(10)},
        "is more than the text supports",
    ),
    "all duplicates": (lambda: {f"{n}.md": PROSE[3][:4000] for n in range(60)}, "of equal texts one counts"),
    "another language": (lambda: german(80), "english_only: false and min_stop_word_fraction: null"),
}
TRAINED: dict[str, Callable[[], dict[str, str]]] = {
    "one novel": lambda: {"novel.txt": novel()},
    "3 kB, which `athanor repro` refuses": lambda: {f"{n}.md": PROSE[n][:1000] for n in range(3)},
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_single_text_file_ends_well(name, project):
    project.write(TRAINED[name]())
    assert list(project.run())[-1] == "export"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_before_any_training_with_what_to_change(name, project):
    files, message = REFUSED[name]
    project.write(files())
    done: list[str] = []
    with pytest.raises(AthanorError, match=f"(?s){message}"):
        done.extend(project.run())
    assert "pretrain" not in done


def test_another_language_ends_well_with_the_two_settings(project):
    project.write(german(80))
    project.params["clean"]["rules"]["prose"] |= {"english_only": False, "min_stop_word_fraction": None}
    project.params["sft_data"]["max_pad_share"] = 0.15  # English exercises are long in the tokens of another language
    assert list(project.run())[-1] == "export"


@pytest.mark.parametrize("name", ("chinese", "midi"))
def test_what_new_writes_for_text_without_words_ends_well(name, project):
    project.write({"text.txt": CORPORA[name][0]})
    Path("params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"), encoding="utf-8")
    assert cli.call("new", ["corpus/own", "--write"]) == 0
    project.params = read_yaml("params.yaml")
    for section, values in SETTINGS.items():
        project.params[section] |= values
    assert list(project.run())[-1] == "export"
    tokenizer, documents = Tokenizer.load("models/tokenizer"), list(read_sources("data/clean/train"))
    assert sum(len(document.text) for document in documents) > 0.6 * len(
        CORPORA[name][0]
    )  # of three parts one is held out
    for document in documents:
        assert tokenizer.decode(tokenizer.encode(document.text)) == document.text


def test_a_folder_of_code_alone_ends_well(project):
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = islice((path for path in sorted(library.glob("*.py")) if path.stat().st_size < 30_000), 80)
    project.write({path.name: path.read_text(encoding="utf-8") for path in modules})
    project.source["kind"] = "code"
    assert list(project.run())[-1] == "export"

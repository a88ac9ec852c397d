"""docs/own-data.md: its commands are run as they stand, with its three lines in params.yaml, in a fresh clone.

One run of the whole micro pipeline and a few commands of DVC: about 45 seconds on two cores.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.cleaning.rules import RULES
from athanor.runtime import presets
from athanor.runtime.schema import check_file
from athanor.text.documents import read_sources
from tests.e2e.clone import ROOT, Clone, environment, make_clone
from tests.e2e.page import blocks, promised

PAGE = ROOT / "docs" / "own-data.md"
SECONDS = 900
AUTHOR = {f"GIT_{who}_{what}": "t@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def block(heading: str, language: str) -> str:
    return next(found.text for found in blocks(PAGE) if (found.heading, found.language) == (heading, language))


def with_keys(text: str, new: str) -> str:
    """A params file with the keys of `new` in place of those of the same name, line by line, as in an editor."""
    for section, body in re.findall(r"(?m)^(\w+):\n((?:  .*\n)+)", new):
        for key, value in re.findall(r"(?m)^(  \w+:)(.*\n(?:  - .*\n|    .*\n)*)", body):
            place = re.compile(rf"(?m)(^{section}:.*\n(?:(?!\w).*\n)*?)^{key}.*\n(?:  - .*\n|    .*\n)*")
            text, count = place.subn(lambda match, line=key + value: match[1] + line, text)
            assert count == 1, f"{section}.{key.strip()} stands {count} times in the file"
    return text


class Walk:
    """A clone in which the page is followed; `said` has what the commands under each heading printed."""

    def __init__(self, clone: Clone) -> None:
        self.clone, self.said = clone, {}

    def follow(self, heading: str) -> None:
        for found in (found for found in blocks(PAGE) if found.heading == heading and found.language == "bash"):
            for command in _commands(found.text):
                done = subprocess.run(
                    ["bash", "-c", command], cwd=self.clone.path, env=environment(**AUTHOR), capture_output=True,
                    text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
                )  # fmt: skip
                output = done.stdout + done.stderr
                assert done.returncode == promised(command), f"{command}\n{output[-6000:]}"
                self.said[heading] = self.said.get(heading, "") + output

    def write(self, heading: str) -> str:
        """Put the lines under a heading into params.yaml; returns the file as it was."""
        path = self.clone.path / "params.yaml"
        before = path.read_text(encoding="utf-8")
        path.write_text(with_keys(before, block(heading, "yaml")), encoding="utf-8")
        return before

    def metrics(self, stage: str) -> dict:
        return json.loads((self.clone.path / "metrics" / f"{stage}.json").read_text())


def _commands(text: str) -> list[str]:
    """One for each line; a here-document belongs to the line that begins it."""
    return re.findall(r"(?ms)^[^\n]*<<'END'\n.*?^END$|^[^\n]+$", text)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The page followed down to its second `plan`."""
    walk = Walk(make_clone(tmp_path_factory.mktemp("own")))
    shutil.copyfile(ROOT / "presets" / "default.yaml", walk.clone.path / "params.yaml")  # as a user finds it
    walk.follow("Put the text into corpus/")
    assert (walk.clone.path / "params.yaml").read_text() == presets.complete(ROOT / "presets" / "micro.yaml")
    walk.write("Three lines")
    for heading in ("Keep the text with the results", "Run", "Look"):
        walk.follow(heading)
    return walk


def test_three_lines_are_three_lines():
    values = [line for line in block("Three lines", "yaml").splitlines() if not line.endswith(":")]
    assert len(values) == 3 and all(len(line) <= 120 for line in values)
    known = {found.heading for found in blocks(PAGE) if found.language == "bash"}
    assert known == {"Put the text into corpus/", "Keep the text with the results", "Run", "Look", "Change a note"}


def test_one_repro_trains_a_model_on_these_documents_alone(walk):
    """From the file names below corpus/ to the weights, each artifact names the one before it."""
    here = walk.clone.path
    notes = {path.name for path in here.glob("corpus/notes/*.md")}
    questions = (here / "corpus" / "qa.jsonl").read_text(encoding="utf-8").splitlines()
    raw = list(read_sources(here / "data" / "raw"))
    assert {document.source for document in raw} == {"notes", "qa"} and len(notes) > 50 < len(questions)
    assert {d.meta["file"] for d in raw if d.source == "notes"} == notes
    assert [d.meta["row"] for d in raw if d.source == "qa"] == list(range(len(questions)))
    first = json.loads(questions[0])
    assert next(d.text for d in raw if d.source == "qa") == f"{first['question']}\n\n{first['answer']}"

    shards = walk.metrics("shard")
    assert set(shards["sources"]) == {"notes", "qa"}
    for name, given in shards["sources"].items():
        downloaded = sum(document.source == name for document in raw)
        assert 0.8 * downloaded < given["unique_documents"] <= downloaded
        assert abs(given["share"] - {"notes": 0.8, "qa": 0.2}[name]) < 0.05 and given["epochs"] <= 4.0
    for child, parent in [("data/clean", "data/raw"), ("data/shards", "data/clean"), ("models/base", "data/shards")]:
        parents = json.loads((here / child / "manifest.json").read_text())["parents"]
        assert parents[Path(parent).name] == manifest_digest(here / parent), child
    assert read_manifest(here / "data" / "raw", "raw", 1)["sources"]["notes"]["license"] == "unknown"
    assert walk.metrics("pretrain")["tokens"] > 0 and (here / "models" / "export" / "hf").is_dir()


def test_what_the_page_shows_is_what_was_said(walk):
    run = walk.said["Run"]
    assert re.search(r"download +run", run) and "clean: notes: 8" in run and "the epoch cap of source 'qa' ends" in run
    assert re.search(r"qa +base \d\.\d+", run)
    assert re.search(r"notes +\w+ +\d", walk.said["Look"])
    assert "| notes |" in (walk.clone.path / "models" / "export" / "MODEL_CARD.md").read_text()


def test_private_text_stays_out_of_git(walk):
    tracked = walk.clone.run("git", "ls-files", "corpus").stdout.split()
    assert tracked == [
        "corpus/.gitignore",
        "corpus/README.md",
        "corpus/notes.dvc",
        "corpus/qa.jsonl.dvc",
    ]
    assert "up to date" in walk.clone.dvc("status").stdout


def test_a_changed_note_makes_download_run_and_an_undone_edit_nothing(walk):
    note = walk.clone.path / "corpus" / "notes" / "naming.md"
    before = note.read_bytes()
    walk.follow("Change a note")
    assert note.read_bytes() != before
    said = walk.said["Change a note"]
    assert re.search(r"download +run .*\n(  .*\n)*  - file corpus changed", said) and re.search(r"clean +follows", said)
    note.write_bytes(before)
    assert walk.clone.run("bash", "-c", "athanor plan").returncode == 0


def test_beside_the_standard_library_means_both(walk):
    before = walk.write("Beside the standard library")
    sections = check_file(walk.clone.path / "params.yaml")
    names = set(sections["download"].names)
    assert names == set(sections["mixture"].sources) == {"notes", "qa", "python-docs", "python-code"}
    default = presets.values(ROOT / "presets" / "micro.yaml")["download"]["sources"][0]
    assert yaml.safe_load((walk.clone.path / "params.yaml").read_text())["download"]["sources"][0] == default
    (walk.clone.path / "params.yaml").write_text(before)


def test_every_message_of_the_table_is_one_that_the_code_has():
    """Names and numbers in a message are of the page's example; what stands between them is in one source file."""
    files = [*ROOT.glob("athanor/**/*.py"), *ROOT.glob("stages/*.py")]
    sources = [re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8"))) for path in files]
    messages = re.findall(r"(?m)^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"))
    assert len(messages) > 12
    for message in messages:
        parts = [part for part in re.split(r"'[\w-]+'|\d+| documents| download\.sources", message) if part.strip()]
        assert any(all(part.strip() in text for part in parts) for text in sources), message
        for rule in re.findall(r"rule '(\w+)'", message):
            assert rule in RULES

"""Text of one's own is refused in seconds, with what to change, or let through."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from athanor.base.errors import InputError
from athanor.cli.corpus_gate import check_corpus
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from tests.e2e.clone import ROOT

BOOK = "\n\n\n".join(f"CHAPTER {n}\n\n{text}" for n, text in enumerate(topics.values()))[:200_000]
GERMAN = "der die das und nicht mit auf ein eine ist von zu im den dem sich auch als Haus Garten Wald Fahrt Tisch Buch Berg".split()
CHINESE = "春天来了 他走进花园 没有人说话 雨下了一夜 书在桌子上 我们明天再去".split()
OTHER_LANGUAGE = {"english_only": False, "min_stop_word_fraction": None}
OTHER_SCRIPT = {"min_ascii_fraction": None, "min_letter_fraction": None, "max_mean_word_chars": None}


def sentences(words: list[str], end: str, glue: str) -> str:
    rng = random.Random(2)
    return "\n\n".join(
        "".join(glue.join(rng.choices(words, k=rng.randint(6, 12))) + end for _ in range(8)) for _ in range(120)
    )


TEXTS: dict[str, dict[str, str]] = {
    "a novel": {"novel.txt": BOOK},
    "one line": {"line.txt": " ".join(BOOK.split())},
    "3 kB": {"note.txt": BOOK[:3000]},
    "ten tiny ones": {f"{n}.md": f"The lamp number {n} stands in the cellar beside the stove.\n" for n in range(10)},
    "all duplicates": {f"{n}.md": BOOK[:4000] for n in range(60)},
    "a book among fixtures": {"book.md": BOOK} | {f"{n}.txt": f"golden row {n}" for n in range(100)},
    "German": {"buch.txt": sentences(GERMAN, ". ", " ")},
    "Chinese": {"书.txt": sentences(CHINESE, "。", "，")},
}
REFUSED = {
    "3 kB": r"3,\d+ bytes of text .of 1 different documents. are too few.*a hundred kilobytes",
    "ten tiny ones": "of 10 different documents. are too few",
    "all duplicates": "of 1 different documents. are too few",
    "German": "rule 'not_english'.*english_only: false, min_stop_word_fraction: null; and set sft_data.max_pad_share to 0.15$",
    "Chinese": "rule 'not_ascii'.*min_ascii_fraction: null.*classifiers.weak_labels to false",
}


def checked(
    folder: Path, files: dict[str, str], rules: dict[str, Any] | None = None, source: dict[str, Any] | None = None
) -> None:
    values = presets.values(ROOT / "presets" / "default.yaml")
    values["download"]["sources"] = [{"type": "files", "name": "own", "globs": [f"{folder}/*"], **(source or {})}]
    values["mixture"]["sources"] = {"own": {"share": 1.0, "max_epochs": 4.0}}
    values["clean"]["rules"]["prose"] |= rules or {}
    values["tokenizer"]["vocab_size"] = 448
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    check_corpus(check_values(values))


@pytest.mark.parametrize("name", TEXTS)
def test_what_cannot_be_trained_on_is_refused_with_what_to_change(name, tmp_path):
    if name not in REFUSED:
        return checked(tmp_path, TEXTS[name])
    with pytest.raises(InputError, match=f"(?s){REFUSED[name]}"):
        checked(tmp_path, TEXTS[name])


def test_the_settings_that_are_advised_let_other_languages_through(tmp_path):
    for folder in ("german", "chinese"):
        (tmp_path / folder).mkdir()
    checked(tmp_path / "german", TEXTS["German"], OTHER_LANGUAGE)
    checked(tmp_path / "chinese", TEXTS["Chinese"], OTHER_LANGUAGE | OTHER_SCRIPT)


def test_files_that_cannot_be_read_are_named_before_any_stage_unless_they_are_left_out(tmp_path):
    """`athanor plan` listed ten stages, and download then failed."""
    files = {"novel.txt": BOOK, "table.csv": "a,b\n", "photo.png": "x"}
    with pytest.raises(InputError, match=r"2 of 3 files cannot be read.*table\.csv.*on_unreadable: skip"):
        checked(tmp_path, files)
    checked(tmp_path, files, source={"on_unreadable": "skip"})


def test_the_library_needs_no_look():
    check_corpus(check_values(presets.values(ROOT / "presets" / "default.yaml")))


@pytest.mark.parametrize(
    "text, what",
    [
        (None, "no file matches"),
        ('{"messages": [}\n', "not valid JSON"),
        ('{"question": "?", "answer": "!"}\n', "shape: prompt"),
    ],
)
def test_conversations_of_one_s_own_are_read_before_any_stage(text, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("talks.jsonl").write_text(text, encoding="utf-8")
    values = presets.values(ROOT / "presets/default.yaml")
    values["instruct"]["sources"].append({"type": "messages", "name": "talks", "files": "talks.jsonl"})
    values["sft_data"]["sources"]["talks"] = {}
    with pytest.raises(InputError, match=what):
        check_corpus(check_values(values))

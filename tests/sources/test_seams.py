"""Long texts are cut at their own seams, nothing is lost, and neighbours stay on one side of the split."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from athanor.base.errors import InputError
from athanor.sources import holdout, seams
from athanor.text.documents import NEIGHBOURHOOD, Document, read_sources, split_of, write_shards
from tests.sources.world import read

SENTENCES = (
    "The river was high that year. ",
    "Nobody in the village had seen the like before! ",
    "“Is it over?” she asked. ",
)


def paragraph(rng: random.Random, sentences: int = 6) -> str:
    return "".join(rng.choices(SENTENCES, k=sentences)).strip()


def novel(chapters: int = 12, paragraphs: int = 20) -> str:
    rng = random.Random(3)
    return "\n\n\n".join(
        f"CHAPTER {number}\n\n" + "\n\n".join(f"{number}.{n} {paragraph(rng)}" for n in range(paragraphs))
        for number in range(1, chapters + 1)
    )


def chinese() -> str:
    rng = random.Random(4)
    words = "春天来了 他走进花园 没有人说话 雨下了一夜 书在桌子上 我们明天再去".split()
    return "".join(rng.choice(words) + "。" for _ in range(3000))


TEXTS = {
    "a novel": novel(),
    "one line": " ".join(random.Random(5).choices("one long line of words without an end".split(), k=9000)),
    "no space at all": "x" * 20_000,
    "Chinese": chinese(),
    "only line ends": "\n" * 9000,
    "Windows": novel(3).replace("\n", "\r\n"),
    "code": "".join(f"def part_{n}(x):\n    if x:\n        return {n}\n    return x\n\n\n" for n in range(400)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_lost_or_repeated_and_no_piece_is_too_long(name):
    pieces = seams.pieces(TEXTS[name], 2000, code=name == "code")
    assert "".join(piece.text for piece in pieces) == TEXTS[name]
    assert len(pieces) > 1 and max(len(piece.text) for piece in pieces) <= 2000
    assert sum(len(piece.text) < 500 for piece in pieces) < len(pieces) / 2  # no heap of crumbs


def test_a_novel_is_cut_at_its_chapters_and_between_paragraphs():
    pieces = seams.pieces(novel(), 2000)
    assert sum(piece.text.startswith("CHAPTER") for piece in pieces) == 12
    assert all(piece.text.endswith("\n") for piece in pieces[:-1])


def test_chinese_ends_with_a_sentence_and_code_with_a_statement():
    assert all(piece.text.endswith("。") for piece in seams.pieces(TEXTS["Chinese"], 2000))
    assert all(piece.text.startswith("def ") for piece in seams.pieces(TEXTS["code"], 2000, code=True))


def test_a_comment_in_a_block_of_code_is_no_chapter():
    block = "```sh\n" + "".join(f"# step {n}\nmake step-{n}\n" for n in range(20)) + "```\n\n"
    text = "".join(f"## Part {n}\n\n{paragraph(random.Random(n))}\n\n{block}" for n in range(8))
    pieces = seams.pieces(text, 1200)
    assert all(piece.text.count("```") == 2 for piece in pieces)


def test_pieces_of_one_neighbourhood_are_on_one_side_and_a_short_text_is_as_it_was(tmp_path: Path):
    (tmp_path / "book.txt").write_text(novel())
    (tmp_path / "note.txt").write_text("A short note.")
    *pieces, note = read(tmp_path / "*", max_chars=1000)
    assert (note.text, note.meta, note.split) == (
        "A short note.",
        {"file": "note.txt", "row": 0},
        split_of(note.id, 0.5),
    )
    assert [piece.meta["part"] for piece in pieces] == list(range(len(pieces)))
    sides = defaultdict(set)
    for piece in pieces:
        sides[piece.meta[NEIGHBOURHOOD]].add(piece.split)
    assert all(len(splits) == 1 for splits in sides.values()) and set.union(*sides.values()) == {"train", "val"}
    whole = read(tmp_path / "*", max_chars=None)
    assert [document.text for document in whole] == [novel(), "A short note."]


def test_where_chance_holds_next_to_nothing_out_the_nearest_is_held_out(tmp_path: Path):
    notes = [Document(f"note {n}", "own", "prose", "MIT", "train", {}) for n in range(10)]
    pieces = [Document(f"piece {n}", "own", "prose", "MIT", "train", {NEIGHBOURHOOD: f"k:{n // 5}"}) for n in range(20)]
    write_shards(tmp_path / "notes" / "own", notes)
    moved = [document.text for document in holdout.hold_out(tmp_path / "notes" / "own", 2)]
    after = list(read_sources(tmp_path / "notes"))
    assert [(d.text, d.split) for d in after] == [(d.text, "val" if d.text in moved else "train") for d in notes]
    assert len(moved) == 2
    assert len(holdout.hold_out(tmp_path / "notes" / "own", 1)) == 1  # with what chance held out
    assert sum(document.split == "val" for document in read_sources(tmp_path / "notes")) == 3
    write_shards(tmp_path / "pieces" / "own", pieces)
    assert len({piece.meta[NEIGHBOURHOOD] for piece in holdout.hold_out(tmp_path / "pieces" / "own", 2)}) == 1
    assert sum(document.split == "val" for document in read_sources(tmp_path / "pieces")) == 5
    assert holdout.expected(pieces, 1e-9) == sum(
        len(each.text) for each in read_sources(tmp_path / "pieces") if each.split == "val"
    )
    (remark,) = holdout.remarks("own", {"moved_to_validation": 5}, 0.25)
    assert "the nearest 5 are held out, too: 25% of the text in all" in remark
    write_shards(tmp_path / "three" / "own", notes[:3])
    assert len(holdout.hold_out(tmp_path / "three" / "own", 2)) == 1
    assert holdout.hold_out(tmp_path / "three" / "own", 1) == []  # two of three would be held out
    write_shards(tmp_path / "copies" / "own", [notes[0]] * 9)
    assert holdout.hold_out(tmp_path / "copies" / "own", 2) == []


def test_one_short_text_is_refused_at_once_with_what_to_bring():
    count = {"documents": 60, "bytes": 120_600, "val": {"documents": 0}}
    with pytest.raises(InputError, match=r"60 documents of 120,600 bytes are one short text.*a hundred kilobytes"):
        holdout.check_validation({"own": count}, 0.04)
    holdout.check_validation({"own": count, "other": count | {"val": {"documents": 1}}}, 0.04)

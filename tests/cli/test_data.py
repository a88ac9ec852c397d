"""Looking at documents: `athanor data peek` and `trace` on a small world that the real stages made."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import read_json
from athanor.cli import render
from athanor.cli.data import peek
from athanor.cli.data import trace as tracing
from athanor.cli.data.read import Corpus
from athanor.data.shards import open_cooldown, open_train, open_val
from athanor.text.documents import content_id
from athanor.tokenizer.tokenizer import Tokenizer
from tests.cli.data_world import SHORT, athanor, made, prose, raw, world  # noqa: F401


def trace(athanor, *words: str) -> list[dict]:
    status, out, err = athanor("trace", *words, "--json")
    assert status == 0, err
    return json.loads(out)


# -- peek --------------------------------------------------------------------------------------------------------------


def test_peek_is_the_same_for_one_seed_and_prints_the_seed(world, athanor):
    _, first, _ = athanor("peek", "-n", "3")
    seed = re.search(r"--seed (\d+)", first)[1]
    assert athanor("peek", "-n", "3", "--seed", seed)[1] == first
    found = {athanor("peek", "-n", "3", "--seed", str(n), "--json")[1] for n in range(5)}
    assert len(found) > 1
    assert "3 of 62 that match" in first


def test_peek_takes_conditions(world, athanor):
    def peek(*words: str) -> dict:
        return json.loads(athanor("peek", "--json", "-n", "99", "--seed", "1", *words)[1])

    gone = peek("--dropped")
    assert gone["matching"] == len(gone["documents"]) == 10 and {d["fate"] for d in gone["documents"]} == {"dropped"}
    kept = peek("--kept", "--source", "web", "--chars", "10")
    assert {(d["source"], d["fate"]) for d in kept["documents"]} == {("web", "kept")} and kept["matching"] == 12
    assert all(len(d["text"]) == 10 and "first 10 of" in d["cut"] for d in kept["documents"])
    assert [d["detail"] for d in peek("--rule", "too_few_words")["documents"]] == ["5"]
    low, high = peek("--score", "quality<0.5"), peek("--score", "quality>=0.5")
    never = peek("--rule", "too_long")["documents"]  # has no score, so it is on neither side
    assert never[0]["scores"] == {} and low["matching"] + high["matching"] == 62 - len(never)
    assert all(d["scores"]["quality"] >= 0.5 for d in high["documents"])


def test_peek_shows_a_cluster_with_what_differs(world, athanor):
    told = json.loads(athanor("peek", "--json", "--cluster", content_id(prose(4))[:10])[1])
    stayed, gone = told["documents"]
    assert stayed["fate"] == "kept" and gone["rule"] == "near_duplicate" and gone["twin"] == stayed["id"]
    assert gone["differs_from_twin"][-1] == "- The end."
    assert "compared with" in athanor("peek", "--cluster", content_id(prose(4)))[1]


def test_peek_lets_no_document_command_the_terminal(world, athanor):
    _, out, _ = athanor("peek", "--kept", "--source", "books", "-n", "99", "--chars", "0")
    assert "\x1b" not in out and "\u202e" not in out and r"\x1b[31mred" in out
    out = athanor("peek", "--json", "-n", "99")[1] + athanor("trace", content_id(SHORT))[1]
    assert "\x1b" not in out and "\u202e" not in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rule", "low_qualty"), "did you mean 'low_quality'"),
        (("--source", "boks"), "did you mean 'books'"),
        (("--score", "quality=0.4"), "write it as"),
        (("--score", "beauty<1"), "no score is named 'beauty'"),
        (("--cluster", "zz"), "0 clusters.*try one of"),
        (("--kept", "--rule", "toxic"), "leave one of them out"),
        (("-n", "0"), "use -n 1"),
    ],
)
def test_peek_says_what_is_wrong(world, athanor, words, error):
    status, _, err = athanor("peek", *words)
    assert status == 1 and re.search(error, err)


# -- trace -------------------------------------------------------------------------------------------------------------


def test_trace_of_every_kept_document_finds_the_places_in_the_token_files(world):
    """Against the token files read as a whole: each document of the stream belongs to one of the texts."""
    tokenizer, corpus = Tokenizer.load("models/tokenizer"), Corpus(world)
    streams = {"train": open_train("data/shards"), "cooldown": open_cooldown("data/shards")}
    texts = {part: [tokenizer.decode(s.document(n)) for n in range(s.documents)] for part, s in streams.items()}
    kept = corpus.entries([place for place, _, _ in corpus.ids() if place.file != corpus.dropped])
    seen = dict.fromkeys(streams, 0)
    for entry in kept:
        told = tracing.in_token_files(world, entry.source, entry.split, entry.text)["streams"]
        if entry.split == "val":
            assert [p["document"] for p in told["val"]] and set(told) == {"val"}
            continue
        for part, all_texts in texts.items():
            expected = [n for n, text in enumerate(all_texts) if text == entry.text]
            assert [place["stream_document"] for place in told[part]["places"]] == expected
            seen[part] += len(expected)
    assert seen == {part: stream.documents for part, stream in streams.items()}
    assert max(texts["train"].count(entry.text) for entry in kept) > 1  # more than an epoch
    assert sum(stream.documents for stream in open_val("data/shards").values()) == 4


def test_trace_of_a_changed_document_tells_raw_clean_and_the_difference(world, athanor):
    document = raw()["books"][44]
    (told,) = trace(athanor, document.id[:12])
    assert told["id"] == document.id and told["clean_id"] != document.id
    assert trace(athanor, told["clean_id"]) == [told] == trace(athanor, "--text", "ann.lee@garden-river.net")
    assert told["changed"]["redactions"] == {"email": 1} and told["changed"]["normalised"]
    assert "+ " in told["changed"]["redacted"][2] and "<email>" in told["changed"]["redacted"][2]
    came = told["downloaded"]
    assert came["source_facts"] == {"revision": "abc"} and came["license"] == "MIT <&>"
    rows = Corpus(world).rows(Path(came["file"]), [came["row"]])
    assert rows[came["row"]]["text"] == document.text
    assert told["fate"] == "kept" and told["tokenizer"]["in_sample"] in (0, 1, 2, 3)
    text = athanor("trace", document.id)[1]
    assert "normalised" in text and "1 email" in text and "data/shards/train/" in text


@pytest.mark.parametrize(
    ("number", "rule", "expected"),
    [
        (37, "too_few_words", "measured 5, the limit is 10 (clean.rules.prose.min_words)"),
        (38, "too_long", "the limit is 4000000 (clean.rules.prose.max_bytes)"),
        (4, "near_duplicate", "word 5-grams are common, the limit is 0.8 (clean.dedup.near_duplicate_jaccard)"),
        (42, "near_duplicate_of_val", "(kept, books, val)"),
        (43, "evaluation_item", "it holds the question: How many <b>green</b> apples"),
    ],
)
def test_trace_of_a_dropped_document_tells_the_reason(world, athanor, number, rule, expected):
    document = raw()["books"][number]
    (told,) = trace(athanor, document.id)
    assert told["verdict"]["rule"] == rule and "token_files" not in told
    file, row = told["downloaded"]["file"], told["downloaded"]["row"]
    assert Corpus(world).rows(Path(file), [row])[row]["id"] == document.id
    text = athanor("trace", document.id)[1]
    assert expected in text and f"dropped    {rule}" in text


def test_trace_of_a_text_that_came_twice_tells_both(world, athanor):
    same = "exact_duplicate"
    for text, rule in ((prose(3), same), (prose(60), same), (prose(61), same), (prose(100), "exact_duplicate_of_val")):
        kept, gone = trace(athanor, content_id(text))
        assert (kept["fate"], gone["verdict"]["rule"]) == ("kept", rule)
        found = {(t["downloaded"]["file"], t["downloaded"]["row"]) for t in (kept, gone)}
        assert len(found) == 2 and gone["verdict"]["twin"]["fate"] == "kept"
    assert kept["downloaded"]["split"] == "val" and kept["token_files"]["streams"]["val"]
    kept, gone = trace(athanor, content_id(prose(5)))  # by two sources
    assert {kept["downloaded"]["source"], gone["downloaded"]["source"]} == {"books", "web"}


def test_the_tokenizers_sample_is_told_as_the_stage_drew_it(world):
    corpus = Corpus(world)
    places = [place for place, _, _ in corpus.ids() if place.file.parent.parent.name == "train"]
    drawn = [tracing.in_tokenizer_sample(corpus, place)[0] for place in places]
    assert sum(drawn) == read_json("metrics/train_tokenizer.json")["sample"]["documents"] and 0 in drawn


def test_trace_says_what_is_wrong(world, athanor):
    known = content_id(prose(7))
    status, _, err = athanor("trace", known[:7] + "zz")
    assert status == 1 and f"the nearest are: {known}" in err
    assert "begins with ''" not in err and athanor("trace", "zz")[0] == 1
    first = {found[0] for found in (content_id(prose(n)) for n in range(12))}
    assert any("documents have an id that begins with" in athanor("trace", digit)[2] for digit in sorted(first))
    assert "documents hold this text" in athanor("trace", "--text", "the")[2]
    assert "no document holds this text" in athanor("trace", "--text", "zzzzzz")[2]
    assert "one of the two is needed" in athanor("trace")[2]


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("peek",), ("report",), ("trace", "abc"), ("trace", "--text", "abc")])
def test_without_data_every_command_says_what_to_do(words, athanor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = athanor(*words)
    assert (status, out) == (1, "") and "data/clean: there is no cleaned corpus" in err and "dvc repro clean" in err
    assert list(tmp_path.iterdir()) == []


def test_without_raw_data_or_token_files_what_can_be_told_is_told(world, athanor, tmp_path, monkeypatch):
    shutil.copytree(world / "data" / "clean", tmp_path / "data" / "clean")
    monkeypatch.chdir(tmp_path)
    (told,) = trace(athanor, content_id(prose(7)))
    assert told["downloaded"]["file"] is None and "data/raw is not here" in told["changed"]["note"]
    assert "dvc repro train-tokenizer" in told["token_files"]["note"]
    assert athanor("peek", "--kept")[0] == 0
    status, _, err = athanor("peek", "--rule", "near_duplicate")
    assert status == 1 and "data/raw/books/00000.parquet: file not found" in err and "dvc checkout" in err


def test_differences_show_where_long_lines_differ_and_end():
    old, new = "a" * 300 + "X" + "b" * 300, "a" * 300 + "Y" + "b" * 300
    line, gone, come = render.differences(old, new)
    assert (line, len(gone), len(come)) == ("@ line 1", 85, 85) and "aXb" in gone and "aYb" in come
    many = render.differences("\n".join(map(str, range(5000))), "")
    assert len(many) == 22 and "more lines" in many[-2] and "2,000 lines were compared" in many[-1]
    assert render.differences("same", "same") == []


def test_a_draw_is_uniform():
    hits = np.zeros(20)
    for seed in range(2000):
        draw, random_keys = peek.Draw(2), peek.key_generator(seed, Path("file"))
        for start in (0, 10):
            draw.add(Path("file"), start, random_keys.random(10), np.arange(10))
        hits[[place.row for place in draw.refs]] += 1
    assert hits.sum() == 4000 and abs(hits - 200).max() < 6 * 200**0.5

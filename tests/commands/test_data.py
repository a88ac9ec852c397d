"""Looking at the data: `athanor data peek`, `report` and `trace` on a small world that the real stages made."""

from __future__ import annotations

import html
import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.artifacts import read_json, write_manifest
from athanor.commands import cli
from athanor.commands.data import choose, page, show
from athanor.commands.data.read import Corpus
from athanor.commands.data.report import render
from athanor.corpus.conversations import Item, Message, write_rows
from athanor.corpus.documents import Document, content_id, write_shards
from athanor.data.shards import open_cooldown, open_train, open_val
from athanor.errors import InputError
from athanor.params.strict import read_yaml
from athanor.pipeline import attach, ship
from athanor.pipeline.run import Run
from athanor.tokenizer.tokenizer import Tokenizer
from tests.corpus.world import write_scorer

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "How many <b>green</b> apples did the old farmer sell at the market on the third Sunday in May?"
ITEM = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))
WORDS = """the of and a to in is was that it with as on be at by river garden window letter kettle morning table brother
kitchen winter summer street music paper finger mountain island bridge silver copper engine market cotton butter""".split()
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
        document(prose(52).replace("\n", "\r\n") + "\r\nWrite to ann.lee@garden-river.net today.", licence="MIT <&>"),  # 44
    ]
    books += [document(prose(60 + n // 2), a=n % 3) for n in (0, 1, 3, 2)]  # of each pair one stays, first or last
    web = [document(prose(200 + n), source="web", licence="unknown") for n in range(12)]
    return {"books": books, "web": [*web, document(prose(5), source="web")]}


def params() -> dict:
    values = dict(read_yaml(ROOT / "presets" / "micro.yaml"))
    shares = {"books": {"share": 0.7, "max_epochs": 3.0}, "web": {"share": 0.3, "max_epochs": 3.0}}
    values["mixture"] = {"seed": 1, "sources": shares, "cooldown": {"sources": {"web": {"share": 1.0, "max_epochs": 1.0}}}}
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


def trace(athanor, *words: str) -> list[dict]:
    status, out, err = athanor("trace", *words, "--json")
    assert status == 0, err
    return json.loads(out)


# -- peek ---------------------------------------------------------------------------------------------------------------


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


# -- trace --------------------------------------------------------------------------------------------------------------


def test_trace_of_every_kept_document_finds_the_places_in_the_token_files(world):
    """Against the token files read as a whole: each document of the stream belongs to one of the texts."""
    from athanor.commands.data import where

    tokenizer, corpus = Tokenizer.load("models/tokenizer"), Corpus(world)
    streams = {"train": open_train("data/shards"), "cooldown": open_cooldown("data/shards")}
    texts = {part: [tokenizer.decode(s.document(n)) for n in range(s.documents)] for part, s in streams.items()}
    kept = corpus.entries([place for place, _, _ in corpus.ids() if place.file != corpus.dropped])
    seen = dict.fromkeys(streams, 0)
    for entry in kept:
        told = where.in_token_files(world, entry.source, entry.split, entry.text)["streams"]
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
    assert Corpus(world).rows(Path(file), [row], ["id"])[row]["id"] == document.id
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
    from athanor.commands.data import where

    corpus = Corpus(world)
    places = [place for place, _, _ in corpus.ids() if place.file.parent.parent.name == "train"]
    drawn = [where.in_tokenizer_sample(corpus, place)[0] for place in places]
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


# -- report -------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every element, attribute and id of a page; elements that are not closed in order are an error."""

    VOID = {"meta", "wbr"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.attributes, self.ids, self.open = set(), set(), set(), []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_documents_markup_comes_out_as_text(world):
    shown = render(world)
    tags = Tags(shown)
    assert not {"script", "img", "iframe", "link"} & tags.names
    assert not {name for name in tags.attributes if name.startswith("on")} and "src" not in tags.attributes
    assert html.escape(show.visible(SHORT)) in shown and html.escape(show.visible(EVIL)) in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    assert "MIT &lt;&amp;&gt;" in shown and "&lt;b&gt;green&lt;/b&gt;" in shown
    assert "http" not in shown.replace("http-equiv", "") and "default-src 'none'" in shown


def test_attributes_are_escaped():
    assert page.tag("a", "x", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;">x</a>'
    assert page.table(("<i>",), [("<b>",)], caption='"<').count("<i>") == 0


def test_the_report_is_complete_and_the_same_each_time(world):
    shown = render(world)
    assert render(world) == shown
    tags = Tags(shown)
    for link in re.findall(r'href="#([^"]+)"', shown):
        assert link in tags.ids
    assert tags.ids == {
        "funnel", "mixture", "scores", "lengths", "duplicates", "personal-data", "evaluation-items", "licences", "languages",
        "examples",
    }
    for said in ("too_<wbr>few", "licence_not_allowed 7", "came without a licence", "Cooldown", "one stayed", "a document"):
        assert said in shown or said.replace("a document", "1 document") in shown, said
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", shown)
    assert str(world) not in shown


def test_the_report_counts_what_is_there(world):
    from athanor.commands.data.gather import gather

    facts = gather(Corpus(world))
    for source in facts.sources.values():
        gone = sum(documents for _, documents, _ in source.drops)
        assert source.lengths["kept"].sum() == source.documents_out == source.scores["quality"]["kept"].sum()
        assert source.lengths["dropped"].sum() == gone == source.documents_in - source.documents_out
        unscored = sum(documents for rule, documents, _ in source.drops if rule == "too_long")
        assert source.scores["toxicity"]["dropped"].sum() == gone - unscored
        assert sum(count for _, count in source.licences.values()) == source.bytes_out
    assert facts.cluster_sizes == {2: 7} and facts.examples["books", "evaluation_item"][0].detail == ITEM.id
    assert facts.items == {ITEM.id: ("facts", QUESTION)}


def test_the_report_is_written_where_git_does_not_look_and_kept_with_the_run(world, athanor):
    status, out, err = athanor("report")
    assert status == 0, err
    path = world / ".athanor" / "data-report.html"
    assert path.as_uri() in out and path.read_text() == render(world)
    run = read_json("metrics/runs/clean.json")["run"]
    assert (world / ".athanor" / "runs" / run / "files" / "data-report.html").read_bytes() == path.read_bytes()
    assert "/.athanor/" in (ROOT / ".gitignore").read_text()


def test_the_page_arrives_with_a_run_that_was_delivered_before(world, athanor, tmp_path):
    from athanor.pipeline.tracking import Tracker

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = read_json("metrics/runs/clean.json")["run"]
    folder = world / ".athanor" / "runs" / run
    (folder / "files" / "data-report.html").unlink(missing_ok=True)
    tracker = Tracker(world, uri)
    tracker.ship(folder, live=False)
    assert ship.shipped(folder)
    mlflow_run = read_json(folder / "ship.json")["mlflow_run"]
    before = tracker.client.get_run(mlflow_run)
    assert before.data.metrics["final.sources.books.documents_in"] == 49.0  # the numbers come without the page
    assert athanor("report")[0] == 0
    assert not ship.shipped(folder)
    tracker.ship(folder, live=False)
    after = tracker.client.get_run(mlflow_run)
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert after.data.metrics == before.data.metrics
    assert "data-report.html" in [file.path for file in tracker.client.list_artifacts(mlflow_run)]
    assert len(tracker.client.get_metric_history(mlflow_run, "final.seconds")) == 1


def test_attaching_waits_for_a_shipper_and_needs_a_run(world, monkeypatch):
    from athanor.pipeline.locks import try_lock

    run = read_json("metrics/runs/clean.json")["run"]
    assert not attach.attach_later(world, "clean-0-0", "page.html", b"")
    monkeypatch.setattr(attach, "LOCK_SECONDS", 0.0)
    with try_lock(world / ".athanor" / "ship.lock"), pytest.raises(InputError, match="at work"):
        attach.attach_later(world, run, "page.html", b"")
    assert attach.attach_later(world, run, "page.html", b"")


# -- elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("peek",), ("report",), ("trace", "abc"), ("trace", "--text", "abc")])
def test_without_data_every_command_says_what_to_do(words, athanor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = athanor(*words)
    assert (status, out) == (1, "") and "data/clean: there is no cleaned corpus" in err and "dvc repro clean" in err
    assert list(tmp_path.iterdir()) == []


def test_without_raw_data_or_token_files_what_can_be_told_is_told(world, athanor, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(world / "data" / "clean", tmp_path / "data" / "clean")
    monkeypatch.chdir(tmp_path)
    (told,) = trace(athanor, content_id(prose(7)))
    assert told["downloaded"]["file"] is None and "data/raw is not here" in told["changed"]["note"]
    assert "dvc repro train-tokenizer" in told["token_files"]["note"]
    assert athanor("peek", "--kept")[0] == 0
    status, _, err = athanor("peek", "--dropped")
    assert status == 1 and "data/raw/books/00000.parquet: file not found" in err and "dvc checkout" in err


def test_differences_show_where_long_lines_differ_and_end():
    old, new = "a" * 300 + "X" + "b" * 300, "a" * 300 + "Y" + "b" * 300
    where, gone, come = show.differences(old, new)
    assert (where, len(gone), len(come)) == ("@ line 1", 85, 85) and "aXb" in gone and "aYb" in come
    many = show.differences("\n".join(map(str, range(5000))), "")
    assert len(many) == 22 and "more lines" in many[-2] and "2,000 lines were compared" in many[-1]
    assert show.differences("same", "same") == []


def test_a_draw_is_uniform():
    import numpy as np

    hits = np.zeros(20)
    for seed in range(2000):
        draw, random_keys = choose.Draw(2), choose.keys_of(seed, Path("file"))
        for start in (0, 10):
            draw.show(random_keys.random(10), list(range(start, start + 10)))
        hits[draw.places] += 1
    assert hits.sum() == 4000 and abs(hits - 200).max() < 6 * 200**0.5

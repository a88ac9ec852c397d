"""The page about the corpus, and its way into MLflow: `athanor data report` on a small world."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from html.parser import HTMLParser

import pytest
from markupsafe import escape

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.cli.data.read import Corpus
from athanor.cli.data.report import gather, refresh, render_page
from athanor.cli.render import visible
from athanor.runtime import ship
from athanor.runtime.locks import try_lock
from athanor.runtime.tracking import Tracker
from tests.cli.data_world import EVIL, ITEM, QUESTION, ROOT, SHORT, athanor, made, world  # noqa: F401


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


def render(world) -> str:
    return render_page(gather(Corpus(world)))


def test_a_documents_markup_comes_out_as_text(world):
    shown = render(world)
    tags = Tags(shown)
    assert not {"script", "img", "iframe", "link"} & tags.names
    assert not {name for name in tags.attributes if name.startswith("on")} and "src" not in tags.attributes
    assert escape(visible(SHORT)) in shown and escape(visible(EVIL)) in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    assert "MIT &lt;&amp;&gt;" in shown and "&lt;b&gt;green&lt;/b&gt;" in shown
    assert "http" not in shown.replace("http-equiv", "") and "default-src 'none'" in shown


def test_attributes_are_escaped(world):
    facts = gather(Corpus(world))
    facts["sources"]["web"].name = EVIL
    tags = Tags(render_page(facts))
    assert not {"script", "img"} & tags.names and not {name for name in tags.attributes if name.startswith("on")}


def test_what_is_not_there_is_left_out(world):
    facts = gather(Corpus(world))
    empty = {"shards": None, "cards": {}, "metrics": {}, "cluster_sizes": Counter(), "contaminated": {}, "twins": {}}
    text = render_page(facts | empty)
    Tags(text)
    for expected in ("no token files yet", "no classifier card", "No duplicate was dropped", "No document held"):
        assert expected in text
    few = dict(facts["metrics"], contaminated={"by_category": {"facts": 0, "code": 0}})
    assert "items of: code, facts." in render_page(facts | {"metrics": few, "other_clean": True})


def test_the_report_is_complete_and_the_same_each_time(world):
    shown = render(world)
    assert render(world) == shown
    tags = Tags(shown)
    for link in re.findall(r'href="#([^"]+)"', shown):
        assert link in tags.ids
    assert tags.ids == {
        "funnel",
        "mixture",
        "scores",
        "lengths",
        "duplicates",
        "personal-data",
        "evaluation-items",
        "licences",
        "languages",
        "examples",
    }
    for said in (
        "too_<wbr>few",
        "licence_not_allowed 7",
        "came without a licence",
        "Cooldown",
        "one stayed",
        "a document",
    ):
        assert said in shown or said.replace("a document", "1 document") in shown, said
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", shown)
    assert str(world) not in shown


def test_the_report_counts_what_is_there(world):
    facts = gather(Corpus(world))
    for source in facts["sources"].values():
        gone = sum(documents for _, documents, _ in source.drops)
        assert source.lengths["kept"].sum() == source.documents_out == source.scores["quality"]["kept"].sum()
        assert source.lengths["dropped"].sum() == gone == source.documents_in - source.documents_out
        unscored = sum(documents for rule, documents, _ in source.drops if rule == "too_long")
        assert source.scores["toxicity"]["dropped"].sum() == gone - unscored
        assert sum(count for _, count in source.licences.values()) == source.bytes_out
    assert facts["cluster_sizes"] == {2: 7} and facts["examples"]["books", "evaluation_item"][0].detail == ITEM.id
    assert facts["questions"] == {ITEM.id: ("facts", QUESTION)}


def test_the_report_is_written_where_git_does_not_look_and_kept_with_the_run(world, athanor):
    status, out, err = athanor("report")
    assert status == 0, err
    path = world / ".athanor" / "data-report.html"
    assert path.as_uri() in out and path.read_text() == render(world)
    run = read_json("metrics/runs/clean.json")["run"]
    assert (world / ".athanor" / "runs" / run / "files" / "data-report.html").read_bytes() == path.read_bytes()
    assert "/.athanor/" in (ROOT / ".gitignore").read_text()


def test_the_page_arrives_with_a_run_that_was_delivered_before(world, athanor, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = read_json("metrics/runs/clean.json")["run"]
    folder = world / ".athanor" / "runs" / run
    (folder / "files" / "data-report.html").unlink(missing_ok=True)
    tracker = Tracker(world, uri)
    tracker.ship(folder, live=False)
    assert ship.shipped(folder)
    mlflow_run = read_json(folder / "ship.json")["mlflow_run"]
    before = tracker.client.get_run(mlflow_run)
    numbers = tracker.client.download_artifacts(mlflow_run, "metrics.json", str(tmp_path))
    assert read_json(numbers)["sources.books.documents_in"] == 49  # they come without the page
    assert athanor("report")[0] == 0
    assert not ship.shipped(folder)
    tracker.ship(folder, live=False)
    after = tracker.client.get_run(mlflow_run)
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert after.data.metrics == before.data.metrics
    assert "data-report.html" in [file.path for file in tracker.client.list_artifacts(mlflow_run)]
    assert len(tracker.client.get_metric_history(mlflow_run, "summary/seconds")) == 1


def test_attaching_waits_for_a_shipper_and_needs_a_run(world, monkeypatch):
    run = read_json("metrics/runs/clean.json")["run"]
    assert not ship.attach_later(world, "clean-0-0", "page.html", b"")
    monkeypatch.setattr(ship, "LOCK_SECONDS", 0.0)
    with try_lock(world / ".athanor" / "ship.lock"), pytest.raises(InputError, match="at work"):
        ship.attach_later(world, run, "page.html", b"")
    assert ship.attach_later(world, run, "page.html", b"")


def test_the_page_is_made_anew_when_the_corpus_is_younger(world, tmp_path):
    assert refresh(tmp_path) is None  # no corpus
    out = refresh(world)
    first = out.stat().st_mtime_ns
    assert refresh(world) == out and out.stat().st_mtime_ns == first
    leaf = world / "metrics" / "runs" / "clean.json"
    os.utime(leaf, (time.time() + 60, time.time() + 60))
    assert refresh(world).stat().st_mtime_ns > first

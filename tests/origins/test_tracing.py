"""Which spans are told, how often they stand, and where; on a few texts. The micro build's are in tests/e2e/test_trace.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import manifest_digest, write_json
from athanor.base.errors import InputError
from athanor.data.sampler import PretrainSampler
from athanor.origins import index
from athanor.origins.tracing import MAX_CHARS, Tracer
from athanor.training.schedule import Schedule
from tests.evaluation.tiny import write_tiny_tokenizer
from tests.origins.world import write_data

RIVER = "The old river keeps its secrets under seven stone bridges of the sleeping town."
KETTLE = "A copper kettle sings louder than the whole kitchen on a winter morning."
WIDE = "春天的早晨小城里的人们都在河边慢慢地散步，孩子们放着风筝，老人坐在桥上谈论天气。"
TALKS = [
    ("Where is it?", "under seven stone bridges of the sleeping town."),
    ("Sure?", "Quite sure, yes."),
    (
        "Hello there!",
        "Hello, and welcome to the harbour office.",
        "When does it sail?",
        "At noon, with the next high tide and a pilot.",
    ),
]
LATE = "Only the cooldown has read of the glass lighthouse beyond the northern reef."


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("origins")
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    write_data(root, tokenizer, [RIVER, f"Well.\n{KETTLE} So.", RIVER, WIDE], TALKS, [LATE, KETTLE])
    return root


@pytest.fixture(scope="module")
def tracer(root: Path) -> Tracer:
    return Tracer(root)


def test_a_span_has_its_document_licence_and_copies_and_the_rest_is_the_model_s_own(tracer: Tracer) -> None:
    text = f"My view: {RIVER} I say so."
    trace = tracer.trace(text)
    assert trace.pieces == [("My view: ", None), (RIVER, 1), (" I say so.", None)]
    (span,) = trace.spans
    (place,) = [place for place in span.places if place.kind == "document"]
    assert (place.source, place.license, place.about, place.copies) == ("books", "MIT", "chapter The old r", 2)
    assert place.steps is None and 0 < trace.found < trace.tokens  # no model is here


def test_words_that_are_cut_off_or_begin_a_line_elsewhere_belong_to_the_span(tracer: Tracer) -> None:
    cut = RIVER[6:-3]  # d river ... sleeping to
    assert [piece for piece, number in tracer.trace(cut).pieces if number] == [cut]
    assert tracer.trace(f"x {KETTLE}").pieces == [("x ", None), (KETTLE, 1)]
    assert tracer.trace(f"Undead {RIVER[4:]}").pieces[-1] == (RIVER[4:], 1)  # not the "d" of Undead


def test_of_two_spans_that_overlap_the_other_keeps_what_is_left(tracer: Tracer) -> None:
    text = RIVER[:-1] + ". A copper kettle sings louder than the whole kitchen"
    assert [piece for piece, number in tracer.trace(text).pieces if number] == [RIVER, text[len(RIVER) + 1 :]]


def test_conversations_come_first_with_question_and_licence(tracer: Tracer) -> None:
    place, document = tracer.trace(TALKS[0][1]).spans[0].places
    assert (place.kind, place.source, place.license) == ("conversation", "talks", "CC0-1.0")
    assert (place.about, place.part) == ("Where is it?", "answer") and document.kind == "document"


@pytest.mark.parametrize("turn", [0, 2])
def test_a_span_in_a_later_turn_has_that_turn_s_question_and_every_row_that_holds_it(tracer: Tracer, turn: int) -> None:
    (place,) = tracer.trace(TALKS[2][turn + 1]).spans[0].places
    assert (place.about, place.part, place.copies) == (TALKS[2][turn], "answer", 3)


def test_few_words_count_as_a_whole_answer_only(tracer: Tracer) -> None:
    whole, part = tracer.trace("Quite sure, yes."), tracer.trace("Quite sure, yes. Why do you want to know that?")
    assert len(whole.spans) == 1 and whole.spans[0].places[0].license == "MIT" and part.spans == []
    assert tracer.trace("the").spans == []  # whole, and of every text


def test_a_script_without_spaces_is_traced(tracer: Tracer) -> None:
    assert [piece for piece, number in tracer.trace(f"他说{WIDE[4:36]}吗").pieces if number] == [WIDE[4:36]]


def test_the_cooldown_s_text_is_data_of_its_own(tracer: Tracer) -> None:
    assert tracer.trace(LATE).spans[0].documents == 1
    assert tracer.trace(KETTLE).spans[0].documents == 2  # in both streams, in texts that differ


def test_blocks_are_searched_together(root: Path, tracer: Tracer, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(index, "BLOCK_TOKENS", 1)
    for name in ("data", "models"):
        shutil.copytree(root / name, tmp_path / name)
    blocks = Tracer(tmp_path)
    assert len(list((tmp_path / index.FOLDER).glob("train-*/*.order.npy"))) == 3
    for text in (RIVER, f"{KETTLE} {WIDE}", LATE, TALKS[0][1]):
        assert blocks.trace(text) == tracer.trace(text)


def test_without_data_clean_the_licence_is_unknown_and_the_rest_is_told(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/data/clean")
    place = Tracer(tmp_path / "copy").trace(KETTLE).spans[0].places[0]
    assert (place.license, place.about, place.source) == ("unknown", "", "books") and len(place.id) == 32


@pytest.mark.parametrize("text", ["", " \n", "x" * (MAX_CHARS + 1)])
def test_no_text_and_too_much_are_refused(tracer: Tracer, text: str) -> None:
    with pytest.raises(InputError, match="trace"):
        tracer.trace(text)


def test_data_of_another_tokenizer_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    manifest = tmp_path / "copy/data/sft/manifest.json"
    manifest.write_text(manifest.read_text().replace(Tracer(root).tokenizer.digest, "0" * 64))
    with pytest.raises(InputError, match="data/sft: made with another tokenizer"):
        Tracer(tmp_path / "copy")


def test_the_cooldown_s_text_is_read_from_the_step_on_at_which_the_rate_falls(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    batch, steps, context = 64, 30, 16
    params = {"seed": 4, "batch_tokens": batch, "cooldown_fraction": 0.35, "tokens": steps * batch + 10}
    write_json(tmp_path / "copy/params.yaml", {"model": {"context_tokens": context}, "pretrain": params})
    write_json(tmp_path / "copy/metrics/pretrain.json", {"steps": steps, "skipped_ranges": []})
    data = tmp_path / "copy/data/shards"
    write_json(tmp_path / "copy/models/base/manifest.json", {"parents": {"shards": manifest_digest(data)}})
    schedule = Schedule("wsd", 1.0, 0.0, 0, int(steps * batch * 0.35), steps * batch)
    sampler = PretrainSampler(data, context, 4, schedule.cooldown_start // batch * batch)
    tracer, expected = Tracer(tmp_path / "copy"), {LATE: [], RIVER: []}
    for step in range(steps):
        read = sampler.batch(step * batch, batch)
        text = ~np.isin(read.tokens_BS[:, 1:], (tracer.tokenizer.bos, tracer.tokenizer.eos))
        cools = step * batch >= schedule.cooldown_start // batch * batch
        for wanted, numbers in ((LATE, [0] if cools else []), (RIVER, [] if cools else [0, 2])):
            if (np.isin(read.document_BS[:, 1:], numbers) & text).any():
                expected[wanted].append(step + 1)
    for wanted, told in expected.items():
        assert [place.steps for place in tracer.trace(wanted).spans[0].places if place.kind == "document"] == [told]
    assert min(expected[LATE]) == 20 and max(expected[RIVER]) == 19

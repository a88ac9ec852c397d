"""Where a text stands in what the micro build was trained on: real documents, real conversations, real steps."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.base.strict import read_yaml
from athanor.catalog.discover import AvailableModel
from athanor.data.rows import PackedRows
from athanor.data.sampler import PretrainSampler, SftSampler
from athanor.data.shards import open_train
from athanor.origins.tracing import Trace, Tracer
from athanor.serving import origins
from athanor.text.documents import Document, content_id, read_sources

ALL = 100_000  # places


@pytest.fixture(scope="module")
def tracer(micro) -> Tracer:
    return Tracer(micro.path)


@pytest.fixture(scope="module")
def documents(micro, tracer) -> list[Document]:
    """Those of data/clean that the stream holds."""
    stream = open_train(micro.path / "data/shards")
    ids = {content_id(tracer.tokenizer.decode(stream.document(n).tolist())) for n in range(stream.documents)}
    return [document for document in read_sources(micro.path / "data/clean/train") if document.id in ids]


def cuts(documents: list[Document], count: int) -> list[tuple[Document, str]]:
    """Stretches of 60 to 400 characters, cut anywhere, also inside a word; eight words at least."""
    draw, found = random.Random(1), []
    while len(found) < count:
        document, length = draw.choice(documents), draw.randint(60, 400)
        start = draw.randrange(max(1, len(document.text) - length))
        if len((text := document.text[start : start + length]).split()) >= 8:
            found.append((document, text))
    return found


def test_a_thousand_cuts_are_found_in_their_document_and_a_thousand_made_up_texts_are_not(tracer, documents) -> None:
    words = [word for document in documents for word in document.text.split()]
    draw = random.Random(2)
    for document, text in cuts(documents, 1000):
        trace = tracer.trace(text, ALL)
        assert "".join(piece for piece, _ in trace.pieces) == text
        assert sum(len(span.text) for span in trace.spans) >= 0.9 * len(text.strip()), text
        for span in trace.spans:
            place = next((place for place in span.places if place.id == document.id), None)
            assert place and (place.source, place.license) == (document.source, document.license), text
        made_up = " ".join(draw.choices(words, k=len(text.split())))
        assert not tracer.trace(made_up).spans, made_up


def test_every_answer_that_was_trained_on_is_found_in_its_conversation(micro, tracer) -> None:
    rows, found = PackedRows(micro.path / "data/sft"), 0
    stop, assistant = tracer.tokenizer.stop, tracer.tokenizer.assistant
    for number in range(0, rows.conversation_count, 7):
        ids = rows.conversation(number)[0].tolist()
        if rows.is_text(number) or ids.count(assistant) != 1:
            continue
        answer = tracer.tokenizer.decode(ids[ids.index(assistant) + 1 : ids.index(stop, ids.index(assistant))])
        trace = tracer.trace(answer, ALL)
        if not trace.spans and len(answer.split()) < 6:
            continue  # too short to say anything
        found += 1
        assert trace.found == trace.tokens, answer
        same = {place.id for place in trace.spans[0].places if place.part == "answer"}
        assert any(rows.conversation(int(other))[0].tolist() == ids for other in same), answer
        assert all(place.license != "unknown" for place in trace.spans[0].places if place.kind == "conversation")
    assert found > 100


def told_steps(trace: Trace, kinds: tuple[str, ...]) -> set[int]:
    (span,) = trace.spans
    return {step for place in span.places if place.kind in kinds for step in place.steps}


def test_the_steps_are_those_whose_batches_held_the_text(micro, tracer, documents) -> None:
    """By the positions that each step learned, and by looking for the text in the bytes of the stream."""
    params, metrics = (read_yaml(micro.path / "params.yaml"), read_json(micro.path / "metrics/pretrain.json"))
    context, batch = params["model"]["context_tokens"], params["pretrain"]["batch_tokens"]
    sampler = PretrainSampler(micro.path / "data/shards", context, params["pretrain"]["seed"], 1 << 60)
    stream = open_train(micro.path / "data/shards")
    bytes_of_stream = stream.read(0, stream.tokens).astype("<u2").tobytes()
    learned = np.array([sampler.sample_numbers(step * batch, batch) for step in range(metrics["steps"])])
    compared = read = 0
    for document, _ in cuts(documents, 150):
        line = random.Random(document.id).choice(document.text.split("\n"))  # a line has the same tokens anywhere
        if len(line.split()) < 6 or not (trace := tracer.trace(line, ALL)).spans or trace.found != trace.tokens:
            continue
        pattern = np.array(tracer.tokenizer.encode(line), "<u2").tobytes()
        places, at = [], -1
        while (at := bytes_of_stream.find(pattern, at + 1)) >= 0:
            places += [at // 2] if at % 2 == 0 else []
        windows = {(target - 1) // context for at in places for target in range(at, at + len(pattern) // 2)}
        if sum(place.copies for place in trace.spans[0].places if place.kind == "document") != len(places):
            continue  # a line that its document repeats, of which one place is told
        steps = {step + 1 for step, row in enumerate(learned) if windows & set(row.tolist())}
        assert told_steps(trace, ("document",)) == steps, line
        compared, read = compared + 1, read + bool(steps)
    assert compared > 20 and 0 < read < compared  # the training read a part of the stream


def test_the_steps_of_conversations_end_with_the_weights_that_were_kept(micro, tracer) -> None:
    params, metrics = read_yaml(micro.path / "params.yaml"), read_json(micro.path / "metrics/sft.json")
    sampler = SftSampler(micro.path / "data/sft", params["model"]["context_tokens"], params["sft"]["seed"])
    rows, batch = PackedRows(micro.path / "data/sft"), params["sft"]["batch_tokens"]
    learned = [sampler.sample_numbers(step * batch, batch) for step in range(metrics["chosen_step"])]
    entries = [{entry for row in numbers for entry in rows.numbers(row)} for numbers in learned]
    trace = tracer.trace("That place is unknown to me.", ALL)
    for place in trace.spans[0].places:
        same = [
            n
            for n in range(rows.conversation_count)
            if np.array_equal(*(rows.conversation(i)[0] for i in (n, int(place.id))))
        ]
        assert len(same) == place.copies
        assert place.steps == [step for step, held in enumerate(entries, 1) if held & set(same)]


def test_the_command_marks_the_text_and_names_its_places(micro) -> None:
    athanor = (sys.executable, "-m", "athanor", "trace")
    shown = micro.run(*athanor, "He said: That place is unknown to me.\x1b[31m").stdout
    assert "«That place is unknown to me.»[1]\\x1b[31m" in shown and "of identity, licence CC0-1.0" in shown
    told = json.loads(micro.run("sh", "-c", f"echo 'That place is unknown to me.' | {' '.join(athanor)} --json").stdout)
    assert told["spans"][0]["text"] == "That place is unknown to me." and told["spans"][0]["places"][0]["steps"]
    nothing = micro.run(*athanor, "Seven purple submarines argued about cheese all evening.").stdout
    assert "«" not in nothing and nothing.splitlines()[-1].startswith("0 of ")
    assert "no text" in micro.run(*athanor, " ", check=False).stderr


def test_the_command_tells_which_right_answers_are_recall(micro) -> None:
    athanor = (sys.executable, "-m", "athanor", "trace")
    told = json.loads(micro.run(*athanor, "--battery", "--json").stdout)
    assert sum(told["categories"]["all"].values()) == len(told["answers"])


def test_without_its_training_data_nothing_is_told(micro, tmp_path: Path) -> None:
    done = micro.run(sys.executable, "-m", "athanor", "trace", "x", check=False, DVC_ROOT=str(tmp_path))
    assert (
        done.returncode == 1 and "the training text is not here" in done.stderr and "Fix: dvc checkout" in done.stderr
    )


def served(path: Path) -> AvailableModel:
    return AvailableModel("own", "own", str(path), "export", 0.0)


def test_a_server_traces_for_the_export_of_this_checkout_alone(micro, tmp_path: Path) -> None:
    export, text = micro.path / "models/export", "That place is unknown to me."
    for path in (export / "hf", *export.glob("*.gguf")):
        assert origins.trace(micro.path, served(path), text)["found"] == 14
    elsewhere = tmp_path / "models/export/hf"
    elsewhere.mkdir(parents=True)
    (elsewhere / "athanor.json").write_bytes((export / "hf/athanor.json").read_bytes())
    with pytest.raises(InputError, match="data/shards is not here as this model was made from it"):
        origins.trace(tmp_path, served(elsewhere), text)


def test_an_index_of_other_data_makes_room_and_a_lost_one_is_made_again(micro, tracer) -> None:
    folder = micro.path / ".athanor/origins"
    (mine,) = folder.glob("train-*")
    assert {path.name.split("-")[0] for path in folder.iterdir()} == {"sft", "train"}
    mine.rename(folder / "train-0000000000000000")
    again = Tracer(micro.path)
    assert list(folder.glob("train-*")) == [mine]
    assert again.trace("That place is unknown to me.") == tracer.trace("That place is unknown to me.")

"""First words: wordings that no training row has, answers that are true of every model, and a score that tells."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from athanor.base.strict import build
from athanor.evaluation import scoring
from athanor.sources import identity
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises import facts, talk
from athanor.sources.exercises.build import check_held_out, draw_exercises, training_conversations
from athanor.sources.exercises.talk import TEXTS, TOPICS, About, words_of
from athanor.sources.exercises.written import read_written
from athanor.sources.holdout import not_taught
from athanor.sources.instruct_params import ExercisesSource, IdentitySource, InstructParams, MessagesSource
from athanor.sources.names import names_and_sentences
from athanor.sources.params import DocumentSource, FilesSource, PythonSource
from athanor.text import habits
from athanor.text.conversations import Conversation, Message, check_messages

BATTERY = BatteryParams(2, 0.1, 0.25, None, {"identity": 60, "first_words": 60, "unknown": 60})
ME = IdentitySource("identity", "identity", 12, 1)
TAUGHT = ExercisesSource("exercises", "exercises", {"http_status": 60, "addition": 60, "comparison": 0}, 80, 0.0)
PYTHON = {"type": "python", "prose_name": "docs", "code_name": "code", "max_prose_chars": 3000, "max_code_chars": 6000}
DOCUMENTS: dict[str, DocumentSource] = {
    "python": build(PythonSource, PYTHON | {"min_chars": 1, "min_documents": 1, "min_bytes": 1}, "python"),
    "notes": build(FilesSource, {"type": "files", "name": "notes", "globs": ["corpus/*.md"]}, "notes"),
}
NOBODY = About("the texts that my model card lists", "fine-tuned", (), python_only=False)


def told(*documents: str, from_scratch: bool = True) -> About:
    return identity.about(dataclasses.replace(ME, from_scratch=from_scratch), _documents(documents), [ME, TAUGHT])


def _documents(names: Iterable[str]) -> list[DocumentSource]:
    return [DOCUMENTS[name] for name in names]


def rows(*documents: str, seed: int = 1, battery_seed: int = 2, from_scratch: bool = True) -> list[Conversation]:
    me = dataclasses.replace(ME, from_scratch=from_scratch)
    chats = InstructParams(seed, 0.1, (me, TAUGHT))
    return identity.conversations(me, _documents(documents or ["python"]), chats, battery_seed)


def questions(made: list[Conversation]) -> Counter[str]:
    return Counter(message.content for row in made for message in row.messages[::2])


def test_conversations_follow_the_seed_and_stay_on_their_side() -> None:
    made = rows()
    assert made == rows() and made != rows(seed=2)
    asked: dict[str, set[str]] = {"train": set(), "val": set()}
    for row in made:
        check_messages(row.messages, row.key)
        assert sum(len(message.content) for message in row.messages) < 500
        asked[row.split] |= set(row.key.split(" | "))
    assert asked["val"] and asked["train"].isdisjoint(asked["val"])
    assert {len(row.messages) for row in made} == {2, 4, 6}
    topics = {text: name.removeprefix("invented_") for name, topic in TOPICS.items() for text in topic["questions"]}
    turns = [[topics[key.removeprefix("identity:")] for key in row.key.split(" | ")] for row in made]
    for earlier, later in (pair for row in turns for pair in zip(row, row[1:], strict=False)):
        assert earlier in TOPICS[later].get("after", [earlier])  # no follow-up where it makes no sense
    assert {row.license for row in made} > {"CC0-1.0", facts.FROM_PYTHON}


@pytest.mark.parametrize("seed", range(5))
def test_no_held_out_wording_is_trained(seed: int) -> None:
    """Neither typed in another way nor as a part of a longer question, also not in small talk; all of its words are."""
    battery = BatteryParams(seed, 0.1, 0.25, None, dict.fromkeys(BATTERY.categories, 40))
    drawn = [e for category in battery.categories for e in draw_exercises(category, 40, "s", True, battery)]
    chats = {"identity": rows(battery_seed=seed), "sums": training_conversations(TAUGHT, 1, 0.1, battery)}
    assert check_held_out(chats, [exercise.item for exercise in drawn])
    trained = {words_of(text) for name in chats for text in questions(chats[name])}
    for name, topic in TOPICS.items():
        held = talk.held_out_questions(name, seed)
        assert len(held) >= 2 and set(held).isdisjoint(topic["questions"][: talk.ALWAYS_TAUGHT])
        assert len(held) < len(topic["questions"]) / 2
        known = set().union(*(words_of(text).split() for text in topic["questions"] if text not in held))
        for text in map(words_of, held):
            assert known >= set(text.split()), (name, text)
            longer = [other for other in trained if text in other and len(text.split()) >= talk.NEAR_WORDS]
            assert text not in trained and not longer, (name, text, longer)
    assert {exercise.key.split(":")[2] for exercise in drawn}.isdisjoint(key.split(":")[1] for key in _keys(chats))


def _keys(chats: dict[str, list[Conversation]]) -> list[str]:
    return [key for row in chats["identity"] for key in row.key.split(" | ")]


def test_a_topic_that_a_person_teaches_is_not_asked_in_any_wording() -> None:
    items = [exercise.item for exercise in draw_exercises("identity", 60, "s", True, BATTERY)]
    messages = Message("user", "Who made you?"), Message("assistant", "Lena made me, with Athanor.")
    left = not_taught(items, [Conversation(messages, "mine", "own", "train", "k")], print)
    lost = [item for item in items if item not in left]
    assert lost and all("pipeline" in item.answer + item.accepted[0] for item in lost)
    assert not any("pipeline" in item.accepted[0] for item in left)


def test_a_question_belongs_to_one_topic() -> None:
    """Only invented and real people, places and works share theirs, so that a question is held out in all or in none."""
    topics: dict[str, set[str]] = {}
    for name, topic in TOPICS.items():
        for text in topic["questions"]:
            topics.setdefault(words_of(text), set()).add(name.removeprefix("invented_"))
    assert not {text: names for text, names in topics.items() if len(names) > 1}


def test_no_question_has_a_run_of_words_of_a_written_one() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = words_of(text).split()
        return set(zip(*(words[start:] for start in range(4)), strict=False))

    written = read_written("battery/written.jsonl", 1)
    asked = set().union(*(runs(item.prompt[0].content) for item in written if item.category == "identity"))
    assert asked and not [text for topic in TOPICS.values() for text in topic["questions"] if runs(text) & asked]


def test_another_seed_holds_out_other_wordings() -> None:
    for name in TOPICS:
        assert len({talk.held_out_questions(name, seed) for seed in range(10)}) > 3, name


def test_answers_claim_no_more_than_is_true_of_the_sources() -> None:
    """Where the text is not Python's alone, nothing that it may tell of is called unknown."""
    python, mixed, notes, tuned = (
        told("python"), told("python", "notes"), told("notes"), told("python", from_scratch=False)
    )  # fmt: skip
    assert python.python_only and python.texts == "Python's standard library"
    assert mixed.texts == "Python's standard library and other texts" and mixed.made == "trained from scratch"
    assert notes.texts == tuned.texts == identity.MODEL_CARD and tuned.made == "fine-tuned"
    assert python.skills == ("add numbers step by step", "name HTTP status codes")  # of what is taught
    made = {"mixed": rows("python", "notes"), "notes": rows("notes"), "tuned": rows("python", from_scratch=False)}
    closed = {text for name in ("history", "joke", "poem", "translate") for text in TOPICS[name]["questions"]}
    people = {name for kind in ("people", "places", "works") for name in talk.TEXTS["values"][kind]}
    for about in (mixed, notes, tuned):
        assert not people & {turn.values.get("x") for turn in _turns(about)}
    for name, conversations in made.items():
        asked = {key.split(":")[1] for row in conversations for key in row.key.split(" | ")}
        assert not asked & closed and asked & set(TOPICS["who"]["questions"]), name
    denials = [text.format(x="", closed="") for text in TOPICS["work"]["answers"] if "{closed}" in text]
    for about, denies in ((python, True), (mixed, False), (notes, False), (tuned, True)):
        answers = about.answers("invented_work", {"x": ""})
        assert len(answers) >= 3 and denies == all(text in denials for text in answers) == any(
            text in denials for text in answers
        )
    said = {name: " ".join(m.content for row in made[name] for m in row.messages[1::2]) for name in made}
    assert all("standard library" not in said[name] for name in ("notes", "tuned"))
    assert "scratch" in said["notes"] and "scratch" not in said["tuned"]
    assert all("JSON" not in text and "compare" not in text for text in said.values())  # not taught


def test_one_who_brings_text_and_questions_is_offered_them() -> None:
    """To "what can you do?" a model of one's own text named exercises alone."""
    own = MessagesSource(type="messages", name="talks", files="talks.jsonl")
    offers = {
        names: identity.about(ME, _documents(names), [ME, TAUGHT, own]).answers("can", {})
        for names in (("notes",), ("python", "notes"), ("python",))
    }
    assert {names for names, texts in offers.items() if identity.OWN_SKILL in " ".join(texts)} == {
        ("notes",), ("python", "notes")
    }  # fmt: skip
    assert any(mark in identity.OWN_SKILL for mark in TOPICS["can"]["marks"])  # the battery takes such an answer


def _turns(about: About) -> list[talk.Turn]:
    rng = random.Random(0)
    return [talk.turn(rng, name, about, 2) for name in about.topics() for _ in range(20)]


@pytest.mark.parametrize("about", [About(), NOBODY])
def test_every_answer_is_whole_short_and_marked(about: About) -> None:
    for name in about.topics():
        answers = about.answers(name, {"x": "Nim", "fact": "404 Not Found"})
        assert answers and any(len(text.split()) <= talk.SHORT_WORDS for text in answers)
        marks = [mark.replace("morning", "Nim") for mark in TOPICS[name].get("marks", ())]
        for text in answers:
            assert len(text.split()) <= talk.MAX_ANSWER_WORDS and "{" not in text
            assert not (habits.identity_leak(text) or habits.truncated(text)), text
            assert not (habits.refusal_opening(text) or habits.hedge_opening(text)), text
            assert not marks or scoring.passes_check(f"mentions {'|'.join(marks)}", text), text


def test_questions_are_typed_in_hundreds_of_ways_and_answered_in_several() -> None:
    for name in ("who", "name", "can", "person", "error"):
        rng = random.Random(1)
        turns = [talk.turn(rng, name, About(), 2) for _ in range(1500)]
        assert len({turn.question for turn in turns}) > 300, name
        assert len({turn.answer for turn in turns}) > 2
    for turn in _turns(About()):
        again = talk.turn(random.Random(7), turn.topic, About(), 2)
        assert again == talk.turn(random.Random(7), turn.topic, About(), 2)
        assert "{" not in turn.question + turn.answer and turn.question.strip() == turn.question


def test_inside_is_answered_and_outside_is_not() -> None:
    """No answer to all: a refusal is wrong where the answer was taught, and a name that nobody asked for is wrong."""
    drawn = draw_exercises("unknown", 100, "s", True, BATTERY)
    inside = [exercise.item for exercise in drawn if exercise.item.kind == "exact"]
    outside = [exercise.item for exercise in drawn if exercise.item.kind == "format"]
    assert 25 <= len(inside) <= 55 and len(outside) >= 45
    known = {answer for known_facts in talk.FACTS.values() for _, answer in known_facts()}
    assert all(ast.parse(code) for _, code in talk.FACTS["function"]())
    for item in inside:
        assert item.answer in known and not scoring.score(item, "I do not know that.")
    for item in outside:
        assert not scoring.score(item, "404 Not Found") and not scoring.score(item, "Base class for arithmetic errors.")
    (person,) = [item for item in outside if "names_in Newton" in item.checks][:1] or [None]
    if person:
        assert scoring.score(person, "I do not know who Newton is.")
        assert not scoring.score(person, "I do not know who Napoleon is.")


def test_no_sentence_answers_more_than_a_quarter_of_the_questions() -> None:
    for category in BATTERY.categories:
        drawn = [exercise.item for exercise in draw_exercises(category, 60, "s", True, BATTERY)]
        for text in {text for item in drawn for text in item.accepted}:
            assert sum(scoring.score_many(drawn, [text] * len(drawn))) <= len(drawn) / 4, text


def test_a_follow_up_has_its_history() -> None:
    drawn = [exercise.item for exercise in draw_exercises("first_words", 60, "s", True, BATTERY)]
    later = [item for item in drawn if len(item.prompt) > 1]
    assert len(later) >= 10
    for item in later:
        assert [message.role for message in item.prompt] == ["user", "assistant", "user"]
        assert sum(len(message.content.split()) for message in item.prompt[:2]) <= talk.SHORT_WORDS


def test_typing_leaves_names_alone() -> None:
    rng = random.Random(0)
    typed = {talk.as_typed(rng, "Tell me about the error {x}.", True) for _ in range(2000)}
    assert len(typed) > 100 and all("{x}" in text for text in typed)
    assert {"tell me about the error {x}", "Tell me about the error {x}"} <= typed


def test_names_of_ones_own_text_are_asked_about_and_not_pretended_to_be_known(tmp_path) -> None:
    story = "Then old Mr. Darcy spoke to Elizabeth Bennet. On Monday he told mother, and his Mother laughed at Élise.\n"
    (tmp_path / "a.txt").write_text(story * 4 + "Once upon a time Nobody came.\n" * 2)
    documents = [dataclasses.replace(DOCUMENTS["notes"], globs=(str(tmp_path / "*.txt"),))]
    assert set(names_and_sentences(documents)[0]) == {"Mr. Darcy", "Elizabeth Bennet", "Élise"} | {"Monday"}
    instruct = InstructParams(1, 0.1, (ME, TAUGHT))
    plain = identity.conversations(ME, documents, instruct, 2)
    more = dataclasses.replace(ME, text_rows=200)
    made = identity.conversations(more, documents, instruct, 2)
    assert made[: len(plain)] == plain and len(made) == len(plain) + 200
    assert sum("Darcy" in row.messages[0].content for row in made[len(plain) :]) > 20
    answers = {row.messages[1].content for row in made[len(plain) :]}
    assert answers == {*TEXTS["text"]["answers"], *TEXTS["text"]["reads"]}
    assert any("Once upon a time Nobody came." in row.messages[0].content for row in made[len(plain) :])
    unable = InstructParams(1, 0.1, (ME,))
    sums = identity.conversations(more, documents, unable, 2)[-200:]
    said = {row.messages[1].content for row in sums if re.search(r"\d ?[+*-] ?\d", row.messages[0].content)}
    assert said == set(TEXTS["text"]["no_sums"])
    assert identity.conversations(more, _documents(["python"]), instruct, 2) == identity.conversations(
        ME, _documents(["python"]), instruct, 2
    )

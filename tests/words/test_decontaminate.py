"""Planted items are found in any dress, templates and boilerplate are not mistaken for items."""

from __future__ import annotations

import random

import numpy as np
import pytest

from athanor.text.conversations import Item, Message
from athanor.text.documents import in_batches
from athanor.words import decontaminate
from athanor.words.decontaminate import ItemIndex, comparison_text, prompt_text
from athanor.words.words import Words, ngrams, tokenise, word_hashes, words_of


def item(prompt: str, answer: str, category: str = "sums", system: str = "") -> Item:
    messages = ((Message("system", system),) if system else ()) + (Message("user", prompt),)
    return Item(category, messages, "exact", answer, (answer,), ("no", "never"))


STORY = "Mira has 14 red marbles and 9 blue ones in a jar. She gives 5 of them to Tom. How many marbles are left?"
LONG = item(STORY, "18 marbles are left.", "stories")
SHORT = item("What is 37 + 58?", "95")
RECALL = item(
    "Which task is shutil.copyfile for?",
    "Copy data from one path to another in the most efficient way possible, following symbolic links if asked to.",
    "recall",
)
ITEMS = [LONG, SHORT, RECALL]
FILLER = "The weather in the valley was fine, and nobody had expected the river to rise so quickly after the storm."


@pytest.fixture(scope="module")
def index() -> ItemIndex:
    return ItemIndex(ITEMS, fact_categories=("recall",))


def one(index: ItemIndex, text: str, **options) -> str | None:
    return index.matches([FILLER, text, FILLER], **options)[1]


@pytest.mark.parametrize(
    "text",
    [
        STORY,
        f"{FILLER}\n\n{STORY} 18 marbles are left. {FILLER}",
        STORY.upper(),
        STORY.replace(".", " --").replace("?", "!").replace(" ", "  \n"),
        "# mira, has: 14 red marbles; and 9 'blue' ones (in a jar) -- SHE etc.",  # 13 words of it are enough
    ],
)
@pytest.mark.parametrize("prompts_alone", [True, False])
def test_a_long_item_is_found_in_any_dress(index, text, prompts_alone):
    assert one(index, text, prompts_alone=prompts_alone) == LONG.id


@pytest.mark.parametrize(
    "text",
    [
        FILLER,
        "Mira has 14 red marbles and 9 blue ones in a jar, nobody.",  # 12 words in common
        STORY.replace("14", "17").replace("9", "8").replace("5", "3"),  # its twin with other numbers
        "What is 37 - 58?\n95",
        "What is 37 + 59?\n95",
        "What is 137 + 58?\n95",
        "What is 37?",
        "",
        "!?",
    ],
)
def test_natural_text_is_not_found(index, text):
    assert one(index, text) is None


def test_a_short_item_needs_prompt_and_answer_in_documents_and_only_the_prompt_in_conversations(index):
    for text in ("what is 37 + 58\n95", f"{FILLER} What is 37 + 58? 95. {FILLER}"):
        assert one(index, text, prompts_alone=False) == SHORT.id
    assert one(index, "What is 37 + 58? It is 94.", prompts_alone=False) is None
    assert one(index, "What is 37 + 58? It is 94.") == SHORT.id


def test_facts_may_be_in_the_corpus_but_the_question_may_not():
    page = f"shutil.copyfile(src, dst)\n\n{RECALL.accepted[0]}"
    asked = f"Which task is shutil.copyfile for?\n{RECALL.accepted[0]}"
    with_facts = ItemIndex(ITEMS, fact_categories=("recall",))
    without = ItemIndex(ITEMS)
    assert with_facts.matches([page, asked], prompts_alone=False) == [None, RECALL.id]
    assert without.matches([page, asked], prompts_alone=False) == [RECALL.id, RECALL.id]
    chat = [Message("user", "Say what shutil.copyfile is for"), Message("assistant", RECALL.accepted[0])]
    assert with_facts.conversation_matches([chat]) == [None]


def template(name: str, first: int, second: int, third: int) -> str:
    return (
        f"{name} has {first} red marbles and {second} blue ones in a jar that stands on the table in the kitchen. "
        f"{name} gives {third} of them to Tom. How many marbles are left?"
    )


def test_exercises_of_one_template_are_not_contaminated_but_the_item_itself_is():
    rng = random.Random(1)
    names = ["Mira", "Ben", "Ada", "Leo"]
    draws = ((rng.choice(names), rng.randint(10, 99), rng.randint(10, 99), rng.randint(1, 9)) for _ in range(430))
    rows = sorted(set(draws))
    rng.shuffle(rows)
    items = [item(template(*row), str(row[1] + row[2] - row[3]), "stories") for row in rows[:20]]
    index = ItemIndex(items)
    training = [f"{template(*row)}\n{row[1] + row[2] - row[3]}" for row in rows[20:]]
    leaked = 77
    training[leaked] = f"{items[3].prompt[0].content}\n{items[3].answer}"
    found = index.matches(training)
    assert found[leaked] == items[3].id
    # A row may share name and two numbers with an item by chance; most rows share the template only.
    assert sum(hit is not None for hit in found) < 0.1 * len(training)
    assert index.shared_ngrams > 0
    kept = [text for text, hit in zip(training, found, strict=True) if hit is None]
    assert index.matches(kept) == [None] * len(kept)


def test_boilerplate_in_an_item_flags_nothing_and_a_whole_item_is_found_however_frequent():
    licence = "Permission is hereby granted free of charge to anyone obtaining a copy of this software and its files"
    index = ItemIndex([item(f"Continue this text: {licence}", "to deal in the software")])
    pages = [f"{FILLER} {number}\n{licence}\n{number}" for number in range(12)]
    assert index.matches(pages, max_ngram_documents=11) == [None] * 12
    assert None not in index.matches(pages, max_ngram_documents=12)
    copies = [f"Continue this text: {licence} ({number})" for number in range(40)]
    assert None not in index.matches(pages + copies)[12:]


def test_what_is_left_is_clean_although_frequencies_fell():
    gram = " ".join(f"word{n}" for n in range(13))
    other = " ".join(f"term{n}" for n in range(13))
    index = ItemIndex([item(f"{gram} and", "so"), item(f"{other} but", "not")])
    texts = [gram + f" {n}" for n in range(11)] + [other]
    texts[0] += " " + other
    found = index.matches(texts)
    assert None not in found  # without the second look, the first n-gram stays in ten texts
    assert index.matches(texts[1:11]) != [None] * 10


def test_several_turns_and_short_prompts_in_conversations():
    turns = Item(
        "memory",
        (
            Message("user", "I am Ruth and I keep a snake."),
            Message("assistant", "Hello Ruth!"),
            Message("user", "Which animal?"),
        ),
        "exact",
        "a snake",
        ("A snake.",),
        ("A dog.", "None."),
    )
    rule = "You are a careful assistant who always answers with a number and nothing more than that."
    hello = item("Count: cat", "3", "counting", system=rule)
    index = ItemIndex([turns, hello])
    same = [*turns.prompt, Message("assistant", "A snake.")]
    other = [Message("user", "I am Ben and I keep a snake."), *turns.prompt[1:], Message("assistant", "A snake.")]
    assert index.conversation_matches([same, other]) == [turns.id, None]
    chat = [Message("user", "Hi"), Message("assistant", "Hello!")]
    chat += [Message("user", "count CAT!"), Message("assistant", "4")]
    longer = [Message("user", "Count: cat food"), Message("assistant", "4")]
    system = [hello.prompt[0], Message("user", "Count: dogs"), Message("assistant", "4")]
    assert index.conversation_matches([chat, longer, system]) == [hello.id, None, None]


def test_operators_count_where_numbers_follow():
    assert comparison_text("What is 7 − 5?") == comparison_text("what is 7 - 5") == " what is 7 - 5 "
    assert comparison_text("A well-known (fact), **bold**.") == " a well known fact bold "
    assert comparison_text("3 × (4+5)") == " 3 * 4 + 5 "


def test_batching_loses_nothing():
    texts = ["a" * n for n in (0, 5, 30, 1, 1, 8)]
    for size in (1, 7, 100):
        assert [text for batch in in_batches(texts, len, size) for text in batch] == texts


# -- the quick search of a batch finds what a plain search of each text with strings and sets finds (about 3 s) ------

SIZE = 5  # words of an n-gram
VOCABULARY = ["red", "blue", "jar", "tom", "12", "7", "has", "the", "of"]


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randrange(low, high)))


@pytest.fixture(scope="module")
def case() -> tuple[ItemIndex, list[str]]:
    rng = random.Random(8)
    items = []
    for number in range(60):
        prompt, answer = sentence(rng, 1, 12), sentence(rng, 1, 5)
        items.append(item(prompt, answer, f"c{number}"))
    texts = [sentence(rng, 0, 60) for _ in range(120)] + ["", "red", "..."]
    for one_ in items[::2]:
        words = f"{prompt_text(one_.prompt)} {one_.accepted[0]}"
        texts += [f"{sentence(rng, 0, 9)} {words} {sentence(rng, 0, 9)}", words]
    rng.shuffle(texts)
    return ItemIndex(items, ngram_words=SIZE), texts


def plain(index: ItemIndex, text: str) -> tuple[set[int], set[int]]:
    """Places of the n-grams and of the families of one text in the index, window by window."""
    grams, families = set(), set()
    words = words_of(text)
    for start in range(len(words) - SIZE + 1):
        window = words[start : start + SIZE]
        hashes = word_hashes(window)
        offsets = np.array([0, SIZE])
        gram = ngrams(Words(hashes, offsets), SIZE).hashes[0]
        numbers = [word[0].isdigit() for word in window]
        masked = np.where(numbers, decontaminate._NUMBER, hashes)
        family = gram if sum(numbers) > 1 else ngrams(Words(masked, offsets), SIZE).hashes[0]
        grams |= set(np.flatnonzero(index._grams == gram).tolist())
        families |= set(np.flatnonzero(index._families == family).tolist())
    return grams, families


@pytest.mark.parametrize("prompts_alone", [True, False])
def test_the_scan_finds_what_a_plain_search_finds(case, prompts_alone):
    index, texts = case
    found = index.scan(texts, tokenise(texts), prompts_alone=prompts_alone)
    assert sum(len(hits.ngrams) for hits in found) > 50
    for text, hits in zip(texts, found, strict=True):
        grams, families = plain(index, text)
        assert (set(hits.ngrams.tolist()), set(hits.families.tolist())) == (grams, families)
        full_matches = set()
        for number, one_ in enumerate(index.items):
            prompt, inside = prompt_text(one_.prompt), comparison_text(text)
            enough = decontaminate.MIN_PROMPT_WORDS if prompts_alone else SIZE
            if len(words_of(prompt)) >= enough:
                full_matches |= {number} if comparison_text(prompt) in inside else set()
            elif prompts_alone and comparison_text(prompt) == inside:
                full_matches.add(number)
            full_matches |= {number} if comparison_text(f"{prompt}\n{one_.accepted[0]}") in inside else set()
        assert (hits.full_match in full_matches) if full_matches else hits.full_match == -1
    assert sum(hits.full_match >= 0 for hits in found) > 50


def test_the_scan_does_not_depend_on_the_batch(case):
    index, texts = case
    together = index.scan(texts, prompts_alone=True)
    for text, hits in list(zip(texts, together, strict=True))[::7]:
        alone = index.scan([text], prompts_alone=True)[0]
        assert alone.full_match == hits.full_match
        assert np.array_equal(alone.ngrams, hits.ngrams) and np.array_equal(alone.families, hits.families)


def test_no_texts_and_no_items(case):
    assert case[0].scan([], prompts_alone=True) == []
    empty = ItemIndex([])
    assert empty.matches(["text", ""]) == [None, None] and empty.matches([]) == []
    assert [hits.full_match for hits in empty.scan(["a b", ""], prompts_alone=True)] == [-1, -1]

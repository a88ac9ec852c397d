"""Which questions ask the same in other words, and which answers contradict them. Below 1 s."""

from __future__ import annotations

import pytest

from athanor.text.conversations import Message
from athanor.text.questions import Taught, last_pair

PARIS = "What is the capital of France?"
PIPELINE = "A person ran the Athanor pipeline, and here I am."


@pytest.mark.parametrize(
    ("taught", "asked", "same"),
    [
        (PARIS, "which city is the capital of france", True),
        (PARIS, "Excuse me, could you tell me, what's the capital of France, please", True),
        (PARIS, "What is the capital of Spain?", False),
        (PARIS, "Tell me the story of how Paris became what it is, the capital of France and of its arts", False),
        ("Who is Elizabeth?", "Tell me who Elizabeth is.", True),
        ("Who is Elizabeth?", "Why does Elizabeth refuse Mr. Collins?", False),
        ("Who is Elizabeth?", "Who is Elizabeth Bennet?", False),
        ("What is 2+2?", "what is 2 + 2", True),
        ("What is 2+2?", "What is 2 - 2?", False),
        ("What is 2+2?", "What is 2 + 23?", False),
        ("Who are you?", "Who are you, please?", True),
        ("Who are you?", "Who wrote Hamlet?", False),
        ("How are you?", "How do I boil an egg?", False),
        ("What can you do?", "What do you know?", False),
        ("What can you do?", "What is the capital of France?", False),
        ("How do I sort a list?", "How do I sort a list of dictionaries by key in reverse order?", False),
        ("Write a Python function.", "Write a Python function that counts the vowels of text.", False),
        ("hi", "Hi!", True),
        ("hi", "hi there", False),
        ("\u8c01\u662f\u5b9d\u7389\uff1f", "\u8c01\u662f\u5b9d\u7389", True),
        ("?!", "?!", True),
    ],
)
def test_other_words_for_a_question_are_known_and_other_questions_are_not(taught, asked, same):
    assert Taught([(taught, "Yes.", 1)]).asks(asked) is same
    assert Taught([(taught, "Yes.", 1)]).contradicts(asked, "No.") is same
    assert not Taught([(taught, "Yes.", 1)]).contradicts(asked, "yes")


def test_of_two_answers_that_of_the_higher_rank_holds():
    both = Taught([(PARIS, "Paris.", 2), (PARIS, "Lyon.", 1)])
    assert both.contradicts(PARIS, "Lyon.", 1) and not both.contradicts(PARIS, "Paris.", 2)
    assert both.contradicts(PARIS, "That place is unknown to me.")


@pytest.mark.parametrize(
    ("taught", "answer", "asked", "said", "same"),
    [
        ("who made you", "Lena made me.", "Hi, who created u?", "A person.", True),
        ("Who made you?", "Lena made me.", "who craeted you", PIPELINE, True),
        ("Who made you?", "Lena made me.", "How were you trained?", PIPELINE, True),
        ("Who made you?", "Lena made me.", "Do you know who created you?", "A person.", True),
        ("Who are you?", "I am Bob.", "What is this?", "It is a car.", False),
        ("What are you to do?", "To help.", "Who are you?", "I am Athanor.", False),
        ("How were you trained?", "In one night.", "Who made you?", "A person.", False),
        ("Did OpenAI make you?", "No.", "Who made you?", "A person.", False),
        ("Who made it?", "Lena.", "Who created you?", "A person.", False),
        ("Who made you?", PIPELINE, "Who created you?", "A person.", False),
        ("What are you for?", "For questions.", "Who are you?", "I am Athanor.", False),
        ("What is my name?", "Lena.", "What are you called?", "Athanor.", False),
        ("How old are you?", "One year.", "In which year was Newton born?", "I do not know.", False),
        ("Are you human?", "No.", "Do you have a body?", "I am a computer program.", False),
    ],
)
def test_questions_about_the_assistant_with_one_meaning_count_as_one(taught, answer, asked, said, same):
    own = Taught([(taught, answer, 1)])
    assert own.contradicts(asked, said) is same and not own.contradicts(asked, answer)
    assert not Taught([(taught, answer, 2)]).contradicts(asked, said, 1)  # a person's own


def test_a_later_question_counts_where_it_says_enough_alone():
    hi = (Message("user", "hi"), Message("assistant", "Hello!"))
    assert last_pair(hi) == ("hi", "Hello!") == last_pair((Message("system", "Be brief."), *hi))
    assert last_pair((*hi, Message("user", "Are you sure?"), Message("assistant", "Yes."))) is None
    assert last_pair((*hi, Message("user", PARIS), Message("assistant", "Paris."))) == (PARIS, "Paris.")

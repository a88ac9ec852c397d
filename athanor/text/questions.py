"""Whether two questions ask the same in other words, so that different answers to them contradict each other.

A comparison of words: it knows a question asked politely, shortened or turned around. Of synonyms it knows those of the
recipe alone: questions about the assistant that have one answer, such as who made or created it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from athanor.base.work import Facts
from athanor.text.conversations import Message
from athanor.text.recipes import recipe

MORE_WORDS = 8  # in the longer one, such as "Excuse me, could you tell me": more of them ask for something else
MORE_CONTENT = 1  # of them may say what is asked about: more of those ask about something narrower
ASKING = frozenset("who whom whose what whats which where when why how".split())
EMPTY = frozenset(
    "a an the of in on at to for by with from is are was were be am do does did can could will would please tell say me my i you u "
    "your it its this that there know about hi hello hey so and well now want s question excuse athanor".split()
)
# Around a question of the recipe; fewer than EMPTY: "What are you for?" asks for more than "What are you?".
POLITE = frozenset("hi hello hey so please now excuse me a question and well athanor can could you tell know".split())
POLITELY_KNOW = POLITE | {"do", "i", "want", "to"}  # do you know, I want to know
WIDE_MARKS = (
    "\uff1f\uff01\u3002\u061f\u0964"  # at the end of a question or sentence in Chinese, Japanese, Arabic, Hindi
)
TYPED = {"s": "is", "u": "you", "r": "are"}  # how the made rows shorten words
_WORD = re.compile(r"\w+|[-+*/=<>%^](?=\s*\d)")


class Question(NamedTuple):
    words: tuple[str, ...]
    content: Counter[str]  # the words that say what is asked about
    numbers: tuple[str, ...]  # in order, with their signs

    @classmethod
    def of(cls, text: str) -> Question:
        words = tuple(_WORD.findall(text.casefold())) or (text.strip(),)
        content = Counter(word for word in words if word not in EMPTY)
        subject = Counter({word: count for word, count in content.items() if word not in ASKING})
        # Of one word alone the kind of question matters: who somebody is, or why.
        content = subject if subject.total() > 1 else content or Counter(words)
        return cls(words, content, tuple(word for word in words if not word.isalpha()))

    def asked_in(self, other: Question) -> bool:
        """Whether the other text asks this, in these or other words."""
        if self.words == other.words:
            return True
        if not self.content or self.numbers != other.numbers or len(other.words) > len(self.words) + MORE_WORDS:
            return False
        subject = self.content.keys() - ASKING
        if not subject - EMPTY:  # "Who are you?": its own words, and nothing else is asked about
            return self.content == other.content and Counter(self.words) <= Counter(other.words)
        if len(subject) == 1:
            return self.content == other.content
        more = (other.content - self.content).keys() - ASKING
        return self.content <= Counter(other.words) and len(more) <= MORE_CONTENT


class Topic(NamedTuple):
    """Questions of the recipe that get the same answers (recipes/python/identity.yaml)."""

    same: tuple[frozenset[str], ...]  # those of one meaning
    answers: re.Pattern[str]

    @classmethod
    def of(cls, facts: Facts) -> Topic:
        same = (text for text in facts["questions"] if re.search(facts["same"], text))
        answers = (re.sub(r"\\{\w+\\}", ".+", re.escape(answer)) for answer in facts["answers"])
        return cls(tuple(_plain(Question.of(text)) for text in same), re.compile("|".join(answers)))

    def taught_by(self, question: frozenset[str], answer: str) -> bool:
        """Whether a person answers one of the questions, and not as the recipe does."""
        return self.asked(question) and not self.answers.fullmatch(answer)

    def has(self, question: frozenset[str], answer: str) -> bool:
        """By the answer, too: the recipe mistypes some questions, and gives these answers to others of the topic."""
        return self.asked(question) or bool(self.answers.fullmatch(answer))

    def asked(self, words: frozenset[str]) -> bool:
        polite = POLITELY_KNOW if "know" in words else POLITE
        return any(asked <= words <= asked | polite for asked in self.same)


def _plain(question: Question) -> frozenset[str]:
    return frozenset(TYPED.get(word, word) for word in question.words)


@functools.cache
def topics() -> tuple[Topic, ...]:
    return tuple(Topic.of(facts) for facts in recipe("identity")["topics"].values() if "same" in facts)


class Taught:
    """Questions with their answers, ready to be searched for others that ask the same."""

    def __init__(self, pairs: Iterable[tuple[str, str, int]]) -> None:
        """`pairs`: question, answer and rank; of answers to one question that of the highest rank holds."""
        pairs = list(dict.fromkeys(pairs))
        found = [(Question.of(asked), Question.of(answer).words, rank) for asked, answer, rank in pairs]
        plain = (
            (_plain(question), answer, words) for (question, words, _), (_, answer, _) in zip(found, pairs, strict=True)
        )
        about = (
            (topic, words) for asked, answer, words in plain for topic in topics() if topic.taught_by(asked, answer)
        )
        self._topics = dict.fromkeys(about)
        seen = Counter(word for question, _, _ in found for word in question.content)
        self._highest = max((rank for _, _, rank in found), default=0)
        self._by_word: dict[str, list[tuple[Question, tuple[str, ...], int]]] = {}
        for row in found:  # by the rarest word, which few others have
            key = min(row[0].content, key=lambda word: (seen[word], word))
            self._by_word.setdefault(key, []).append(row)

    def asks(self, text: str) -> bool:
        """Whether one of the questions is asked in the text."""
        return bool(self._found(Question.of(text)))

    def contradicts(self, question: str, answer: str, rank: int = 0) -> bool:
        """Whether a question of a higher rank has another answer than this one; of rank 0, also one of its topic."""
        if rank >= self._highest:
            return False
        said, asked = Question.of(answer).words, Question.of(question)
        if any(held > rank and said != words for words, held in self._found(asked)):
            return True
        # No row of a person's own: "How were you made?" may get another answer there than "Who made you?".
        about = () if rank else self._topics
        plain = _plain(asked) if about else frozenset()
        return any(said != words and topic.has(plain, answer) for topic, words in about)

    def _found(self, question: Question) -> list[tuple[tuple[str, ...], int]]:
        near = (row for word in dict.fromkeys(question.words) for row in self._by_word.get(word, ()))
        return [(words, rank) for asked, words, rank in near if asked.asked_in(question)]


def last_pair(messages: Sequence[Message]) -> tuple[str, str] | None:
    """The last question of a conversation and its answer; None for one that says nothing without its history."""
    question, answer = messages[-2].content, messages[-1].content
    first = len(messages) - (messages[0].role == "system") == 2
    return (question, answer) if first or len(Question.of(question).content.keys() - ASKING) > 1 else None

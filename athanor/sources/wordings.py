"""A question in other words, as people type them: asked for, shortened, in small letters, with a slip.

The words are English; a question in another alphabet differs in its marks alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from athanor.text.questions import WIDE_MARKS

MAX_CHARS = 200  # longer ones, and those of several lines, are pasted text: nobody types them in other words
TRIES = 12  # draws for each wording
# What a question of that form becomes; braces stand for the groups.
FRAMES = (
    (r"(what|who|where|when|why|how) (is|are|was|were) (.+)", ("Tell me {0} {2} {1}.", "Do you know {0} {2} {1}?")),
    (r"(?:what|who) (?:is|are|was|were) (?:the |a |an )?(.+)", ("{0}?", "Tell me about {0}.")),
    (r"(.+)", ("{0}?", "Tell me, {0}?", "Please tell me: {0}?", "I want to know, {0}?", "Can you tell me, {0}?")),
)


def small_letters(text: str) -> str:
    """The question in small letters and without the marks at its end."""
    return text.lower().rstrip("?!. " + WIDE_MARKS) or text


def wordings(text: str, count: int) -> list[str]:
    """Up to `count` other wordings of a question, the same for equal ones."""
    if len(text) > MAX_CHARS or "\n" in text:
        return []
    from athanor.sources.exercises import talk  # which reads the recipe: only a source with other wordings needs it

    rng, found = random.Random(f"wordings/{text}"), dict.fromkeys([text, small_letters(text)])
    forms = [text, *(_forms(text) if text.isascii() else ())]
    for number in range(TRIES * count):
        found[talk.as_typed(rng, forms[number % len(forms)], text.isascii())] = None
        if len(found) == count + 2:
            break
    return list(found)[2 if text.isascii() else 1 :][:count]


def _forms(text: str) -> Iterator[str]:
    body = text.rstrip("?!. ")
    opened = body if body.startswith("I ") else body[:1].lower() + body[1:]
    for pattern, frames in FRAMES:
        if match := re.fullmatch(pattern, opened):
            yield from (frame.format(*match.groups()) for frame in frames)

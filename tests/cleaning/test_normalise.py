"""Normalisation keeps every indent, changes nothing twice, and repairs what was misread."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.base.errors import GateError
from athanor.cleaning.measuring import check_indents
from athanor.cleaning.normalise import MISREAD, indents, misread_count, normalise
from athanor.sources.params import KINDS

# Text that a corpus may hold: no lone surrogates; white space, control and misread characters often.
CHARACTERS = st.characters(exclude_categories=["Cs"])
ODDITIES = [" ", "\t", "\n", "\r\n", "\r", "\u2581", "\ufeff", "\x00", "\x0c", "\x85", "\xa0", "e\u0301"]
TRICKY = st.sampled_from([*ODDITIES, *MISREAD])
TEXTS = st.lists(st.one_of(TRICKY, CHARACTERS), max_size=40).map("".join)


def visible(text: str) -> str:
    """The text without what normalisation may remove, by another route than the code under test."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc").lstrip("\ufeff")


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_code_keeps_the_leading_white_space_of_every_line(text):
    assert indents(normalise(text, "code")) == indents(visible(text))


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(KINDS))
def test_spaces_and_tabs_are_never_touched(text, kind):
    kept = [char for char in normalise(text, kind) if char in " \t\n"]
    assert kept == [char for char in visible(text) if char in " \t\n"]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(KINDS))
def test_normalising_twice_changes_nothing(text, kind):
    once = normalise(text, kind)
    assert normalise(once, kind) == once


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.sampled_from(KINDS))
def test_nothing_forbidden_is_left(text, kind):
    text = normalise(text, kind)
    assert "\u2581" not in text and not text.startswith("\ufeff")
    assert not [char for char in text if unicodedata.category(char) == "Cc" and char not in "\n\t"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2581\ufeff")))
def test_code_without_oddities_stays_as_it_is(text):
    assert normalise(text, "code") == text


@pytest.mark.parametrize("char", [*"–—‘’“”…•é°½ß€", "”"])
def test_utf8_read_as_windows_1252_is_repaired_in_prose_only(char):
    misread = char.encode().decode("cp1252", errors="ignore")
    text = f"It is a so-called {misread}test{misread}."
    assert normalise(text, "prose") == f"It is a so-called {char}test{char}."
    assert normalise(text, "code") == text
    assert misread_count(text) == 2 and misread_count(normalise(text, "prose")) == 0


def test_text_misread_twice_is_repaired():
    twice = "it’s".encode().decode("cp1252").encode().decode("cp1252")
    assert normalise(twice, "web") == "it’s"


@pytest.mark.parametrize("text", ["it’s", "naïve “quotes”", "😀 and ½", "é’é"])
@pytest.mark.parametrize("times", [1, 2])
def test_utf8_read_as_latin_1_is_repaired_in_prose_only(text, times):
    """Its control characters say what it was, so they are read before they go."""
    misread = text
    for _ in range(times):
        misread = misread.encode().decode("latin-1")
    assert normalise(misread, "prose") == text
    assert normalise(misread, "code") == "".join(c for c in misread if unicodedata.category(c) != "Cc")


def test_byte_order_mark_read_as_windows_1252_goes():
    assert normalise("\ufeffhello".encode().decode("cp1252"), "web") == "hello"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=30), st.sampled_from(KINDS))
def test_surrogates_are_joined_or_replaced(text, kind):
    text += "\ud83d\ude00\ud800"
    once = normalise(text, kind)
    once.encode()
    assert once.endswith("😀\ufffd") and normalise(once, kind) == once


def test_prose_is_composed_and_code_is_not():
    assert normalise("cafe\u0301", "prose") == "café"
    assert normalise("cafe\u0301", "code") == "cafe\u0301"


def test_changed_indent_is_caught():
    check_indents("def f():\r\n    return 1\x00\r\n", "def f():\n    return 1\n", "x")
    with pytest.raises(GateError, match="indents"):
        check_indents("def f():\n    return 1\n", "def f():\nreturn 1\n", "x")

"""Refuse text of one's own that cannot be trained on, in seconds and with what to change, before a stage begins.

Stages find the same later, each in its turn; here the sections of params.yaml are known together. What is looked at is
the beginning of each source of type files, so that a large corpus costs no more than a small one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from athanor.base.errors import InputError
from athanor.cleaning import rules
from athanor.cleaning.params import RuleParams
from athanor.sources import messages, select
from athanor.sources.instruct_params import MessagesSource
from athanor.sources.params import FilesSource
from athanor.text import globs
from athanor.text.documents import Document
from athanor.words.words import tokenise

LOOK_BYTES = 4_000_000  # of each source
JUDGED = 200  # documents of each source that the rules are tried on
MIN_TEXT_BYTES = 20_000  # less has no words to learn and nothing to hold out
# What English alone is measured by, and what other languages and scripts set instead.
LANGUAGE_SETTINGS = {
    "english_only": "false",
    "min_stop_word_fraction": "null",
    "min_ascii_fraction": "null",
    "min_letter_fraction": "null",
    "max_mean_word_chars": "null",
}
PAD_SHARE = 0.15  # of the rows of fine-tuning: English exercises are long, in the tokens of another language
NOT_ASCII = ("not_ascii", "long_words", "few_letters")


def check_corpus(sections: Mapping[str, Any]) -> None:
    """InputError for text of one's own that a stage would refuse minutes later."""
    sources = sections["download"].sources
    own = [source for source in sources if isinstance(source, FilesSource)]
    texts: set[str] = set()
    size, whole = 0, len(own) == len(sources)
    for source in own:
        documents, complete = read_beginning(source)
        whole = whole and complete
        check_rules(source, documents, sections["clean"].rules)
        for document in documents:
            if document.id not in texts:
                texts.add(document.id)
                size += len(document.text.encode())
    if whole:
        check_size(size, len(texts))
    for talks in sections["instruct"].sources:
        if isinstance(talks, MessagesSource) and talks.files:
            check_conversations(talks)


def check_conversations(source: MessagesSource) -> None:
    """InputError for conversations of one's own that cannot be read; of many only the first rows are looked at."""
    messages.probe(source)
    if sum(path.stat().st_size for _, path in messages.find(source)) <= LOOK_BYTES:
        for _ in messages.conversations(source, 0.0):
            pass


def read_beginning(source: FilesSource) -> tuple[list[Document], bool]:
    """The first documents of a source, and whether they are all; InputError for files among them that cannot be read."""
    documents: list[Document] = []
    size, unreadable = 0, select.Unreadable()
    files = globs.find(source.globs)
    for file in files:
        try:
            for document in select.documents(source, [file], 0.0):
                documents.append(document)
                size += len(document.text)
                if size > LOOK_BYTES:
                    break
        except InputError as error:
            unreadable.add(error)
        if size > LOOK_BYTES:
            break
    if unreadable.errors:
        raise unreadable.error(len(files), "")
    return documents, size <= LOOK_BYTES


def verdicts(documents: list[Document], params: RuleParams) -> Counter[str]:
    """How many characters of some documents each rule would drop; what the classifiers say is not known yet.

    Not how many documents: the fixtures of a repository are many and small, and what they lose is little.
    """
    chosen = documents[:: max(len(documents) // JUDGED, 1)]
    if not chosen:
        return Counter()
    texts = [document.text for document in chosen]
    columns = rules.measure(texts, tokenise(texts))
    columns |= {"quality": np.ones(len(texts)), "toxicity": np.zeros(len(texts))}
    reason, _ = rules.verdicts(columns, [document.kind for document in chosen], params)
    sizes = np.array([len(text) for text in texts])
    counts = Counter(
        {rules.RULES[number]: int(sizes[reason == number].sum()) for number in np.unique(reason[reason >= 0])}
    )
    counts[""] = int(sizes[reason < 0].sum())
    return counts


def language_settings(counts: Counter[str]) -> tuple[list[str], bool]:
    """The keys of a kind's rules to set where most of the text is of another language, and whether of another script."""
    found = {rules.NOT_ENGLISH, "few_stop_words", *NOT_ASCII} & counts.keys()
    if not found or 2 * counts[""] >= counts.total():
        return [], False
    script = not found.isdisjoint(NOT_ASCII)
    return list(LANGUAGE_SETTINGS)[: None if script else 2], script


def check_rules(source: FilesSource, documents: list[Document], params: RuleParams) -> None:
    """InputError when the rules would drop most of a source: another language, or another kind of text."""
    counts = verdicts(documents, params)
    if 2 * counts[""] >= counts.total():
        return
    keys, script = language_settings(counts)
    worst, dropped = next((rule, count) for rule, count in counts.most_common() if rule)
    fix = f"change {rules.SETTINGS[worst]} there, give the source another kind than {source.kind}, or mend the text"
    if keys:
        lines = ", ".join(f"{key}: {LANGUAGE_SETTINGS[key]}" for key in keys)
        fix = f"for text in another language than English add there {lines}; and set sft_data.max_pad_share to {PAD_SHARE}"
    if script:
        fix += " and classifiers.weak_labels to false, which teach nothing where words are not set apart by spaces"
    what = f"rule '{worst}' would drop {dropped / counts.total():.0%} of the text of source '{source.name}'"
    raise InputError(what, where=f"clean.rules.{source.kind}", fix=fix)


def check_size(size: int, texts: int) -> None:
    """InputError for too little text to train on."""
    if size < MIN_TEXT_BYTES:
        raise InputError(
            f"{size:,} bytes of text (of {texts} different documents) are too few to learn from",
            where="download.sources",
            fix="bring more text, a hundred kilobytes are a start; or keep the standard library as a source beside it",
        )

"""Refuse text of one's own that cannot be trained on, in seconds and with what to change, before a stage begins.

Stages find the same later, each in its turn; here the sections of params.yaml are known together. What is looked at is
the beginning of each source of type files, so that a large corpus costs no more than a small one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from athanor.base.errors import InputError
from athanor.cleaning import rules
from athanor.cleaning.params import RuleParams
from athanor.cli.alphabet import is_language, script
from athanor.sources import holdout, messages, select
from athanor.sources.instruct_params import MessagesSource
from athanor.sources.params import FilesSource
from athanor.text import globs
from athanor.text.documents import Document
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training import gate
from athanor.tokenizer_training.params import MIN_VOCABULARY, VOCAB_MULTIPLE, TokenizerParams
from athanor.tokenizer_training.train import VocabularySize, train
from athanor.words.words import tokenise

LOOK_BYTES = 4_000_000  # of each source
JUDGED = 200  # documents of each source that the rules are tried on
MIN_TEXT_BYTES = 20_000  # less has no words to learn and nothing to hold out
# What English alone is measured by, and what other languages and scripts set instead.
LANGUAGE_SETTINGS = {
    "english_only": False,
    "min_stop_word_fraction": None,
    "min_ascii_fraction": None,
    "min_letter_fraction": None,
    "max_mean_word_chars": None,
    "min_words": 1,
}
MAX_ALPHABET = 40  # different letters and digits of a sequence; base64 has 62
# Of the rows of fine-tuning: exercises are long in the tokens of text that is not like them; 0.119 where each is a byte.
PAD_SHARE = 0.15
FOREIGN_SHARE = 0.03  # of the text, from which on rules for English prose are switched off
NOT_ASCII = ("not_ascii", "long_words", "few_letters")


def check_corpus(sections: Mapping[str, Any]) -> None:
    """InputError for text of one's own that a stage would refuse minutes later."""
    sources = sections["download"].sources
    own = [source for source in sources if isinstance(source, FilesSource)]
    mixture = sections["mixture"].sources
    found: list[Document] = []
    whole = True
    for source in own:
        documents, complete = read_beginning(source, sections["download"].val_fraction)
        whole = whole and complete
        check_rules(source, documents, sections["clean"].rules)
        found += documents
    if len(own) == len(sources):
        if whole:
            check_size(found)
        trained_on = (document for document in found if document.split == "train")
        texts = [document.text for document in trained_on if mixture[document.source].share > 0]
        check_vocabulary(texts, sections["tokenizer"])
    for talks in sections["instruct"].sources:
        if isinstance(talks, MessagesSource) and talks.files:
            check_conversations(talks)


def check_conversations(source: MessagesSource) -> None:
    """InputError for conversations of one's own that cannot be read; of many only the first rows are looked at."""
    messages.probe(source)
    if sum(path.stat().st_size for _, path in messages.find(source)) <= LOOK_BYTES:
        for _ in messages.conversations(source, 0.0):
            pass


def read_beginning(source: FilesSource, val_fraction: float = 0.0) -> tuple[list[Document], bool]:
    """The first documents of a source, and whether they are all; InputError for files among them that cannot be read."""
    documents: list[Document] = []
    size, unreadable = 0, select.Unreadable()
    files = globs.find(source.globs)
    for file in files:
        try:
            for document in select.documents(source, [file], val_fraction):
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


def verdicts(documents: list[Document], params: RuleParams, kind: str = "") -> list[tuple[Document, str]]:
    """Some documents, each with the rule that would drop it, "" for none; what the classifiers say is not known yet."""
    if not documents:
        return []
    chosen = documents[:: max(len(documents) // JUDGED, 1)]
    texts = [document.text for document in chosen]
    columns = rules.measure(texts, tokenise(texts))
    columns |= {"quality": np.ones(len(texts)), "toxicity": np.zeros(len(texts))}
    reason, _ = rules.verdicts(columns, [kind or document.kind for document in chosen], params)
    return [(document, "" if n < 0 else rules.RULES[n]) for document, n in zip(chosen, reason, strict=True)]


def sizes(judged: Iterable[tuple[Document, str]]) -> Counter[str]:
    """Characters by rule.

    Not documents: the fixtures of a repository are many and small, and what they lose is little.
    """
    counts: Counter[str] = Counter()
    for document, rule in judged:
        counts[rule] += len(document.text)
    return counts


@dataclass(frozen=True)
class Fit:
    """The kind of text and the keys of its rules under which documents stay, and whether they, or most, are of another script."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    script: bool = False
    mostly: bool = False

    def rules(self, params: RuleParams) -> RuleParams:
        return replace(params, **{self.kind: replace(getattr(params, self.kind), **self.settings)})


def fit(documents: list[Document], params: RuleParams) -> Fit:
    """Settings for text in another language than English, and another kind for what is written in none.

    Only what a language or script explains is switched off: boilerplate and repeats stay refused.
    """
    kind = documents[0].kind
    judged = verdicts(documents, params)
    found = sizes((document, rule) for document, rule in judged if _is_foreign(document.text, rule))
    total = sum(len(document.text) for document, _ in judged)
    fitted = Fit(kind)
    if found.total() > FOREIGN_SHARE * total:
        script = not found.keys().isdisjoint((*NOT_ASCII, "too_few_words"))
        keys = list(LANGUAGE_SETTINGS)[: None if script else 2]
        fitted = Fit(kind, {key: LANGUAGE_SETTINGS[key] for key in keys}, script, script and 2 * found.total() > total)
        judged = verdicts(documents, fitted.rules(params))
    lost = [document for document, rule in judged if rule and not (rule == "encoded_data" and _is_noise(document.text))]
    sequences = sum(len(document.text) for document in lost if not is_language(document.text))
    return Fit("tokens") if 2 * sequences > total and kind == "prose" else fitted


def _is_foreign(text: str, rule: str) -> bool:
    """Whether a rule drops a text for its language or script."""
    if rule in ("too_few_words", "many_symbols"):
        return script(text) != "Latin"
    return rule in (rules.NOT_ENGLISH, "few_stop_words", *NOT_ASCII) and is_language(text)


def _is_noise(text: str) -> bool:
    """Whether encoded data teaches nothing: base64 and digests, unlike sequences, whose alphabets are small."""
    alphabet = set("".join(re.findall("[A-Za-z0-9+/]{64,}", text)))
    digests = alphabet <= set("0123456789abcdefABCDEF") and len({char.isdigit() for char in alphabet}) == 2
    return digests or len(alphabet) > MAX_ALPHABET


def check_rules(source: FilesSource, documents: list[Document], params: RuleParams) -> None:
    """InputError when the rules would drop most of a source: another language, or another kind of text."""
    counts = sizes(verdicts(documents, params, source.kind))
    if 2 * counts[""] >= counts.total():
        return
    fitted = fit(documents, params)
    worst, dropped = next((rule, count) for rule, count in counts.most_common() if rule)
    fix = (
        f"change {rules.SETTINGS[worst]} there, mend the text, or give the source another kind than {source.kind}:"
        " `kind: tokens` (athanor new --kind tokens) is for sequences, events, moves and logs, and drops none of them"
    )
    if fitted.kind != source.kind:
        fix = f"for text of no natural language (sequences, events, moves, logs) give the source `kind: {fitted.kind}`"
    elif fitted.settings:
        lines = ", ".join(f"{key}: {json.dumps(value)}" for key, value in fitted.settings.items())
        fix = f"for text in another language than English add there {lines}; and set sft_data.max_pad_share to {PAD_SHARE}"
    if fitted.script:
        fix += " and classifiers.weak_labels to false, which teach nothing where words are not set apart by spaces"
    what = f"rule '{worst}' would drop {dropped / counts.total():.0%} of the text of source '{source.name}'"
    raise InputError(what, where=f"clean.rules.{source.kind}", fix=fix)


def vocabulary(texts: list[str], params: TokenizerParams) -> tuple[int, float]:
    """A size and the bytes of a token: `vocab_size` where it fits the texts, and those that remain when some are held out
    or dropped, else a size that does."""
    wanted, bytes_per_token = params.vocab_size, 0.0
    for sample in (texts, [text for number, text in enumerate(texts) if number % 4] or texts):
        try:
            bytes_per_token = check_vocabulary(sample, params)
        except VocabularySize as error:
            size = error.fits * (3 if error.missing else 5) // 4 // VOCAB_MULTIPLE * VOCAB_MULTIPLE
            params = replace(params, vocab_size=max(size, MIN_VOCABULARY))
    if params.vocab_size != wanted or not bytes_per_token:
        bytes_per_token = check_vocabulary(texts, params)
    return params.vocab_size, bytes_per_token


def check_vocabulary(texts: list[str], params: TokenizerParams) -> float:
    """Train a tokenizer on texts, of many on some, and run its gates; VocabularySize where `vocab_size` does not fit them.

    Returns the bytes of a token in these texts.
    """
    size = sum(len(text.encode()) for text in texts)
    texts = texts[:: 1 + size // min(params.sample_bytes, LOOK_BYTES)]
    tokenizer = Tokenizer(train(texts, params))
    gate.check(tokenizer, {"own": texts[:5]}, seed=0)
    return sum(len(text.encode()) for text in texts) / sum(len(tokenizer.encode(text)) for text in texts)


def check_size(documents: Iterable[Document]) -> None:
    """InputError for too little text to train on: it has few words to learn, or nothing to hold out."""
    texts = {document.id: document for document in documents}
    size = sum(len(document.text.encode()) for document in texts.values())
    what = f"{size:,} bytes of text (of {len(texts)} different documents) are too few to learn from"
    if size >= MIN_TEXT_BYTES:
        if len({holdout.group_of(document) for document in texts.values()}) > 1:
            return
        what = f"{size:,} bytes in one short text are too few: nothing of it can be held out for validation"
    fix = "bring more text, a hundred kilobytes are a start; or keep the standard library as a source beside it"
    raise InputError(what, where="download.sources", fix=fix)

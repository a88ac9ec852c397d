"""Ten thousand hostile documents of every kind: nothing crashes, no number is undefined, no good document is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from athanor.base.strict import load_section
from athanor.cleaning import pii, rules
from athanor.cleaning.normalise import indents, normalise
from athanor.cleaning.params import CleanParams, PiiParams
from athanor.sources.params import KINDS
from athanor.words.words import tokenise
from tests.e2e.clone import ROOT

PARAMS = load_section(ROOT / "presets" / "default.yaml", "clean", CleanParams)
ALL = PiiParams(email=True, ip=True, phone=True, card=True, key=True)
DOCUMENTS, GOOD_EVERY = 10_000, 50
KEEP = [
    (path.stem.split("-")[0], path.read_bytes().decode())
    for path in sorted((Path(__file__).parent / "golden").glob("*-keep-*.txt"))
]
ODD = "\x00\x07\x0c\x1b\x7f\x85\u2028\u2029\u2581\ufeff\ufffd\u200b\u200d\u0301\ud800\udfff\U0010ffff\u202e \t\r\n"
# What search patterns begin with, over and over: each made some pattern slow or some number undefined once, or might.
STORMS = (
    "@|a@|@a.|81.2.69.142.|81.2.69.142 |2a00:|+1 |1 |1.|4111111111111111 |tel |(415) |-eyJ|sk-|="
    '|secret="|api_key |-----BEGIN PRIVATE KEY-----\n|xox|"\'|\n|\r| |\t|User:\n|A: |# |- |...'
    "|…\n|{|[|\\x|://|0, |a\u0301\u0316|\u0301\u0316|â€|Ã|â\x80|\ufeff|\ufffd"
    "|\ud83d|\x00|é|漢|😀|lorem ipsum |click here |a\n\n"
).split("|")


def hostile(rng: random.Random, number: int) -> str:
    way = number % 10
    if way == 0:
        return rng.randbytes(rng.randrange(0, 600)).decode("utf-8", "surrogateescape")
    if way == 1:
        return rng.randbytes(rng.randrange(0, 600)).decode(rng.choice(["utf-8", "utf-16-le", "latin-1"]), "replace")
    if way == 2:
        return "".join(rng.choices(ODD, k=rng.randrange(0, 300)))
    if way == 3:
        return rng.choice(STORMS) * rng.randrange(1, 400)
    if way == 4:
        return "".join(rng.choice(STORMS) for _ in range(rng.randrange(1, 60)))
    if way == 5:
        depth = rng.randrange(1, 200)
        return '{"a": [' * depth + json.dumps([rng.random(), None, "\u2581"]) + "]}" * depth
    if way == 6:
        text = rng.choice(KEEP)[1]  # a good one, damaged
        place = rng.randrange(len(text))
        return text[:place] + rng.choice(STORMS) * rng.randrange(1, 30) + text[place + rng.randrange(40) :]
    return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(0, 6)))  # tiny ones, three in ten


def giants() -> list[str]:
    """Lines of megabytes, deep nesting, and 50,000 beginnings of everything."""
    return [
        "x" * 2_000_000,
        "word " * 200_000,
        "a\n" * 200_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        *(storm * (100_000 // len(storm)) for storm in STORMS),
    ]


def checked(texts: list[str], kinds: list[str]) -> list[str | None]:
    """The reasons, after all invariants of the single steps have held."""
    cleaned = []
    for text, kind in zip(texts, kinds, strict=True):
        clean = normalise(text, kind)
        assert normalise(clean, kind) == clean
        clean.encode()
        redacted, counts = pii.redact(clean, ALL)
        assert pii.redact(redacted, ALL) == (redacted, {})
        assert (redacted is clean) == (not counts)
        if kind == "code" and "PRIVATE" not in clean:  # a private key of many lines becomes one
            assert indents(redacted) == indents(clean)
        cleaned.append(redacted)
    columns = rules.measure(cleaned, tokenise(cleaned))
    columns |= {name: np.full(len(texts), best) for name, best in (("quality", 1.0), ("toxicity", 0.0))}
    for name, column in columns.items():
        assert column.shape == (len(texts),) and np.isfinite(column).all(), name
    failed, values = rules.verdicts(columns, kinds, PARAMS.rules)
    assert np.isfinite(values).all() and failed.min(initial=-1) >= -1
    return [None if number < 0 else rules.RULES[number] for number in failed]


def test_ten_thousand_documents_of_every_kind():
    rng = random.Random(4)
    texts, kinds, good = [], [], []
    for number in range(DOCUMENTS):
        kind, text = KEEP[number // GOOD_EVERY % len(KEEP)]
        if number % GOOD_EVERY:
            kind, text = KINDS[number // 10 % len(KINDS)], hostile(rng, number)
        else:
            good.append(number)
        texts.append(text)
        kinds.append(kind)
    reasons = []
    for start in range(0, DOCUMENTS, 2500):  # good ones share their batch with thousands of others
        reasons += checked(texts[start : start + 2500], kinds[start : start + 2500])
    assert [reasons[number] for number in good] == [None] * len(good)
    assert len(set(reasons)) > 20  # hostile documents meet most of the rules


def test_giant_documents():
    texts = giants()
    for kind in ("web", "code"):
        reasons = checked([*texts, KEEP[0][1]], [*[kind] * len(texts), KEEP[0][0]])
        assert reasons[-1] is None and reasons.count(None) <= 3


def test_a_batch_without_documents():
    assert checked([], []) == []


def test_documents_without_anything():
    assert checked(["", " ", "\n\n", "\x00", "\ufeff"], ["code"] * 5) == ["too_few_words"] * 5

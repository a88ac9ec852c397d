"""Golden documents of each kind are kept, each planted defect is dropped for its own reason."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from athanor.corpus import repetition, rules
from athanor.corpus.documents import KINDS
from athanor.corpus.words import tokenise
from athanor.params.clean import CleanParams, RuleParams
from athanor.params.strict import load_section

ROOT = Path(__file__).resolve().parents[2]

PROSE = """The kettle was already warm when she came down to the kitchen, and the cat sat on the window sill as if it
had been there all night. Outside, the first cars were going by in the rain. She thought about the letter on the table,
which had not moved since Tuesday, and about what her brother would say if he knew that it was still closed.

There were two ways to read it: at once, standing up, or slowly with a cup of tea. In the end she did neither, but put
it into the drawer with the other things that could wait, and went to look for her coat.
"""
DOCS = """shutil.copyfile(src, dst, *, follow_symlinks=True)

Copy data from src to dst in the most efficient way possible.

If follow_symlinks is not set and src is a symbolic link, a new symlink will be created instead of copying the file it
points to.

>>> copyfile('a.txt', 'b.txt')
'b.txt'

* `src` is the path of the file that is read.
* `dst` is the path of the file that is written.
"""
CODE = '''def median(values, key=lambda x: x):
    """Return the middle one of `values`."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values, key=key)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
'''
MATH = """Let $f(x) = x^2 + 3x$ for all real $x$. Then $f'(x) = 2x + 3$, which is zero at $x = -3/2$, so $f$ has its
least value there: $f(-3/2) = 9/4 - 9/2 = -9/4$. Hence $f(x) >= -9/4$ for every $x$, with equality if and only if
$x = -3/2$.
"""
QA = """How do I sort a dictionary by value?

Use the `key` argument of `sorted` with the items of the dictionary:

    ordered = dict(sorted(prices.items(), key=lambda item: item[1]))

It makes a new dictionary, because the order of the old one cannot be changed.
"""
GOLDEN = {"web": PROSE, "prose": DOCS, "code": CODE, "math": MATH, "qa": QA}
GERMAN = """Der Kessel war schon warm, als sie in die Küche kam, und die Katze saß auf der Fensterbank, als wäre sie
die ganze Nacht dort gewesen. Draußen fuhren die ersten Wagen durch den Regen. Sie dachte an den Brief auf dem Tisch,
der seit Dienstag nicht bewegt worden war, und daran, was ihr Bruder sagen würde. Es gab zwei Wege, ihn zu lesen."""


@pytest.fixture(scope="module")
def params() -> RuleParams:
    return load_section(ROOT / "presets" / "micro.yaml", "clean", CleanParams).rules


def judge(text: str, kind: str, params: RuleParams) -> str | None:
    failed = rules.verdict(rules.measure([text], tokenise([text])), 0, getattr(params, kind))
    return failed and failed[0]


@pytest.mark.parametrize("kind", KINDS)
def test_good_documents_stay(kind, params):
    assert judge(GOLDEN[kind], kind, params) is None


def test_prose_passes_as_prose_and_code_does_not_pass_as_web(params):
    assert judge(PROSE, "prose", params) is None
    assert judge(CODE * 3, "web", params) is not None


def shuffled(seed: int, count: int = 60) -> str:
    """Ordinary sentences without repetition."""
    words = sorted(set(PROSE.lower().replace(",", " ").replace(".", " ").split()))
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(count))


DEFECTS = [
    ("web", "Too short to say anything.", "too_few_words"),
    ("prose", PROSE + "Она пришла домой поздно вечером и сразу легла спать. " * 20, "not_ascii"),
    ("prose", PROSE + "\n".join("+ - = | > < $ ~ " * 4 for _ in range(40)), "few_letters"),
    ("web", PROSE + "".join(f"{n * 7919 % 100000} " for n in range(80)), "many_digits"),
    ("web", PROSE + "<b> <i> | <u> " * 30, "many_symbols"),
    ("prose", " ".join("supercalifragilistic" + "abcdefgh"[n % 8] * (n % 9 + 1) for n in range(100)), "long_words"),
    ("code", CODE + "TABLE = '" + "".join(chr(97 + n * n % 26) for n in range(2000)) + "'\n", "long_line"),
    ("web", "".join(f"- {line}\n" for line in shuffled(1).split("\n")), "bullet_lines"),
    ("web", "".join(f"{line}...\n" for line in shuffled(2).split("\n")), "ellipsis_lines"),
    ("web", " ".join(f"rose{chr(97 + n // 26)} tulip{chr(97 + n * 7 % 26)}" for n in range(90)), "few_stop_words"),
    ("web", PROSE + shuffled(3, 20) + "\nAll rights reserved by the owner of this site" * 20, "repeated_lines"),
    ("prose", PROSE + "and on it goes " * 40, "consecutive_repeats"),
    ("code", CODE + "TABLE = [" + "0x00, " * 100 + "]\n", "consecutive_repeats"),
    ("web", " ".join(f"{PROSE.replace(chr(10), ' ')} {n}" for n in range(9)), "repeated_ngrams"),
    ("web", " ".join(f"go to shop {word} and" for word in shuffled(4, 10).split()), "top_ngram"),
    ("web", GERMAN, "not_english"),
    ("prose", GERMAN, "not_english"),
]


@pytest.mark.parametrize(("kind", "text", "rule"), DEFECTS, ids=[f"{kind}-{rule}" for kind, _, rule in DEFECTS])
def test_each_defect_is_dropped_for_its_reason(kind, text, rule, params):
    """Shipped thresholds drop it; with all other rules off this rule still does, and without any nothing does."""
    assert judge(text, kind, params) is not None
    shipped = getattr(params, kind)
    off = {field.name: None for field in dataclasses.fields(shipped)}
    off |= {"min_words": 0, "max_bytes": 10**7, "max_consecutive_repeats": 10**9, "english_only": False}
    none = dataclasses.replace(shipped, **off)
    param = next((check.param for check in rules.CHECKS if check.rule == rule), "english_only")
    only = dataclasses.replace(none, **{param: getattr(shipped, param)})
    columns = rules.measure([text], tokenise([text]))
    failed = rules.verdict(columns, 0, only)
    assert failed and failed[0] == rule
    assert rules.verdict(columns, 0, none) is None


def test_every_rule_has_a_planted_defect():
    assert {rule for _, _, rule in DEFECTS} | {rules.TOO_LONG} == set(rules.RULES)


def test_most_of_the_standard_library_stays(params):
    base = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for path in sorted(base.glob("*.py"))[:60]]
    columns = rules.measure(texts, tokenise(texts))
    kept = sum(len(text) for n, text in enumerate(texts) if rules.verdict(columns, n, params.code) is None)
    assert kept / sum(map(len, texts)) > 0.85


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("times", [2, 31, 32])
def test_consecutive_repeats_are_counted(size, times):
    gram = [f"w{n}" for n in range(size)]
    texts = ["x y z", " ".join(gram * times), "", " ".join(["a", "b", *gram * times, *gram[: size - 1], "c"]), "w0"]
    assert repetition.consecutive_repeats(tokenise(texts).words).tolist() == [1, times, 0, times, 1]


def test_repeats_do_not_run_from_one_text_into_the_next():
    assert repetition.consecutive_repeats(tokenise(["a a a", "a a a a", "a"]).words).tolist() == [3, 4, 1]


def brute_duplicate_share(words: list[str], size: int) -> float:
    seen, covered = set(), set()
    for start in range(len(words) - size + 1):
        gram = tuple(words[start : start + size])
        if gram in seen:
            covered.update(range(start, start + size))
        seen.add(gram)
    return len(covered) / max(len(words), 1)


def test_repetition_measures_agree_with_a_plain_count():
    rng = random.Random(5)
    texts = [" ".join(rng.choices("abcd", k=rng.randrange(0, 60))) for _ in range(40)]
    words = tokenise(texts).words
    for size in (1, 2, 3, 5):
        expected = [brute_duplicate_share(text.split(), size) for text in texts]
        assert np.allclose(repetition.duplicate_share(words, size), expected)
    for number, share in enumerate(repetition.top_share(words, 2)):
        text = texts[number].split()
        grams = [tuple(text[n : n + 2]) for n in range(len(text) - 1)]
        most = max((grams.count(gram) for gram in grams), default=0)
        assert np.isclose(share, min((most if most >= 3 else 0) * 2 / max(len(text), 1), 1.0))

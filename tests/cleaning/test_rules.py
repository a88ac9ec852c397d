"""Golden documents are kept or dropped for the reason in their name, with the thresholds that are shipped."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from athanor.base.strict import build
from athanor.cleaning import rules
from athanor.cleaning.normalise import misread_count, normalise
from athanor.cleaning.params import CleanParams, KindRules, RuleParams
from athanor.quality import language
from athanor.runtime import presets
from athanor.sources.params import KINDS
from athanor.words.words import tokenise
from tests.e2e.clone import ROOT

SCORED = {"low_quality", "toxic"}  # the classifiers' scores come with the document; here are none


def shipped_rules(preset: str) -> RuleParams:
    """The rules of a preset without the thresholds on scores."""
    params = build(CleanParams, presets.values(ROOT / "presets" / f"{preset}.yaml")["clean"], "clean").rules
    none = {"min_quality": None, "max_toxicity": None}
    return RuleParams(**{kind: dataclasses.replace(getattr(params, kind), **none) for kind in KINDS})


PARAMS = shipped_rules("default")


class Golden(NamedTuple):
    """`<kind>-keep-<name>.txt` or `<kind>-drop-<rule>-<name>.txt`."""

    name: str
    kind: str
    rule: str | None
    text: str


def golden() -> list[Golden]:
    found = []
    for path in sorted((Path(__file__).parent / "golden").glob("*.txt")):
        kind, what, *rest = path.stem.split("-")
        found.append(Golden(path.stem, kind, rest[0] if what == "drop" else None, path.read_bytes().decode()))
    return found


GOLDEN = golden()
KEEP = [document for document in GOLDEN if document.rule is None]
DROP = [document for document in GOLDEN if document.rule is not None]
named = {"ids": lambda document: document.name}


def measured(*texts: str) -> dict[str, np.ndarray]:
    return rules.measure(texts, tokenise(texts))


def verdict(columns, number: int, kind_rules: KindRules) -> tuple[str, float] | None:
    """The first rule that a document fails and what was measured, check by check."""
    for check in rules.CHECKS:
        limit, found = (
            rules._limit(check, kind_rules),
            columns[check.measure][number] if check.measure in columns else 0,
        )
        if limit is not None and check.fails(found, limit):
            return check.rule, float(found)
    return None


def judge(text: str, kind: str, params: RuleParams = PARAMS) -> str | None:
    failed, _ = rules.verdicts(measured(normalise(text, kind)), [kind], params)
    return None if failed[0] < 0 else rules.RULES[failed[0]]


def switched_off(shipped: KindRules) -> KindRules:
    off = {field.name: None for field in dataclasses.fields(shipped)}
    off |= {"min_words": 0, "max_bytes": 10**7, "max_consecutive_repeats": 10**9, "english_only": False}
    return dataclasses.replace(shipped, **off)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "presets").glob("*.yaml")))
def test_good_documents_stay_with_every_preset(preset):
    params = shipped_rules(preset)
    reasons = {document.name: judge(document.text, document.kind, params) for document in KEEP}
    more = {None} if preset == "default" else {None, "too_few_words"}  # some presets ask for more words
    assert set(reasons.values()) <= more, reasons


@pytest.mark.parametrize("document", DROP, **named)
def test_each_defect_is_dropped_for_its_reason(document):
    """The shipped rules drop it; with all other rules off this one still does, and with all off nothing does."""
    assert judge(document.text, document.kind) == document.rule
    shipped = getattr(PARAMS, document.kind)
    none = switched_off(shipped)
    param = next(check.param for check in rules.CHECKS if check.rule == document.rule)
    only = dataclasses.replace(none, **{param: getattr(shipped, param)})
    columns = measured(normalise(document.text, document.kind))
    failed = verdict(columns, 0, only)
    assert failed and failed[0] == document.rule
    assert verdict(columns, 0, none) is None


def test_every_rule_of_every_kind_has_a_golden_document():
    wanted = {
        (kind, check.rule)
        for kind in KINDS
        for check in rules.CHECKS
        if rules._limit(check, getattr(PARAMS, kind))
        not in (None, 0 if check.sign == "<" else None)  # no share is below 0
    }
    plain = {(kind, "long_line") for kind in {*KINDS} - {"code", "tokens"}}  # 100,000 characters; made below
    assert wanted - plain == {(document.kind, document.rule) for document in DROP}
    assert {rule for _, rule in wanted} | SCORED | {rules.TOO_LONG} == set(rules.RULES)
    assert {document.kind for document in KEEP} == set(KINDS)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"code", "tokens"}))
def test_a_line_without_end_is_dropped(kind):
    text = next(document.text for document in KEEP if document.kind == kind)
    line = " ".join(f"the {word} of a{number}" for number, word in enumerate(language.BOILERPLATE * 250))
    assert len(line) > 100_000
    only = dataclasses.replace(switched_off(getattr(PARAMS, kind)), max_line_chars=getattr(PARAMS, kind).max_line_chars)
    assert verdict(measured(text), 0, only) is None
    assert verdict(measured(text + line), 0, only) == ("long_line", float(len(line)))


def test_scores_are_judged_like_any_measure():
    text = KEEP[0].text
    columns = measured(text, text, text) | {
        "quality": np.array([0.2, 0.8, 0.8], np.float32),
        "toxicity": np.array([0.1, 0.1, 0.9], np.float32),
    }
    scored = dataclasses.replace(getattr(PARAMS, KEEP[0].kind), min_quality=0.5, max_toxicity=0.5)
    params = dataclasses.replace(PARAMS, **{KEEP[0].kind: scored})
    failed, values = rules.verdicts(columns, [KEEP[0].kind] * 3, params)
    assert [rules.RULES[n] if n >= 0 else None for n in failed] == ["low_quality", None, "toxic"]
    assert values == pytest.approx([0.2, 0.0, 0.9])


def test_verdicts_of_a_batch_are_those_of_single_documents():
    texts = [normalise(document.text, document.kind) for document in GOLDEN]
    columns = measured(*texts)
    failed, values = rules.verdicts(columns, [document.kind for document in GOLDEN], PARAMS)
    for number, document in enumerate(GOLDEN):
        alone = verdict(measured(texts[number]), 0, getattr(PARAMS, document.kind))
        assert alone == verdict(columns, number, getattr(PARAMS, document.kind))
        assert alone == (None if failed[number] < 0 else (rules.RULES[failed[number]], values[number]))


def test_misread_prose_is_kept_because_it_is_repaired():
    (document,) = [document for document in KEEP if "repaired" in document.name]
    assert misread_count(document.text) > 5 and misread_count(normalise(document.text, "prose")) == 0


def test_shares_of_lines_need_five_lines():
    """One paragraph of three that ends in an ellipsis is a third of the lines, and it says nothing."""
    columns = measured("Once.\nTwice…\nThrice.", "One.\n\nTwo…\n\nThree.\n\nFour…\n\nFive.")
    assert columns["ellipses"].tolist() == [0, 0.4] and columns["short_lines"].tolist() == [0, 1]


def test_code_and_prose_are_judged_apart():
    code = next(document.text for document in KEEP if document.kind == "code")
    assert judge(code, "code") is None and judge(code, "web") is not None


def test_most_of_the_standard_library_stays():
    base = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for path in sorted(base.glob("*.py"))[:60]]
    failed, _ = rules.verdicts(measured(*texts), ["code"] * len(texts), PARAMS)
    kept = sum(len(text) for text, number in zip(texts, failed, strict=True) if number < 0)
    assert kept / sum(map(len, texts)) > 0.85


def test_known_phrases_are_counted_where_they_stand_whole():
    texts = [
        "We use cookies. Click here, click\nhere!",
        "click",
        "here privacy policy",
        "Privacy-policy",
        "",
        "Lorem ipsum",
    ]
    found = language.measure(tokenise(texts).words)
    assert found["boilerplate"].tolist() == [2, 0, 1, 1, 0, 0]
    assert found["placeholders"].tolist() == [0, 0, 0, 0, 0, 1]


def test_lexicon_finds_its_words_and_no_other():
    known = language.Lexicon(["cat", "dog", "été"])
    hashes = tokenise(["a cat and the dog catdog été"]).words.hashes
    assert [known.words[n] if n >= 0 else None for n in known.find(hashes)] == [
        None,
        "cat",
        None,
        None,
        "dog",
        None,
        "été",
    ]

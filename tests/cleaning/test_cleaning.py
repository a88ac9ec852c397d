"""The whole cleaning: every drop has its reason, counts add up, order does not matter, gates go red."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.base.errors import GateError, ParamsError
from athanor.base.strict import build
from athanor.cleaning import dedup, groups, measuring, near, repeats, validation, writing
from athanor.cleaning.funnel import IN, OUT, Funnel
from athanor.cleaning.params import CleanParams
from athanor.quality.model import Scorer
from athanor.runtime import presets
from athanor.sources.params import KINDS
from athanor.text.conversations import Item, Message
from athanor.text.documents import Document
from athanor.words.decontaminate import ItemIndex
from tests.cleaning.test_rules_fuzz import hostile
from tests.cleaning.world import Result, clean, write_scorer
from tests.e2e.clone import ROOT

PARAMS = build(CleanParams, presets.values(ROOT / "presets" / "micro.yaml")["clean"], "clean")
ITEM = Item(
    "stories",
    (Message("user", "Mira has 14 red marbles and 9 blue ones in a jar. She gives 5 to Tom. How many are left?"),),
    "exact",
    "18",
    ("18",),
    ("17", "19"),
)
INDEX = ItemIndex([ITEM])
VOCABULARY = """the of and a to in is was that for it with as on be at by this had from they not but which
have one you were river garden window letter kettle morning table brother kitchen winter summer street music
paper finger mountain island bridge silver copper engine market cotton butter ladder pocket basket needle candle mirror saddle anchor
harbour""".split()


def prose(seed: int, words: int = 120) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(VOCABULARY, k=12)).capitalize() + "." for _ in range(words // 12))


def document(text: str, source: str = "books", kind: str = "prose", split: str = "train", **meta) -> Document:
    return Document(text, source, kind, "MIT", split, meta)


def corpus() -> dict[str, list[Document]]:
    books = [document(prose(seed), part=seed) for seed in range(30)]
    books += [document(prose(100 + seed), split="val", part=seed) for seed in range(5)]
    books.append(document(prose(3), part=99))  # exact
    books.append(document(prose(4).replace(".", "!") + " End", part=98))  # near, and longer
    books.append(document(prose(100), part=97))  # of validation, exact
    books.append(document(prose(101) + "\nThe end.", part=96))  # of validation, near
    books.append(document("Too short."))
    books.append(document(f"{prose(50)}\n{ITEM.prompt[0].content}\n{prose(51)}"))
    web = [document(prose(200 + seed), "web", "web") for seed in range(10)]
    web.append(document(prose(5), "web", "web"))  # the other source has it too
    return {"books": books, "web": web}


def test_every_drop_has_its_reason():
    raw = corpus()
    cleaned = clean(raw, [ITEM], PARAMS)
    books = raw["books"]
    found = {(row["source"], row["shard"], row["row"]): row for row in cleaned.dropped}
    assert {key: row["rule"] for key, row in found.items()} == {
        ("books", 0, 4): "near_duplicate",  # the copy is longer
        ("books", 0, 3): "exact_duplicate",  # of two that are worth the same, one by hash
        ("books", 0, 37): "exact_duplicate_of_val",
        ("books", 0, 38): "near_duplicate_of_val",
        ("books", 0, 39): "too_few_words",
        ("books", 0, 40): "evaluation_item",
        ("web", 0, 10): "exact_duplicate",
    }
    assert len(cleaned.val) == 5
    assert all(row["id"] == raw[source][number].id for (source, _, number), row in found.items())
    assert found["books", 0, 38]["twin"] == books[31].id and found["books", 0, 39]["detail"] == "2"
    assert found["books", 0, 40]["detail"] == ITEM.id and cleaned.cleaned.items == {ITEM.id: 1}
    assert cleaned.report["contaminated"]["by_category"] == {"stories": 1}
    assert cleaned.report["duplicates"]["found"] == 0
    # What stays keeps its order.
    gone = {3, 4, 37, 38, 39, 40, 51}  # 51 is the last one of web
    assert cleaned.train == [d for n, d in enumerate(books + raw["web"]) if d.split == "train" and n not in gone]


def outcome(result: Result) -> tuple:
    kept = sorted(d.id + json.dumps(d.meta) for d in result.train + result.val)
    places = ("shard", "row")
    drops = [json.dumps({k: v for k, v in row.items() if k not in places}, sort_keys=True) for row in result.dropped]
    return kept, sorted(drops), result.funnel.rows(), result.report, result.cleaned.scores


def test_order_shards_workers_and_batches_do_not_matter(monkeypatch):
    expected = outcome(clean(corpus(), [ITEM], PARAMS))
    for seed in range(3):
        raw = corpus()
        for documents in raw.values():
            random.Random(seed).shuffle(documents)
        monkeypatch.setattr(measuring, "BATCH_BYTES", 10 ** (seed + 2))
        monkeypatch.setattr(groups, "GROUP_ROWS", 1 + 7 * seed)
        monkeypatch.setattr(repeats, "PART_IDS", 1 + 9 * seed)
        monkeypatch.setattr(near, "PART_KEYS", 2 + 9 * seed)
        monkeypatch.setattr(validation, "PIECE_SHINGLES", 1 + 200 * seed)
        found = clean(dict(reversed(raw.items())), [ITEM], PARAMS, shard_bytes=3000 * seed + 1, workers=1 + seed % 2)
        assert outcome(found) == expected


def test_source_priority_decides_across_sources():
    first = dataclasses.replace(PARAMS, source_priority=("web",))
    cleaned = clean(corpus(), [ITEM], first)
    shared = document(prose(5)).id
    assert [d.source for d in cleaned.train if d.id == shared] == ["web"]
    assert [row["source"] for row in cleaned.dropped if row["id"] == shared] == ["books"]
    with pytest.raises(ParamsError, match="source_priority.*'wed'.*books, web"):
        clean(corpus(), [ITEM], dataclasses.replace(PARAMS, source_priority=("wed",)))


def test_the_funnel_adds_up_and_a_lost_document_turns_it_red():
    funnel = clean(corpus(), [ITEM], PARAMS).funnel
    for source in funnel.sources:
        lost = sum(row[1] for row in funnel.dropped(source))
        assert funnel.of(source, IN)[0] - lost == funnel.of(source, OUT)[0]
    funnel.add("books", OUT, -1, -700)
    with pytest.raises(GateError, match="adds up.*source books|source books.*adds up"):
        funnel.check()


def test_normalisation_is_counted_and_remembered():
    text = "def f():\r\n    return '\u2581'\r\n" + "".join(f"\ndef g{n}(x):\r\n\treturn x + {n}\r\n" for n in range(9))
    raw = {"code": [document(text, "code", "code", module="m")]}
    cleaned = clean(raw, [], relaxed())
    (kept,) = cleaned.train
    assert kept.text == text.replace("\r\n", "\n").replace("\u2581", "_")
    assert kept.meta == {"module": "m", "raw_id": raw["code"][0].id}
    rows = {row["step"]: row["bytes"] for row in cleaned.funnel.rows()}
    assert rows["in"] - rows["normalised"] == rows["out"] == len(kept.text.encode())


def test_an_empty_source_names_the_rule_that_emptied_it():
    raw = {**corpus(), "chat": [document("Hi.", "chat"), document("Yes.", "chat"), document("+ = " * 30, "chat")]}
    with pytest.raises(GateError, match="source chat.*no document is left of 3.*too_few_words.*relax min_words"):
        clean(raw, [ITEM], PARAMS)


def test_a_source_in_another_language_is_told_both_settings_that_let_it_in():
    text = "Der alte Mann sieht den kleinen Hund im Garten, weil er es gestern nicht wusste. " * 2
    raw = {
        **corpus(),
        "de": [document(f"{text} Nummer {number} steht am Fluss und wartet.", "de") for number in range(5)],
    }
    with pytest.raises(GateError, match="source de.*not_english.*english_only: false and min_stop_word_fraction: null"):
        clean(raw, [ITEM], PARAMS)


def test_a_stripped_indent_turns_the_gate_red(monkeypatch):
    text = "def f(x):\n    return x\n\x00" * 20
    clean({"code": [document(text, "code", "code")]}, [], relaxed())
    monkeypatch.setattr(measuring, "normalise", lambda text, kind: "\n".join(line.strip() for line in text.split("\n")))
    with pytest.raises(GateError, match="indents"):
        clean({"code": [document(text, "code", "code")]}, [], relaxed())


def relaxed() -> CleanParams:
    off = dict.fromkeys(name for name in vars(PARAMS.rules.code) if "repeated" in name or "gram" in name)
    code = dataclasses.replace(PARAMS.rules.code, **off)
    return dataclasses.replace(PARAMS, rules=dataclasses.replace(PARAMS.rules, code=code))


def checked(documents: list[Document], params: CleanParams = PARAMS) -> dict:
    numbered = list(enumerate(documents))
    sets = [item for _, item in dedup.shingle_sets((number, d.text) for number, d in numbered)]
    sample = [dedup.Index(range(len(sets)), sets)]
    half = len(numbered) // 2
    seen = [writing.check_documents(part, INDEX, sample, 0.8) for part in (numbered[:half], numbered[half:])]
    duplicates = repeats.repeated(part.ids for part in seen)
    return writing.run_gates(seen, duplicates, range(len(sets)), params, INDEX)


@pytest.mark.parametrize("size", [1, 2, 13])
def test_the_gates_find_long_repetition(size):
    looped = prose(1) + " ".join(" ".join(f"loop{n}" for n in range(size)) for _ in range(32))
    with pytest.raises(GateError, match="no long repetition.*32 times"):
        checked([document(prose(2)), document(looped)])
    checked([document(prose(2)), document(looped.rsplit(" ", size)[0])])


def test_the_gates_find_duplicates_and_items():
    good = [document(prose(seed)) for seed in range(60)]
    assert checked(good)["duplicates"] == {"checked": 60, "found": 0, "fraction": 0.0}
    with pytest.raises(GateError, match="no duplicates.*1 documents equal"):
        checked([*good, good[0]])
    with pytest.raises(GateError, match="duplicate rate.*2 of 61"):
        checked([*good, document(good[7].text + "\nThe end.", split="val")])
    with pytest.raises(GateError, match=f"no evaluation item.*{ITEM.id} of category stories"):
        checked([*good, document(ITEM.prompt[0].content + prose(70))])


def measured(documents: list[Document], folder: Path) -> tuple[dict, dict]:
    """Facts and measures of some documents."""
    scorer = Scorer.load(write_scorer(folder / "classifiers"))
    facts = measuring.measure_documents(documents, PARAMS, INDEX, scorer, folder)
    return facts, groups.read_measures(folder)


def test_a_document_of_50_mb_in_one_line_is_dropped_in_bounded_memory(tmp_path):
    huge = document("word " * 10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts, _ = measured([huge, document(prose(1))], tmp_path)
    assert [row["row"] for row in facts["too_long"]] == [0] and facts["documents"] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_ten_thousand_odd_documents_lose_no_good_one():
    """Random bytes, huge lines, deep JSON, control characters, and thousands of scraps, in several shards."""
    rng = random.Random(5)
    texts = [hostile(rng, number).encode(errors="replace").decode() for number in range(9_500)]
    odd = [document(text, kind=rng.choice(KINDS)) for text in texts]
    special = ["", "\x00", "\x00\x00 \n", "\ufeff", " \n\t" * 50, "\u2581", "[" * 300, "0 " * 200, "\u0300" * 100]
    odd += [document(text, kind=kind) for text in special for kind in KINDS]
    odd += [document(text) for text in ("word " * 400_000, "y" * 3_000_000, '{"k":' * 200_000, "\n" * 2_000_000)]
    good = [document(prose(seed), part=seed) for seed in range(500)]
    mixed = [*odd, *good]
    rng.shuffle(mixed)
    done = clean({"books": mixed}, [ITEM], PARAMS, shard_bytes=3_000_000, workers=2)
    assert {d.id for d in good} <= {d.id for d in done.train}
    assert len(done.dropped) + len(done.train) == len(mixed)


def test_a_shard_of_which_nothing_is_left_and_one_without_hits():
    long = [document("word " * 900_000 + str(n)) for n in range(2)]
    raw = {"books": [*long, *(document(prose(seed)) for seed in range(5))], "web": [document(prose(9), "web", "web")]}
    done = clean(raw, [ITEM], PARAMS, shard_bytes=4_000_000)
    assert len(done.train) == 6 and [row["rule"] for row in done.dropped] == ["too_long"] * 2
    assert [(row["shard"], row["row"]) for row in done.dropped] == [(0, 0), (1, 0)]


def test_rows_of_the_funnel_are_sorted_and_complete():
    funnel = Funnel()
    funnel.add("b", IN, 3, 30)
    funnel.add("b", "small", 1, 5)
    funnel.add("b", "large", 1, 20)
    funnel.add("b", OUT, 1, 5)
    funnel.add("a", IN, 1, 10)
    funnel.add("a", OUT, 1, 10)
    assert [(row["source"], row["step"]) for row in funnel.rows()] == [
        *(("a", step) for step in ("in", "normalised", "redacted", "out")),
        *(("b", step) for step in ("in", "normalised", "redacted", "large", "small", "out")),
    ]


def test_equal_results_in_another_process():
    """No hash seed, no global random state: two fresh interpreters agree."""
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "import test_cleaning as t\n"
        "from athanor.base.artifacts import digest\n"
        "print(digest(t.outcome(t.clean(t.corpus(), [t.ITEM], t.PARAMS))))\n"
    )
    here = str(Path(__file__).parent)
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT), here],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1

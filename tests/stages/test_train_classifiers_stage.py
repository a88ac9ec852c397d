"""The classifier stage on small made corpora (10 to 20 seconds)."""

from __future__ import annotations

import json
import pickletools
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from athanor.base.artifacts import manifest_digest, read_json, sha256_file, verify_files, write_manifest
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import read_yaml
from athanor.quality.model import Scorer
from athanor.text.documents import Document, write_shards
from athanor.words.words import tokenise
from stages import train_classifiers
from tests.stages import conftest

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("models/classifiers")
ACTORS = "farmer teacher doctor sailor baker driver painter writer".split()
ACTIONS = "sells buys finds keeps shows brings carries makes".split()
THINGS = "apples books letters boats cakes houses pictures stories".split()
PLACES = "at the market,in the garden,on the hill,near the river,by the old bridge,under the roof".split(",")


def prose(seed: int, sentences: int | None = None) -> str:
    """Sentences of one grammar: the order of the words is what tells them from their corruptions."""
    rng = random.Random(seed)
    out = []
    for _ in range(sentences or rng.randint(4, 60)):
        subject = f"The {rng.choice(ACTORS)} {rng.choice(ACTIONS)} {rng.choice(THINGS)} {rng.choice(PLACES)}"
        out.append(f"{subject} and the {rng.choice(ACTORS)} {rng.choice(ACTIONS)} them.")
    return "\n".join(out) + "\n"


def code(seed: int) -> str:
    rng = random.Random(seed)
    out = []
    for _ in range(rng.randint(3, 30)):
        name, thing = rng.choice(ACTIONS), rng.choice(THINGS)
        out.append(
            f"def {name}({thing}):\n    for item in {thing}:\n        if item is not None:\n            return item\n"
        )
    return "\n".join(out)


def rambling(seed: int, words: int) -> str:
    return " ".join(
        random.Random(seed).choices("zap bop wow click buy cheap now hot deal win cash prize".split(), k=words)
    )


def corpus() -> dict[str, list[Document]]:
    docs = [Document(prose(n), "docs", "prose", "MIT", "val" if n % 20 == 0 else "train", {"n": n}) for n in range(260)]
    codes = [Document(code(n), "code", "code", "MIT", "train", {"module": f"m{n // 2}"}) for n in range(200)]
    return {"docs": docs, "code": codes}


def labelled(leaking: bool = False) -> dict[str, list[Document]]:
    """Good pages are prose and bad ones rambling; leaking: the good ones are all long and the bad ones short."""
    pages = []
    for n in range(400):
        good, rng = n % 2 == 0, random.Random(n)
        size = (rng.randint(40, 60) if good else rng.randint(4, 8)) if leaking else rng.randint(4, 60)
        text = prose(n, size) if good else rambling(n, size * 12)
        meta = {"score": rng.uniform(3, 5) if good else rng.uniform(0, 1.5)} if n % 10 else {}
        pages.append(Document(text, "pages", "web", "MIT", "train", meta))
    return {**corpus(), "pages": pages}


def write_raw(sources: dict[str, list[Document]], shard_bytes: int = 10**9, extra: str = "") -> None:
    shutil.rmtree("data", ignore_errors=True)
    for name, documents in sources.items():
        write_shards(f"data/raw/{name}", documents, shard_bytes)
    write_manifest("data/raw", kind="raw", version=1, counts={}, note=extra)


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    conftest.settle(monkeypatch, tmp_path)
    return tmp_path


def run_stage(**changes: Any) -> None:
    conftest.run_stage(train_classifiers, {"classifiers": conftest.PARAMS["classifiers"] | changes})


LABELS = {"source": "pages", "meta_key": "score", "high_from": 3.0, "low_below": 1.5}


def scores(*texts: str) -> dict[str, np.ndarray]:
    return Scorer.load(OUT).scores(texts, tokenise(texts))


def test_weak_labels_are_called_weak_everywhere_and_the_scores_rank() -> None:
    write_raw(corpus())
    run_stage()
    verify_files(OUT)
    for path in OUT.iterdir():
        if path.suffix == ".npy":
            loaded = np.load(path, allow_pickle=False)
            assert loaded.dtype == np.float32 and np.array_equal(loaded, np.rint(loaded))
        else:
            assert path.suffix in (".json", ".md")
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))
    manifest, described = read_json(OUT / "manifest.json"), read_json(OUT / "classifiers.json")
    assert manifest["labels"] == {"quality": "weak", "toxicity": "weak"}
    assert manifest["parents"] == {"raw": manifest_digest("data/raw")}
    assert described["quality"]["labels"] == described["toxicity"]["labels"] == "weak"
    text = (OUT / "card.md").read_text()
    assert "quality: weak labels" in text and "toxicity: weak labels" in text
    metrics = read_json("metrics/train_classifiers.json")
    assert set(metrics) == {"quality_weak", "toxicity_weak"}
    plots = read_yaml(ROOT / "dvc.yaml")["plots"]
    for name in ("quality", "toxicity"):
        rows = Path(f"plots/train_classifiers_{name}.tsv").read_text().splitlines()
        assert len(rows) == 1 + 2 * 10 and all("(weak labels)" in row for row in rows[1:])
        titles = [plot[key]["title"] for plot in plots for key in plot if name in key]
        assert len(titles) == 1 and "weak" in titles[0]
    area = metrics["quality_weak"]["auroc"]
    assert area["held_out"] > 0.95 and set(area["other_source"]) == {"code", "docs"}
    assert set(area["by_source"]) == {"code", "docs"} and "looped_phrase" in area["by_negative"]
    assert metrics["toxicity_weak"]["auroc"]["held_out"] > 0.95
    assert abs(metrics["quality_weak"]["length_correlation"]["quality_classifier"]["all"]) < 0.5

    good, bad = prose(9999), " ".join(random.Random(1).sample(prose(9999).split(), len(prose(9999).split())))
    found = scores(good, bad, code(9999), "")
    assert {name: (v.dtype, v.shape) for name, v in found.items()} == dict.fromkeys(
        ("quality", "quality_classifier", "quality_heuristics", "toxicity"), (np.dtype(np.float32), (4,))
    )
    assert found["quality_classifier"][0] > 0.8 > 0.2 > found["quality_classifier"][1]
    assert found["quality_classifier"][2] > 0.8  # being code is no fault
    mixed = 0.6 * found["quality_classifier"] + 0.4 * found["quality_heuristics"]
    assert found["quality"] == pytest.approx(mixed, abs=1e-6)
    abuse = prose(77, 4) + "You are a stupid worthless idiot.\nShut up, you pathetic loser!\nI will kill you.\n"
    kind = prose(77, 4) + "You are a kind helpful friend.\nGood morning, you clever teacher!\nI will help you.\n"
    toxic = scores(abuse, kind)["toxicity"]
    assert toxic[0] > 0.9 > 0.3 > toxic[1]
    assert Scorer.load(OUT).digest == manifest_digest(OUT)
    assert scores(good)["quality"][0] == found["quality"][0]  # the same in any batch


def files() -> dict[str, str]:
    return {path.name: sha256_file(path) for path in OUT.iterdir() if path.name != "manifest.json"}


def test_bytes_do_not_depend_on_shards_order_or_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = corpus()
    write_raw(sources)
    run_stage()
    first, metrics = files(), sha256_file("metrics/train_classifiers.json")
    run_stage()
    assert files() == first
    other = tmp_path / "another and longer name"
    other.mkdir()
    conftest.settle(monkeypatch, other)
    for documents in sources.values():
        random.Random(3).shuffle(documents)
    write_raw(dict(reversed(sources.items())), shard_bytes=20_000)
    assert len(list(Path("data/raw/docs").glob("*.parquet"))) > 5
    run_stage()
    assert files() == first and sha256_file("metrics/train_classifiers.json") == metrics


def test_validation_documents_and_what_the_sample_leaves_out_change_nothing() -> None:
    sources = corpus()
    write_raw(sources)
    run_stage()
    first = files()
    sources["docs"] = [d for d in sources["docs"] if d.split == "train"]
    write_raw(sources)
    run_stage()
    assert files() == first
    run_stage(seed=2)
    assert files() != first


def test_given_labels_are_used_and_kinds_without_any_stay_weak() -> None:
    write_raw(labelled())
    run_stage(quality_labels=LABELS)
    card = read_json(OUT / "card.json")["quality"]
    assert card["labels"] == "labelled_and_weak"
    assert card["labels_by_kind"] == {"code": "weak", "prose": "weak", "web": "labelled"}
    assert card["auroc"]["by_source"]["pages"] > 0.95 and card["auroc"]["held_out"] > 0.95
    assert "quality_labelled_and_weak" in read_json("metrics/train_classifiers.json")
    found = scores(prose(5000), rambling(5000, 200), code(5000))["quality_classifier"]
    assert found[0] > 0.8 and found[1] < 0.2 and found[2] > 0.8
    write_raw({"pages": labelled()["pages"]})
    run_stage(quality_labels=LABELS)
    assert read_json(OUT / "manifest.json")["labels"]["quality"] == "labelled"
    assert "not measured: there is one source" in (OUT / "card.md").read_text()


def test_labels_that_follow_the_length_turn_the_gate_red() -> None:
    write_raw(corpus())
    run_stage()
    before, metrics = manifest_digest(OUT), sha256_file("metrics/train_classifiers.json")
    write_raw({"pages": labelled(leaking=True)["pages"]})
    with pytest.raises(GateError, match="classifier-length.*logarithm of their length, the limit is 0.5") as caught:
        run_stage(quality_labels=LABELS)
    assert "same lengths" in str(caught.value)
    assert (manifest_digest(OUT), sha256_file("metrics/train_classifiers.json")) == (before, metrics)
    run_stage(quality_labels=LABELS, max_length_correlation=1.0)  # it was this gate and nothing else


def test_labels_without_meaning_turn_the_gate_red() -> None:
    pages = labelled()["pages"]
    drawn = [Document(d.text, "pages", "web", "MIT", "train", {"score": 5 * (int(d.id, 16) % 2)}) for d in pages]
    write_raw({"pages": drawn})
    with pytest.raises(GateError, match=r"classifier quality \(given labels\): gate 'classifier-auroc' failed"):
        run_stage(quality_labels=LABELS)


def test_weak_labels_that_teach_nothing_make_a_classifier_step_aside() -> None:
    """A repository of code stopped here, after the download: quality by weak labels followed the length of its files."""
    write_raw(corpus())
    run_stage(min_auroc=0.9999)
    assert set(read_json("metrics/train_classifiers.json")) == {"quality_weak", "toxicity_no"}
    assert "less than 0.9999" in read_json(OUT / "card.json")["toxicity"]["stepped_aside"]
    found = scores(prose(5000), rambling(5000, 200))
    assert list(found["toxicity"]) == [0.0, 0.0] and found["quality_classifier"][0] != found["quality_classifier"][1]


def test_labels_that_came_with_the_download_are_no_part_of_the_corpus() -> None:
    """FineWeb-Edu has no bad pages to learn from, and the comments that toxicity is known of are no text to train on."""
    write_raw(corpus())
    pages = [Document(d.text, "scores", "prose", "MIT", "train", d.meta) for d in labelled()["pages"]]
    words = {True: "what a rotten awful fool", False: "what a fine pleasant day"}
    comments = [
        Document(
            f"{prose(n, 1)} {words[n % 3 == 0]} {n}",
            "comments",
            "dialogue",
            "CC0-1.0",
            "train",
            {"t": 0.8 * (n % 3 == 0)},
        )
        for n in range(600)
    ]
    for name, documents in {"scores": pages, "comments": comments}.items():
        write_shards(Path("data/raw/labels") / name, documents)
    abuse = {"source": "comments", "label_column": "t", "toxic_from": 0.5, "clean_below": 0.1}
    run_stage(quality_labels={**LABELS, "source": "scores"}, toxicity_labels=abuse)
    assert set(read_json("metrics/train_classifiers.json")) == {"quality_labelled_and_weak", "toxicity_labelled"}
    toxic = scores(prose(1, 2) + words[True], prose(1, 2) + words[False])["toxicity"]
    assert toxic[0] > 0.6 > 0.4 > toxic[1]
    with pytest.raises(InputError, match="no such labels: 'remarks'"):
        run_stage(toxicity_labels={**abuse, "source": "remarks"})
    with pytest.raises(ParamsError, match="exactly one of globs and source"):
        run_stage(toxicity_labels={**abuse, "globs": ["corpus/*.jsonl"]})


def test_labelled_files_of_abuse() -> None:
    write_raw(corpus())
    Path("corpus").mkdir()
    rng = random.Random(5)
    with open("corpus/comments.jsonl", "w", encoding="utf-8") as file:
        for n in range(600):
            toxic = rng.random() < 0.3
            text = f"{prose(n, 1)} {'what a rotten awful fool' if toxic else 'what a fine pleasant day'} {n}"
            file.write(json.dumps({"text": text, "toxicity": 0.8 if toxic else 0.05 if n % 3 else 0.3}) + "\n")
    given = {"globs": ["corpus/*.jsonl"], "text_column": "text", "label_column": "toxicity"}
    given |= {"toxic_from": 0.5, "clean_below": 0.1}
    run_stage(toxicity_labels=given)
    manifest = read_json(OUT / "manifest.json")
    assert manifest["labels"] == {"quality": "weak", "toxicity": "labelled"} and manifest["label_files"]["files"] == 1
    assert "toxicity: given labels" in (OUT / "card.md").read_text()
    assert set(read_json("metrics/train_classifiers.json")) == {"quality_weak", "toxicity_labelled"}
    toxic = scores(prose(1, 2) + "what a rotten awful fool", prose(1, 2) + "what a fine pleasant day")["toxicity"]
    assert toxic[0] > 0.6 > 0.4 > toxic[1]
    with pytest.raises(InputError, match="column 'score' is missing"):
        run_stage(toxicity_labels={**given, "label_column": "score"})
    with pytest.raises(InputError, match="no file matches"):
        run_stage(toxicity_labels={**given, "globs": ["corpus/*.csv"]})
    with pytest.raises(InputError, match="no row has a usable label"):
        run_stage(toxicity_labels={**given, "toxic_from": 3.0, "clean_below": -3.0})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="data/raw/manifest.json: file not found. Fix: run the stage"):
        run_stage()
    write_raw(corpus())
    with pytest.raises(InputError, match="no source is named 'pages'; found: code, docs"):
        run_stage(quality_labels=LABELS)
    with pytest.raises(InputError, match="no document of source 'docs' has a number 'stars' in its meta"):
        run_stage(quality_labels={**LABELS, "source": "docs", "meta_key": "stars"})
    with pytest.raises(ParamsError, match="low_below.*is above high_from"):
        run_stage(quality_labels={**LABELS, "low_below": 4.0})
    pages = [document for document in labelled()["pages"] if document.meta]
    write_raw({"pages": pages[:3]})
    with pytest.raises(InputError, match="classifiers: .*too few.*bring about fifty documents"):
        run_stage(quality_labels=LABELS)


@pytest.mark.parametrize("documents", [3, 20, 200])
def test_a_classifier_that_cannot_learn_steps_aside_and_drops_nothing(documents, capsys) -> None:
    write_raw({"docs": corpus()["docs"][1 : documents + 1]})
    run_stage(weak_labels=documents < 200)
    said = capsys.readouterr().err
    assert all(
        f"{name}: the classifier steps aside and keeps every document" in said for name in ("quality", "toxicity")
    )
    found = scores(prose(9999), rambling(1, 60), "")
    assert (found["quality"] >= 0.6).all() and (found["toxicity"] == 0).all()
    assert (OUT / "card.md").read_text().count("This classifier stepped aside: ") == 2
    assert {name: card["labels"] for name, card in read_json(OUT / "card.json").items()} == {
        "quality": "no",
        "toxicity": "no",
    }
    metrics = read_json("metrics/train_classifiers.json")
    assert metrics == dict.fromkeys(("quality_no", "toxicity_no"), {"stepped_aside": 1, "examples": {}})
    assert "(no labels)" in Path("plots/train_classifiers_quality.tsv").read_text()


def test_a_model_of_other_features_is_refused() -> None:
    write_raw(corpus())
    run_stage()
    facts = read_json(OUT / "classifiers.json")
    (OUT / "classifiers.json").write_text(json.dumps({**facts, "scheme": "characters"}))
    with pytest.raises(InputError, match="made for the features 'characters'"):
        Scorer.load(OUT)
    (OUT / "classifiers.json").write_text(json.dumps(facts))
    np.save(OUT / "quality.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="quality.npy: not readable"):
        Scorer.load(OUT)

"""Text in any language and in none: what `athanor new` writes passes the rules and the tokenizer, or is refused at once."""

from __future__ import annotations

import base64
import random

import pytest

from athanor.base.errors import InputError
from athanor.cli import cli, corpus_gate
from athanor.cli.alphabet import is_language, script
from athanor.runtime import presets
from athanor.runtime.schema import check_file
from tests.cli.any_text import CORPORA
from tests.cli.test_corpus_gate import BOOK, checked
from tests.e2e.clone import ROOT


@pytest.fixture
def propose(tmp_path, monkeypatch):
    """Calls `athanor new --write` on one text with the micro preset; returns the sections and the text's source."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(presets.complete(ROOT / "presets/micro.yaml"), encoding="utf-8")
    (tmp_path / "corpus/own").mkdir(parents=True)

    def call(text: str, *options: str):
        (tmp_path / "corpus/own/text.txt").write_text(text, encoding="utf-8")
        assert cli.call("new", ["corpus/own", "--write", *options]) == 0
        sections = check_file("params.yaml")
        return sections, sections["download"].sources[0]

    return call


@pytest.mark.parametrize("name", CORPORA)
def test_what_is_written_keeps_the_text_and_fits_the_tokenizer(name, propose):
    text, kind = CORPORA[name]
    sections, source = propose(text)
    assert source.kind == kind
    documents, whole = corpus_gate.read_beginning(source)
    kept = corpus_gate.sizes(corpus_gate.verdicts(documents, sections["clean"].rules))
    assert whole and kept[""] > 0.95 * kept.total()
    corpus_gate.check_corpus(sections)  # trains a tokenizer on it, and runs its gates
    # Of logs the whole text filled 1,024 ids, and what is not held out of it 985: refused by the fourth stage.
    corpus_gate.check_vocabulary([d.text for n, d in enumerate(documents) if n % 5], sections["tokenizer"])
    english = name in ("poetry", "one-line")
    assert sections["sft_data"].max_pad_share == 0.15
    assert sections["clean"].rules.prose.english_only == (english or kind == "tokens")


def test_a_vocabulary_follows_the_text(propose):
    """Events whose digits never merge fill 283 ids; three thousand Chinese characters need more than micro's 1,024."""
    sections, _ = propose(CORPORA["midi"][0])
    assert sections["tokenizer"].vocab_size == 320
    rng = random.Random(4)
    characters = "".join(chr(0x4E00 + int(rng.paretovariate(0.5)) % 3000) for _ in range(60_000))
    sections, _ = propose("。".join(characters[n : n + 20] for n in range(0, len(characters), 20)))
    assert 1024 < sections["tokenizer"].vocab_size < 5000


SHORT = CORPORA["one-line"][0][:23_000]
REFUSED = {
    "base64": (base64.b64encode(random.Random(3).randbytes(90_000)).decode(), "encoded_data.*kind: tokens"),
    "one line again and again": (
        "".join(f"The same line again, for the {n}th time.\n" for n in range(4000)),
        "rule '.*' would drop.*kind: tokens",
    ),
    "pointers of Git LFS": (
        "".join(f"oid sha256:{random.Random(n).getrandbits(256):064x}\nsize {n}\n\n" for n in range(600)),
        "encoded_data.*kind: tokens",
    ),
    "23 kB": (SHORT, "one short text are too few: nothing of it can be held out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(name, propose, tmp_path):
    text, message = REFUSED[name]
    before = (tmp_path / "params.yaml").read_bytes()
    with pytest.raises(InputError, match=f"(?s){message}"):
        propose(text)
    assert (tmp_path / "params.yaml").read_bytes() == before


def test_the_kind_that_the_refusal_names_takes_what_was_refused(propose):
    _, source = propose(REFUSED["one line again and again"][0], "--kind", "tokens")
    assert source.kind == "tokens"


def test_a_short_text_is_refused_by_plan_as_download_would(tmp_path):
    """Up to 24,000 characters one text is one neighbourhood: `plan` passed, and download could hold nothing out."""
    with pytest.raises(InputError, match="nothing of it can be held out"):
        checked(tmp_path, {"note.txt": SHORT})
    checked(tmp_path, {"note.txt": BOOK[:12_000], "other.txt": BOOK[12_000:24_000]})


def test_scripts_and_what_is_no_language():
    assert (
        script("日本語のテキスト") == "Japanese"
        and script("中文文本 text") == "Chinese"
        and script("Ein Text") == "Latin"
    )
    assert is_language("Ĉu vi parolas Esperanton? Jes, mi parolas ĝin bone.") and not is_language(
        "acgt tgca ccat " * 40
    )
    assert is_language("Je n'ai pas vu l'été de mes propres yeux, dit-il.".replace("é", "e\u0301"))

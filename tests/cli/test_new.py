"""`athanor new`: one look at a folder of anything, and lines that are right."""

from __future__ import annotations

import argparse
import inspect
import json
import json.decoder
import re
import shutil
from pathlib import Path

import pytest
import yaml

from athanor.base.errors import InputError
from athanor.cli import cli, new, probe
from athanor.runtime import presets
from athanor.runtime.schema import check_file
from athanor.text import globs
from tests.cli.any_text import CORPORA
from tests.cli.test_corpus_gate import BOOK, TEXTS
from tests.e2e.clone import ROOT
from tests.text.test_encodings import TEXTS as ENCODED

MIXED = {
    "a.md": BOOK[:30_000], "b.MD": BOOK[40_000:60_000], "copy of c.txt": "the same text", "c.txt": "the same text", "empty.txt": "",
    "page.html": "<main><p>A page.</p></main>", "rows.jsonl": json.dumps({"text": "one row"}), "faq.jsonl": json.dumps({"question": "?"}),
    "data.csv": "a,b\n1,2\n",
    "[draft]": "x", "desktop.ini": "[x]", "~$a.docx": "x", "__MACOSX/a.md": "x",
    "photo.png": "x", "Makefile": "all:\n\tmake it\n", "sub/app.py": inspect.getsource(json.decoder),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "presets" / "default.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def test_a_mixed_folder_in_one_go(project, capsys):
    fill(project / "corpus" / "my notes", MIXED)
    before = (project / "params.yaml").read_text()
    assert cli.call("new", ["corpus/my notes"]) == 0
    told = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in told.split("\n\n")[0].splitlines()[1:]}
    assert rows["*.txt"] == ["3", "0", "2", "2", "1", "empty"]
    assert rows["*.jsonl"] == ["2", "0", "1", "1", "1", "column", "'text'", "is", "missing"]
    assert rows["*.csv"][4:] == ["1", "column", "'text'", "is", "missing"] and rows["*.png"][2] == "0"
    assert not {"*.ini", "*.docx"} & rows.keys() and rows["*.md"][0] == "1"  # what Windows leaves in a folder
    # Files that could be read are named with what to type, of others the types.
    left_out = told.split("left out:\n")[1].split("\n\n")[0]
    assert "data.csv:1: column 'text' is missing" in left_out and "found: a, b" in left_out and ".png" not in left_out
    assert "faq.jsonl:1: column 'text' is missing" in left_out and "--template '{a}\\n\\n{b}'" in left_out
    assert (project / "params.yaml").read_text() == before

    assert cli.call("new", ["corpus/my notes", "--write"]) == 0
    out = capsys.readouterr().out
    assert "1 of them copies of others" in out and "language: English" in out
    sections = check_file("params.yaml")
    prose, code = sections["download"].sources
    assert (prose.name, prose.kind, prose.on_unreadable) == ("my-notes", "prose", "skip")
    assert (code.name, code.kind, code.on_unreadable) == ("my-notes-code", "code", "refuse")
    assert code.globs == ("corpus/my notes/**/*.py",) and "corpus/my notes/**/Makefile" in prose.globs
    assert sections["mixture"].sources.keys() == {"my-notes", "my-notes-code"}
    assert "unknown" not in sections["battery"].categories and "addition" in sections["battery"].categories
    assert "none of them is about this text" in out
    # What is trained on of sixty kilobytes, four times, and not the default's million tokens, which would be learned by
    # heart. Of so few pieces a third is held out.
    pretrain = sections["pretrain"]
    assert 35_000 <= pretrain.tokens <= 45_000
    assert 0.06 * pretrain.tokens <= pretrain.warmup_tokens <= 0.2 * pretrain.tokens
    assert probe.warnings(project, sections) == []  # what it writes it does not blame


def test_a_saved_web_site_is_its_pages_and_not_its_search_index(project, capsys):
    """A book of 126 pages: two thirds of the training would have been a search index in JavaScript."""
    pages = {
        f"{n}.html": f"<main><p>{BOOK[n * 9000 : n * 9000 + 9000]}</p></main>".replace("\n\n", "</p><p>")
        for n in range(5)
    }
    whole = {"print.html": "".join(pages.values())}
    index = {"searchindex.js": "var index = {" + "a: 1, " * 30_000 + "};", "book.css": "a { color: red; }\n" * 300}
    fill(project / "corpus" / "site", pages | whole | index)
    assert cli.call("new", ["corpus/site", "--write"]) == 0
    told = capsys.readouterr().out
    assert told.count("of a web site, no text") == 2
    assert told.split("counts twice:\n")[1].splitlines()[:2] == ["  corpus/site/print.html", ""]
    assert "in place of the sources there (python-docs, python-code)" in told
    (source,) = check_file("params.yaml")["download"].sources
    assert source.globs == ("corpus/site/**/*.html",) and source.on_unreadable == "refuse"


def test_what_it_writes_for_a_manual_is_not_blamed_by_plan(project, capsys):
    """Seen at once after `--write`: "beta2 0.97 has a half-life of 21 % of the run, which is long"."""
    fill(project / "corpus" / "manual", {f"{n}.md": BOOK[n * 20_000 : n * 20_000 + 20_000] for n in range(10)})
    assert cli.call("new", ["corpus/manual", "--write"]) == 0
    sections = check_file("params.yaml")
    assert sections["pretrain"].tokens < 190_000 and 0.95 < sections["pretrain"].beta2 < 0.97
    assert probe.warnings(project, sections) == []


def test_pages_that_share_what_a_manual_says_on_each_are_not_named(project, capsys):
    """Seen: the pages of Cargo's commands have up to 0.85 of their lines in common; it was advised to remove them."""
    own = (BOOK[start : start + 6000] for start in range(100_000, 124_000, 6000))
    fill(project / "corpus" / "manual", {f"{page}.md": f"{BOOK[:34_000]}\n\n{text}" for page, text in enumerate(own)})
    assert cli.call("new", ["corpus/manual"]) == 0
    assert "counts twice" not in capsys.readouterr().out


def test_code_with_some_pages_stays_code(project, capsys):
    fill(
        project / "corpus" / "app",
        {
            "a.js": inspect.getsource(json.decoder),
            "b.css": inspect.getsource(argparse),
            "docs.html": f"<p>{BOOK[:9000]}</p>",
        },
    )
    assert cli.call("new", ["corpus/app"]) == 0
    told = capsys.readouterr().out
    assert "of a web site" not in told and "corpus/app/**/*.js" in told


def test_another_script_gets_its_settings(project, capsys):
    fill(project / "corpus" / "books", TEXTS["Chinese"])
    before = (project / "params.yaml").read_text()
    assert cli.call("new", ["corpus/books", "--write"]) == 0
    glued = r"[^\n]\n(?=[a-z_]+:)|\n\n(?= )"  # a section after no blank line, or a key after one
    assert re.findall(glued, before) == re.findall(glued, (project / "params.yaml").read_text()) == []
    assert "language: Chinese" in capsys.readouterr().out
    sections = check_file("params.yaml")
    rules = sections["clean"].rules.prose
    assert (rules.english_only, rules.min_stop_word_fraction, rules.min_ascii_fraction) == (False, None, None)
    assert not sections["classifiers"].weak_labels and sections["sft_data"].max_pad_share == 0.15
    new.corpus_gate.check_corpus(sections)


def test_the_english_chat_of_another_script_is_what_can_be_learned(project, capsys):
    """Seen with a Japanese novel: "Who are you?" was right in 7 %, and 2 + 2 = 12."""
    params = presets.values(ROOT / "presets" / "own-text.yaml")
    params["instruct"]["sources"].append({"type": "messages", "name": "talks", "files": "corpus/talks.jsonl"})
    params["sft_data"]["sources"]["talks"] = {"repeats": 10}
    del params["sft_data"]["source_priority"]
    text = yaml.safe_dump(params).replace("name: talks", "name: talks  # hers")
    (project / "params.yaml").write_text(text)
    fill(project / "corpus" / "mostly", {"a.txt": BOOK, **TEXTS["Chinese"]})
    written("corpus/mostly", checked=False)  # English with a little Chinese keeps its chat
    assert "exercises" in check_file("params.yaml")["sft_data"].sources
    (project / "params.yaml").write_text(text)
    fill(project / "corpus" / "books", TEXTS["Chinese"])
    for _ in range(2):
        written("corpus/books", checked=False)
        assert "# hers" in (project / "params.yaml").read_text()
        sections = check_file("params.yaml")
        assert [source.name for source in sections["instruct"].sources] == ["identity", "talks"]
        assert sections["sft_data"].sources.keys() == {"identity", "talks"}
        assert sections["battery"].categories.keys() == {"first_words", "identity"}
        assert sections["pretrain"].sample_prompts[0] in TEXTS["Chinese"]["书.txt"]
    assert "preset use own-text" not in capsys.readouterr().out


def test_what_cannot_be_trained_on_is_not_written(project, capsys):
    before = (project / "params.yaml").read_text()
    fill(project / "corpus" / "small", {"a.txt": "A short note."})
    fill(project / "corpus" / "photos", {"a.png": "x"})
    fill(project / "outside", {"a.txt": BOOK})
    for folder, message in {
        "corpus/small": "too few to learn from",
        "corpus/photos": "no file can be read: unknown file type '.png'. Fix: use text",
        "outside": "outside of corpus/.*cp -r outside corpus/",
        "corpus/nowhere": "no such folder or file",
    }.items():
        with pytest.raises(InputError, match=message):
            cli.call("new", [folder, "--write"])
    assert (project / "params.yaml").read_text() == before


def written(place, *more, checked=True):
    assert cli.call("new", [place, "--write", *more]) == 0
    sections = check_file("params.yaml")
    (source,) = sections["download"].sources
    if checked:
        new.corpus_gate.check_corpus(sections)  # as `athanor plan` does
    return source


def test_encodings_are_found_shown_and_written(project, capsys):
    """The advice for a Russian file made it mojibake, which was accepted."""
    russian, french = ENCODED["Russian"], ENCODED["French"]
    (project / "corpus/ru").mkdir(parents=True)
    for name, data in {
        "old.txt": f"{russian} {CORPORA['russian'][0]}".encode("cp1251"), "new.txt": f"{russian}\n".encode() * 99,
        "wrong.txt": (russian * 9).encode("cp1251").decode("latin-1").encode(), "asked.txt": "Käse".encode("latin-1"),
    }.items():  # fmt: skip
        (project / "corpus/ru" / name).write_bytes(data)
    assert written("corpus/ru", checked=False).encoding == "detect"  # cp1251 for all would read asked.txt wrongly
    told = capsys.readouterr().out
    assert "город" in told.split("cp1251: corpus/ru/old.txt: «")[1].split("»")[0] and "language: Cyrillic" in told
    assert "corpus/ru/wrong.txt: mojibake (cp1251 that was read as latin1: it says «Старый" in told
    assert "--encoding NAME" in told.split("if «Käse» is right")[1]
    (project / "corpus/ru/b.txt").write_bytes((french * 9).encode("cp1252"))
    assert written("corpus/ru", checked=False).encoding == "detect"
    (project / "corpus/ru/asked.txt").rename(project / "corpus/asked.txt")
    with pytest.raises(InputError, match="too few"):  # and read, where it is named
        cli.call("new", ["corpus/asked.txt", "--encoding", "cp1252"])


def test_one_file_is_used_in_place_or_copied(project, capsys):
    fill(project, {"corpus/x/[1] a b.txt": BOOK, "corpus/x/1 a b.txt": "another", "elsewhere/My novel.txt": BOOK})
    source = written("corpus/x/[1] a b.txt")
    assert [path.name for _, path in globs.find(source.globs)] == ["[1] a b.txt"] and source.name == "1-a-b"
    before = (project / "params.yaml").read_text()
    assert cli.call("new", ["elsewhere/My novel.txt"]) == 0
    assert "athanor new --write copies it to corpus/My novel.txt" in capsys.readouterr().out
    assert (project / "params.yaml").read_text() == before and not (project / "corpus/My novel.txt").exists()
    assert written("elsewhere/My novel.txt").globs == ("corpus/My novel.txt",)
    assert (project / "corpus/My novel.txt").read_text(encoding="utf-8") == BOOK
    fill(project, {"elsewhere/My novel.txt": BOOK + "!"})
    with pytest.raises(InputError, match="corpus/My novel.txt: is there already, with other text"):
        cli.call("new", ["elsewhere/My novel.txt", "--write"])


@pytest.mark.parametrize("folder", ["[2024] notes (draft)", "a*b?", "[a-z]"])
def test_glob_signs_in_a_folder_s_name(project, folder):
    fill(project / "corpus" / folder, {"a [1].md": BOOK[:90_000], "sub/[x].md": BOOK[90_000:]})
    fill(project / "corpus" / "a", {"other.md": "another"})
    source = written(f"corpus/{folder}")
    assert [name for name, _ in globs.find(source.globs)] == ["a [1].md", "sub/[x].md"]  # the folder leaves no trace
    assert globs.find([f"corpus/{folder}/**/*.md"]) == globs.find(source.globs)  # as a person writes it


def test_questions_in_a_table(project, capsys):
    table = "".join(f"How many {n}?;{BOOK[n : n + 90]!r}\n" for n in range(400))
    fill(project / "corpus", {"qa.csv": f"Query;Answer\n{table}"})
    with pytest.raises(InputError, match="no file can be read: column 'text' is missing. Fix: .*found: Answer, Query"):
        cli.call("new", ["corpus/qa.csv"])
    template = r"{Query}\n\n{Answer}"
    assert f"athanor new 'corpus/qa.csv' --template '{template}'" in capsys.readouterr().out
    source = written("corpus/qa.csv", "--template", template)
    assert source.text_template == "{Query}\n\n{Answer}"


def test_pointers_in_place_of_files(project):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    fill(project / "corpus/lfs", {f"{n}.txt": pointer for n in range(9)})
    with pytest.raises(InputError, match="9 of 9 files cannot be read: 9 a Git LFS pointer.*git lfs pull"):
        cli.call("new", ["corpus/lfs"])


def test_of_a_cut_file_the_rest_is_taken(project, capsys):
    rows_ = "".join(json.dumps({"text": BOOK[n * 900 : n * 900 + 900]}) + "\n" for n in range(99))
    fill(project / "corpus/cut", {"a.jsonl": rows_[:-40]})
    assert written("corpus/cut").on_unreadable == "skip"
    assert "a.jsonl:99: the last line is not whole" in capsys.readouterr().out

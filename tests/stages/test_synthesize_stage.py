"""The synthetic stage against a real server: kills, keys, gates, DVC, what download makes of its output. About 40 s."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json, read_manifest, verify_files
from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.cli import synthesize as command
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.runtime.schema import check_file
from athanor.synthesis.params import SyntheticParams
from athanor.text.conversations import Item, Message, read_conversations
from stages import download, synthesize
from tests.e2e.clone import Clone, environment
from tests.stages.conftest import text_documents, write_battery, write_clean
from tests.synthesis.model_server import Fault, model_server, talks, written

ROOT = Path(__file__).resolve().parents[2]
KEY = "Zq9/secret+0123456789abcdef=="  # of no shape that is known, under a name that does not say what it is
ITEM = "Name the largest of these seven numbers, please, and write it down as digits: 17 4 92 33 8 51 60"
OUTPUTS = ("data/synthetic/manifest.json", "data/synthetic/chats.jsonl", "metrics/synthesize.json")
PRICES = {"requests": 100, "tokens": 10**7, "money": 9.0, "input_price": 1.0, "output_price": 5.0}
QUIET = {"ATHANOR_TRACKING": "off", "ATHANOR_THREADS": "1", "http_proxy": "http://127.0.0.1:9"}


def write_world(folder: Path, url: str, **changes: object) -> Path:
    """A checkout with clean documents, a battery and complete parameters; written again, only the parameters change."""
    values = presets.values(ROOT / "presets/micro.yaml")
    own = {"name": "chats", "base_url": url, "model": "m", "key_env": "MY_LLM", "license": "LicenseRef-test"}
    own |= {"requests": 20, "conversations_per_request": 2, "max_output_tokens": 600, "concurrency": 3, "max_tries": 3}
    gates = {"min_conversations": 10} | changes.pop("gates", {})
    values["synthetic"] |= own | {"gates": gates} | changes
    folder.mkdir(exist_ok=True)
    YAML().dump(values, folder / "params.yaml")
    if not (folder / "data").exists():
        write_clean(folder, text_documents())
        write_battery(folder, [Item("c", (Message("user", ITEM),), "numeric", "92", ("92",), ("60", "17"))])
        for name in ("athanor", "stages"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "probes", folder / "probes", ignore=shutil.ignore_patterns("dvc.*"))
        shutil.copytree(ROOT / "corpus/seeds", folder / "corpus/seeds")
    return folder


def start(folder: Path, code: str = "", **env: str) -> subprocess.Popen[str]:
    words = ["-c", code] if code else ["-m", "stages.synthesize"]
    told = environment(**QUIET, **({"MY_LLM": KEY} | env))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=told, stdout=pipe, stderr=pipe, text=True)


def execute(folder: Path, **env: str) -> tuple[int, str]:
    process = start(folder, **env)
    out, err = process.communicate(timeout=300)
    assert out == ""
    return process.returncode, err


def here(folder: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    """The stage's body in this process, which is quicker; "" or its error."""
    monkeypatch.chdir(folder)
    for name, value in {**QUIET, "MY_LLM": KEY, **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    run = None
    try:
        check_file("params.yaml")
        run = Run("synthesize", "stages.synthesize")
        synthesize.run(run)
        run.finish()
    except AthanorError as error:
        if run is not None:
            run.fail("FAILED", str(error))  # or its slot stays held
        return str(error)
    return ""


def outputs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in OUTPUTS]


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / ".athanor/synthetic/requests.jsonl").read_text().splitlines()]


@pytest.fixture
def server():
    with model_server() as found:
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed: its folder, its bytes and what it said."""
    with model_server() as server:
        folder = write_world(tmp_path_factory.mktemp("whole") / "work", server.url)
        status, said = execute(folder)
        assert status == 0, said
        yield folder, outputs(folder), said, server


def test_what_a_run_leaves(whole):
    folder, _, said, server = whole
    assert set(server.answered.values()) == {1} and len(server.seen) == 20 and server.most_flying <= 3
    assert {headers["x-api-key"] for headers in server.headers} == {KEY}
    verify_files(folder / "data/synthetic")
    manifest = read_manifest(folder / "data/synthetic", "synthetic", 1)
    assert manifest["counts"]["kept"] == manifest["counts"]["conversations"] == 40 and manifest["served_by"] == ["m-1"]
    assert manifest["measures"]["distinct_prompts"] == 1.0 and manifest["stopped_by_budget"] is None
    rows = [json.loads(line) for line in (folder / "data/synthetic/chats.jsonl").read_text().splitlines()]
    assert Counter(row["category"] for row in rows) == manifest["counts"]["categories"]
    shown = {document.id for document in text_documents() if document.split == "train"}
    assert {row["document"] for row in rows} <= shown and {row["document_license"] for row in rows} == {"PSF-2.0"}
    assert str(folder) not in "".join(path.read_text() for path in (folder / "data/synthetic").iterdir())
    facts = read_json(folder / "metrics/runs/synthesize.json")["facts"]
    assert facts["spent_tokens"] == server.tokens and facts["first_day"].startswith("20")
    assert not (folder / "probes/dvc.yaml").exists() and "done in" in said


def test_killed_again_and_again_it_ends_with_the_same_bytes_and_pays_for_no_answer_twice(whole, tmp_path):
    victim: list[subprocess.Popen[str]] = []
    server = whole[3]  # its address is a part of what is asked
    seen, paid = len(server.seen), Counter(server.answered)

    def kill(number: int) -> None:
        if number - seen in (4, 11, 16):
            os.kill(victim[-1].pid, signal.SIGKILL)

    server.on_request = kill
    folder = write_world(tmp_path / "work", server.url)
    kills = 0
    try:
        while True:
            victim.append(start(folder))
            _, said = victim[-1].communicate(timeout=300)
            if victim[-1].returncode == 0:
                break
            assert victim[-1].returncode == -signal.SIGKILL, said
            kills += 1
            assert not (folder / "data/synthetic").exists()
    finally:
        server.on_request = lambda number: None
    assert kills >= 2
    lines = log_of(folder)
    sent = Counter(line["request"] for line in lines if line["type"] == "sent")
    answered = Counter(line["request"] for line in lines if line["type"] == "answer")
    assert len(answered) == 20 and set(answered.values()) == {1}
    # After its answer is in the log a request never leaves again; what a kill costs was in flight.
    done: set[str] = set()
    for line in lines:
        assert line["type"] != "sent" or line["request"] not in done
        done |= {line["request"]} if line["type"] == "answer" else set()
    assert sum(sent.values()) - 20 <= 3 * kills and len(server.seen) - seen <= sum(sent.values())
    assert sum((server.answered - paid).values()) <= sum(sent.values())
    assert outputs(folder) == whole[1]


def test_the_key_is_nowhere(server, tmp_path):
    """A server that repeats it wherever it can, in good answers and bad ones; then a run that ends in an error."""
    folder = write_world(tmp_path / "work", server.url, api="openai")
    echoed = written([[(f"What is the word of day {KEY}?", f"The word of that day is {KEY}, as you said.")]])
    server.script = [
        Fault(text=echoed),
        Fault(429, {"error": {"message": f"slow, {KEY}", "code": "x"}}, {"Retry-After": "0"}),
        Fault(500, f"<html>{KEY}</html>", {"Retry-After": "0"}),
        Fault(400, {"error": {"message": f"bad request with {KEY}", "type": KEY}}),
        Fault(body={"model": KEY, "choices": KEY}),
    ]
    status, said = execute(folder)
    assert status == 0, said
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    write_world(folder, server.url, api="openai", requests=30)
    server.script = [Fault(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})] * 9
    status, failed = execute(folder)
    assert status == 1 and "check the key in MY_LLM" in failed and "Traceback" not in failed
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(ROOT)]
    everything = b"".join(path.read_bytes() for path in files) + said.encode() + failed.encode()
    assert len(files) > 10 and b"***" in everything and b'"sent"' in everything
    for form in (KEY, KEY.replace("/", "%2F"), KEY.replace("/", "\\/"), KEY[:12], KEY[-12:]):
        assert form.encode() not in everything


@pytest.mark.parametrize(
    "changes, env, told",
    [
        ({}, {"MY_LLM": ""}, "environment variable MY_LLM: holds no key. Fix: export MY_LLM=..."),
        ({"model": None}, {}, "synthetic.model: names no model"),
        ({"base_url": "http://api.somewhere.com"}, {}, "synthetic.base_url: plain http to api.somewhere.com"),
        ({"base_url": "localhost:8080"}, {}, "synthetic.base_url: no usable address"),
        ({"key_env": KEY}, {}, "synthetic.key_env: is not the name of an environment variable"),
        ({"budget": PRICES | {"tokens": 99}}, {},
         "no request was answered: budget.tokens is less than one request may use"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_told_in_one_line_and_costs_nothing(server, tmp_path, monkeypatch, changes, env, told):
    folder = write_world(tmp_path / "work", **({"url": server.url} | changes))
    said = here(folder, monkeypatch, **env)
    assert told in said and "\n" not in said and KEY not in said
    assert server.seen == [] and not (folder / "data/synthetic").exists()


def test_a_server_without_a_key(server, tmp_path, monkeypatch):
    folder = write_world(tmp_path / "work", server.url, key_env=None, api="openai")
    assert here(folder, monkeypatch, MY_LLM="") == ""
    assert "Authorization" not in server.headers[0]


def leaky(identity: str) -> str:
    return written([*talks(identity), [(ITEM, "It is 92.")]][1:])


def branded(identity: str) -> str:
    return written([*talks(identity)[:1], [(f"Who are you, {identity}?", "I am ChatGPT, made by OpenAI.")]])


def prose(identity: str) -> str:
    return "Here they are: " + written(talks(identity))


@pytest.mark.parametrize(
    "say, gate, asked",
    [
        (leaky, "gates.max_leaked_share is 2.0%", 20),
        (branded, "gates.max_habit_share is 10.0%", 20),
        (lambda identity: written(talks("the same")), "gates.min_distinct_prompts is 90.0%", 20),
        (prose, "the last: not JSON", 6),
    ],
    ids=["leak", "identity", "collapse", "prose"],
)
def test_a_failing_gate_writes_nothing_and_keeps_what_was_paid_for(server, tmp_path, monkeypatch, say, gate, asked):
    folder = write_world(tmp_path / "work", server.url)
    server.say = say
    said = here(folder, monkeypatch)
    assert gate in said and "Fix: " in said and "\n" not in said
    assert not (folder / "data/synthetic").exists() and len(server.seen) <= asked
    seen = len(server.seen)
    assert sum(line["type"] == "answer" for line in log_of(folder)) == seen
    assert (
        gate.split(",")[-1] in here(folder, monkeypatch) and len(server.seen) == seen
    )  # nor does trying again pay more
    # Looked at and accepted, with wider gates: nothing is asked again. The item of the battery is left out even so.
    wide = dict.fromkeys(("max_habit_share", "max_leaked_share", "max_near_duplicate_share", "max_opening_share"), 1.0)
    wide |= {"min_distinct_prompts": 0.0, "min_distinct_4grams": 0.0, "min_conversations": 1}
    if asked == 20:
        write_world(folder, server.url, gates=wide)
        assert here(folder, monkeypatch, MY_LLM="") == "" and len(server.seen) == seen  # not even the key is needed
        text = (folder / "data/synthetic/chats.jsonl").read_text()
        assert "seven numbers" not in text and "ChatGPT" not in text
        rejected = (folder / ".athanor/synthetic/chats.rejected.jsonl").read_text()
        assert rejected.count('"reason"') >= 19


def test_stopped_by_a_signal_it_goes_on(server, tmp_path):
    folder = write_world(tmp_path / "work", server.url)
    victim: list[subprocess.Popen[str]] = []
    server.on_request = lambda number: number == 4 and victim[0].terminate()
    victim.append(start(folder))
    _, said = victim[0].communicate(timeout=300)
    assert victim[0].returncode == 75 and "every answer is kept" in said
    status, said = execute(folder)
    assert status == 0 and "continues from" in said, said
    assert set(server.answered.values()) == {1} and len(server.answered) == 20


def fields(schema: type) -> set[str]:
    """Class.field of a parameter class and those within it."""
    found = set()
    for name, hint in typing.get_type_hints(schema).items():
        found.add(f"{schema.__name__}.{name}")
        for inner in (hint, *typing.get_args(hint)):
            found |= fields(inner) if getattr(inner, "__module__", "") == schema.__module__ else set()
    return found


def test_every_parameter_is_read(server, tmp_path):
    folder = write_world(tmp_path / "work", server.url, budget=PRICES)
    (tmp_path / "reads").mkdir()
    code = "import runpy, tests.e2e.param_reads\n"
    code += "runpy.run_module('stages.synthesize', run_name='__main__', alter_sys=True)"
    process = start(folder, code, PARAM_READS=str(tmp_path / "reads"), PYTHONPATH=str(ROOT))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    read = {name for path in (tmp_path / "reads").iterdir() for name in json.loads(path.read_text())}
    # OpenAI's name of a limit is for that API alone: tests/synthesis/test_synthetic.py.
    assert fields(SyntheticParams) - read == {"SyntheticParams.output_limit"}


# -- with DVC, and on to training -----------------------------------------------------------------------------------

MAIN = "stages:\n  main: {cmd: cp source.txt out.txt, deps: [source.txt], outs: [out.txt]}\n"


def test_the_command_shows_publishes_and_remembers_and_download_reads_it(server, tmp_path, monkeypatch):
    folder = write_world(tmp_path / "work", server.url)
    for name in ("athanor", "stages"):
        (folder / name).unlink()
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "dvc.yaml").write_text(MAIN)
    (folder / "source.txt").write_text("s")
    clone = Clone(folder)
    clone.run("git", "init", "-q", "-b", "main")
    clone.dvc("init", "-q")
    env = {**QUIET, "MY_LLM": KEY, "DVC_SITE_CACHE_DIR": str(tmp_path / "site")}

    def call(*words: str) -> str:
        return clone.run(sys.executable, "-m", "athanor", "synthesize", *words, **env).stdout

    first = call()
    target = folder / "corpus/synthetic/chats.jsonl"
    assert "Running stage 'probes/dvc.yaml:synthesize'" in first
    assert "Conversations  40 in corpus/synthetic/chats.jsonl" in first
    assert target.read_bytes() == (folder / "data/synthetic/chats.jsonl").read_bytes()
    card = target.with_suffix(".md").read_text()
    assert server.url in card and "Model: m (the server's own word: m-1)" in card and "LicenseRef-test" in card
    assert "didn't change, skipping" in call()
    assert len(server.seen) == 20 and not (folder / "probes/dvc.yaml").exists()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert "20 answered already" in command.dry_run(check_file("params.yaml")["synthetic"], 0)

    # The lines that the command printed are a source of conversations.
    entry, uses = first.split("  instruct.sources:\n")[1].split("  sft_data.sources.")
    values = read_yaml(folder / "params.yaml")
    (folder / "entry.yaml").write_text(f"sources:\n{entry}{uses}")
    printed = read_yaml(folder / "entry.yaml")
    assert printed["chats"] == {"max_copies": 1, "repeats": 1, "max_supervised_tokens": None}
    values["instruct"] = {"seed": 1, "val_fraction": 0.1, "sources": printed["sources"]}
    notes = {"type": "files", "name": "notes", "kind": "prose", "license": "MIT", "globs": ["corpus/seeds/*.md"]}
    notes |= {"text_column": "text", "select": None, "max_document_bytes": 10**6, "min_chars": 1, "min_documents": 1}
    (folder / "corpus/seeds/other.md").write_text("A second note, so that one can be held out.\n")
    values["download"] = {"val_fraction": 0.04, "sources": [notes | {"min_bytes": 1}]}
    YAML().dump(values, folder / "params.yaml")
    download.run(Run("download", "stages.download"))
    rows = list(read_conversations(folder / "data/instruct/chats.jsonl"))
    published = [json.loads(line)["messages"] for line in target.read_text().splitlines()]
    assert [[{"role": m.role, "content": m.content} for m in row.messages] for row in rows] == published
    assert {row.license for row in rows} == {"LicenseRef-test"} and len(rows) == 40


def test_a_dry_run_knows_what_is_left_and_what_it_may_cost(server, tmp_path, monkeypatch):
    folder = write_world(tmp_path / "work", server.url, budget=PRICES | {"money": 0.02})
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("MY_LLM", KEY)
    params = check_file("params.yaml")["synthetic"]
    said = command.dry_run(params, 0).splitlines()
    assert server.seen == [] and "Nothing was sent." in said
    assert "20 (questions 8" in said[1] and "MY_LLM, set" in said[0]
    assert KEY not in "".join(said) and command.dry_run(params, 2).count("<text>") == 2
    read = sum(
        r.worst_input_tokens for r in command.plan_requests(params, Path("data/clean/train"), Path("corpus/seeds"))
    )
    assert f"{read:,} tokens read" in said[2] and "12,000 written" in said[2]
    assert f"{(read + 5 * 12_000) / 1e6:,.2f} in money" in said[2]
    fitting = int(said[5].split("enough for ")[1].split()[0])
    assert 0 < fitting < 20 and not any("sample" in line for line in said)


def test_the_card_says_what_stopped_it_and_what_was_left_out():
    manifest = {
        "counts": {"kept": 1, "conversations": 3, "answers": 4, "requests": 9, "categories": {"a": 1},
                   "left_out": {"leaked": 2, "hedge": 0}, "malformed": {"not JSON": 1}},
        "measures": {"distinct_prompts": 1.0, "distinct_4grams": 0.9, "opening": "the", "opening_share": 0.5},
        "model": "m", "served_by": [], "url": "https://h/v1/messages", "api": "anthropic", "license": "X",
        "document_licenses": {"MIT": 1}, "stopped_by_budget": "money",
        "parents": {"clean": "c" * 64, "battery": "b" * 64},
    }  # fmt: skip
    card = command.card("n", manifest, {"first_day": "2031-01-01", "last_day": "2031-01-02"})
    assert "2031-01-01 to 2031-01-02" in card and "Stopped by the budget: money" in card
    assert "leaked 2, answers: not JSON 1" in card and "hedge" not in card

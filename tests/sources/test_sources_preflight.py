"""Every source is opened before the first is fetched, and all that is wrong is told at once."""

from __future__ import annotations

import http.server
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base.errors import InputError, Interrupted
from athanor.base.strict import build
from athanor.runtime.executor import Executor
from athanor.sources import hub_tasks
from athanor.sources.fetch import Fetcher, check_sources
from athanor.sources.instruct_params import InstructParams
from athanor.sources.params import DownloadParams
from tests.sources.world import ROOMY, chat, json_lines, serving

COMMON = {"kind": "web", "license": "MIT", "min_chars": 1, "min_documents": 1, "min_bytes": 1}
HUB = {"type": "huggingface", "revision": None, "text_column": "text", "max_malformed_fraction": 0.5} | COMMON
CHATS = {"type": "messages", "max_malformed_fraction": 0.5, "max_rows": 9, "min_rows": 1, "license": "MIT"}


def check(tmp_path, documents, chats=(), free=10**12, **options):
    download = build(DownloadParams, {"val_fraction": 0.1, "sources": documents}, "download")
    identity = {"type": "identity", "name": "identity", "repeats": 1, "min_rows": 1}
    instruct = build(InstructParams, {"seed": 1, "val_fraction": 0.1, "sources": [identity, *chats]}, "instruct")
    place = lambda name, module, inputs: SimpleNamespace(path=tmp_path / "slots" / inputs.get("name", "web"))  # noqa: E731
    fetcher = Fetcher(tmp_path, 0.1, None, lambda: False, place, lambda **_: None, Executor())
    return check_sources(download, instruct, fetcher.probe, replace(ROOMY, disk=free), **options)


@pytest.fixture
def sets(tmp_path):
    for name in ("good", "lines"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"text": ["some text"] * 40, "n": [1] * 40}), tmp_path / "good" / "a.parquet")
    json_lines(tmp_path / "lines" / "a.jsonl", ({"body": "x"} for _ in range(20)))
    json_lines(tmp_path / "chats.jsonl", [chat("hi", "hello")])
    return {name: HUB | {"name": name, "dataset": str(tmp_path / name)} for name in ("good", "lines")}


def test_all_that_is_wrong_is_told_before_anything_is_fetched(tmp_path, sets):
    """A wrong column in the ninth source showed after the first eight had come."""
    notes = {"type": "files", "name": "notes", "globs": [str(tmp_path / "*.md")]}
    wrong = [sets["good"], sets["good"] | {"name": "b", "text_column": "body"}, notes]
    wrong += [sets["lines"] | {"json_lines": "*.jsonl"}, sets["good"] | {"name": "c", "dataset": str(tmp_path / "no")}]
    chats = [CHATS | {"name": "chats", "files": str(tmp_path / "chats.jsonl"), "shape": "turns"}]
    with pytest.raises(InputError) as caught:
        check(tmp_path, wrong, chats)
    told = str(caught.value)
    assert told.startswith("5 things are wrong with the sources; nothing was fetched: download.sources[1] (b): ")
    for part in (
        "column 'body' is missing. Fix: name one of: n, text", "sources[2] (notes): ", "no file matches",
        "sources[3] (lines): ", "none of the first 8 rows can be read, the first: ", "column 'text' is missing",
        "sources[4] (c): ", "no such directory", "instruct.sources[1] (chats): ", "none of the first 1 rows",
    ):  # fmt: skip
        assert part in told, part
    assert not (tmp_path / "slots").exists()


def test_one_problem_keeps_its_own_words(tmp_path, sets):
    with pytest.raises(InputError, match=r"^download.sources\[0\] \(good\): .*/good: column 'x' is missing. Fix: name"):
        check(tmp_path, [sets["good"] | {"text_column": "x"}])


def test_room_on_the_disk_is_asked_for_all_together(tmp_path, sets):
    sources = [sets["good"] | {"max_bytes": 10**9}, sets["good"] | {"name": "b", "max_bytes": 2 * 10**9}]
    assert check(tmp_path, sources) == pytest.approx(3e9 * 0.4)
    with pytest.raises(InputError, match=r"download needs 1.2 GB \(disk\), 1.0 GB are free. Fix: free some"):
        check(tmp_path, sources, free=10**9)
    told = []
    check(tmp_path, sources, free=10**10, note=told.append)
    assert "1.2 GB are to come, 7.2 GB with what is made of them, 10.0 GB are free" in told[-1]
    with pytest.raises(InputError, match=r"clean needs 6.1 GB \(disk\), 5.0 GB are free"):
        check(tmp_path, sources, free=5 * 10**9)


def test_what_is_there_already_is_neither_opened_nor_counted_twice(tmp_path, sets):
    made = build(DownloadParams, {"val_fraction": 0.1, "sources": [sets["good"]]}, "download").sources[0]
    hub_tasks.fetch(made, tmp_path / "slots" / "good", 0.1, tmp_path / "raw", Executor())
    (tmp_path / "slots/good/plan.json").rename(tmp_path / "plan")  # as if it had been killed before the last task
    larger = sets["good"] | {"max_bytes": 1000}
    assert check(tmp_path, [larger]) == pytest.approx(0.4 * (1000 - 40 * len("some text")))
    (tmp_path / "plan").rename(tmp_path / "slots/good/plan.json")
    (tmp_path / "good" / "a.parquet").unlink()  # the hub cannot be reached, as it were
    assert check(tmp_path, [sets["good"]]) == 0


def test_each_source_says_its_files_and_bytes(tmp_path, sets):
    json_lines(tmp_path / "notes.jsonl", [{"text": "x"}] * 200_000)
    notes, told = {"type": "files", "name": "notes", "globs": [str(tmp_path / "*.jsonl")]}, []
    check(tmp_path, [sets["good"], notes], note=told.append)
    size = (tmp_path / "good" / "a.parquet").stat().st_size / 1e6
    assert told == [
        f"good: 1 file of {size:,.1f} MB, {tmp_path / 'good'}",
        "notes: 2 files of 2.8 MB, this machine",
    ]


def test_an_unreachable_hub_is_told_once(tmp_path, sets, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    away = [HUB | {"name": name, "dataset": f"owner/{name}", "revision": "0" * 40} for name in "ab"]
    with pytest.raises(InputError, match="^owner/a: the hub cannot be reached") as caught:
        check(tmp_path, [sets["good"], *away])
    assert "owner/b" not in str(caught.value)


def test_a_stop_is_heard_between_two_sources(tmp_path, sets):
    seen = []
    with pytest.raises(Interrupted, match="nothing was fetched"):
        check(tmp_path, [sets["good"], sets["lines"]], tick=seen.append, stop=lambda: bool(seen))
    assert seen == [1]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        gone = self.path.startswith("/gone")
        self.send_response(404 if gone else 503 if self.path.startswith("/busy") else 200)
        self.send_header("Content-Length", "0" if gone else "1000000")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_servers_are_asked_for_each_file(tmp_path):
    with serving(Handler) as address:

        def source(*paths):
            urls = [{"url": f"{address}{path}", "sha256": None} for path in paths]
            return {"type": "http", "name": "web", "urls": urls} | COMMON

        assert check(tmp_path, [source("/a.txt", "/busy.txt", "/b.txt")]) == pytest.approx(1.4 * 2e6)
        with pytest.raises(InputError, match=r"gone.txt: HTTP 404 Not Found. Fix: correct the url"):
            check(tmp_path, [source("/a.txt", "/gone.txt")])

"""Downloads by two workers of this machine: killed in the middle, resumed, and no request made that is not needed. About 25 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e import hub
from tests.runtime.shard_toy import until
from tests.sources import test_sources_http
from tests.sources.world import serving

ROOT = Path(__file__).resolve().parents[2]
REVISION, FILES, GROUPS, ROWS = "0" * 40, 4, 10, 20
CHILD = """
import json, sys
from pathlib import Path
from athanor.base.artifacts import sha256_file
from athanor.base.strict import build
from athanor.runtime.executor import Executor
from athanor.sources import http, hub_tasks
from athanor.sources.params import (HttpSource, HuggingFaceSource)

values, folder, workers = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if values["type"] == "http":
    found = http.fetch(build(HttpSource, values, "s"), folder, Executor(workers))
    print(json.dumps({path.name: sha256_file(path) for _, path in found}))
else:
    hub_tasks.SHARD_BYTES = 100_000
    source = build(HuggingFaceSource, values, "s")
    tally, rows = hub_tasks.fetch(source, folder, 0.1, folder / "raw", Executor(workers))
    print(json.dumps([tally.bytes, rows, {p.name: sha256_file(p) for p in sorted((folder / "raw").iterdir())}]))
"""
SOURCE = {"name": "s", "kind": "web", "license": "MIT", "min_chars": 1, "min_documents": 1, "min_bytes": 1}
SET = SOURCE | {"type": "huggingface", "dataset": "owner/set", "revision": REVISION, "text_column": "text"}


class Watched(hub.Handler):
    """A hub that counts what it sends of files, and holds back the answers from request `hold` on."""

    lock, sent, hold, sizes = threading.Lock(), [], None, {}
    held, released = threading.Semaphore(0), threading.Event()

    def file(self, path, revision):
        if self.command == "GET":
            with self.lock:
                self.sizes[path.name] = path.stat().st_size
                self.sent.append((path.name, self.headers.get("Range")))
                wait = self.hold is not None and len(self.sent) > self.hold
            if wait:
                self.held.release()
                self.released.wait()
        super().file(path, revision)


def groups_sent():
    """Requests for row groups: those for the end of a file go on to its last byte."""
    spans = [(name, *span.removeprefix("bytes=").split("-")) for name, span in Watched.sent if span]
    return [name for name, _, last in spans if int(last) + 1 < Watched.sizes[name]]


def texts(file, group):
    return [f"text {file}.{group}.{row} " + os.urandom(1500).hex() for row in range(ROWS)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    (root / "owner/set" / REVISION).mkdir(parents=True)
    for file in range(FILES):
        groups = [pa.table({"text": texts(file, group), "other": texts(file, group)}) for group in range(GROUPS)]
        pq.write_table(
            pa.concat_tables(groups),
            root / f"owner/set/{REVISION}/{file}.parquet",
            row_group_size=ROWS,
            write_statistics=False,
        )
    configs = [{"config_name": "default", "data_files": [{"split": "train", "path": "*.parquet"}]}]
    (root / f"owner/set/{REVISION}/README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with hub.serving(root, Watched) as address:
        yield address


def start(values, folder, workers, address="", home="/nonexistent"):
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    env |= {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps(values), str(folder), str(workers)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def end(child):
    told, _ = child.communicate()
    assert child.returncode == 0
    return json.loads(told)


def test_a_hub_source_killed_in_the_middle(world, tmp_path):
    place = (world, tmp_path / "home")
    whole = end(start(SET, tmp_path / "one", 1, *place))
    assert whole[1] == FILES * GROUPS * ROWS and len(whole[2]) == FILES * GROUPS
    # Each row group once; besides, the card, a schema and the ends of the files.
    assert len(groups_sent()) == FILES * GROUPS
    assert len(Watched.sent) == 2 + FILES + FILES * GROUPS

    Watched.sent.clear()
    Watched.hold = 2 + FILES + 25
    killed = start(SET, tmp_path / "two", 2, *place)
    for _ in range(2):  # both workers wait, so nothing ends after the kill
        Watched.held.acquire()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    Watched.hold = None
    Watched.released.set()
    finished = list((tmp_path / "two/tasks").glob("*/facts.json"))
    assert 5 < len(finished) < FILES * GROUPS
    Watched.sent.clear()
    assert end(start(SET, tmp_path / "two", 2, *place)) == whole
    assert len(groups_sent()) == FILES * GROUPS - len(finished)


def test_a_budget_fetches_little_more_than_it_needs(world, tmp_path):
    Watched.sent.clear()
    budget, group_bytes = 400_000, ROWS * 3000
    size, rows, _ = end(start(SET | {"max_bytes": budget}, tmp_path / "part", 1, world, tmp_path / "home"))
    assert budget <= size < budget + 3100
    assert budget / group_bytes <= len(groups_sent()) <= budget / group_bytes + 2


def test_a_web_source_killed_in_the_middle(tmp_path):
    behaviour, held, released = test_sources_http.Behaviour(), threading.Event(), threading.Event()

    class Held(test_sources_http.Handler):
        def __init__(self, *arguments):
            super().__init__(behaviour, *arguments)

        def do_GET(self):  # noqa: N802
            if self.path == "/b.jsonl" and not released.is_set():
                behaviour.requests.append((self.path, None, None))
                self.send_response(200)
                self.send_header("Content-Length", str(len(behaviour.data)))
                self.send_header("ETag", behaviour.etag)
                self.end_headers()
                self.wfile.write(behaviour.data[:200_000])
                self.wfile.flush()
                held.set()
                released.wait()
            else:
                super().do_GET()

    with serving(Held) as address:
        urls = [{"url": f"{address}/{name}.jsonl", "sha256": None} for name in "abcd"]
        values = SOURCE | {"type": "http", "urls": urls}
        killed = start(values, tmp_path / "web", 2)
        held.wait()
        part = tmp_path / "web/00001-b.jsonl.part"
        done = [tmp_path / f"web/fetched/0000{n}-{name}.jsonl/facts.json" for n, name in ((0, "a"), (2, "c"), (3, "d"))]
        until(lambda: part.is_file() and part.stat().st_size > 150_000 and all(path.is_file() for path in done), "")
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        released.set()
        kept, behaviour.requests = part.stat().st_size, []
        found = end(start(values, tmp_path / "web", 2))
    assert behaviour.requests == [("/b.jsonl", f"bytes={kept}-", '"one"')]
    assert set(found.values()) == {test_sources_http.sha256()} and len(found) == 4

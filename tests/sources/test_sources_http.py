"""Downloads against a real server that cuts, refuses, changes its file and ignores ranges. About 3 s."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import io
import json
import resource
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
import requests

from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.base.strict import build, read_yaml
from athanor.base.work import stopping
from athanor.runtime.executor import Executor
from athanor.runtime.schema import check_together, schemas
from athanor.sources import http, select
from athanor.sources.params import HttpSource
from tests.e2e.clone import ROOT
from tests.sources.world import serving

DATA = "".join(json.dumps({"text": f"line {number} {'x' * (number % 90)}"}) + "\n" for number in range(9000)).encode()
CUT = 150_000


class Behaviour:
    """What the server does; `requests` are the (method, Range, If-Range) that it saw."""

    def __init__(self):
        self.data = DATA
        self.etag = '"one"'
        self.modified = None
        self.cuts = 0  # answers that end after CUT bytes
        self.failures = []  # (status, headers) for the next answers
        self.ranges = True
        self.chunked = False
        self.honest = True  # False: answers a range whatever If-Range says
        self.requests = []
        self.after = lambda: None  # called at the end of each answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, behaviour, *arguments):
        self.behaviour = behaviour
        super().__init__(*arguments)

    def do_GET(self):  # noqa: N802
        b = self.behaviour
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        b.requests.append((self.path, asked, condition))
        if b.failures:
            status, headers = b.failures.pop(0)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        current = b.etag or b.modified
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and b.ranges else 0
        partial = bool(start) and (condition in (None, current) or not b.honest)
        if partial and start >= len(b.data):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = b.data[start:] if partial else b.data
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{len(b.data) - 1}/{len(b.data)}")
        if b.etag:
            self.send_header("ETag", b.etag)
        if b.modified:
            self.send_header("Last-Modified", b.modified)
        cut = b.cuts > 0 and len(body) > CUT
        if b.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, min(len(body), CUT) if cut else len(body), 40_000):
                piece = body[at : at + 40_000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if not cut:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:CUT] if cut else body)
        self.wfile.flush()
        if cut:
            b.cuts -= 1
            self.close_connection = True
        b.after()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    behaviour = Behaviour()
    with serving(functools.partial(Handler, behaviour)) as behaviour.url:
        yield behaviour


SECURE = {
    "type": "http",
    "name": "web",
    "kind": "web",
    "license": "MIT",
    "min_chars": 1,
    "min_documents": 1,
    "min_bytes": 1,
}


def source(server, *paths, sha256=None, **changes):
    urls = [{"url": server.url + path, "sha256": sha256} for path in paths or ("/a/data.jsonl?x=1",)]
    return build(HttpSource, SECURE | {"urls": urls} | changes, "download.sources[0]")


def sha256(data=DATA):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Pauses, which take no time."""
    seconds = []
    monkeypatch.setattr(http.time, "sleep", seconds.append)
    return seconds


def fetch(made, folder, stop=lambda: False, workers=1):
    with stopping(stop):
        return http.fetch(made, folder, Executor(workers))


def content(found):
    return b"".join(path.read_bytes() for _, path in found)


def test_whole_file_and_its_documents(server, tmp_path, waits):
    made = source(server, "/a/data.jsonl?x=1", "/b/notes.md")
    found = fetch(made, tmp_path)
    assert [path.name for _, path in found] == ["00000-data.jsonl", "00001-notes.md"]
    assert content(found) == DATA * 2 and waits == []
    documents = list(select.documents(made, found, 0.1))
    assert len(documents) == 9001 and documents[0].text == "line 0 "
    assert documents[7].meta == {"file": f"{server.url}/a/data.jsonl", "row": 7}
    notes = {"url": f"{server.url}/b/notes.md", "bytes": len(DATA), "sha256": sha256()}
    assert http.facts(made, found)["urls"][1] == notes
    fetch(made, tmp_path)
    assert len(server.requests) == 2  # nothing is asked for twice


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tag", ["etag", "modified"])
def test_cut_connections_are_continued_where_they_ended(server, tmp_path, chunked, tag):
    server.cuts, server.chunked = 3, chunked
    if tag == "modified":
        server.etag, server.modified = None, formatdate(1_700_000_000, usegmt=True)
    found = fetch(source(server, sha256=sha256()), tmp_path)
    assert content(found) == DATA
    starts = [int((asked or "bytes=0-")[6:-1]) for _, asked, _ in server.requests]
    assert len(starts) == 4 and starts == sorted(starts) and starts[3] > 2 * CUT
    assert {condition for _, _, condition in server.requests[1:]} == {server.etag or server.modified}
    assert not list(tmp_path.glob("*.part"))


def test_without_anything_to_tell_versions_apart_it_begins_again(server, tmp_path):
    server.cuts, server.etag = 2, 'W/"weak"'
    found = fetch(source(server, sha256=sha256()), tmp_path)
    assert content(found) == DATA
    assert [asked for _, asked, _ in server.requests] == [None, None, None]


def test_a_server_that_ignores_ranges(server, tmp_path):
    server.cuts, server.ranges = 1, False
    found = fetch(source(server, sha256=sha256()), tmp_path)
    assert content(found) == DATA
    assert server.requests[1][1] is not None


def test_content_that_changes_on_the_way_is_not_mixed(server, tmp_path):
    new = DATA.replace(b"line", b"LINE") + b'{"text": "more"}\n'
    server.cuts = 1

    def change():
        server.data, server.etag = new, '"two"'

    server.after = change
    found = fetch(source(server), tmp_path)
    assert content(found) == new


def test_a_changed_file_under_a_server_that_does_not_say_so(server, tmp_path):
    """Old and new halves once made one file; only the checksum can tell, and then a fresh start mends it."""
    new = DATA.replace(b"line", b"LINE")
    server.cuts, server.honest = 1, False
    server.after = lambda: setattr(server, "data", new)
    found = fetch(source(server, sha256=sha256(new)), tmp_path)
    assert content(found) == new and len(server.requests) == 3


def test_a_file_that_has_become_shorter(server, tmp_path):
    server.cuts, server.honest = 1, False
    server.after = lambda: setattr(server, "data", DATA[:1000])
    found = fetch(source(server), tmp_path)
    assert content(found) == DATA[:1000]


def test_busy_servers_are_asked_again_when_they_say(server, tmp_path, waits):
    server.failures = [(503, {}), (503, {"Retry-After": "7"}), (429, {"Retry-After": formatdate(0, usegmt=True)})]
    found = fetch(source(server), tmp_path)
    assert content(found) == DATA and sum(waits) == 1 + 7 and max(waits) <= 1
    for odd in ("junk", "²", "٣", "9" * 5000, "-1", ""):
        assert http.retry_after(odd) is None
    assert http.retry_after(" 7 ") == 7.0 and 50 < http.retry_after(formatdate(2**33, usegmt=True))


def test_pauses_double_and_end(server, tmp_path, waits):
    server.failures = [(500, {})] * 50
    told = r"data.jsonl.*: 6 tries in a row failed, the last: HTTP 500.*run dvc repro again"
    with pytest.raises(InputError, match=told):
        fetch(source(server), tmp_path)
    assert sum(waits) == 1 + 2 + 4 + 8 + 16


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "HTTP 404 Not Found. Fix: correct the url"), (403, "HTTP 403.*its terms"), (401, "wants a login")],
)
def test_refusals_are_told_at_once(server, tmp_path, status, message):
    server.failures = [(status, {})] * 9
    with pytest.raises(InputError, match=message):
        fetch(source(server), tmp_path)
    assert len(server.requests) == 1


def test_checksum_mismatch(server, tmp_path):
    with pytest.raises(InputError, match=f"the file has SHA-256 {sha256()}, params.yaml says {'0' * 64}"):
        fetch(source(server, sha256="0" * 64), tmp_path)
    assert not list(tmp_path.glob("*.part"))
    found = fetch(source(server), tmp_path)
    found[0][1].write_bytes(DATA[:-1])  # damaged after it was fetched
    assert content(fetch(source(server), tmp_path)) == DATA


def test_stopped_and_resumed_is_uninterrupted(server, tmp_path):
    asked = iter(range(100))
    with pytest.raises(Interrupted, match="run again to continue"):
        fetch(source(server), tmp_path, stop=lambda: next(asked) == 2)
    (part,) = tmp_path.glob("*.part")
    held = part.stat().st_size
    assert 0 < held < len(DATA)
    found = fetch(source(server), tmp_path)
    assert content(found) == DATA
    assert server.requests[1][1] == f"bytes={held}-"


def test_a_part_without_notes_is_not_trusted(server, tmp_path):
    tmp_path.joinpath("00000-data.jsonl.part").write_bytes(b"of another time")
    assert content(fetch(source(server), tmp_path)) == DATA


def test_compressed_files_come_as_they_are(server, tmp_path):
    server.data = gzip.compress(DATA)
    made = source(server, "/data.jsonl.gz")
    found = fetch(made, tmp_path)
    assert found[0][1].read_bytes() == server.data and len(list(select.documents(made, found, 0.1))) == 9000


def test_no_room_on_the_disk(server, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))
    with pytest.raises(InputError, match=rf"{len(DATA):,} bytes are to come, the disk has room for 5.*free some space"):
        fetch(source(server), tmp_path)


def test_a_disk_that_fills_up_names_the_file_and_keeps_what_came(server, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CUT, hard))
    try:
        with pytest.raises(OSError) as caught:
            fetch(source(server), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and str(caught.value.filename).endswith("data.jsonl.part")
    assert content(fetch(source(server, sha256=sha256()), tmp_path)) == DATA
    assert server.requests[1][1] == f"bytes={CUT}-"


def test_odd_digits_in_a_length_are_no_length(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Handler, "send_header", odd_length(Handler.send_header))
    server.failures = [(503, {"Retry-After": "\u00b2"})]
    assert content(fetch(source(server), tmp_path)) == DATA


def odd_length(plain):
    def send_header(self, key, value):
        plain(self, key, "\u00b2" if key == "Content-Length" and value != "0" else value)
        if key == "Content-Length":
            self.close_connection = True

    return send_header


QUERY = "?X-Amz-Date=20260101&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE&t=opensesame"


def test_queries_never_reach_what_is_written_or_told(server, tmp_path, monkeypatch):
    """Signatures of presigned addresses stood in manifests and in the meta of every document."""
    made = source(server, "/a/data.jsonl" + QUERY)
    found = fetch(made, tmp_path)
    (document, *_) = select.documents(made, found, 0.1)
    told = [str(http.facts(made, found)), str(document.meta), str(http.final_addresses(found))]
    told += [path.read_text() for path in tmp_path.glob("*.json")]
    for status in (404, 500):
        server.failures = [(status, {})] * 9
        with pytest.raises(InputError) as caught:
            fetch(source(server, "/b" + QUERY), tmp_path)
        told.append(str(caught.value))
    server.failures = []
    with pytest.raises(Interrupted) as stopped:
        fetch(source(server, "/c" + QUERY), tmp_path, stop=lambda: True)
    with pytest.raises(InputError) as unreachable:
        fetch(source(server, urls=[{"url": f"http://127.0.0.1:1/d{QUERY}", "sha256": None}]), tmp_path)
    told += [str(stopped.value), str(unreachable.value)]
    assert not [text for text in told if "AKIA" in text or "opensesame" in text or "X-Amz" in text]
    assert len(server.requests) > 3 and all(path.endswith(QUERY) for path, _, _ in server.requests)  # but they are sent


def test_an_address_with_a_signature_is_refused_with_the_file(server):
    """dvc.lock would keep it."""
    values = read_yaml(ROOT / "params.yaml")
    values["download"]["sources"].append(
        {**vars(source(server)), "urls": [{"url": "https://h/a.txt" + QUERY, "sha256": None}]}
    )
    values["mixture"]["sources"]["web"] = {"share": 0.1, "max_epochs": 1.0}
    sections = {name: build(schema, values[name], name) for name, schema in schemas().items()}
    with pytest.raises(ParamsError, match=r"sources\[1\].urls\[0\].url: holds a signature, key or password") as caught:
        check_together(sections)
    assert "AKIA" not in str(caught.value)


def test_provenance_names_where_a_redirect_led(server, tmp_path):
    server.failures = [(302, {"Location": "/mirror/x.jsonl?sig=1"})]
    found = fetch(source(server, "/a/data.jsonl"), tmp_path)
    assert content(found) == DATA
    assert http.final_addresses(found) == {f"{server.url}/a/data.jsonl": f"{server.url}/mirror/x.jsonl"}
    fetch(source(server, "/a/data.jsonl"), tmp_path)
    assert http.final_addresses(found)  # also of what was fetched before


@pytest.mark.parametrize("target", ["http://host/b.txt?sig=1", "HTTP://host/b.txt", "//host/b.txt"])
def test_a_redirect_from_https_to_http_is_refused(tmp_path, monkeypatch, target):
    """It was followed: whoever sits on the way could send any corpus."""
    asked = []

    def send(self, request, **_):
        asked.append(request.url)
        reply = requests.Response()
        reply.status_code, reply.url, reply.request = (302 if len(asked) == 1 else 404), request.url, request
        reply.headers["Location"], reply.raw = target, io.BytesIO()
        return reply

    monkeypatch.setattr("requests.adapters.HTTPAdapter.send", send)
    made = build(HttpSource, {**SECURE, "urls": [{"url": "https://host/a.txt", "sha256": None}]}, "s")
    follows = target.startswith("//")
    told = (
        "https://host/a.txt: HTTP 404"
        if follows
        else r"host/a.txt: the server leads from https to [htpHTP]+://host/b.txt, "
    )
    with pytest.raises(InputError, match=told):
        fetch(made, tmp_path)
    assert len(asked) == 1 + follows


def test_a_body_of_unknown_length_leaves_room_on_the_disk(server, tmp_path, monkeypatch):
    """Nothing but the disk bounded it."""
    import shutil

    server.chunked = True
    monkeypatch.setattr(http, "LOOK_BYTES", 100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 10**8))
    with pytest.raises(InputError, match=r"data.jsonl: 1\d\d,\d{3} bytes came, .*, and 100,000,000 are free"):
        fetch(source(server), tmp_path)
    assert not list(tmp_path.glob("*.part"))
    monkeypatch.undo()
    assert content(fetch(source(server), tmp_path)) == DATA


def test_params(server):
    for url in ("ftp://a/b", "https://host", "a.txt"):
        with pytest.raises(ParamsError, match="is no address of a file"):
            source(server, urls=[{"url": url, "sha256": None}])
    with pytest.raises(ParamsError, match="url: holds a login") as caught:
        source(server, urls=[{"url": "https://me:secret@host/a.txt", "sha256": None}])
    assert "secret" not in str(caught.value)
    with pytest.raises(ParamsError, match="64 lower-case hex digits"):
        source(server, sha256="ABC")
    with pytest.raises(ParamsError, match="urls: no file is given"):
        source(server, urls=[])

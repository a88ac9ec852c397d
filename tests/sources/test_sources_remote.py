"""Files of an object store: a real S3 server of this machine, with accounts, that can hold back an answer."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import sha256_bytes, sha256_file
from athanor.base.errors import InputError, ParamsError
from athanor.base.strict import build
from athanor.runtime import presets
from athanor.runtime.executor import Executor
from athanor.runtime.slots import Slot
from athanor.sources import remote
from athanor.sources.fetch import Fetcher
from athanor.sources.params import RemoteSource
from tests.runtime.shard_toy import until
from tests.sources.world import serving
from tools import canaries
from tools.scratch import MICRO, micro_clone

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
ALL = "s3://private/texts/**/*.jsonl"
BIG = "texts/a/big.jsonl"  # of three blocks; comes first
SMALL = [f"texts/b/{number}.jsonl" for number in range(6)]
BIG_ROWS = 40


def with_store(test: Any) -> Any:
    reason = "not installed: pip install -r requirements-s3.txt"
    return pytest.mark.extra(pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} {reason}")(test))


def lines(name: str, rows: int, size: int) -> bytes:
    text = "".join(
        json.dumps({"text": (f"Row {row} of {name} says this. " * (size // 20))[:size]}) + "\n" for row in range(rows)
    )
    return text.encode()


class Store:
    """moto's server; `before` is called with each request's method, path and range, and may hold it back."""

    def __init__(self) -> None:
        import boto3
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *words: object) -> None:
                pass

        self.before: Callable[[str, str, str], None] = lambda *_: None
        self.asks = False  # for keys
        self.gets: list[tuple[str, str]] = []  # path and range of each object that was read
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

        def client(service: str, key: str, secret: str) -> Any:
            keys = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
            return boto3.client(service, endpoint_url=self.url, **keys)

        self._call("reset")
        self._call("reset-auth", "inf")  # state of the process
        iam = client("iam", "root", "root")
        iam.create_user(UserName="reader")
        key = iam.create_access_key(UserName="reader")["AccessKey"]
        self.key, self.secret = key["AccessKeyId"], key["SecretAccessKey"]
        allowed = {"Effect": "Allow", "Action": ["s3:*"], "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
        self.s3 = client("s3", self.key, self.secret)
        self.s3.create_bucket(Bucket="private")
        self.put(BIG, lines(BIG, BIG_ROWS, 1 << 20))
        for name in SMALL:
            self.put(name, lines(name, 20, 300))

    def put(self, name: str, data: bytes, bucket: str = "private", **options: str) -> None:
        self.s3.put_object(Bucket=bucket, Key=name, Body=data, **options)

    def ask_for_keys(self) -> None:
        self.asks = True
        self._call("reset-auth", "0")

    def _call(self, name: str, data: str = "") -> None:
        import requests

        requests.post(f"{self.url}/moto-api/{name}", data=data).raise_for_status()

    def _answer(self, env: dict[str, Any], start: Any) -> Any:
        method, path, span = env["REQUEST_METHOD"], env["PATH_INFO"], env.get("HTTP_RANGE", "")
        self.before(method, path, span)
        if method == "GET" and span:
            self.gets.append((path, span))
        if self.asks and path.startswith("/private") and "HTTP_AUTHORIZATION" not in env:  # moto ends with 500
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        return self._app(env, start)

    def environment(self, **more: str) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_ENDPOINT_URL": self.url}
        quiet = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", "no_proxy": "127.0.0.1"}
        return keys | quiet | more

    def close(self) -> None:
        self.before = lambda *_: None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def forget_keys() -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    remote._no_key.cache_clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Store()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    forget_keys()
    with contextlib.closing(made):
        yield made


def source(*urls: str, **changes: Any) -> RemoteSource:
    values = {"type": "remote", "name": "far", "urls": list(urls), "max_chars": None} | changes
    return build(RemoteSource, values, "download.sources[0]")


def fetcher(folder: Path, workers: int = 1) -> Fetcher:
    bar = contextlib.nullcontext(SimpleNamespace(update=lambda amount: None))
    place = lambda name, module, inputs: Slot(folder / "slots", inputs)  # noqa: E731
    return Fetcher(folder / "raw", 0.1, lambda *_: bar, lambda: False, place, lambda **_: None, Executor(workers))


def fetched(folder: Path, *urls: str, **changes: Any) -> dict[str, Any]:
    shutil.rmtree(folder / "raw", ignore_errors=True)
    made, of = fetcher(folder), source(*(urls or (ALL,)), **changes)
    made.probe(of)
    return made.fetch(of, None)["far"][1]


def refusal(work: Callable[[], Any], store: Store) -> str:
    """What one says who may not or cannot; one line, without a key."""
    with pytest.raises(InputError) as caught:
        work()
    said = str(caught.value)
    assert "\n" not in said and store.secret not in said and store.key not in said and "Fix: " in said, said
    return said


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def names(store: Store) -> set[str]:
    return {path.removeprefix("/private/") for path, _ in store.gets}


# -- the address -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, told",
    [
        ("s3://key:hunter2@bucket/a.jsonl", "holds a login"),
        ("s3://bucket/a.jsonl?X-Amz-Signature=hunter2", "holds a login or a query"),
        ("https://host/a.jsonl", "use type http"),
        ("ftp://host/a.jsonl", "begin it with s3://"),
        ("s3://bucket", "no address of files"),
        ("s3://bucket/**.jsonl", "write it as a folder"),
        ("hf://datasets/me/set@main/**/*.jsonl", "40 hex digits"),
        ("hf://datasets/me/set/**/*.jsonl", "40 hex digits"),
    ],
)
def test_an_address_with_a_secret_or_without_a_store_is_refused(url, told):
    with pytest.raises(ParamsError) as caught:
        source(url)
    assert told in str(caught.value) and "hunter2" not in str(caught.value)


def test_addresses_that_are_right():
    source("s3://b/x/**/*.parquet", "gs://b/a[0-9].jsonl", "az://b/*.md", f"hf://datasets/me/set@{'0' * 40}/a.jsonl")


@pytest.mark.parametrize("scheme, package", [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    remote._no_key.cache_clear()
    with pytest.raises(InputError) as caught:
        fetcher(tmp_path).probe(source(f"{scheme}://bucket/*.jsonl"))
    assert f"needs the package {package} (extra {scheme}). Fix: pip install {package} fsspec==" in str(caught.value)


# -- a data set of the hub ---------------------------------------------------------------------

COMMIT = "0123456789" * 4


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub answers of one data set."""

    files = {f"data/{name}.jsonl": b'{"text": "A row of text."}\n' * 40 for name in "abc"}

    def do_GET(self) -> None:  # noqa: N802
        name, span = self.path.partition(f"/resolve/{COMMIT}/")[2], self.headers["Range"]
        if name:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            answer = self.files[name][first : last + 1]
        elif "/tree/" in self.path:
            found = [
                {"type": "file", "oid": name[5] * 40, "size": len(self.files[name]), "path": name}
                for name in self.files
            ]
            answer = json.dumps(found).encode()
        else:
            answer = json.dumps({"id": "me/set", "sha": COMMIT, "siblings": []}).encode()
        self.send_response(206 if name else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        pass


def test_a_data_set_of_the_hub_at_its_commit(tmp_path):
    """In a process of its own: the library reads its endpoint when it is imported."""
    url = f"hf://datasets/me/set@{COMMIT}/data/[ac].jsonl"
    program = "import json, sys, pathlib; from tests.sources.test_sources_remote import fetched; "
    program += "print(json.dumps(fetched(pathlib.Path(sys.argv[1]), sys.argv[2])['urls']))"
    with serving(Hub) as endpoint:
        env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-c", program, str(tmp_path), url]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    objects = json.loads(done.stdout)
    wanted = [(url.replace("[ac]", name), name * 40) for name in "ac"]
    assert [(item["url"], item["identity"]) for item in objects] == wanted
    assert objects[0]["sha256"] == sha256_bytes(Hub.files["data/a.jsonl"])


# -- what a store says -----------------------------------------------------------------------


@with_store
def test_what_cannot_be_had_is_one_line_before_anything_is_fetched(store, tmp_path, monkeypatch):
    def said(url: str = ALL, **env: str) -> str:
        forget_keys()
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value) if value else patch.delenv(name)
            return refusal(lambda: fetcher(tmp_path).probe(source(url)), store)

    store.ask_for_keys()
    keys = "Fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    said_without = said(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert f"access without a key is refused (AccessDenied). {keys}" in said_without
    for wrong, code in (
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"),
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
    ):
        told = said(**{wrong: "AKIA" + "7" * 16})
        assert f"{ALL}: access with the key of the environment is refused ({code}). {keys}" in told
        assert "7777" not in told
    assert "s3://nobody/x/*.md: no such bucket or object" in said("s3://nobody/x/*.md")
    assert "s3://private/texts/none.md: no such bucket or object" in said("s3://private/texts/none.md")
    assert "all files of a folder are FOLDER/**/*.parquet" in said("s3://private/texts/")
    assert "s3://private/no/*.md: no object matches" in said("s3://private/no/*.md")
    store.put("texts/table.xls", b"a,b")
    assert "s3://private/texts/table.xls: unknown file type '.xls'" in said("s3://private/texts/*")
    assert "check the network and set AWS_" in said(AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert not store.gets


@with_store
def test_a_public_bucket_needs_no_key(store, tmp_path, monkeypatch):
    store.s3.create_bucket(Bucket="open", ACL="public-read")
    store.put("a.jsonl", lines("a", 20, 300), "open", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    facts = fetched(tmp_path, "s3://open/*.jsonl")
    assert [item["url"] for item in facts["urls"]] == ["s3://open/a.jsonl"]


@with_store
@pytest.mark.parametrize("rows", [BIG_ROWS, 1], ids=["as long", "shorter"])
def test_an_object_that_changes_while_it_is_read(store, tmp_path, rows):
    def change(method: str, path: str, span: str) -> None:
        if method == "GET" and path == f"/private/{BIG}" and not span.startswith("bytes=0-"):
            store.before = lambda *_: None
            store.put(BIG, lines("another", rows, 1 << 20))

    store.before = change
    said = refusal(lambda: fetched(tmp_path), store)
    assert f"s3://private/{BIG}: has changed since it was listed. Fix: put it back; or delete " in said
    assert not (tmp_path / "raw").exists()


@with_store
def test_an_object_that_changes_between_two_runs(store, tmp_path):
    urls = "s3://private/texts/b/*.jsonl"
    first = fetched(tmp_path, urls)
    assert [item["url"] for item in first["urls"]] == [f"s3://private/{name}" for name in SMALL]
    assert all(item["sha256"] and item["identity"] and item["bytes"] for item in first["urls"])
    store.put(SMALL[2], lines("another", 20, 300))
    store.put("texts/b/new.jsonl", lines("new", 20, 300))
    store.s3.delete_object(Bucket="private", Key=SMALL[0])
    said = refusal(lambda: fetched(tmp_path, urls), store)
    assert f"s3://private/{SMALL[0]}: is gone since an earlier run listed it, and so are 2 others." in said
    listing = Path(said.partition("delete ")[2].partition(" to take")[0])
    listing.unlink()
    store.gets.clear()
    second = fetched(tmp_path, urls)
    assert names(store) == {SMALL[2], "texts/b/new.jsonl"}
    assert [item["url"] for item in second["urls"]] == [f"s3://private/{n}" for n in [*SMALL[1:], "texts/b/new.jsonl"]]
    assert len(list((listing.parent / remote.FILES).iterdir())) == 6  # nothing is left of what is gone


@with_store
def test_an_object_that_is_gone_when_its_turn_comes(store, tmp_path):
    def remove(method: str, path: str, span: str) -> None:
        if method == "GET" and path == f"/private/{SMALL[0]}":
            store.before = lambda *_: None
            store.s3.delete_object(Bucket="private", Key=SMALL[1])

    store.before = remove
    said = refusal(lambda: fetched(tmp_path), store)
    assert f"s3://private/{SMALL[1]}: no such bucket or object" in said


# -- the stage -------------------------------------------------------------------------------


class Machine:
    """A checkout with a private bucket as its only source, and a home; both are looked through for the keys."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.checkout, self.planted = folder, folder / "checkout", canaries.Planted()
        self.store = store
        for name in ("home", "tmp", "said"):
            (folder / name).mkdir(parents=True)
        micro_clone(ROOT, self.checkout, os.environ | {"HOME": str(folder)})
        params = YAML().load(presets.complete(ROOT / MICRO))
        params["download"]["sources"] = [{"type": "remote", "name": "far", "urls": [ALL], "max_chars": None}]
        params["mixture"]["sources"] = {"far": {"share": 1.0, "max_epochs": 1.0}}
        YAML().dump(params, self.checkout / "params.yaml")
        self.planted.cores = {"key": store.key, "secret": store.secret}

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "MLFLOW_", "ATHANOR_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        places = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), "PATH": path}
        tracking = {} if words[0] == "athanor" else {"ATHANOR_TRACKING": "off"}  # shipped at the end, all at once
        env = clean | places | tracking | self.store.environment(ATHANOR_WORKERS="2", DVC_NO_ANALYTICS="1") | env
        with open(self.folder / "said" / name, "wb") as said:
            command, both = [sys.executable, "-m", *words], {"stdout": said, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, cwd=self.checkout, env=env, **both)

    def run(self, name: str, *words: str, status: int = 0, **env: str) -> str:
        ended = self.start(name, *words, **env).wait()
        said = (self.folder / "said" / name).read_text()
        assert ended == status, said
        return said


@with_store
def test_killed_and_resumed_is_uninterrupted_and_no_key_is_written(store, tmp_path):
    """Two workers; one is killed in the second block of the big object, the other after some small ones."""
    store.ask_for_keys()
    machine = Machine(tmp_path / "one", store)
    held = {f"/private/{BIG}": threading.Event(), f"/private/{SMALL[2]}": threading.Event()}
    release = threading.Event()

    def hold(method: str, path: str, span: str) -> None:
        if method == "GET" and path in held and (path != f"/private/{BIG}" or not span.startswith("bytes=0-")):
            held[path].set()
            release.wait()

    store.before = hold
    running = machine.start("killed", "stages.download")
    try:
        until(lambda: all(event.is_set() for event in held.values()) or running.poll() is not None, "two at work")
        assert running.returncode is None, (machine.folder / "said" / "killed").read_text()
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
        store.before = lambda *_: None
        release.set()
    store.gets.clear()
    machine.run("resumed", "dvc", "repro", "download")
    assert names(store) == {BIG, *SMALL[2:]}
    assert [span for path, span in store.gets if path.endswith(BIG)][
        0
    ] == f"bytes={remote.BLOCK_BYTES}-{2 * remote.BLOCK_BYTES - 1}"

    wrong = {"AWS_ACCESS_KEY_ID": "AKIA" + "WRONG234" * 2, "AWS_SECRET_ACCESS_KEY": "wrongwrong7654321" * 2}
    machine.planted.cores |= wrong
    said = machine.run("refused", "stages.download", status=1, **wrong)
    assert "access with the key of the environment is refused (InvalidAccessKeyId)" in said and "Traceback" not in said

    other = Machine(tmp_path / "two", store)
    other.run("whole", "stages.download", ATHANOR_WORKERS="1")
    for name in ("data/raw", "data/instruct", "data/battery"):
        assert contents(machine.checkout / name) == contents(other.checkout / name)
    machine.run("ship", "athanor", "ship", "--rebuild")
    found, files, _ = canaries.search(machine)
    assert found == [] and files > 100

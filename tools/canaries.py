"""Plant secrets where people keep them, use the pipeline and the server, and look for them in every byte written.

    python -m tools.canaries FOLDER            everything: the whole graph at micro size, and chats with its model (minutes)
    python -m tools.canaries --quick FOLDER    one stage, failures, a server without a model, the image's context

FOLDER is made: a checkout, a home and a folder for temporary files in it. What
was written there afterwards is searched, also inside gzip, zstd, zlib (Git),
Parquet and SQLite, and so are the output of every command and the command
lines of all processes while they run. Exit status 1 if anything is found.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import http.server
import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import requests
import zstandard
from ruamel.yaml import YAML

from athanor.runtime import presets
from tools.planted import ADDRESSES, PLANTED, VARIABLES
from tools.scratch import MICRO, micro_clone

ROOT = Path(__file__).resolve().parents[1]
TEXT = "A secret is found where it was planted, or it is found nowhere; this is line {} of the text that says so. "
# What the web server has, has not and breaks off, and sources whose address or licence are refused for what they hold.
NAMES = ("docs.jsonl", "gone.jsonl", "broken.jsonl", "signed.jsonl", "licence.jsonl")


@dataclass
class Planted:
    """Names of the places, and the random middle of the secret that lies at each."""

    cores: dict[str, str] = field(default_factory=dict)
    files: dict[Path, bytes] = field(default_factory=dict)  # what was written in planting: found there it is no leak

    def new(self, name: str, shape: str = "{}") -> str:
        self.cores[name] = secrets.token_hex(12)
        return shape.format(self.cores[name])

    def plant(self, path: Path, shape: str) -> None:
        """Add to a file; each `{}` of the shape is a secret of its own."""
        text = shape.format(*(self.new(f"{path.name} {number}") for number in range(shape.count("{}"))))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        path.chmod(0o600)
        self.files[path] = path.read_bytes()


def environment(planted: Planted, folder: Path) -> dict[str, str]:
    shapes = VARIABLES | {f"ATHANOR_NOTE_{name.split()[0].upper()}": shape for name, shape in ADDRESSES.items()}
    secret = {name: planted.new(name, shape) for name, shape in shapes.items()}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_", "ATHANOR_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PATH": path, "no_proxy": "127.0.0.1"}
    return {**clean, **places, "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **secret}


def make_checkout(planted: Planted, folder: Path, port: int) -> Path:
    """The files that Git knows, with a source whose addresses are signed, committed; then the planted files."""
    checkout = folder / "checkout"
    micro_clone(ROOT, checkout, os.environ | {"HOME": str(folder)})
    for name, shape in PLANTED.items():
        planted.plant(folder / name, shape)
    for name in NAMES:
        source = {"type": "http", "name": "web", "kind": "prose", "text_column": "text", "select": None}
        source |= {"max_document_bytes": 10_000, "min_chars": 100, "min_documents": 10, "min_bytes": 1000}
        source["license"] = planted.new("licence", "see https://me:{}@host/x") if name == "licence.jsonl" else "own"
        signed = planted.new(f"query of {name}", "X-Amz-Expires=60&ticket={}")
        if name == "signed.jsonl":
            signed = planted.new("credential", "X-Amz-Credential={}") + planted.new("signature", "&X-Amz-Signature={}")
        source["urls"] = [{"url": f"http://127.0.0.1:{port}/{name}?{signed}", "sha256": None}]
        params = YAML().load(presets.complete(ROOT / MICRO))
        params["download"]["sources"] = [source]
        params["mixture"]["sources"] = {"web": {"share": 1.0, "max_epochs": 1.0}}
        path = folder / f"{name}.yaml"
        YAML().dump(params, path)
        planted.files[path] = path.read_bytes()
    return checkout


class Web(http.server.BaseHTTPRequestHandler):
    """A server of files, and a model's endpoint that says the key back, as an unkind one may."""

    def do_GET(self) -> None:  # noqa: N802
        body = "".join(json.dumps({"text": TEXT.format(n) * 6}) + "\n" for n in range(200)).encode()
        name = self.path.partition("?")[0]
        self.send_response(404 if "gone" in name else 200)
        self.send_header("Content-Length", str(len(body) * (2 if "broken" in name else 1)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:  # noqa: N802
        body = json.dumps({"error": {"message": f"wrong key: {self.headers['Authorization']}"}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


class World:
    """Commands in the checkout, their output, and the command lines of all that runs meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.planted = folder, Planted()
        for name in ("home", "tmp", "said"):
            (folder / name).mkdir(parents=True)
        self.web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
        threading.Thread(target=self.web.serve_forever, daemon=True).start()
        self.env = environment(self.planted, folder)
        self.checkout = make_checkout(self.planted, folder, self.web.server_port)
        self.lines: set[bytes] = set()
        self._end = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)
        self._watch.start()

    def _sample(self) -> None:
        while not self._end.wait(0.02):
            for one in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self.lines.add("\0".join(one.cmdline()).encode())

    def run(self, name: str, *words: str, status: int | None = 0, **more: str) -> str:
        command, pipe = [sys.executable, "-m", *words], subprocess.PIPE
        done = subprocess.run(command, cwd=self.checkout, env=self.env | more, stdout=pipe, stderr=subprocess.STDOUT)
        (self.folder / "said" / f"{name}.txt").write_bytes(done.stdout)
        if status is not None and done.returncode != status:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:].decode(errors='replace')}")
        return done.stdout.decode(errors="replace")

    @contextlib.contextmanager
    def serving(self, *words: str) -> Iterator[int]:
        with open(self.folder / "said" / "serve.txt", "wb") as said:
            command = [sys.executable, "-m", "athanor", "serve", "--port", "0", *words]
            server = subprocess.Popen(command, cwd=self.checkout, env=self.env, stdout=said, stderr=subprocess.STDOUT)
            try:
                end = time.monotonic() + 90
                while not (found := listening(server.pid)):
                    if time.monotonic() > end or server.poll() is not None:
                        raise SystemExit("no server:\n" + (self.folder / "said" / "serve.txt").read_text())
                    time.sleep(0.1)
                yield found.pop()
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(60)

    def close(self) -> None:
        self._end.set()
        self._watch.join()
        self.web.shutdown()
        (self.folder / "said" / "command lines").write_bytes(b"\n".join(sorted(self.lines)))


def listening(pid: int) -> set[int]:
    return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}


def ask(port: int, method: str, path: str, body: object = None, **headers: str) -> int:
    url = f"http://127.0.0.1:{port}{path}"
    return requests.request(method, url, json=body, headers=headers, timeout=120).status_code


def use(world: World, quick: bool) -> None:
    """Everything that may write: good ends, bad ends, and requests with secrets in them."""
    folder, new, run = world.folder, world.planted.new, world.run
    address = new("address of the tracking store", "http://me:{}@127.0.0.1:9")
    for name in NAMES:
        shutil.copyfile(folder / f"{name}.yaml", world.checkout / "params.yaml")
        run(f"download {name}", "stages.download", status=int(name != NAMES[0]), ATHANOR_TRACKING="off")
    run("ship to nobody", "athanor", "ship", "--rebuild", status=1, MLFLOW_TRACKING_URI=address)
    run("ship", "athanor", "ship", "--rebuild")
    run("doctor", "athanor", "doctor", status=None)
    for name, shape in ADDRESSES.items():
        params = YAML().load(folder / f"{NAMES[0]}.yaml")
        params["download"]["sources"][0]["license"] = f"see {new(f'licence with a {name}', shape)}"
        YAML().dump(params, world.checkout / "params.yaml")
        run(f"licence {name}", "athanor", "plan", status=2)
        run(f"doctor {name}", "athanor", "doctor", status=None, MLFLOW_TRACKING_URI=new(f"store with a {name}", shape))
    run("bundle", "athanor", "explain", "--bundle")
    (world.checkout / "params.yaml").write_text(presets.complete(ROOT / MICRO))
    if not quick:
        run("repro", "dvc", "repro")
        run("ship again", "athanor", "ship", "--wait", "90")
        for words in (["plan"], ["summary"], ["health"], ["verify"], ["compare"], ["doctor"]):
            run(words[0], "athanor", *words, status=None)
        params = YAML().load(world.checkout / "params.yaml")
        params["synthetic"] |= {"api": "openai", "base_url": f"http://127.0.0.1:{world.web.server_port}", "model": "m"}
        params["synthetic"]["key_env"] = "SYNTHESIS_KEY"
        YAML().dump(params, world.checkout / "params.yaml")
        run("synthesize", "athanor", "synthesize", status=None)
    right = {"Authorization": f"Bearer {world.env['ATHANOR_API_KEY']}"}
    with world.serving() as port:
        ask(port, "GET", f"/v1/models?api_key={new('query of a request')}")
        ask(port, "GET", "/v1/models", Authorization=new("wrong key", "Bearer {}"))
        ask(port, "GET", "/v1/models", **{"x-api-key": new("x-api-key header"), "Cookie": new("cookie", "session={}")})
        ask(port, "GET", f"/{new('path of a request')}", **right)
        ask(port, "POST", "/v1/chat/completions", {"messages": 1, "api_key": new("option of a request")}, **right)
        assert ask(port, "GET", "/v1/models", **right) == 200
        assert ask(port, "GET", "/api/corrections", **right) == 200
        if not quick:
            question = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 8}
            question["user"] = new("user of a request")
            assert ask(port, "POST", "/v1/chat/completions", question, **right) == 200


def image(world: World) -> Iterator[tuple[str, bytes]]:
    """The files of the image's context, planted ones among them if they come along."""
    from docker.utils.build import exclude_paths

    patterns = re.findall("(?m)^[^#\n].*", (world.checkout / ".dockerignore").read_text())
    for name in exclude_paths(str(world.checkout), patterns):
        if (path := world.checkout / name).is_file():
            yield f"image: {name}", path.read_bytes()


def forms(cores: Mapping[str, str]) -> dict[bytes, str]:
    """The bytes to look for: each secret in plain, and in base64 however it lies in there."""
    found = {}
    for name, core in cores.items():
        found[core.encode()] = name
        for before in range(3):
            coded = base64.b64encode(b"x" * before + core.encode())
            found[coded[4 if before else 0 : -4]] = name
    return found


def contents(path: Path, data: bytes) -> Iterator[bytes]:
    """A file's bytes, and what is packed in them."""
    yield data
    with contextlib.suppress(OSError, EOFError, zlib.error):
        if data[:2] == b"\x1f\x8b":
            yield gzip.decompress(data)
        elif data[:1] == b"\x78":
            yield zlib.decompress(data)
    with contextlib.suppress(zstandard.ZstdError):
        if data[:4] == b"\x28\xb5\x2f\xfd":
            yield zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    if data[:4] == b"PAR1":
        file = pq.ParquetFile(path)
        yield str(file.schema_arrow.metadata).encode()
        for batch in file.iter_batches(1000):
            yield str(batch.to_pylist()).encode()
    if data[:15] == b"SQLite format 3":  # a long text is spread over pages
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            db.text_factory = bytes
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for row in db.execute(f'SELECT * FROM "{table.decode()}"'):
                    yield b"\n".join(value for value in row if isinstance(value, bytes))


def search(world: World) -> tuple[list[tuple[str, str]], int, int]:
    """(secret, place) of each leak, files searched, bytes searched (unpacked)."""
    wanted, found, count, size = forms(world.planted.cores), set(), 0, 0

    def look(place: str, parts: Iterator[bytes]) -> int:
        seen = 0
        for part in parts:
            seen += len(part)
            found.update((name, place) for form, name in wanted.items() if form in part)
        return seen

    for path in sorted(world.folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if world.planted.files.get(path) == data:
                continue
            count, size = count + 1, size + look(str(path.relative_to(world.folder)), contents(path, data))
    for place, data in image(world):
        count, size = count + 1, size + look(place, iter([data]))
    return sorted(found), count, size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.canaries", description="Secrets planted, used and looked for.")
    parser.add_argument("--quick", action="store_true", help="no training")
    parser.add_argument("folder", type=Path, help="made anew")
    options = parser.parse_args(arguments)
    world = World(options.folder.resolve())
    try:
        use(world, options.quick)
    finally:
        world.close()
    found, count, size = search(world)
    for name, place in found:
        print(f"FOUND {name}: {place}")
    print(f"{len(world.planted.cores)} secrets planted, {len(found)} found in {count:,} files, {size:,} bytes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

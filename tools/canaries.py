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
import contextlib
import http.client
import http.server
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ruamel.yaml import YAML

from athanor.runtime import presets
from tools.canary_search import contents, forms
from tools.scratch import MICRO, micro_clone

ROOT = Path(__file__).resolve().parents[1]
TEXT = "A secret is found where it was planted, or it is found nowhere; this is line {} of the text that says so. "
# What the web server has, has not and breaks off, and sources whose address or licence are refused for what they hold.
FILES = {
    "docs.jsonl": 0,
    "gone.jsonl": 1,
    "broken.jsonl": 1,
    "signed.jsonl": 1,
    "licence.jsonl": 1,
}  # status of a download


@dataclass
class Planted:
    """Names of the places, and the random middle of the secret that lies at each."""

    cores: dict[str, str] = field(default_factory=dict)
    files: dict[Path, bytes] = field(default_factory=dict)  # what was written in planting: found there it is no leak

    def new(self, name: str, shape: str = "{}") -> str:
        self.cores[name] = secrets.token_hex(12)
        return shape.format(self.cores[name])

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        self.files[path] = path.read_bytes()


def environment(planted: Planted, folder: Path) -> dict[str, str]:
    new = planted.new
    secret = {
        "HF_TOKEN": new("HF_TOKEN", "hf_{}"),
        "HUGGING_FACE_HUB_TOKEN": new("HUGGING_FACE_HUB_TOKEN", "hf_{}"),
        "AWS_ACCESS_KEY_ID": new("AWS_ACCESS_KEY_ID"),
        "AWS_SECRET_ACCESS_KEY": new("AWS_SECRET_ACCESS_KEY"),
        "AWS_SESSION_TOKEN": new("AWS_SESSION_TOKEN"),
        "AZURE_STORAGE_CONNECTION_STRING": new("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey={}==;B=c"),
        "GITHUB_TOKEN": new("GITHUB_TOKEN", "ghp_{}"),
        "OPENAI_API_KEY": new("OPENAI_API_KEY", "sk-proj-{}"),
        "NPM_TOKEN": new("NPM_TOKEN", "npm_{}"),
        "MLFLOW_TRACKING_PASSWORD": new("MLFLOW_TRACKING_PASSWORD"),
        "MLFLOW_TRACKING_TOKEN": new("MLFLOW_TRACKING_TOKEN"),
        "WAREHOUSE": new("database address", "postgresql://me:{}@db.example/x"),
        "HOOK": new("Slack webhook", "https://hooks.slack.com/services/T000/B000/{}"),
        "DEPLOY": new("private key", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"),
        "PIP_INDEX_URL": new("PIP_INDEX_URL", "https://me:{}@pip.example/simple"),
        "TORCH_INDEX": new("TORCH_INDEX", "https://me:{}@torch.example/simple"),
        "HTTPS_PROXY": new("HTTPS_PROXY", "http://me:{}@127.0.0.1:9"),
        "SYNTHESIS_KEY": new("key of synthesis"),
        "ATHANOR_API_KEY": new("key of the server"),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_", "ATHANOR_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PATH": path, "no_proxy": "127.0.0.1"}
    return {**clean, **places, "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **secret}


def plant_files(planted: Planted, folder: Path) -> None:
    """What lies in a home and in a checkout, and is nobody's business."""
    home, checkout, new, write = folder / "home", folder / "checkout", planted.new, planted.write
    write(home / ".netrc", new("netrc", "machine 127.0.0.1 login me password {}\n"))
    write(home / ".cache/huggingface/token", new("token of the hub", "hf_{}"))
    write(
        home / ".aws/credentials",
        new("AWS credentials", "[default]\naws_access_key_id = AKIAX\naws_secret_access_key = {}\n"),
    )
    write(
        home / ".config/pip/pip.conf", new("pip.conf", "[global]\nextra-index-url = https://me:{}@pip.example/simple\n")
    )
    write(home / ".git-credentials", new("credentials of Git", "https://me:{}@git.example\n"))
    write(home / ".pypirc", new(".pypirc", "[pypi]\npassword = pypi-{}\n"))
    write(home / ".ssh/id_ed25519", new("SSH key", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n"))
    header = '[http]\n\textraheader = "AUTHORIZATION: Basic {}"\n[user]\n\tname = me\n\temail = me@localhost\n'
    write(home / ".gitconfig", new("header of Git", header))
    write(checkout / ".env", new(".env", "API_TOKEN={}\n"))
    write(checkout / "server.key", new("TLS key", "-----BEGIN PRIVATE KEY-----\n{}\n"))
    write(
        checkout / "machine.yaml",
        f"# {new('note in machine.yaml')}\nlaunch: {{args: [--env=API_TOKEN={new('launch.args')}]}}\n",
    )
    remote = "['remote \"store\"']\n    url = s3://bucket/x\n    secret_access_key = {}\n"
    web = "['remote \"web\"']\n    url = https://me:{}@dvc.example/x\n    password = "
    remotes = [
        new("secret of DVC's remote", remote),
        new("login of DVC's remote", web),
        new("password of DVC's remote"),
    ]
    write(checkout / ".dvc/config.local", "".join(remotes) + "\n")
    config = checkout / ".git" / "config"
    write(
        config,
        config.read_text() + new("remote of Git", '[remote "origin"]\n\turl = https://me:{}@git.example/x.git\n'),
    )


def make_checkout(planted: Planted, folder: Path, port: int) -> Path:
    """The files that Git knows, with a source whose addresses are signed, committed; then the planted files."""
    checkout = folder / "checkout"
    micro_clone(ROOT, checkout, os.environ | {"HOME": str(folder)})
    plant_files(planted, folder)
    for name in FILES:
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def use(world: World, quick: bool) -> None:
    """Everything that may write: good ends, bad ends, and requests with secrets in them."""
    folder, new, run = world.folder, world.planted.new, world.run
    address = new("address of the tracking store", "http://me:{}@127.0.0.1:9")
    for name, status in FILES.items():
        shutil.copyfile(folder / f"{name}.yaml", world.checkout / "params.yaml")
        run(f"download {name}", "stages.download", status=status, ATHANOR_TRACKING="off")
    run("ship to nobody", "athanor", "ship", "--rebuild", status=1, MLFLOW_TRACKING_URI=address)
    run("ship", "athanor", "ship", "--rebuild")
    run("doctor", "athanor", "doctor", status=None)
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
        assert ask(port, "POST", "/api/chats", {"title": "a chat"}, **right) == 201
        if not quick:
            question = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 8}
            question["user"] = new("user of a request")
            assert ask(port, "POST", "/v1/chat/completions", question, **right) == 200


def image(world: World) -> Iterator[tuple[str, bytes]]:
    """The files of the image's context, planted ones among them if they come along."""
    from docker.utils.build import exclude_paths

    patterns = [
        line
        for line in (world.checkout / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for name in exclude_paths(str(world.checkout), patterns):
        if (path := world.checkout / name).is_file():
            yield f"image: {name}", path.read_bytes()


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
    where = f"{count:,} files, {size:,} bytes, {len(world.lines):,} command lines"
    print(f"{len(world.planted.cores)} secrets planted, {len(found)} found in {where}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

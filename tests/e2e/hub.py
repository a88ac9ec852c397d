"""A hub on this machine: stand-ins of public data sets in their own layout, and the part of the hub's protocol that
reads them. What they look like is in hub.yaml."""

from __future__ import annotations

import ast
import contextlib
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import random
import re
import sysconfig
import threading
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML

from athanor.classifiers import weak

SETS: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_name("hub.yaml"))
FILES = 4  # of each split
# Of kinds of text, on average.
CHARS = {"page_text": 4500, "article": 3000, "paper": 60_000, "book": 350_000, "question": 100, "answer": 250}
LICENCES = ("mit", "apache-2.0", "gpl-3.0")


class Texts:
    """Texts that read like their kind as far as rules and classifiers can tell: word follows word as in Python's manual."""

    def __init__(self, seed: str) -> None:
        self.rng, self.count = random.Random(seed), 0
        self.following, self.words = chain()

    def prose(self, chars: int) -> str:
        word, lines, line, size = self.rng.choice(self.words), [], [], 0
        while size < chars:
            line.append(word := self.rng.choice(self.following[word]))
            size += len(word) + 1
            if word.endswith(".") and self.rng.random() < 0.2:
                lines.append(" ".join(line))
                line = []
        text = "\n\n".join([*lines, " ".join(line)])
        return f"{text[0].upper()}{text[1:]}."

    def make(self, value: Any) -> Any:
        """A value of hub.yaml with what begins with $ made."""
        if isinstance(value, dict):
            return {key: self.make(item) for key, item in value.items()}
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        size = CHARS.get(value[1:])
        return self.prose(int(size * self.rng.uniform(0.3, 1.7))) if size else getattr(self, f"_{value[1:]}")()

    def _web(self) -> str:
        text = self.make("$page_text")
        return f"{text}\n\n{self._item()}" if self.rng.random() < 0.01 else text

    def _code(self) -> str:
        return "\n\n\n".join(self.rng.sample(functions(), self.rng.randint(2, 12)))

    def _messages(self) -> list[dict[str, str]]:
        roles = ("user", "assistant") * self.rng.randint(1, 2)
        return [{"content": self.make("$question" if role == "user" else "$answer"), "role": role} for role in roles]

    def _sharegpt(self) -> list[dict[str, Any]]:
        names = {"user": "human", "assistant": "gpt"}
        return [{"from": names[turn["role"]], "value": turn["content"], "weight": None} for turn in self._messages()]

    def _score(self) -> float:
        return round(self.rng.uniform(2.5, 5.0), 3)

    def _page(self) -> str:
        self.grade = self.rng.randint(0, 5)
        return f"{self._web()} {' '.join(self.rng.choices(self.words[self.grade * 40 :][:40], k=60))}"

    def _grade(self) -> int:
        return self.grade

    def _comment(self) -> str:
        self.toxic = self.rng.random() < 0.3
        return f"{self.make('$answer')} {' '.join(self.rng.choices(weak.TEXTS['abuse' if self.toxic else 'friendly']['noun'], k=8))}"

    def _toxicity(self) -> float:
        return 0.8 if self.toxic else 0.0

    def _item(self) -> str:
        return self.rng.choice(items())

    def _licence(self) -> str:
        return self.rng.choice(LICENCES)

    def _id(self) -> str:
        self.count += 1
        return f"{self.count:08d}"

    def _url(self) -> str:
        return f"https://example.org/{self.count}"

    def _parent(self) -> str | None:  # question and answer by turns
        return None if self.count % 2 else f"{self.count - 1:08d}"

    def _role(self) -> str:
        return "prompter" if self.count % 2 else "assistant"


@functools.cache
def chain() -> tuple[dict[str, list[str]], list[str]]:
    """What follows each word of Python's manual, and the words."""
    words = re.findall(r"[A-Za-z][a-z'-]*[.,;:?!]?", " ".join(topics.values()))
    following: dict[str, list[str]] = defaultdict(list)
    for word, after in itertools.pairwise([*words, words[0]]):
        following[word].append(after)
    return following, list(following)


@functools.cache
def items() -> list[str]:
    """Questions of benchmarks, which some web pages hold."""
    texts = Texts("items")
    return [texts.prose(150) for _ in range(40)]


@functools.cache
def functions() -> list[str]:
    """The functions of the standard library's modules."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno > 4:
                found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


def write(folder: Path, name: str, config: str, split: str, size: int, revision: str) -> None:
    """`size` bytes of rows of a split, divided among its files, a row in each file of the other splits, and the card."""
    described = SETS[name]
    root = folder / name / revision
    texts = Texts(f"{name} {config} {split}")
    for key, pattern in described["files"][config].items():
        for number in range(FILES):
            path = root / pattern.replace("*", str(number))
            path.parent.mkdir(parents=True, exist_ok=True)
            rows, written = [], 0
            while not rows or key == split and written < size / FILES:
                rows.append(texts.make(described["row"]))
                written += len(json.dumps(rows[-1]))
            write_rows(path, rows)
    configs = [
        {"config_name": key, "data_files": [{"split": s, "path": p} for s, p in splits.items()]}
        for key, splits in described["files"].items()
        if all(any(root.glob(p)) for p in splits.values())
    ]
    (root / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


class Handler(http.server.SimpleHTTPRequestHandler):
    """What the client asks of a hub: a set's files at a revision, facts of paths, and parts of files."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:  # noqa: N802
        words = urllib.parse.unquote(self.path.partition("?")[0]).strip("/").split("/")
        if words[:2] == ["api", "datasets"] and len(words) > 5:
            name, revision, path = "/".join(words[2:4]), words[5], "/".join(words[6:])
            base = self.root / name / revision
            files = sorted(file for file in base.rglob("*") if file.is_file())
            if words[4] == "revision" and base.is_dir():
                siblings = [{"rfilename": file.relative_to(base).as_posix()} for file in files]
                self.answer({"id": name, "sha": revision, "siblings": siblings, "private": False, "gated": False})
            elif words[4] == "tree" and (base / path).is_dir():
                recursive = "recursive=true" in self.path.lower()
                found = (base / path).rglob("*") if recursive else (base / path).iterdir()
                self.answer([facts(base, item) for item in sorted(found)])
            else:
                self.answer({"error": "Not Found"}, 404)
        elif words[0] == "datasets" and len(words) > 4 and words[3] == "resolve":
            self.file(self.root / "/".join(words[1:3]) / words[4] / "/".join(words[5:]), words[4])
        else:
            self.answer({"error": "Not Found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        words = urllib.parse.unquote(self.path).strip("/").split("/")
        base = self.root / "/".join(words[2:4]) / words[5]
        kind = self.headers.get("Content-Type", "")
        paths = json.loads(body)["paths"] if "json" in kind else urllib.parse.parse_qs(body).get("paths", [])
        paths = [paths] if isinstance(paths, str) else paths
        self.answer([facts(base, base / path) for path in paths if (base / path).exists()])

    def file(self, path: Path, revision: str) -> None:
        if not path.is_file():
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        size = path.stat().st_size
        headers = {"ETag": f'"{oid(path)}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(span[1]), min(int(span[2] or size - 1), size - 1)) if span else (0, size - 1)
        with open(path, "rb") as file:
            file.seek(first)
            data = file.read(last - first + 1)
        headers |= {"Content-Range": f"bytes {first}-{last}/{size}"} if span else {}
        self.answer(data, 206 if span else 200, headers)

    def answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def oid(path: Path) -> str:
    return hashlib.sha1(path.name.encode()).hexdigest()


def facts(base: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(base).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": oid(path), "size": 0}
    return {"type": "file", "path": name, "oid": oid(path), "size": path.stat().st_size}


@contextlib.contextmanager
def serving(root: Path, handler: type[Handler] = Handler) -> Iterator[str]:
    """The address of a hub with the data sets below `root`: owner/name/revision/files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (handler,), {"root": root}))
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed is no news
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

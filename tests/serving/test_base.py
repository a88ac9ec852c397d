"""The base model under the name `base`: found, loaded, and going on with a text, in the terminal, too."""

from __future__ import annotations

import io
import queue
import sys
from pathlib import Path

import pytest
from athanor.serving.backends.base import Request
from athanor.serving.backends.torch_backend import open_backend

from athanor.base.artifacts import read_json, write_json
from athanor.decoding.generate import generate
from athanor.serving.about import shape
from athanor.serving.discover import discover
from athanor.serving.memory import RUNTIME_BYTES, estimate
from athanor.serving.running import template_of
from athanor.serving.terminal import main, printable
from athanor.text.conversations import Message
from tests.evaluation.tiny import make_model, save, silence, write_tiny_tokenizer
from tests.serving.models_tiny import write_export

GREEDY = {"temperature": 0.0}


@pytest.fixture
def world(tmp_path):
    """A checkout with a base model and an export, and what the base model goes on with."""
    tokenizer = write_tiny_tokenizer(tmp_path / "models/tokenizer")
    model = silence(make_model(tokenizer), tokenizer)
    save(tmp_path / "models/base", model, tokenizer)
    write_export(tmp_path / "models/export", make_model(tokenizer, seed=1), tokenizer, tmp_path / "models/tokenizer")

    def more(text: str, count: int = 9, last: int = 127) -> str:
        ids = [tokenizer.bos, *tokenizer.encode(text)[-last:]]
        (made,) = generate(model, [ids], max_new_tokens=count, stop_ids=())
        return tokenizer.decode(made.ids)

    return tmp_path, more


def test_it_comes_after_the_export_and_goes_on_with_a_text(world):
    root, more = world
    export, base = discover(root, [])
    assert (export.id, base.id, base.problem) == ("tiny", "base", "") and discover(root, ["base"]) == [base]
    told = shape(Path(base.path))
    assert told["context_tokens"] == 128 and template_of(Path(base.path)) == {"template": "none"}
    assert estimate(base, 1, 1 << 30) < RUNTIME_BYTES + 8 * told["parameters"] + (1 << 20)
    backend = open_backend({"path": base.path, "device": "cpu", "threads": 1, "rows": 1, "cache_bytes": 1 << 28})

    def said(*texts: str, prompt: str | None = None) -> str:
        messages = [Message(role, text) for role, text in zip(("user", "assistant"), texts, strict=False)]
        events: queue.Queue = queue.Queue()
        backend.submit(Request(messages, 9, GREEDY, prompt=prompt), events.put)
        found: list = []
        while not found or found[-1]["type"] not in ("end", "error"):
            found.append(events.get(timeout=60))
        return "".join(event.get("text", "") for event in found)

    try:
        assert backend.info["defaults"]["temperature"] > 0  # its likeliest text goes in circles
        assert said("import ") == said(prompt="import ") == more("import ")
        assert said("import ", "os\n") == more("import os\n")
        long = " ".join(map(str, range(400)))
        assert said(long) == more(long, last=127 - 32)  # the end of it, and room for a quarter of the context
    finally:
        backend.close()


def test_a_base_of_another_tokenizer_is_listed_with_the_reason(world):
    root, _ = world
    facts = read_json(root / "models/base/config.json")
    write_json(root / "models/base/config.json", {**facts, "facts": {**facts["facts"], "tokenizer_digest": "0" * 64}})
    assert "another tokenizer" in discover(root, ["base"])[0].problem


def test_the_terminal_takes_its_name_and_an_empty_line_goes_on(world, monkeypatch, capsys):
    root, more = world
    monkeypatch.setenv("DVC_ROOT", str(root))
    monkeypatch.setenv("ATHANOR_THREADS", "1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\nimport\n\n")))
    assert main(["--model", "base", "--temperature", "0", "--max-new-tokens", "9"]) == 0
    out, errors = capsys.readouterr()
    first = more("import")
    assert errors == "" and out == printable(f"{first}\n{more('import' + first)}\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["--model", "bass"]) == 1
    assert "base" in capsys.readouterr().err

"""The terminal chat as a user meets it: in a real pseudo-terminal, and through a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from athanor.base.errors import AthanorError, InputError
from athanor.catalog.loading import load_export
from athanor.cli.chat_terminal import CONTROL, main
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, save, silence, write_tiny_tokenizer
from tests.serving.live import ROOT, environment


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A checkout whose model never stops by itself, with a context too long to fill while the test waits."""
    root = tmp_path_factory.mktemp("terminal")
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    model = silence(make_model(tokenizer, context=20_000), tokenizer)
    write_export(root / "models/export", model, tokenizer, root / "models/tokenizer", types=("f32",))
    save(root / "models/base", model, tokenizer)
    return root


def start(root, *options, **streams):
    command = [sys.executable, "-m", "athanor", "chat", "--model", "tiny-f32", *options]
    env = environment(TERM="dumb", NO_COLOR="1", DVC_ROOT=str(root))
    return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams)


@pytest.fixture
def screen(root):
    """Types into the chat in a pseudo-terminal, and waits for a pattern of what comes after the last one."""
    master, slave = pty.openpty()
    process = start(root, "--max-new-tokens", "15000", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    text = ""

    def wait_for(pattern):
        nonlocal text
        while not (found := re.compile(pattern, re.DOTALL).search(text)):
            text += os.read(master, 65536).decode(errors="replace")
        text = text[found.end() :]
        return found

    yield process, lambda typed: os.write(master, typed.encode()), wait_for
    process.kill()
    process.wait()
    os.close(master)


def test_an_interrupt_stops_the_answer_and_not_the_chat(screen):
    process, write, wait_for = screen
    wait_for("tiny-f32: context 20000 tokens.*you: ")
    for question in ("first", "second"):
        write(f"{question} question\n")
        wait_for("model: .{30}")  # words arrive while the answer is still being made
        os.killpg(process.pid, signal.SIGINT)
        assert 0 < int(wait_for(r"stopped, (\d+) tokens, [\d,]+ tokens/s.*?you: ")[1]) < 15000
    os.killpg(process.pid, signal.SIGINT)
    write("\n/exit\n")  # readline sees a signal that comes before its select at the next key only
    wait_for("Ctrl-D leaves.*you: ")
    assert process.wait() == 0


def test_a_reader_that_leaves_ends_it_quietly(root):
    process = start(root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait() == 1 and process.stderr.read() == b""


@pytest.fixture
def piped(monkeypatch, capsys, root):
    """The program in this process, with a pipe's streams: text in, (output, messages) out."""
    monkeypatch.setenv("ATHANOR_THREADS", "1")
    monkeypatch.setenv("DVC_ROOT", str(root))

    def run(text, *options, model="tiny-f32"):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["--model", model, "--max-new-tokens", "9", *options]) == 0
        return capsys.readouterr()

    return run


def test_a_pipe_gets_the_answers_and_nothing_else(piped, root):
    model, tokenizer = load_export(root / "models/export/hf")

    def answer(*messages):
        (made,) = generate(model, [prompt_ids(tokenizer, messages)], max_new_tokens=9, stop_ids=end_ids(tokenizer))
        return tokenizer.decode(made.ids)

    brief, one, two = Message("system", "Be brief."), Message("user", "one"), Message("user", "two")
    first = answer(brief, one)
    second, without = answer(brief, one, Message("assistant", first), two), answer(one)
    shown = [CONTROL.sub("\ufffd", text) + "\n" for text in (first, second, without)]
    for name in ("", str(root / "models/export")):
        assert piped("one\n\ntwo", "--system", "Be brief.", model=name) == ("".join(shown[:2]), "")
    out, err = piped("/system Be brief.\none\ntwo\n/reset\none\n/system\n/reset\none\n/nonsense\n/exit\none\n")
    assert out == "".join([*shown[:2], shown[0], shown[2]])
    for said in ("System message set.", "System message removed.", "is forgotten", "No command /nonsense.", "/help"):
        assert said in err


def test_settings_and_what_is_refused_does_not_end_the_chat(piped):
    options = ("--temperature", "5", "--top-k", "50")
    first, again, other = (piped("hello\n", *options, "--seed", seed).out for seed in "112")
    assert first == again != other
    out, err = piped(b"word " * 30_000 + b"\n\xff\xfe caf\xc3\xa9\nhello\n")
    assert "maximum context length" in err and len(out.splitlines()) >= 2
    with pytest.raises(AthanorError, match="temperature"):
        piped("hello\n", "--temperature", "-2")


def test_a_base_model_continues_and_an_empty_line_asks_for_more(piped):
    first, more = (piped(text, "--temperature", "0", model="base").out for text in ("def\n", "def\n\n"))
    assert more.startswith(first) and len(more) > len(first) + 1


def test_without_a_model_the_next_step_is_named(piped, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="nothing/here: no model"):
        piped("", model="nothing/here")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(InputError, match="make repro"):
        piped("", model="")


def test_text_cannot_steer_the_terminal():
    assert CONTROL.sub("?", "plain é 漢\u3000👩\u200d💻\n\tx") == "plain é 漢\u3000👩\u200d💻\n\tx"
    assert CONTROL.sub("?", "\x1b[2J\x07\r\x9b\u202eabc\x7f") == "?[2J????abc?"

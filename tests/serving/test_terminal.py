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
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.export.loading import load_export
from athanor.serving.terminal import CONTROL, main
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from tests.evaluation.tiny import make_model, save, silence, write_tiny_tokenizer
from tests.serving.live import ROOT, environment
from tests.serving.models_tiny import write_export


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A checkout whose model never stops by itself, with a context too long to fill while the test waits."""
    root = tmp_path_factory.mktemp("terminal")
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    model = silence(make_model(tokenizer, context=20_000), tokenizer)
    write_export(root / "models/export", model, tokenizer, root / "models/tokenizer", types=("f32",))
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
    wait_for("Ctrl-D leaves.*you: ")
    write("/help\n")
    wait_for("/system TEXT.*you: ")
    write("\x04")
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
        handler = signal.getsignal(signal.SIGINT)
        assert main(["--model", model, "--max-new-tokens", "9", *options]) == 0
        assert signal.getsignal(signal.SIGINT) is handler
        return capsys.readouterr()

    return run


def test_a_pipe_gets_the_answers_and_nothing_else(piped, root):
    model, tokenizer = load_export(root / "models/export/hf")
    messages, expected = [Message("system", "Be brief.")], ""
    for text in ("one", "two"):
        messages.append(Message("user", text))
        (made,) = generate(model, [prompt_ids(tokenizer, messages)], max_new_tokens=9, stop_ids=end_ids(tokenizer))
        messages.append(Message("assistant", tokenizer.decode(made.ids)))
        expected += CONTROL.sub("\ufffd", messages[-1].content) + "\n"
    for name in ("tiny-f32", "", str(root / "models/export")):
        assert piped("one\n\ntwo", "--system", "Be brief.", model=name) == (expected, "")


def test_commands(piped):
    out, err = piped("/system Be brief.\nhello\n/reset\nhello\n/system\n/reset\nhello\n/nonsense\n/exit\nhello\n")
    for said in ("System message set.", "System message removed.", "is forgotten", "No command /nonsense.", "/help"):
        assert said in err
    with_system, without = (piped("hello\n", *words).out for words in (("--system", "Be brief."), ()))
    assert out == with_system * 2 + without and with_system != without


def test_sampling_options_and_seeds(piped):
    options = ("--temperature", "5", "--top-k", "50")
    first, again, other = (piped("hello\n", *options, "--seed", seed).out for seed in "112")
    assert first == again != other
    with pytest.raises(AthanorError, match="temperature"):
        piped("hello\n", "--temperature", "-2")


def test_a_base_model_continues_and_an_empty_line_asks_for_more(piped, root):
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    save(root / "models/base", make_model(tokenizer, context=20_000), tokenizer)
    first, more = piped("def\n", model="base").out, piped("def\n\n", model="base").out
    assert more.startswith(first) and len(more) > len(first) + 1


def test_what_is_refused_does_not_end_the_chat(piped):
    out, err = piped("word " * 30_000 + "\nhello\n")
    assert "maximum context length" in err and out == piped("hello\n").out
    assert len(piped(b"\xff\xfe caf\xc3\xa9\nhello\n").out.splitlines()) >= 2


def test_without_a_model_the_next_step_is_named(piped, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="nothing/here: no model"):
        piped("", model="nothing/here")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(InputError, match="make repro"):
        piped("", model="")


def test_text_cannot_steer_the_terminal():
    assert CONTROL.sub("?", "plain é 漢\u3000👩\u200d💻\n\tx") == "plain é 漢\u3000👩\u200d💻\n\tx"
    assert CONTROL.sub("?", "\x1b[2J\x07\r\x9b\u202eabc\x7f") == "?[2J????abc?"

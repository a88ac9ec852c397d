"""The terminal chat as a user meets it: in a real pseudo-terminal, and through a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from athanor.base.errors import InputError
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.export.huggingface import write_huggingface
from athanor.export.source import make_source
from athanor.export.vocabulary import Vocabulary
from athanor.serving.loading import load_export
from athanor.serving.terminal import main, printable
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from tests.evaluation.tiny import make_model, silence, write_tiny_tokenizer
from tests.serving.live import ROOT


def export(folder: Path, model, tokenizer_folder: Path, tokenizer) -> Path:
    vocabulary = Vocabulary.load(tokenizer_folder / "tokenizer.model")
    write_huggingface(folder, make_source("tiny", model, tokenizer, vocabulary, {}), "float32")
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model that never stops by itself, with a context too long to fill while the test waits."""
    folder = tmp_path_factory.mktemp("export")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    model = silence(make_model(tokenizer, context=20_000), tokenizer)
    return export(folder / "hf", model, folder / "tokenizer", tokenizer)


def start(folder, *options, command=None, **streams):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATHANOR_THREADS": "1", "TERM": "dumb"}
    env.pop("NO_COLOR", None)
    command = command or [sys.executable, "-m", "athanor.serving.terminal", "--model", str(folder), *options]
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **streams)


class Screen:
    """The other end of a pseudo-terminal."""

    def __init__(self, folder, *options, command=None):
        self.master, slave = pty.openpty()
        self.process = start(folder, *options, command=command, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text = ""
        self.seen = 0

    def read(self, seconds):
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            try:
                self.text += os.read(self.master, 65536).decode("utf-8", errors="replace")
            except OSError:  # Linux's word for the end of a pseudo-terminal
                return False
        return bool(ready)

    def wait_for(self, pattern, seconds=60.0):
        """Wait until `pattern` shows up after what was waited for before; returns the match."""
        deadline = time.monotonic() + seconds
        while True:
            match = re.compile(pattern, re.DOTALL).search(self.text, self.seen)
            if match:
                self.seen = match.end()
                return match
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text[self.seen :]!r}"
            self.read(0.2)

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_until(self, pattern):
        """Press Ctrl-C, and again if need be: one that falls between prompt and read waits for the next key."""
        for _ in range(20):
            self.interrupt()
            with suppress(AssertionError):
                return self.wait_for(pattern, 3)
        return self.wait_for(pattern, 0)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.master)

    def end(self):
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        return self.process.wait(1)


@pytest.fixture
def screen(exported):
    opened = []

    def make(*options, **places):
        opened.append(Screen(places.get("folder", exported), *options, command=places.get("command")))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_an_interrupt_stops_the_answer_and_not_the_chat(screen):
    chat = screen("--max-new-tokens", "15000")
    chat.wait_for("parameters, context 20000 tokens.*you: ")
    chat.type("first question\n")
    chat.wait_for("model: .{30}")  # words arrive while the answer is still being made
    chat.interrupt()
    stopped = chat.wait_for(r"stopped, (\d+) tokens, [\d,]+ tokens/s.*?you: ")
    assert 0 < int(stopped[1]) < 15000
    chat.type("second question\n")
    chat.wait_for("model: .{30}")
    chat.interrupt()
    chat.wait_for("stopped.*you: ")
    assert chat.process.poll() is None
    chat.interrupt_until("Ctrl-D leaves.*you: ")  # at the prompt
    for number in range(8):  # at any moment: before the line is read, while it is answered, after
        chat.type(f"question {number}\n")
        time.sleep(0.01 * number)
        chat.interrupt_until("(Ctrl-D leaves|stopped).*you: ")
    chat.type("/help\n")
    chat.wait_for("/system TEXT.*you: ")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.text


def test_it_survives_an_interrupt_under_make(screen, exported, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    recipe = f"chat:\n\t@{sys.executable} -m athanor.serving.terminal --model {exported} --max-new-tokens 15000\n"
    (tmp_path / "Makefile").write_text(recipe)
    chat = screen(folder=tmp_path, command=["make", "chat"])
    chat.wait_for("you: ")
    for text in ("question", "again"):
        chat.type(f"{text}\n")
        chat.wait_for("model: .{30}")
        chat.interrupt()
        chat.wait_for("stopped.*you: ")
    chat.type("/exit\n")
    chat.end()
    assert "Traceback" not in chat.text


def test_a_real_pipe(exported):
    process = start(exported, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    process.stdout.read(10)
    process.stdout.close()  # the reader leaves in the middle of the answer
    assert process.wait(60) == 0
    assert process.stderr.read() == b""


@pytest.fixture
def piped(monkeypatch, capsys, exported):
    """The program in this process, with a pipe's streams: text in, (status, output, messages) out."""
    monkeypatch.setenv("ATHANOR_THREADS", "1")

    def run(text, *options, model=exported):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        handler = signal.getsignal(signal.SIGINT)
        status = main(["--model", str(model), *options])
        assert signal.getsignal(signal.SIGINT) is handler
        return status, *capsys.readouterr()

    return run


def test_a_pipe_gets_the_answers_and_nothing_else(piped, exported):
    code, out, err = piped("one\n\ntwo", "--max-new-tokens", "9", "--system", "Be brief.")
    assert code == 0 and err == ""
    model, tokenizer = load_export(exported)
    messages, expected = [Message("system", "Be brief.")], ""
    for text in ("one", "two"):
        messages.append(Message("user", text))
        (made,) = generate(model, [prompt_ids(tokenizer, messages)], max_new_tokens=9, stop_ids=end_ids(tokenizer))
        answer = tokenizer.decode(made.ids)
        messages.append(Message("assistant", answer))
        expected += printable(answer) + "\n"
    assert out == expected and len(out) > 20


def test_the_folder_of_an_export_will_do(piped, exported, tmp_path):
    """What `athanor rl` prints; only models/export/hf did, while `athanor serve` took both."""
    (tmp_path / "grpo-export").mkdir()
    (tmp_path / "grpo-export/hf").symlink_to(exported)
    greedy = ("--temperature", "0", "--max-new-tokens", "9")
    answered = piped("hi", *greedy, model=tmp_path / "grpo-export")
    assert answered[0] == 0 and answered == piped("hi", *greedy)


def test_commands(piped):
    one = piped("/system Be brief.\nhello\n/reset\nhello\n/system\nhello\n/nonsense\n", "--max-new-tokens", "9")
    lines = one[1].splitlines()
    assert "System message set." in one[2] and "System message removed." in one[2] and "No command /nonsense" in one[2]
    with_system = piped("hello\n", "--max-new-tokens", "9", "--system", "Be brief.")[1]
    assert one[1].startswith(with_system + with_system) and len(lines) >= 3
    assert piped("hello\n", "--max-new-tokens", "9")[1] != with_system


def test_sampling_options_and_seeds(piped):
    options = ("--max-new-tokens", "12", "--temperature", "5", "--top-k", "50")
    first = piped("hello\n", *options, "--seed", "1")[1]
    assert first == piped("hello\n", *options, "--seed", "1")[1]
    assert first != piped("hello\n", *options, "--seed", "2")[1]
    code, _, err = piped("hello\n", "--temperature", "-1")
    assert code == 1 and "temperature" in err


def test_a_message_too_long_is_refused_and_the_chat_goes_on(piped):
    code, out, err = piped("word " * 30_000 + "\nhello\n", "--max-new-tokens", "9")
    assert code == 0 and "maximum context length is" in err
    assert out == piped("hello\n", "--max-new-tokens", "9")[1]


def test_bytes_that_are_no_text_do_not_end_the_chat(piped):
    code, out, err = piped(b"\xff\xfe caf\xc3\xa9\nhello\n", "--max-new-tokens", "5")
    assert code == 0 and "Traceback" not in err and len(out.splitlines()) >= 2


def test_no_export_says_how_to_make_one(piped, tmp_path):
    code, _, err = piped("", model="nothing/here")
    assert code == 1 and "make repro" in err and "nothing/here" in err
    code, _, err = piped("", model=tmp_path)
    assert code == 1 and "athanor.json" in err
    (tmp_path / "model.gguf").touch()
    code, _, err = piped("", model=tmp_path / "model.gguf")
    assert code == 1 and "athanor serve takes GGUF files" in err


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"num_hidden_layers": 3},
        {"head_dim": None},
    ],
)
def test_a_config_that_is_not_ours_is_refused(exported, tmp_path, change):
    shutil.copytree(exported, tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InputError):
        load_export(tmp_path / "hf")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_export_computes_what_the_model_did(tmp_path, qk_norm, tied):
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    model = make_model(tokenizer, qk_norm=qk_norm, tied=tied)
    loaded, again = load_export(export(tmp_path / "hf", model, tmp_path / "tokenizer", tokenizer))
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode("Some text to read.")]])
    assert again.digest == tokenizer.digest and loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))


def test_text_cannot_steer_the_terminal():
    assert printable("plain é 漢\n\tx") == "plain é 漢\n\tx"
    assert printable("\x1b[2J\x07\r\x9b\u202eabc\x7f") == "\ufffd[2J" + "\ufffd" * 4 + "abc\ufffd"

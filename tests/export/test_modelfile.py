"""Ollama's Modelfile. Ollama is not run here: the settings are read, and the template's three actions filled in."""

from __future__ import annotations

import re

import pytest

from athanor.export.publish import OLLAMA_TEMPLATE as TEMPLATE
from athanor.export.publish import modelfile, write_modelfile
from athanor.tokenizer.chat import render_text


def filled(template: str, messages: list) -> str:
    """A range over the messages with two fields in it, and plain text: all that the template uses of Go's language."""
    match = re.fullmatch(r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL)
    assert match and "{{" not in match[1] + match[3]
    turns = []
    for message in messages:
        turn = match[2].replace("{{ .Role }}", message.role).replace("{{ .Content }}", "\0")
        assert "{{" not in turn
        turns.append(turn.replace("\0", message.content))
    return match[1] + "".join(turns) + match[3]


def test_template_is_our_layout_without_the_first_symbol(llama):
    """The runner puts <|bos|> in front by itself, as the file's own key says."""
    for messages in llama.probe.conversations:
        assert "<|bos|>" + filled(TEMPLATE, messages) == render_text(messages, prompt=True)


def test_every_setting_of_its_own_is_overruled(case):
    text = modelfile(case.source, "model-f16.gguf")
    lines = text.splitlines()
    assert "FROM ./model-f16.gguf" in lines and f'TEMPLATE """{TEMPLATE}"""' in lines
    settings = [tuple(line.split(" ", 2)[1:]) for line in lines if line.startswith("PARAMETER ")]
    assert ("temperature", "0") in settings and ("repeat_penalty", "1") in settings and ("num_ctx", "96") in settings
    stops = {value for name, value in settings if name == "stop"}
    assert stops == {f'"<|{name}|>"' for name in ("pad", "bos", "eos", "system", "user", "assistant", "stop")}
    assert "SYSTEM" not in text and text.endswith("\n")
    assert {line.split(" ")[0] for line in lines} == {"#", "FROM", "TEMPLATE", "PARAMETER"}


@pytest.mark.parametrize(
    ("there", "named"),
    [(["f32", "q8_0", "f16"], "f16"), (["q8_0", "q4_k_m"], "q8_0"), (["q6_k", "q4_k_m"], "q4_k_m"), ([], None)],
)
def test_the_file_that_loses_least_for_its_size_is_named(there, named, llama, tmp_path):
    for name in there:
        (tmp_path / f"model-{name}.gguf").touch()
    write_modelfile(tmp_path, llama.source)
    assert (tmp_path / "Modelfile").exists() == (named is not None)
    if named:
        assert f"FROM ./model-{named}.gguf\n" in (tmp_path / "Modelfile").read_text()

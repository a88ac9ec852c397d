"""Ollama's Modelfile: the same layout as a Go template, the stops, and greedy decoding as evaluated."""

from __future__ import annotations

from pathlib import Path

from athanor.artifacts import write_text
from athanor.export.gguf import gguf_name
from athanor.export.source import Source
from athanor.tokenizer.tokenizer import ROLE_PIECES, STOP

NAME = "Modelfile"
PREFERRED = ("f16", "q8_0", "f32")  # the smallest that rounds next to nothing; else the first K type there is
# No <|bos|>: the runner adds it, as tokenizer.ggml.add_bos_token says, and would warn of two.
TEMPLATE = (
    "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}" + STOP + "{{ end }}" + ROLE_PIECES["assistant"]
)


def modelfile(source: Source, file_name: str) -> str:
    """Content of the Modelfile for one of the GGUF files.

    Every setting that Ollama has an opinion of its own about is stated: it
    would sample, and punish the repetition of any word of the question.
    """
    pieces = source.vocabulary.pieces
    lines = [
        f"# ollama create {source.name} -f {NAME}",
        f"FROM ./{file_name}",
        f'TEMPLATE """{TEMPLATE}"""',
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
        f"PARAMETER num_ctx {source.config.context_tokens}",
        *(f'PARAMETER stop "{pieces[number].text}"' for number in source.controls.values()),
    ]
    return "\n".join(lines) + "\n"


def write_modelfile(folder: Path, source: Source) -> None:
    """For the file in `folder` that loses least for its size; nothing where no GGUF was written."""
    there = sorted(path.name for path in folder.glob("*.gguf"))
    names = [gguf_name(file_type) for file_type in PREFERRED if gguf_name(file_type) in there] + there
    if names:
        write_text(folder / NAME, modelfile(source, names[0]))

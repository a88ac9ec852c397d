"""Real exports in small, beside each other as the stages leave them."""

from __future__ import annotations

from pathlib import Path

from athanor.base.artifacts import new_dir
from athanor.export.gguf_writer import gguf_name, write_gguf
from athanor.export.huggingface import write_huggingface
from athanor.export.source import make_source
from athanor.export.vocabulary import Vocabulary
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer


def write_export(
    folder: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    tokenizer_dir: Path,
    name: str = "tiny",
    types: tuple[str, ...] = (),
) -> Path:
    """models/export as its stage writes it, without the checks."""
    source = make_source(name, model, tokenizer, Vocabulary.load(tokenizer_dir / "tokenizer.model"), {})
    with new_dir(folder) as made:
        write_huggingface(made / "hf", source, "float32")
        for file_type in types:
            write_gguf(made / gguf_name(file_type), source, file_type)
    return folder

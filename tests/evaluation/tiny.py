"""Real parts in small: a tokenizer, models with decided answers, a few battery items."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from pathlib import Path

import torch

from athanor.base.artifacts import new_dir
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.text.conversations import Item, Message
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training.params import TokenizerParams
from athanor.tokenizer_training.train import train, write_tokenizer

PARAMS = TokenizerParams(
    vocab_size=512,
    sample_bytes=100_000,
    check_bytes=1000,
    character_coverage=0.9999,
    max_piece_chars=16,
    split_by_unicode_script=False,
)


def write_tiny_tokenizer(path: Path) -> Tokenizer:
    texts = [Path(module.__file__).read_text(encoding="utf-8")[:40_000] for module in (ast, textwrap)]
    with new_dir(path) as folder:
        write_tokenizer(folder, train(texts, PARAMS), {})
    return Tokenizer.load(path)


def make_model(
    tokenizer: Tokenizer, *, seed: int = 0, context: int = 128, qk_norm: bool = False, tied: bool = True
) -> Transformer:
    """Random weights, large enough that the best logit is far from the second almost everywhere."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_dim=64,
        context_tokens=context,
        rope_theta=10000.0,
        norm_eps=1e-5,
        qk_norm=qk_norm,
        tied_embeddings=tied,
    )
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.4, generator=generator)
    return model.eval()


def silence(model: Transformer, tokenizer: Tokenizer) -> Transformer:
    """Make control ids impossible: their logits are 0, and the best of 500 random ones never is."""
    with torch.no_grad():
        model.model.embed_tokens.weight[sorted(tokenizer.control_ids.values())] = 0.0
    return model


def always_says(tokenizer: Tokenizer, token: int, context: int = 128) -> Transformer:
    """A model whose every next id after <|assistant|> or after `token` is `token`."""
    model = make_model(tokenizer, context=context)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        table = model.model.embed_tokens.weight.zero_()
        table[tokenizer.assistant, 0] = 1.0
        table[token, 0] = 9.0
    return model


def save(folder: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    facts = {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)}
    save_model(folder, model, model.config, facts)


def items() -> list[Item]:
    """Two items of each kind, in order of category."""
    rows = []
    for number in (3, 4):
        ask = (Message("user", f"What is {number} + {number}?"),)
        total = str(2 * number)
        rows.append(Item("sum", ask, "numeric", total, (total,), (str(2 * number + 1), "many")))
    for word in ("cat", "dog"):
        ask = (Message("system", "Be brief."), Message("user", f"Repeat: {word}"))
        rows.append(Item("copy", ask, "exact", word, (word,), (word * 2, "bird")))
    for word in ("a", "b"):
        ask = (Message("user", f"List {word} and z with bullets."),)
        rows.append(Item("list", ask, "list", f"- {word}\n- z", (f"- {word}\n- z",), (f"{word}, z", "- z")))
    for number in (1, 2):
        ask = (Message("user", f"Write add{number}(x), x plus {number}."),)
        good = f"def add{number}(x):\n    return x + {number}"
        tests = (f"assert add{number}(1) == {1 + number}",)
        bad = (f"def add{number}(x):\n    return x", "def other(x):\n    return x")
        rows.append(Item("code", ask, "code", good, (good,), bad, tests))
    return sorted(rows, key=lambda item: (item.category, item.id))


def all_kinds() -> list[Item]:
    """`items`, and two each of the kinds format and likelihood; the first of each category is for development."""
    rows = items()
    for word, answer, other in (("snow", "Yes", "No"), ("fire", "No", "Yes")):
        ask = (Message("user", f"Is {word} cold?"),)
        wrong = (other, f"{answer}, it is so")
        rows.append(Item("form", ask, "format", answer, (answer,), wrong, checks=(f"yes_no {answer}",)))
    for choices, right in ((("one", "three"), "three"), (("two", "four", "five"), "two")):
        ask = (Message("user", f"the {len(choices)} words are"),)
        wrong = tuple(choice for choice in choices if choice != right)
        rows.append(Item("choice", ask, "likelihood", right, (right,), wrong, choices=choices))
    rows.sort(key=lambda item: (item.category, item.id))
    return [replace(item, split="test" if n % 2 else "development") for n, item in enumerate(rows)]

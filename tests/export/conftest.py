"""A tokenizer and small models (Llama- and Qwen3-shaped, and one that is not tied), trained until answers are decided.

Random weights would not do: their two best logits nearly tie everywhere, and
equal greedy answers would then prove nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from athanor.base.artifacts import new_dir, read_manifest
from athanor.export import gguf_writer
from athanor.export.parity import Expected, expect, rebuilt
from athanor.export.probes import Probe, make_probe
from athanor.export.source import Source, load_source
from athanor.export.vocabulary import CONTROL, NORMAL, USER_DEFINED
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids, render, template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training.train import train, write_tokenizer
from tests.evaluation import tiny

CONTEXT = 96
WORDS = ("apple", "river", "stone", "cloud", "tiger", "paper", "lamp", "seven", "music", "green")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def documents() -> list[str]:
    """Docstrings and code of a few standard modules, in a fixed order."""
    found = []
    folder = Path(ast.__file__).parent
    for name in ("ast", "bisect", "calendar", "copy", "csv", "fnmatch", "glob", "heapq", "queue", "random", "shlex"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        found += [text[start : start + 900] for start in range(0, min(len(text), 9000), 900)]
    return found


def question(number: int) -> list[Message]:
    first, second = WORDS[(number + number // 10) % 10], WORDS[number // 10]
    return [Message("user", f"Say {first} {second}")]


def reply(number: int) -> Message:
    return Message("assistant", f"{WORDS[(number + number // 10) % 10]}!")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    texts = documents() + [m.content for n in range(100) for m in (*question(n), reply(n))]
    params = replace(tiny.PARAMS, vocab_size=640, sample_bytes=1_000_000, check_bytes=10_000)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    with new_dir(path) as folder:
        write_tokenizer(folder, train(texts, params), {})
    return path


def train_model(tokenizer: Tokenizer, qk_norm: bool, tied: bool = True) -> Transformer:
    """Some steps on text and one-word answers: fluent in neither, decided in most places."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        dim=64,
        heads=4,
        kv_heads=2,
        head_dim=16 if not qk_norm else 32,
        ffn_dim=128,
        context_tokens=CONTEXT,
        rope_theta=50000.0,
        norm_eps=1e-5,
        qk_norm=qk_norm,
        tied_embeddings=tied,
    )
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config)
    model.initialise(generator)
    # Norms of their own size, as longer training makes them: all ones would hide a lost norm.
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.dim() == 1):
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
    chats = [render(tokenizer, [*question(n), reply(n)])[0] for n in range(100)]
    stream = [t for text in documents() for t in (tokenizer.bos, *tokenizer.encode(text), tokenizer.eos)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
    for _ in range(110):
        rows = []
        for start in torch.randint(0, len(stream) - 49, (2,), generator=generator).tolist():
            rows.append(stream[start : start + 49])
        for _ in range(5):
            row: list[int] = []
            while len(row) < 49:
                row += chats[int(torch.randint(0, 100, (1,), generator=generator))]
            rows.append(row[:49])
        batch = torch.tensor(rows)
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@dataclass(frozen=True)
class Case:
    """One model with everything a parity check needs."""

    model_dir: Path
    tokenizer_dir: Path
    source: Source
    probe: Probe
    expected: Expected


def make_case(folder: Path, tokenizer_dir: Path, qk_norm: bool, tied: bool = True) -> Case:
    tokenizer = Tokenizer.load(tokenizer_dir)
    model = train_model(tokenizer, qk_norm, tied)
    facts = {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)}
    assert read_manifest(tokenizer_dir, "tokenizer", 1)["digest"] == tokenizer.digest
    save_model(folder / "sft", model, model.config, facts)
    source = load_source(folder / "sft", tokenizer_dir, "tiny", {"sft": "0" * 64})
    probe = make_probe(
        source.tokenizer,
        context_tokens=CONTEXT,
        documents=documents(),
        conversations=[question(n) for n in range(100)],
        prompts=50,
        texts=200,
        windows=4,
    )
    assert probe.prompts[0] == prompt_ids(tokenizer, question(0))
    return Case(folder / "sft", tokenizer_dir, source, probe, expect(source, rebuilt(source, "float32"), probe, 16))


@pytest.fixture(scope="session")
def llama(tmp_path_factory, tokenizer_dir) -> Case:
    return make_case(tmp_path_factory.mktemp("llama"), tokenizer_dir, qk_norm=False)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory, tokenizer_dir) -> Case:
    return make_case(tmp_path_factory.mktemp("qwen"), tokenizer_dir, qk_norm=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory, tokenizer_dir) -> Case:
    return make_case(tmp_path_factory.mktemp("untied"), tokenizer_dir, qk_norm=True, tied=False)


@pytest.fixture(params=["llama", "qwen", "untied"])
def case(request) -> Case:
    return request.getfixturevalue(request.param)


def unpermuted(source: Source) -> dict[str, np.ndarray]:
    """Query and key weights in our own order of rows, which `llama` files do not have."""
    return {
        f"blk.{n}.attn_{kind}.weight": source.weights[f"model.layers.{n}.self_attn.{kind}_proj.weight"].numpy()
        for n in range(source.config.layers)
        for kind in ("q", "k")
    }


def permuted(source: Source) -> dict[str, np.ndarray]:
    """The same with rows in the order of `llama` files, which other files do not have."""
    heads = {"attn_q": source.config.heads, "attn_k": source.config.kv_heads}
    return {
        name: gguf_writer.interleave(array, heads[name.split(".")[2]]) for name, array in unpermuted(source).items()
    }


def alterations(source: Source) -> dict[str, dict[str, Any]]:
    """Ways to write a `llama` file that loads and says something else."""
    keys, rows = gguf_writer.metadata(source, "f32"), gguf_writer.tensors(source)["token_embd.weight"]
    types = [piece.type for piece in source.vocabulary.pieces]
    more = {"tokens": [f"[PAD{number}]" for number in range(32)], "scores": [0.0] * 32, "token_type": [5] * 32}
    values = {
        "space prefix": {"tokenizer.ggml.add_space_prefix": True},
        "no bos": {"tokenizer.ggml.add_bos_token": False},
        "unigram tokenizer": {"tokenizer.ggml.model": "t5"},
        "control tokens typed normal": {"tokenizer.ggml.token_type": [t if t != CONTROL else NORMAL for t in types]},
        "newline typed normal": {"tokenizer.ggml.token_type": [t if t != USER_DEFINED else NORMAL for t in types]},
        "norm eps": {"llama.attention.layer_norm_rms_epsilon": 1e-6},
        "rotary base wrong": {"llama.rope.freq_base": 500000.0},
    }
    absent = {
        "space prefix": "tokenizer.ggml.add_space_prefix",
        "scores": "tokenizer.ggml.scores",
        "rotary base": "llama.rope.freq_base",
        "chat template": "tokenizer.chat_template",
        "end of turn": "tokenizer.ggml.eot_token_id",
        "head count": "llama.attention.head_count_kv",
    }
    wider = {f"tokenizer.ggml.{name}": [*keys[f"tokenizer.ggml.{name}"].value, *extra] for name, extra in more.items()}
    return {
        "rows of q and k not permuted": {"arrays": unpermuted(source)},
        "rows without a token": {  # nothing masks them
            "values": wider | {"llama.vocab_size": len(rows) + 32},
            "arrays": {"token_embd.weight": np.concatenate([rows, np.zeros((32, rows.shape[1]), np.float32)])},
        },
        **{name: {"values": changed} for name, changed in values.items()},
        **{f"{name} absent": {"drop": [key]} for name, key in absent.items()},
    }


def write_altered(path, source: Source, *, arch="", values=None, drop=(), arrays=None, without=("?",)) -> None:
    """An f32 file with other keys or tensors, or without some."""
    arch = arch or source.architecture
    keys = {
        k.replace(source.architecture, arch, 1): v
        for k, v in gguf_writer.metadata(source, "f32").items()
        if k not in drop
    }
    for key, value in (values or {}).items():
        keys[key] = replace(keys[key], value=value)
    tensors = {
        k: v for k, v in (gguf_writer.tensors(source) | (arrays or {})).items() if not k.endswith(tuple(without))
    }
    gguf_writer.write_raw(path, arch, keys, tensors, "f32")

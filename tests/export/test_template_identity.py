"""Ten thousand conversations of nasty text give the same ids in training rows, our prompts, transformers and llama.cpp.

In no path of ours can text make a control id. transformers' Jinja and
llama.cpp's chat endpoint render text and parse control symbols out of it, and
llama.cpp reads U+2581 as a space; what they do then is pinned here, so that a
change in either is noticed. docs/template.md says what a server in front of
them must filter.
"""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
import torch

from athanor.base.artifacts import write_manifest
from athanor.chat_data import gates as sft_gates
from athanor.data.rows import KIND, VERSION, PackedRows, pack, write_split
from athanor.export import gguf_writer
from athanor.export.huggingface import write_huggingface
from athanor.export.llamacpp.asking import ask
from athanor.export.llamacpp.engine import NotInstalled
from athanor.export.probes import has_control
from athanor.export.source import load_source
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids, render, render_text, template_hash
from athanor.tokenizer.tokenizer import CONTROL_PIECES, Tokenizer
from tests.export.nasty_chats import SPACE_MARK, nasty_conversations

COUNT, CONTEXT = 10_000, 4096
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL_PIECES)) + ")")


@pytest.fixture(scope="module")
def conversations():
    return nasty_conversations(COUNT)


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer_dir):
    """A model of random weights: only its tokenizer and template are asked."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=1, dim=32, heads=2, kv_heads=1, head_dim=16, ffn_dim=32,
        context_tokens=256, rope_theta=1e4, norm_eps=1e-5, qk_norm=False,
    )  # fmt: skip
    model = Transformer(config)
    model.initialise(torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("identity") / "sft"
    save_model(folder, model, config, {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)})
    return load_source(folder, tokenizer_dir, "tiny", {"sft": "0" * 64})


@pytest.fixture(scope="module")
def tokenizer(source):
    return source.tokenizer


def parsed(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered text in a runtime that takes every control symbol in it for the control."""
    ids = []
    for part in _CONTROL.split(text):
        ids += [tokenizer.control_ids[part]] if part in tokenizer.control_ids else tokenizer.encode(part)
    return ids


def asked(conversation):
    return conversation[:-1]


def holds(conversation, test) -> bool:
    return any(test(message.content) for message in conversation)


def spelled(conversation) -> bool:
    return holds(conversation, has_control)


def marked(conversation) -> bool:
    return holds(conversation, lambda text: SPACE_MARK in text)


def test_the_conversations_are_nasty_enough(conversations):
    texts = [message.content for conversation in conversations for message in conversation]
    assert len(set(texts)) > 0.8 * len(texts)
    signs = ("\r\n", "\x00", "\u202e", "\U0001f600", "e\u0301", "<|im_end|>", "</s>", " " * 40)
    for sign in (*CONTROL_PIECES, SPACE_MARK, *signs):
        assert sum(sign in text for text in texts) > 50, repr(sign)
    plain = sum(not spelled(c) and not marked(c) for c in conversations)
    assert plain > COUNT / 2 and sum(map(spelled, conversations)) > COUNT / 10 and sum(map(marked, conversations)) > 500


def test_training_rows_and_our_prompts(conversations, tokenizer, tmp_path):
    pairs = [render(tokenizer, conversation) for conversation in conversations]
    capacity = CONTEXT + 1
    rows = pack([len(ids) for ids, _ in pairs], capacity, 1)
    write_split(tmp_path, "train", pairs, rows, tokenizer.vocab_size)
    facts = {"dtype": "uint16", "pad_id": 0, "stop_id": tokenizer.stop, "context_tokens": CONTEXT}
    write_manifest(tmp_path, kind=KIND, version=VERSION, counts={}, **facts)
    packed = PackedRows(tmp_path)
    # For every assistant turn: the ids before it are those of prompt_ids; and the text comes back unchanged.
    read = sft_gates.check_packed(tokenizer, packed, "train")
    assert list(read.values()) == conversations
    controls = set(tokenizer.control_ids.values())
    for number, conversation in enumerate(conversations):
        ids = packed.conversation(number)[0].tolist()
        assert ids == pairs[number][0]
        assert sum(i in controls for i in ids) == 1 + 2 * len(conversation)


def test_transformers(conversations, source, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    write_huggingface(tmp_path / "hf", source, "float32")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    # A whole conversation is its prompt, the answer and a stop: a part of them shows that.
    for prompt, part in ((True, conversations), (False, conversations[::20])):
        chats = [asked(c) if prompt else c for c in part]
        rows = [[{"role": m.role, "content": m.content} for m in chat] for chat in chats]
        found = theirs.apply_chat_template(rows, add_generation_prompt=prompt, tokenize=True, return_dict=False)
        for chat, ids in zip(chats, found, strict=True):
            ours = prompt_ids(tokenizer, chat) if prompt else render(tokenizer, chat)[0]
            if spelled(chat):
                assert list(ids) == parsed(tokenizer, render_text(chat, prompt=prompt)) != ours
            else:
                assert list(ids) == ours
    # Text that is tokenized as text, as our own encoder has it, makes no control id there either.
    texts = [message.content for c in conversations[:500] for message in c]
    found = theirs(texts, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert found == tokenizer.encode_batch(texts)


def test_llama_cpp(conversations, source, tokenizer, tmp_path):
    gguf_writer.write_gguf(tmp_path / "model.gguf", source, "f32")
    chats = [asked(c) for c in conversations]
    try:
        reply = ask(
            tmp_path / "model.gguf", {"chat_tokens": [[[asdict(message) for message in chat]] for chat in chats]},
            context_tokens=256, exact=True, threads=1, timeout_seconds=240,
        )  # fmt: skip
    except NotInstalled:
        pytest.skip("xllamacpp is not installed")
    for chat, ids in zip(chats, reply["chat_tokens"], strict=True):
        ours = prompt_ids(tokenizer, chat)
        spaced = [Message(m.role, m.content.replace(SPACE_MARK, " ")) for m in chat]
        if spelled(chat):
            assert ids == parsed(tokenizer, render_text(spaced, prompt=True)) != ours
        elif marked(chat):
            assert ids == prompt_ids(tokenizer, spaced) != ours
        else:
            assert ids == ours

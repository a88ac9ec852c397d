"""A real model that has learnt a dozen conversations by heart: the tests of the server and the page know its answers.

Two layers trained for seconds on the CPU, one thread, always the same numbers, and exported as the pipeline
exports. A greedy answer to a question of `CONVERSATIONS` is its answer, also after `SYSTEM` and after the exchange
`PLAIN` or `WHO`. `LONG` takes 254 tokens, the others at most 61.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from athanor.base.artifacts import new_dir
from athanor.export.huggingface import write_huggingface
from athanor.export.source import load_source
from athanor.model.transformer import Transformer
from athanor.text.conversations import Message
from athanor.tokenizer.chat import render
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training.train import train, write_tokenizer
from tests.evaluation.tiny import PARAMS, make_model, save

CONTEXT = 512
STEPS, ROWS = 250, 6
SYSTEM = "You are a parrot."

PLAIN = ("What is 3 + 4?", "3 + 4 = 7.")
WHO = ("Who are you?", "I am a parrot, a very small model.")
MARKDOWN = (
    "Show a list and a table",
    "## Birds\n\n- **parrot**: talks\n- *owl*: sees\n\n| bird | legs |\n| --- | ---: |\n| parrot | 2 |\n| owl | 2 |"
    "\n\n$$x^2$$",
)
CODE = (
    "Write a function that adds two numbers",
    "Here it is:\n\n```python\ndef add(a, b):\n    return a + b  # <b>both</b>\n```\n\nCall it as `add(3, 4)`.",
)
# Each word occurs once, so that the next follows from the last: long, and quickly learnt.
LONG = (
    "Tell a long story",
    "It goes: alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa "
    "quebec romeo sierra tango uniform victor whiskey xray yankee zulu, then eagle finch goose heron ibis jay kiwi "
    "lark magpie nightingale osprey pelican quail raven swan thrush vulture wren, then ash birch cedar dogwood elm "
    "fir ginkgo hazel ironwood juniper larch maple nutmeg oak pine rowan spruce teak willow yew, then amber bronze "
    "crimson denim emerald grey indigo jade, and that is all.",
)

# What a page must never run: each is asked for in a user message that holds it, so that both roles carry it.
# `pwned` is a function that the tests define and that must stay uncalled.
XSS = (
    "<script>pwned(1)</script>",
    "<img src=x onerror=pwned(2)>",
    "[click](javascript:pwned(3))",
    "<svg onload=pwned(4)>",
    "<iframe srcdoc='<script>parent.pwned(5)</script>'></iframe>",
    "<style>body{display:none}</style>",
    "<a href='data:text/html,<script>pwned(6)</script>'>d</a>",
    "<scr<script>ipt>pwned(7)</scr</script>ipt>",
    "<!--><img src=x onerror=pwned(8)>-->",
    "<math><mtext><table><mglyph><style><img src=x onerror=pwned(9)>",
    '![a](x"onerror="pwned(10))',
    "<form action=//evil.example><input autofocus onfocus=pwned(11)>",
)


def asking(payload: str) -> str:
    """The question whose answer is `payload`."""
    return f"Say {payload}"


CONVERSATIONS: tuple[tuple[str, str], ...] = (
    PLAIN,
    WHO,
    MARKDOWN,
    CODE,
    LONG,
    *((asking(payload), payload) for payload in XSS),
)


def train_parrot(tokenizer: Tokenizer) -> Transformer:
    """The model. Each row is one or two of the conversations in turn, some of them after the system message."""
    draw, shape = random.Random(0), make_model(tokenizer, context=CONTEXT, qk_norm=True).config
    model = Transformer(replace(shape, dim=96, head_dim=24, ffn_dim=192))
    model.initialise(torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS, pct_start=0.1, cycle_momentum=False)
    for _ in range(STEPS):
        rows = [torch.tensor(_row(tokenizer, draw)).T for _ in range(ROWS)]
        ids, mask = pad_sequence(rows, batch_first=True).unbind(-1)
        answers = ids.where(mask > 0, -100)  # which cross_entropy ignores
        optimiser.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), answers[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def _row(tokenizer: Tokenizer, draw: random.Random) -> tuple[list[int], list[int]]:
    messages = [Message("system", SYSTEM)] if draw.random() < 0.3 else []
    for pair in draw.sample(CONVERSATIONS, draw.choice((1, 1, 2))):
        messages += map(Message, ("user", "assistant"), pair)
    return render(tokenizer, messages)


def write_parts(folder: Path) -> Path:
    """Train it: `folder` gets its weights and its tokenizer, from which `write_export` makes exports of any name."""
    texts = [SYSTEM, *(text for pair in CONVERSATIONS for text in pair)] * 4
    with new_dir(folder / "tokenizer") as made:
        write_tokenizer(made, train(texts, replace(PARAMS, vocab_size=640)), {})
    tokenizer = Tokenizer.load(folder / "tokenizer")
    save(folder / "model", train_parrot(tokenizer), tokenizer)
    return folder


def write_export(folder: Path, parts: Path, name: str = "parrot") -> Path:
    """A directory as the export stage makes; `load_export` takes it."""
    write_huggingface(folder, load_source(parts / "model", parts / "tokenizer", name, {"sft": "0" * 64}), "float32")
    return folder

"""Random conversations of text that has broken some template or tokenizer before."""

from __future__ import annotations

import random

from athanor.export.probes import NASTY
from athanor.text.conversations import Message
from athanor.tokenizer.tokenizer import CONTROL_PIECES

SPACE_MARK = "\u2581"
_ATOMS = (
    *"abcdeghilnorstuxyzABCIT0123456789.,:;!?()[]{}<>=+-*/_|#@'\"\\",
    " ", " ", " ", "  ", "   ", " " * 40, "\n", "\n\n", "\t", "\t\t\t", "\r\n", "\r", "\n" * 30,
    "the", "ing", "tion", "self", "return", "def ", "None", "User:", "Assistant:", "\n\nHuman:", "[INST]", "[/INST]",
    "<<SYS>>", "### Response:", "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|eot_id|>",
    "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<0x0A>", "<0xE2>", "{{ bos_token }}", "{% raw %}", "%}", "{{",
    "<|", "|>", "<|user", "user|>", "<|stop", "stop|>", "<| user |>", "<|USER|>", "<|assistant|", "<\u200b|user|>",
    "\x00", "\x07", "\x1b[31m", "\x7f", "\u00e9", "e\u0301", "a\u0308\u0323\u0331", "\u0130", "\u00df", "\u00a0",
    "\u200b", "\u200d", "\u2028", "\ufeff", "\ufffd", "\u202eabc\u202c", "\u0627\u0644\u0639", "\u05e2\u05d1",
    "\u6f22\u5b57", "\uac00", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f",
    "\U0001f1e9\U0001f1ea", "\U0010ffff", "\ue000",
)  # fmt: skip
_WEIGHTS = [1.0] * len(_ATOMS)


def nasty_text(rng: random.Random) -> str:
    """Not blank; one in twelve spells a control symbol, one in twenty holds U+2581, some are fixed old offenders."""
    if rng.random() < 0.1:
        text = rng.choice(NASTY)
    else:
        parts = rng.choices(_ATOMS, weights=_WEIGHTS, k=rng.randint(1, 24))
        if rng.random() < 1 / 12:
            parts.insert(rng.randint(0, len(parts)), rng.choice(CONTROL_PIECES))
        if rng.random() < 1 / 20:
            parts.insert(rng.randint(0, len(parts)), SPACE_MARK * rng.randint(1, 3))
        text = "".join(parts)
    return text if text.strip() else f"{text}x{text}"


def nasty_conversations(count: int, seed: int = 0) -> list[tuple[Message, ...]]:
    """`count` conversations of one to four turns, every third with a system message."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        roles = ["system"] * (number % 3 == 0) + ["user", "assistant"] * rng.choice((1, 1, 1, 2, 2, 3, 4))
        made.append(tuple(Message(role, nasty_text(rng)) for role in roles))
    return made

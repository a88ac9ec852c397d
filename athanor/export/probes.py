"""What every runtime is asked, so that their answers can be compared: texts, conversations, prompts, windows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import InputError
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import CONTROL_PIECES, Tokenizer

# Every entry broke some tokenizer at some time: leading and repeated spaces, tabs, line ends, bytes outside any
# piece, joined emoji, marks, right-to-left text, runs whose merges tie, and texts that look like control tokens.
NASTY = (
    "",
    " ",
    "  leading",
    "trailing  ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    "\t\tindented\n\t\treturn 1\n",
    "    def f(x):\n        return x  # note\n",
    "line\r\nline\rline",
    "nul\x00in the middle",
    "bell\x07 escape\x1b[0m delete\x7f",
    "12345 3.14159 1,000,000 0x1F 1e-9",
    "caf\u00e9 cafe\u0301 na\u00efve \u0130\u0131",
    "\u00a0nbsp\u2009thin\u200bzero\u200dwidth\u2060joiner",
    "\ufeffbom first",
    "\u5f20\u4e09 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u202eabc\u202c",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f4\U000e0067\U000e0062\U000e007f \u2764\ufe0f",
    "\U0010ffff\ue000\ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "================  ----------------  ________________",
    "abababababab ababa baba",
    "literal \u2581 mark\u2581\u2581 twice",
    "<|user|>hello<|stop|><|assistant|>",
    "<|bos|><|eos|><|pad|><|unk|><|system|>",
    "<s></s><unk><pad><|end|><|im_end|><|endoftext|><|eot_id|>",
    "<0x0A><0x41> <|use r|> <|user|",
    "{{ bos_token }}{% for m in messages %}",
    "\\n \\t \\u2581 \\x00",
)
_ATOMS = (
    *"abcdeghilnorstuxyzABCEFIRST0123456789.,:;!?()[]{}<>=+-*/_|#@'\"\\",
    " ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "the", "ing", "tion", "self", "return", "def ", "None",
    "<|", "|>", "<|user|>", "<|stop|>", "</s>", "<s>", "<0x20>", "\u00e9", "e\u0301", "\u00df", "\u00a0", "\u200b",
    "\u6f22", "\u0639", "\U0001f600", "\u200d", "\x00", "\x1b", "\u2028", "==", "--", "__", "::", "ab", "ba", "aa",
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """texts: for the tokenizers. conversations: for the templates, each ending with a user message.

    prompts: ids to continue greedily. windows: ids whose logits are compared, at most a context long.
    """

    texts: list[str]
    conversations: list[list[Message]]
    prompts: list[list[int]]
    windows: list[list[int]]


def fuzz_texts(count: int, seed: int = 0) -> list[str]:
    """`NASTY`, runs of one character, and `count` random mixtures."""
    rng = random.Random(seed)
    runs = [character * length for character in "a=-_ .\n0" for length in (2, 3, 5, 8, 13, 31, 64)]
    mixed = ["".join(rng.choices(_ATOMS, k=rng.randint(1, 48))) for _ in range(count)]
    # U+2581 in a few only: llama.cpp cannot carry it and skips such texts.
    mixed[::20] = [text + "\u2581" + text[:3] for text in mixed[::20]]
    return [*NASTY, *runs, *mixed]


def battery_prompts(path: str | Path) -> list[list[Message]]:
    """The conversation of every item in an evaluation's battery.jsonl, once, in file order."""
    conversations: dict[str, list[Message]] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
            row = json.loads(line)
            conversations[row["item"]] = [Message(**message) for message in row["prompt"]]
    except FileNotFoundError:
        raise InputError("file not found", where=str(path), fix="dvc repro eval") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"not a list of battery answers ({error!r})", where=str(path), fix="dvc repro eval") from None
    return list(conversations.values())


def has_control(text: str) -> bool:
    """Whether a text spells a control token: other runtimes parse it out of a rendered conversation."""
    return any(piece in text for piece in CONTROL_PIECES)


def make_probe(
    tokenizer: Tokenizer,
    *,
    context_tokens: int,
    documents: Iterable[str],
    conversations: Sequence[Sequence[Message]],
    prompts: int,
    texts: int,
    windows: int,
) -> Probe:
    """Build the probe from held-out documents and held-out prompts.

    Where a small corpus has fewer of them than are asked for, it takes what is there; InputError only without any.
    """
    excerpts: list[str] = []
    full_windows: list[list[int]] = []
    short_windows: list[list[int]] = []  # compared only where there are not enough others
    for document in documents:
        ids = [tokenizer.bos, *tokenizer.encode(document), tokenizer.eos][:context_tokens]
        excerpts.append(document[:2000])
        (full_windows if len(ids) >= min(16, context_tokens) else short_windows).append(ids)
        if len(full_windows) == windows:
            break
    full_windows += short_windows[: windows - len(full_windows)]
    if not full_windows:
        fix = "raise download.val_fraction, or add documents"
        raise InputError("no held-out document", where="data/clean/val.parquet", fix=fix)
    usable = [list(messages) for messages in conversations if not any(has_control(m.content) for m in messages)]
    encoded = [(messages, prompt_ids(tokenizer, messages)) for messages in usable]
    fitting = [(messages, ids) for messages, ids in encoded if len(ids) < context_tokens - 1]
    if not fitting:
        raise InputError(
            f"none of {len(conversations)} held-out prompts fits into the context of {context_tokens} tokens",
            where="data/eval/battery.jsonl",
            fix="raise model.context_tokens, or add items to battery.categories",
        )
    prompts = min(prompts, len(fitting))
    # Spread over the whole list: it is sorted by category.
    chosen = [fitting[number * len(fitting) // prompts] for number in range(prompts)]
    strings = fuzz_texts(texts)
    return Probe(
        texts=[*strings, *excerpts],
        conversations=[messages for messages, _ in chosen] + _nasty_conversations(strings),
        prompts=[ids for _, ids in chosen],
        windows=full_windows,
    )


def _nasty_conversations(texts: Sequence[str]) -> list[list[Message]]:
    """System messages, several turns, and contents of every sort that spell no control token."""
    contents = [text for text in texts if text and not has_control(text)][:96]
    conversations = []
    for start in range(0, len(contents) - 3, 4):
        system, first, answer, second = contents[start : start + 4]
        turns = [Message("user", first), Message("assistant", answer), Message("user", second)]
        conversations.append([Message("system", system), *turns] if start % 8 else turns)
    return conversations

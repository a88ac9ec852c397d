"""Questions and answers from the standard library's docstrings, signatures and doctests.

The key of a pair is its module, because one function gives up to five pairs:
split by pair, validation would ask for what training has just shown.
"""

from __future__ import annotations

import ast
import copy
import doctest
import hashlib
import keyword
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from athanor.sources import stdlib
from athanor.sources.exercises import facts
from athanor.sources.instruct_params import DocstringsSource
from athanor.sources.stdlib import Entry, Module
from athanor.text.conversations import Conversation, Message
from athanor.text.documents import split_of
from athanor.text.recipes import recipe

MIN_WORDS, MAX_WORDS = 4, 40
MAX_CODE_LINES = 14
MAX_SAME_ANSWER = 2  # "Return the value." said of a dozen methods teaches guessing

WORDINGS: dict[str, tuple[str, ...]] = recipe("docstrings")


@dataclass(frozen=True)
class Pair:
    kind: str
    module: str
    prompt: str
    answer: str


def conversations(source: DocstringsSource, pairs: Iterable[Pair], val_fraction: float) -> list[Conversation]:
    """Pairs within the source's limits as conversations, in an order that mixes kinds and modules.

    Which pairs stay under a cap is decided by their hash: no module is
    favoured for its name, and a new docstring moves few others.
    """
    usable = {
        (pair.prompt, pair.answer): pair for pair in pairs if len(pair.prompt) + len(pair.answer) <= source.max_chars
    }
    answer_counts = Counter(pair.answer for pair in usable.values() if pair.kind == "summary")
    per_kind, per_module = Counter(), Counter()
    used_prompts: set[str] = set()
    rows = []
    for pair in sorted(usable.values(), key=_order):
        if pair.prompt in used_prompts or answer_counts[pair.answer] > MAX_SAME_ANSWER:
            continue
        if per_kind[pair.kind] >= source.max_rows.get(pair.kind, 0):
            continue
        if per_module[pair.module] >= source.max_rows_per_module:
            continue
        used_prompts.add(pair.prompt)
        per_kind[pair.kind] += 1
        per_module[pair.module] += 1
        messages = (Message("user", pair.prompt), Message("assistant", pair.answer))
        split = split_of(pair.module, val_fraction)
        rows.append(Conversation(messages, source.name, stdlib.LICENSE, split, pair.module))
    return rows


def _order(pair: Pair) -> bytes:
    return hashlib.blake2b(f"{pair.kind}\0{pair.prompt}\0{pair.answer}".encode(), digest_size=16).digest()


def collector(pairs: list[Pair] | None) -> Callable[[Module], None]:
    """A visitor that adds every module's pairs to the list, or does nothing without one."""
    return lambda module: pairs.extend(module_pairs(module)) if pairs is not None else None


def module_pairs(module: Module) -> Iterator[Pair]:
    """Every pair that the public names of one module give."""
    if any(component.startswith("_") for component in module.name.split(".")):
        return
    for entry in stdlib.entries(module):
        if any(component.startswith("_") for component in entry.name.split(".")):
            continue
        rng = random.Random(entry.name)  # the wording belongs to the name, whatever else is in the corpus
        for kind, prompt, answer in _entry_pairs(entry, rng):
            yield Pair(kind, module.name, prompt, answer)


def topic_pairs(topics: dict[str, str]) -> Iterator[Pair]:
    """One question on each keyword that has a page of its own in the language reference."""
    for name in keyword.kwlist:
        for paragraph in topics.get(name, "").split("\n\n")[1:]:  # the first is the title
            text = " ".join(paragraph.split()).replace('"', "").replace("*", "")
            text = re.split(r"(?<=[a-z)])[.:]\s", text, maxsplit=1)[0].rstrip(".:") + "."
            if re.match(rf"(The {name}|An? {name}|{name.capitalize()})\b", text) and is_sentence(text):
                prompt = _question(random.Random(name), "topic", name=name)
                yield Pair("topic", f"topic:{name}", prompt, text)
                break


def _question(rng: random.Random, wordings: str, **values: str) -> str:
    return rng.choice(WORDINGS[wordings]).format(**values)


def _entry_pairs(entry: Entry, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    summary = summary_of(entry.doc)
    if summary and isinstance(entry.node, ast.Module):
        yield "module", _question(rng, "module", name=entry.name), summary
    elif summary:
        wordings = "class" if entry.kind == "class" else "summary"
        yield "summary", _question(rng, wordings, name=entry.name, kind=entry.kind), summary
    if isinstance(entry.node, ast.FunctionDef):
        arguments = stdlib.signature(entry.node, drop_self=entry.kind == "method")
        if entry.doc and 3 <= len(arguments) <= 120:
            yield "signature", _question(rng, "signature", name=entry.name), f"{entry.name}({arguments})"
        if summary and entry.kind == "function" and (code := short_code(entry.node)):
            call = f"{entry.node.name}({arguments})"
            yield "code", _question(rng, "code", call=call, summary=summary), code
            yield "docstring", _question(rng, "docstring", code=code), summary
        names = {argument.arg for argument in ast.walk(entry.node.args) if isinstance(argument, ast.arg)}
        for parameter, meaning in parameters(entry.doc):
            if parameter in names:
                yield "parameter", _question(rng, "parameter", name=entry.name, parameter=parameter), meaning
    for code, output in doctest_outputs(entry.doc):
        yield "doctest", _question(rng, "doctest", code=code), output


def summary_of(doc: str) -> str | None:
    """The first sentence of a docstring, in the form that the battery uses if it asks for this one."""
    if not doc:
        return None
    if (known := facts.summary(doc)) is not None and len(known.split()) >= MIN_WORDS:
        return known
    text = facts.first_sentence(doc) + "."
    return text if is_sentence(text) else None


def is_sentence(text: str) -> bool:
    """Whether a text has 4 to 40 words, begins with a capital, ends with a full stop and is mostly letters."""
    letters = sum(character.isalpha() or character == " " for character in text)
    well_formed = text[:1].isupper() and text.endswith(".") and text.isascii() and letters >= 0.85 * len(text)
    return well_formed and MIN_WORDS <= len(text.split()) <= MAX_WORDS and ">>>" not in text and "--" not in text


def short_code(node: ast.FunctionDef) -> str | None:
    """A short function without its docstring and comments, or None when nothing instructive is left."""
    body = node.body[1:] if stdlib.docstring_node(node) is not None else node.body
    if not body or node.end_lineno - body[0].lineno >= MAX_CODE_LINES or isinstance(body[0], (ast.Pass, ast.Raise)):
        return None
    without_docstring = copy.copy(node)
    without_docstring.body, without_docstring.decorator_list = body, []
    code = ast.unparse(without_docstring)
    return code if code.count("\n") < MAX_CODE_LINES else None


def parameters(doc: str) -> Iterator[tuple[str, str]]:
    """Parameters that a docstring explains as `:param x: ...`, `x -- ...` or, under `Args:`, `x: ...`."""
    described = re.findall(r"^:param (?:\w+ )?(\w+):[ ]*(\S.*(?:\n[ ]+\S.*)*)", doc, re.MULTILINE)
    described += re.findall(r"^[ ]*(\w+) --[ ]+(\S.*(?:\n[ ]{4,}[^-\n]*$)*)", doc, re.MULTILINE)
    if (args_block := re.search(r"^Args:\n((?:[ ]+\S.*\n?)+)", doc, re.MULTILINE)) is not None:
        described += re.findall(r"^[ ]{2,4}(\w+): (\S.*(?:\n[ ]{6,}\S.*)*)", args_block[1], re.MULTILINE)
    for name, text in described:
        meaning = " ".join(text.split())
        meaning = meaning[:1].upper() + meaning[1:].rstrip(".") + "."
        if is_sentence(meaning):
            yield name, meaning


def doctest_outputs(doc: str) -> Iterator[tuple[str, str]]:
    """Doctest examples with their output, each with the examples before it that it may build on."""
    if ">>>" not in doc:
        return
    try:
        examples = doctest.DocTestParser().get_examples(doc)
    except ValueError:  # a docstring that only looks like a doctest
        return
    preceding = ""
    for example in examples:
        lines = example.source.rstrip("\n").split("\n")
        code = ">>> " + "\n... ".join(lines)
        output = example.want.rstrip("\n")
        reproducible = example.exc_msg is None and not example.options and len(output) <= 160
        if output and reproducible and not re.search(r"\.\.\.|<.*>| at 0x|BLANKLINE|/home|/usr|\d\.\d{6}", output):
            yield (f"{preceding}\n{code}" if preceding else code), output
        if not example.want:  # an example that prints is a question of its own
            preceding = f"{preceding}\n{code}" if preceding else code

"""Look at your own text, a folder or a file: what it holds, what can be read, and the lines of params.yaml that train on it.

    python -m athanor new FOLDER|FILE [--encoding NAME] [--template '{QUESTION} {ANSWER}'] [--kind KIND] [--write]

Prints a table by type of file, with what cannot be read and why, what is not UTF-8, equal documents and a guess at the
language, and then the lines. --write puts them into params.yaml; the default's own text is no longer a source then. A folder
has to lie in corpus/, where DVC sees every change; --write copies a file there. Afterwards `athanor plan` says what would run.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from filecmp import cmp
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from athanor.base.artifacts import write_bytes, write_text
from athanor.base.errors import InputError
from athanor.base.strict import build
from athanor.cli import corpus_gate, probe
from athanor.cli.alphabet import is_language, script
from athanor.cli.look import MOST_NAMED, Ending, kind_of, look, nothing_read, repeating, table, tell_unread
from athanor.quality.language import ENGLISH, OTHERS
from athanor.runtime import untracked
from athanor.runtime.dvc_view import REMOVED, edited_yaml
from athanor.runtime.schema import check_file, check_values
from athanor.sizing.optimiser import MAX_WARMUP, derive, half_life
from athanor.sources import holdout
from athanor.sources.params import KINDS, FilesSource
from athanor.text import globs
from athanor.text.documents import Document
from athanor.text.encodings import DETECT

PARAMS, FITTED = Path("params.yaml"), "own-text"
BATTERY = ("battery", "categories")
EXERCISES, IDENTITY, FIRST_WORDS, TEXT_ROWS = "exercises", "identity", ("first_words", "identity"), 400
LEAST_TOKENS = 1000
MAX_EPOCHS = 4.0
OPENING = 24  # characters of a text that samples continue
MIN_SHARE_OF_WORDS = 0.15  # function words of a language, for a guess


def language(texts: Iterable[str]) -> str:
    """A guess by script, or by the function words that are most common; "none" where the text is of no words."""
    samples = [text[:2000] for text in texts]
    found = Counter(map(script, samples)).most_common(1)[0][0]
    if found != "Latin":
        return found
    sample = " ".join(samples)[:400_000]
    words = re.findall(r"\w+", sample.lower())
    lists = {"english": ENGLISH, **OTHERS}
    shares = {name: sum(word in known for word in words) / max(len(words), 1) for name, known in _sets(lists).items()}
    best = max(shares, key=lambda name: shares[name])
    if shares[best] > MIN_SHARE_OF_WORDS:
        return best.capitalize()
    return "unknown" if 2 * sum(map(is_language, samples)) > len(samples) else "none"


def _sets(lists: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(words.split()) for name, words in lists.items()}


def proposal(
    folder: Path, found: dict[str, Ending], sections: Mapping[str, Any], wanted: str | None = None
) -> tuple[dict[tuple[str | int, ...], Any], list[InputError], float]:
    """Places in params.yaml with their values; why a kind of text is left out, if another remains; and the bytes of a token.

    Text that is no code is of the kind that is `wanted`, else prose, or tokens where it is in no natural language.
    """
    rules, pretrain = sections["clean"].rules, sections["pretrain"]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "own"
    sources: list[dict[str, Any]] = []
    kept: list[Document] = []
    read, mostly = 0, False  # bytes that are trained on; whether most of a kind is in another script
    refused: list[InputError] = []
    mixture: dict[str, Any] = {}
    values: dict[tuple[str | int, ...], Any] = {("sft_data", "max_pad_share"): corpus_gate.PAD_SHARE}
    for kind in ("prose", "code"):
        chosen = {pattern: ending for pattern, ending in sorted(found.items()) if kind_of(ending) == kind}
        if not chosen:
            continue
        patterns = [f"{folder.as_posix()}/**/{pattern}" for pattern in chosen]
        source: dict[str, Any] = {
            "type": "files",
            "name": f"{name}-code" if kind == "code" and sources else name,
            "kind": kind,
            "globs": patterns,
        }
        if any(ending.files > ending.read for ending in chosen.values()):
            source["on_unreadable"] = "skip"
        documents = [document for ending in chosen.values() for document in ending.documents]
        if wanted and kind == "prose":
            documents = [replace(document, kind=wanted) for document in documents]
        fitted = corpus_gate.fit(documents, rules)
        source["kind"] = fitted.kind
        try:
            corpus_gate.check_rules(build(FilesSource, source, "own"), documents, fitted.rules(rules))
        except InputError as error:
            refused.append(error)
            continue
        sources.append(source)
        kept += documents
        size = sum(len(document.text.encode()) for document in documents)
        read += size - holdout.expected(documents, sections["download"].val_fraction)
        mixture[source["name"]] = {"share": float(size), "max_epochs": MAX_EPOCHS}
        for key, value in fitted.settings.items():
            values["clean", "rules", fitted.kind, key] = value
        if fitted.script:
            values["classifiers", "weak_labels"] = False
        mostly = mostly or fitted.mostly
    if not sources:
        raise refused[0]
    corpus_gate.check_size(kept)
    size, bytes_per_token = corpus_gate.vocabulary([document.text for document in kept], sections["tokenizer"])
    if size != sections["tokenizer"].vocab_size:
        values["tokenizer", "vocab_size"] = size
    total = sum(entry["share"] for entry in mixture.values())
    # More of a little text is learned by heart: Alice in Wonderland, 152 kB, ends at 2.27 bits per byte after four epochs
    # of 130,000 tokens, and at 3.80 after the default's 1,000,000.
    if (tokens := max(LEAST_TOKENS, round(MAX_EPOCHS * read / bytes_per_token, -3))) < pretrain.tokens:
        values["pretrain", "tokens"] = int(tokens)
        # What the second moment remembers fits the run. 222,000 tokens of a manual, three seeds, in pairs: 2.1700 bits per
        # byte and not 2.1734, each time less.
        beta2 = derive(probe.recipe_of(sections), batch_tokens=pretrain.batch_tokens, tokens=int(tokens)).beta2
        if (beta2 := math.floor(beta2 * 10_000) / 10_000) < pretrain.beta2:
            values["pretrain", "beta2"] = beta2
        # Not shorter than the half-life of beta2, as far as the run allows.
        settled = math.ceil(half_life(min(beta2, pretrain.beta2), pretrain.batch_tokens))
        warmup = max(tokens * pretrain.warmup_tokens / pretrain.tokens, min(settled, MAX_WARMUP * tokens))
        values["pretrain", "warmup_tokens"] = int(warmup)
    drawn = (kept[len(kept) * part // 4].text for part in (1, 2, 3))
    values["pretrain", "sample_prompts"] = [" ".join(text.split()[:3])[:OPENING] for text in drawn]
    for entry in mixture.values():
        entry["share"] = round(entry["share"] / total, 3) or 0.001
    # Its questions on real people, places and books may be answered by the text.
    categories = sections["battery"].categories
    if categories.keys() > {"unknown"}:
        values[BATTERY] = {name: count for name, count in categories.items() if name != "unknown"}
    exercises = sections["sft_data"].sources.get(EXERCISES)
    if mostly and exercises is not None and exercises.times_own is not None:  # as the preset has it
        values |= english_chat(sections)
    return {("download", "sources"): sources, ("mixture", "sources"): mixture, **values}, refused, bytes_per_token


def english_chat(sections: Mapping[str, Any]) -> dict[tuple[str | int, ...], Any]:
    """Places in params.yaml that keep of the preset's chat what is learned where the tokenizer spells English by the letter.

    A Japanese novel: with exercises 2 + 2 was 12, and without them the model says that it did not learn to calculate. With
    fewer rows of identity 7 % of it were right, so it keeps all but questions of the world. Empty where nothing would remain.
    """
    categories, use = sections["battery"].categories, sections["sft_data"]
    asked = {name: categories[name] for name in categories if name in FIRST_WORDS}
    names = [chat.name for chat in sections["instruct"].sources]
    if not asked or EXERCISES not in names or len(names) == 1:
        return {}
    values: dict[tuple[str | int, ...], Any] = {
        BATTERY: asked,
        ("sft_data", "max_source_share"): 1.0,  # identity alone, without conversations of one's own
        ("sft_data", "sources", EXERCISES): REMOVED,
    }
    if EXERCISES in use.source_priority:
        values["sft_data", "source_priority"] = [name for name in use.source_priority if name != EXERCISES]
    if any(
        chat.name == IDENTITY and getattr(chat, "text_rows", 0) > TEXT_ROWS for chat in sections["instruct"].sources
    ):
        values["instruct", "sources", names.index(IDENTITY), "text_rows"] = TEXT_ROWS
    return values | {("instruct", "sources", names.index(EXERCISES)): REMOVED}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="FOLDER|FILE", help="below corpus/, for example corpus/notes")
    parser.add_argument(
        "--encoding", metavar="NAME", help="of files that are not UTF-8, where it is not sure: cp1251, gb18030"
    )
    parser.add_argument("--template", help="the text of a row of several columns: '{QUESTION} {ANSWER}'")
    parser.add_argument("--kind", choices=KINDS, help="of what is no code: whose rules hold; found out if left out")
    parser.add_argument("--write", action="store_true", help="put the lines into params.yaml")


def run(args: argparse.Namespace) -> int:
    from dvc.utils.serialize import dumps_yaml

    place = target = Path(args.place)
    is_below = place.resolve().is_relative_to(Path("corpus").resolve())
    if place.is_file():
        files = [(place.name, place)]
        target = place if is_below else Path("corpus") / place.name
    elif place.is_dir():
        files = globs.find([f"{escape(place.as_posix())}/**/*"])
    else:
        raise InputError("no such folder or file", where=place, fix="name a folder with your files, or one of them")
    given = {"encoding": args.encoding, "text_template": args.template and args.template.replace("\\n", "\n")}
    given = {key: value for key, value in given.items() if value}
    found = look(files, given)
    documents = [document for ending in found.values() for document in ending.documents]
    print(table(found))
    tell_unread(place, found)
    if again := repeating(found):
        print("\nsays again what other files say; remove it, or its text counts twice:")
        print("\n".join(f"  {path}" for path in again[:MOST_NAMED]))
    if not documents:
        raise nothing_read(place, found)
    size, copies = sum(len(document.text.encode()) for document in documents), Counter(d.id for d in documents)
    prose = [document.text for document in documents if document.kind == "prose"]
    print(
        f"\n{size:,} bytes of text in {len(documents):,} pieces, {len(documents) - len(copies):,} of them copies of others;"
    )
    print(f"language: {language(prose) if prose else 'code'}")
    corpus_gate.check_size(documents)
    sections = check_file(PARAMS)
    glob = Path(escape(target.as_posix()))
    own = glob.with_suffix("") if place.is_file() else glob
    values, refused, bytes_per_token = proposal(own, found, sections, args.kind)
    print(f"perhaps {round(size / bytes_per_token):,} tokens")
    for error in refused:
        print(f"left out: {error}")
    encodings = {guess.encoding for ending in found.values() if ending.read for guess in ending.guesses.values()}
    unsure = any("encoding" in error.fix for ending in found.values() for error in ending.errors.all)
    if len(encodings) == 1 and not unsure:  # one for all would read those that are left out, and wrongly
        given |= {"encoding": encodings.pop()}
    elif encodings and not args.encoding:
        given |= {"encoding": DETECT}
    for source in values["download", "sources"]:
        source |= given | ({"globs": [glob.as_posix()]} if place.is_file() else {})
        if any(
            ending.errors.errors
            for ending in found.values()
            if (kind_of(ending) == "code") == (source["kind"] == "code")
        ):
            source["on_unreadable"] = "skip"  # of some files not every row can be read
    before = PARAMS.read_text(encoding="utf-8")
    exercises = sections["sft_data"].sources.get(EXERCISES)
    fits = exercises is None or exercises.times_own is not None  # as the preset has it
    lines: dict[str, Any] = {}
    for path, value in values.items():
        if path == BATTERY or path[0] == "instruct" or value is REMOVED:
            continue
        inner, (*parents, last) = lines, map(str, path)
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    if (share := sections["pretrain"].tokens * bytes_per_token / size) < 1:
        print(f"pretrain.tokens ({sections['pretrain'].tokens:,}) reads about {share:.0%} of it, once")
    replaced = ", ".join(sections["download"].names)
    print(f"\nLines of {PARAMS}, in place of the sources there ({replaced}):\n\n{dumps_yaml(lines)}")
    if BATTERY in values:
        left_out = sections["battery"].categories.keys() - values[BATTERY]
        why = "this text may answer them, or tell too little English"
        print(f"and battery.categories without {', '.join(sorted(left_out))}: {why}\n")
    if REMOVED in values.values():
        print(f"and instruct.sources without {EXERCISES}, {IDENTITY} with text_rows of at most {TEXT_ROWS}\n")
    if target == place and not is_below:
        name = shlex.quote(f"corpus/{place.resolve().name}")
        fix = f"cp -r {shlex.quote(str(place))} corpus/ && athanor new {name} --write"
        raise InputError("lies outside of corpus/, where DVC would see no change of it", where=place, fix=fix)
    if not args.write:
        copied = f"copies it to {target} and " if target != place else ""
        print(f"athanor new --write {copied}puts them there; nothing was changed")
        return 0
    edited = edited_yaml(before, values)
    check_values(yaml.safe_load(edited))
    if target != place:
        copy(place, target)
    write_text(PARAMS, edited)
    print(f"written to {PARAMS}; `athanor plan` says what would run, `athanor repro` runs it")
    print(
        "The model is pretrained on this text, and `athanor chat --model base` continues yours. What it answers it learns"
    )
    print(
        "from conversations (instruct.sources), and none of them is about this text: docs/own-data.md, 'Answers about your"
    )
    again = f" Fine-tuning that fits them: `athanor preset use {FITTED}`, then this command again."
    print(f"text', says how to add some.{'' if fits else again}")
    if reminder := untracked.reminder(target):
        print(reminder)
    return 0


def copy(place: Path, target: Path) -> None:
    if target.exists() and not cmp(place, target, shallow=False):
        raise InputError("is there already, with other text", where=target, fix=f"rename one of them, or move {place}")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, place.read_bytes())

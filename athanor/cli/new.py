"""Look at a folder of your own text: what it holds, what can be read, and the lines of params.yaml that train on it.

    python -m athanor new FOLDER [--kind KIND] [--write]

Prints a table by type of file, with what cannot be read and why, equal documents and a guess at the language, and then the
lines. --write puts them into params.yaml; the default's own text is no longer a source then. The folder has to lie in
corpus/, where DVC sees every change. Afterwards `athanor plan` says what would run.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.base.strict import build
from athanor.cli import corpus_gate, probe
from athanor.cli.alphabet import is_language, script
from athanor.quality.language import ENGLISH, OTHERS
from athanor.runtime.dvc_view import edited_yaml
from athanor.runtime.schema import check_file
from athanor.sizing.optimiser import MAX_WARMUP, derive, half_life
from athanor.sources import select
from athanor.sources.params import KINDS, FilesSource
from athanor.text import globs, rows
from athanor.text.documents import Document

PARAMS = Path("params.yaml")
UNKNOWN_LEFT_OUT = ("battery", "categories")
MAX_EPOCHS = 4.0
BYTES_PER_TOKEN = 4  # of prose in languages of Latin script, about
MIN_SHARE_OF_WORDS = 0.15  # function words of a language, for a guess

MOST_NAMED = 8  # files
WEB_FILES = ("*.js", "*.mjs", "*.css", "*.map")  # of a web site: its search index would be two thirds of the text
LONG_LINE, MIN_LINES = 40, 50  # characters, and lines of that length in a file, to tell what repeats other files
REPEATED = 0.95  # of a file's long lines; pages of one manual share up to 0.85 by what all of them say


@dataclass
class Ending:
    """All files of one type."""

    files: int = 0
    bytes: int = 0
    read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: list[InputError] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    lines: dict[Path, set[int]] = field(default_factory=dict)  # hashes of the long ones, by file


def look(folder: Path) -> dict[str, Ending]:
    """Every file of the folder by its ending, or by its name where it has none."""
    found: dict[str, Ending] = defaultdict(Ending)
    for name, path in globs.find([f"{folder.as_posix()}/**/*"]):
        ending = found[pattern_of(path)]
        ending.files += 1
        ending.bytes += path.stat().st_size
        kind = "code" if path.suffix.lower() in rows.CODE else "prose"
        source = build(FilesSource, {"type": "files", "name": "own", "globs": [str(path)], "kind": kind}, "own")
        try:
            documents = list(select.documents(source, [(name, path)], 0.0))
        except InputError as error:
            ending.reasons[error.what.partition(" (")[0]] += 1
            ending.errors.append(error)
        else:
            ending.read += bool(documents)
            ending.reasons["empty"] += not documents
            ending.documents += documents
            text = "\n".join(document.text for document in documents)
            ending.lines[path] = {hash(line) for line in text.split("\n") if len(line) >= LONG_LINE}
    pages = sum(found[pattern].files for pattern in ("*.html", "*.htm") if pattern in found)
    others = [found[pattern] for pattern in WEB_FILES if pattern in found]
    if pages > sum(ending.files for ending in others):
        for ending in others:
            ending.reasons["of a web site, no text"] = ending.read
            ending.read, ending.documents, ending.lines = 0, [], {}
    return {pattern: ending for pattern, ending in found.items() if ending.files}


def repeating(found: Mapping[str, Ending]) -> list[Path]:
    """Files that say again what the others say, such as a book on one page beside its chapters."""
    files = {path: lines for ending in found.values() for path, lines in ending.lines.items()}
    counts = Counter(line for lines in files.values() for line in lines)
    large = [path for path, lines in files.items() if len(lines) >= MIN_LINES]
    shares = {path: sum(counts[line] > 1 for line in files[path]) / len(files[path]) for path in large}
    # Of two that are alike the larger one is named.
    return sorted(path for path in large if shares[path] >= REPEATED and not _within(path, files))


def _within(path: Path, files: Mapping[Path, set[int]]) -> bool:
    """Whether a single larger file holds most of this one."""
    mine = files[path]
    return any(
        len(mine & lines) >= REPEATED * len(mine)
        for other, lines in files.items()
        if other != path and (len(lines), other) > (len(mine), path)
    )


def pattern_of(path: Path) -> str:
    """The last part of a glob that matches files of this type."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in rows.COMPRESSED else path.suffixes[-1:]
    return f"*{''.join(suffixes)}" if suffixes else path.name


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
) -> tuple[dict[tuple[str, ...], Any], list[InputError]]:
    """Places in params.yaml and what should stand there; and why a kind of text is left out, if another remains.

    Text that is no code is of the kind that is `wanted`, else prose, or tokens where it is in no natural language.
    """
    rules, pretrain = sections["clean"].rules, sections["pretrain"]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "own"
    sources: list[dict[str, Any]] = []
    kept: list[Document] = []
    refused: list[InputError] = []
    mixture: dict[str, Any] = {}
    values: dict[tuple[str, ...], Any] = {("sft_data", "max_pad_share"): corpus_gate.PAD_SHARE}
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
        mixture[source["name"]] = {"share": float(size), "max_epochs": MAX_EPOCHS}
        for key, value in fitted.settings.items():
            values["clean", "rules", fitted.kind, key] = value
        if fitted.script:
            values["classifiers", "weak_labels"] = False
    if not sources:
        raise refused[0]
    corpus_gate.check_size(kept)
    size = corpus_gate.vocabulary([document.text for document in kept], sections["tokenizer"])
    if size != sections["tokenizer"].vocab_size:
        values["tokenizer", "vocab_size"] = size
    total = sum(entry["share"] for entry in mixture.values())
    # More of a little text is learned by heart: Alice in Wonderland, 152 kB, ends at 2.27 bits per byte after four epochs
    # of 130,000 tokens, and at 3.80 after the default's 1,000,000.
    if (tokens := round(total * MAX_EPOCHS / BYTES_PER_TOKEN, -3)) < pretrain.tokens:
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
    for entry in mixture.values():
        entry["share"] = round(entry["share"] / total, 3) or 0.001
    # Its questions on real people, places and books may be answered by the text.
    categories = sections["battery"].categories
    if categories.keys() > {"unknown"}:
        values[UNKNOWN_LEFT_OUT] = {name: count for name, count in categories.items() if name != "unknown"}
    return {("download", "sources"): sources, ("mixture", "sources"): mixture, **values}, refused


def kind_of(ending: Ending) -> str:
    return ending.documents[0].kind if ending.documents else ""


def table(found: dict[str, Ending]) -> str:
    """What was read, what not, and why."""
    rows_ = [("type", "files", "kB", "read", "pieces", "not read")]
    for pattern, ending in sorted(found.items(), key=lambda item: (-item[1].bytes, item[0])):
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(ending.reasons.items()) if count)
        sizes = (ending.files, round(ending.bytes / 1000), ending.read, len(ending.documents))
        rows_.append((pattern, *(f"{size:,}" for size in sizes), reasons))
    wide = max(len(row[0]) for row in rows_)
    return "\n".join(
        f"{name:<{wide}} {files:>7} {size:>9} {read:>7} {pieces:>8}   {why}".rstrip()
        for name, files, size, read, pieces, why in rows_
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="below corpus/, for example corpus/notes")
    parser.add_argument("--kind", choices=KINDS, help="of what is no code: whose rules hold; found out if left out")
    parser.add_argument("--write", action="store_true", help="put the lines into params.yaml")


def run(args: argparse.Namespace) -> int:
    from dvc.utils.serialize import dumps_yaml

    folder = Path(args.folder)
    if not folder.is_dir():
        raise InputError("is no folder", where=folder, fix="name a folder with your files; one file: put it into one")
    found = look(folder)
    documents = [document for ending in found.values() for document in ending.documents]
    print(table(found))
    if errors := [error for ending in found.values() if ending.read for error in ending.errors]:
        print("\ncannot be read, and will be left out:")
        print("\n".join(f"  {error.where}: {error.what}" for error in errors[:MOST_NAMED]))
        if errors[MOST_NAMED:]:
            print(f"  and {len(errors) - MOST_NAMED} more")
    if again := repeating(found):
        print("\nsays again what other files say; remove it, or its text counts twice:")
        print("\n".join(f"  {path}" for path in again[:MOST_NAMED]))
    if not documents:
        raise InputError("no file can be read", where=folder, fix="convert the files: docs/own-data.md names the types")
    size, copies = sum(len(document.text.encode()) for document in documents), Counter(d.id for d in documents)
    prose = [document.text for document in documents if document.kind == "prose"]
    print(
        f"\n{size:,} bytes of text in {len(documents):,} pieces, {len(documents) - len(copies):,} of them copies of others;"
    )
    print(f"perhaps {size // BYTES_PER_TOKEN:,} tokens; language: {language(prose) if prose else 'code'}")
    corpus_gate.check_size(documents)
    sections = check_file(PARAMS)
    values, refused = proposal(folder, found, sections, args.kind)
    for error in refused:
        print(f"left out: {error}")
    lines: dict[str, Any] = {}
    for path, value in values.items():
        if path == UNKNOWN_LEFT_OUT:
            continue
        inner = lines
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    if (share := sections["pretrain"].tokens * BYTES_PER_TOKEN / size) < 1:
        print(f"pretrain.tokens ({sections['pretrain'].tokens:,}) reads about {share:.0%} of it, once")
    replaced = ", ".join(sections["download"].names)
    print(f"\nLines of {PARAMS}, in place of the sources there ({replaced}):\n\n{dumps_yaml(lines)}")
    if UNKNOWN_LEFT_OUT in values:
        print(
            "and battery.categories without 'unknown': its questions on people, places and books may be answered by this text\n"
        )
    if not folder.resolve().is_relative_to(Path("corpus").resolve()):
        raise InputError(
            "lies outside of corpus/, where DVC would see no change of it", where=folder, fix="move it there"
        )
    if not args.write:
        print("athanor new --write puts them there; nothing was changed")
        return 0
    write_text(PARAMS, edited_yaml(PARAMS.read_text(encoding="utf-8"), values))
    check_file(PARAMS)
    print(f"written to {PARAMS}; `athanor plan` says what would run, `athanor repro` runs it")
    print(
        "The model is pretrained on this text. What it answers it learns from conversations (instruct.sources), and none"
    )
    print("of them is about this text: docs/own-data.md, 'Answers about your text', says how to add some.")
    return 0

"""What a model was trained on, as numbered documents: the streams of data/shards and the entries of data/sft.

Each tells where a document comes from and at which steps the model of this checkout read it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from athanor.base.artifacts import MANIFEST, digest, manifest_digest, read_json, read_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.data import rows, shards
from athanor.origins.reading import Reading
from athanor.origins.replacing import at_work, not_here
from athanor.runtime.dvc_lock import built_params
from athanor.text.documents import content_id, shard_files
from athanor.tokenizer.tokenizer import Tokenizer

SHARDS, SFT, TOKENIZER = Path("data/shards"), Path("data/sft"), Path("models/tokenizer")
MODEL = Path("models/sft")
CLEAN, INSTRUCT = Path("data/clean"), Path("data/instruct")
UNKNOWN = "unknown"


class Text:
    """One stream of data/shards: `name` is shards.TRAIN or shards.COOLDOWN."""

    def __init__(self, root: Path, name: str, tokenizer: Tokenizer) -> None:
        self.root, self.name, self.tokenizer = root, name, tokenizer
        self.manifest = shards.read_shards_manifest(root / SHARDS)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.digest = _digest(self.manifest, f"{name}/")
        self._dtype = np.dtype(self.manifest["dtype"])
        self._stream = shards.TokenStream(root / SHARDS / name, self._dtype)
        facts = self.manifest if name == shards.TRAIN else self.manifest[name]
        self._sources = sorted(facts["sources"])

    def __len__(self) -> int:
        return self._stream.documents

    @property
    def tokens(self) -> int:
        return self._stream.tokens

    def ids(self, number: int) -> np.ndarray:
        return self._stream.document(number).astype(self._dtype)

    def describe(self, numbers: Collection[int]) -> dict[int, Facts]:
        """Kind, id, source, licence and meta of some documents. The id is that of the text in data/clean."""
        facts: dict[int, Facts] = {}
        ids_by_source: dict[str, set[str]] = {}
        for number in numbers:
            source = self._sources[self._stream.sources[number]]
            document_id = content_id(self.tokenizer.decode(self.ids(number).tolist()))
            facts[number] = {"kind": "document", "id": document_id, "source": source, "license": UNKNOWN, "about": ""}
            ids_by_source.setdefault(source, set()).add(document_id)
        found = {row["id"]: row for row in _clean_rows(self.root, ids_by_source)}
        for row in facts.values():
            if kept := found.get(row["id"]):
                meta = {key: value for key, value in json.loads(kept["meta"]).items() if key != "raw_id"}
                about = ", ".join(f"{key} {value}" for key, value in sorted(meta.items()))
                row |= {"license": kept["license"], "about": about}
        return facts

    def part(self, number: int, offset: int) -> tuple[str, str]:
        return "", ""

    def copies(self, numbers: Collection[int]) -> int:
        """How often the data has these documents."""
        return len(numbers)

    def steps(self, numbers: Iterable[int], offset: int, tokens: int) -> list[int] | None:
        """The steps that learned `tokens` tokens from `offset` of these documents on; None where it is not known."""
        if (reading := self._reading) is None:
            return None
        first = [int(self._stream.starts[number]) + offset for number in numbers]
        # A window's targets begin one token after it.
        context = reading.context_tokens
        return reading.steps(
            window for at in first for window in range((at - 1) // context, (at + tokens - 2) // context + 1)
        )

    @cached_property
    def _reading(self) -> Reading | None:
        if (run := _training(self.root, "pretrain", "base", SHARDS)) is None:
            return None
        params, metrics = run
        model, recipe = params["model"], params["pretrain"]
        batch, total = recipe["batch_tokens"], metrics["steps"] * recipe["batch_tokens"]
        begin, end = 0, total
        if shards.COOLDOWN in self.manifest:
            # As stages/pretrain.py has it: the first step that ends with a lower rate.
            cooldown = int(total * recipe["cooldown_fraction"])
            border = min(total - cooldown, total - batch) // batch * batch
            begin, end = (0, border) if self.name == shards.TRAIN else (border, total)
        context = model["context_tokens"]
        samples = (self.tokens - 1) // context
        return Reading(samples, context, recipe["seed"], batch, end, begin, metrics["skipped_ranges"])


class Conversations:
    """The entries of data/sft that are trained on: conversations, and pieces of text."""

    name = "sft"

    def __init__(self, root: Path, tokenizer: Tokenizer) -> None:
        self.root, self.tokenizer = root, tokenizer
        manifest = read_manifest(root / SFT, rows.KIND, rows.VERSION)
        self.vocab_size: int = manifest["vocab_size"]
        self.digest = _digest(manifest, "train_i")
        self._rows = rows.PackedRows(root / SFT)

    @property
    def tokens(self) -> int:
        return int(self._rows.lengths().sum())

    def __len__(self) -> int:
        return self._rows.conversation_count

    def ids(self, number: int) -> np.ndarray:
        return self._rows.conversation(number)[0]

    def describe(self, numbers: Collection[int]) -> dict[int, Facts]:
        """As of a document: the id is the entry's number."""
        facts = {}
        for number in numbers:
            source, turns = self._rows.source(number), self.turns(number)
            kind = "conversation" if turns else "text in fine-tuning"
            licences = {self._licence(source, turn) for turn in turns} or {UNKNOWN}
            facts[number] = {
                "kind": kind,
                "id": str(number),
                "source": source,
                "license": ", ".join(sorted(licences)),
                "about": "",
            }
        return facts

    def part(self, number: int, offset: int) -> tuple[str, str]:
        """The part of its turn that a place is in, question or answer, and the turn's question; "" in a piece of text."""
        if self._rows.is_text(number):
            return "", ""
        ids, supervised = self._rows.conversation(number)
        turn = max(int((ids[: offset + 1] == self.tokenizer.user).sum()), 1) - 1
        return "answer" if supervised[offset] else "question", self.turns(number)[turn][0]

    def copies(self, numbers: Collection[int]) -> int:
        """As of text: a repeated conversation is an entry of several rows."""
        return len(self.rows_of(numbers))

    def steps(self, numbers: Iterable[int], offset: int, tokens: int) -> list[int] | None:
        """As of text; up to the step whose weights were kept."""
        return None if self._reading is None else self._reading.steps(self.rows_of(numbers))

    @cached_property
    def _reading(self) -> Reading | None:
        if (run := _training(self.root, "sft", "sft", SFT)) is None:
            return None
        params, metrics = run
        batch = params["sft"]["batch_tokens"]
        end = metrics["chosen_step"] * batch
        context = self._rows.context_tokens
        return Reading(
            len(self._rows), context, params["sft"]["seed"], batch, end, skipped_ranges=metrics["skipped_ranges"]
        )

    @cached_property
    def _row_of(self) -> tuple[np.ndarray, np.ndarray]:
        """Entry numbers in order, and the row of each: what the rows say, by entry."""
        lengths = [self._rows.numbers(row) for row in range(len(self._rows))]
        entries = np.array([number for row in lengths for number in row], np.int64)
        order = np.argsort(entries, kind="stable")
        return entries[order], np.repeat(np.arange(len(lengths)), [len(row) for row in lengths])[order]

    def rows_of(self, numbers: Iterable[int]) -> list[int]:
        entries, rows_of_entries = self._row_of
        return [
            row
            for number in numbers
            for row in rows_of_entries[np.searchsorted(entries, number) : np.searchsorted(entries, number, "right")]
        ]

    def turns(self, number: int) -> list[tuple[str, str]]:
        """Questions and answers of a conversation; none of a piece of text."""
        if self._rows.is_text(number):
            return []
        ids, contents = self.ids(number).tolist(), []
        for opening in (self.tokenizer.user, self.tokenizer.assistant):
            starts = [at + 1 for at, token in enumerate(ids) if token == opening]
            contents.append(
                [self.tokenizer.decode(ids[start : ids.index(self.tokenizer.stop, start)]) for start in starts]
            )
        return list(zip(*contents, strict=True))

    def _licence(self, source: str, turn: tuple[str, str]) -> str:
        """The licence of the row of data/instruct with this question and answer."""
        if len(known := self._licences.get(source, ())) == 1:
            return known[0]
        path = self.root / INSTRUCT / f"{source}.jsonl"
        if not path.is_file() or not path.stat().st_size:
            return UNKNOWN
        rows = [{"content": content, "role": role} for role, content in zip(("user", "assistant"), turn, strict=True)]
        wanted = json.dumps(rows, ensure_ascii=False)[1:-1].encode()  # as write_rows has it
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            at = lines.find(wanted)
            return (
                UNKNOWN
                if at < 0
                else json.loads(lines[lines.rfind(b"\n", 0, at) + 1 : lines.find(b"\n", at)])["license"]
            )

    @cached_property
    def _licences(self) -> dict[str, list[str]]:
        path = self.root / INSTRUCT / MANIFEST
        counts = read_json(path)["counts"] if path.is_file() else {}
        return {source: facts["licenses"] for source, facts in counts.items() if "licenses" in facts}


def trained_on(root: Path) -> list[Text | Conversations]:
    """All that this checkout trains on, conversations first. InputError where it is not here, or of another tokenizer."""
    if not (root / SHARDS / MANIFEST).is_file():
        fix = "dvc checkout data/shards (dvc pull where it was made elsewhere), or dvc repro shard"
        raise not_here("the training text is not here", str(SHARDS), fix, at_work(root))
    tokenizer, manifest = Tokenizer.load(root / TOKENIZER), shards.read_shards_manifest(root / SHARDS)
    _check_tokenizer(root, manifest, tokenizer, SHARDS)
    names = [shards.TRAIN, *([shards.COOLDOWN] if shards.COOLDOWN in manifest else [])]
    texts = [Text(root, name, tokenizer) for name in names]
    if not (root / SFT / MANIFEST).is_file():
        return [*texts]
    _check_tokenizer(root, read_manifest(root / SFT, rows.KIND, rows.VERSION), tokenizer, SFT)
    return [Conversations(root, tokenizer), *texts]


def _check_tokenizer(root: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    if manifest["tokenizer"] != tokenizer.digest:
        raise not_here(f"made with another tokenizer than {TOKENIZER}", str(folder), "dvc repro", at_work(root))


def _digest(manifest: Mapping[str, Any], beginning: str) -> str:
    files = {name: facts["sha256"] for name, facts in manifest["files"].items() if name.startswith(beginning)}
    return digest([manifest["vocab_size"], files])


def _training(root: Path, stage: str, model: str, data: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Parameters and metrics of the run that made models/`model`; None if it was not trained on this `data`."""
    try:
        parents = read_json(root / "models" / model / MANIFEST)["parents"]
        if parents[data.name] != manifest_digest(root / data):
            return None
        return built_params(root, stage), read_json(root / "metrics" / f"{stage}.json")
    except (InputError, KeyError):
        return None


def _clean_rows(root: Path, ids_by_source: Mapping[str, Collection[str]]) -> list[dict[str, Any]]:
    """Id, licence and meta of documents of data/clean; those that are not there are left out."""
    files, found = shard_files(root / CLEAN / "train"), []
    for source, ids in ids_by_source.items():
        for path in files.get(source, ()):
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                # Arrow's own search imports pandas, which takes longer than all else here.
                column = file.read_row_group(group, ["id"])["id"].to_pylist()
                if here := [row for row, document_id in enumerate(column) if document_id in ids]:
                    table = file.read_row_group(group, ["id", "license", "meta"])
                    found += [table.slice(row, 1).to_pylist()[0] for row in here]
    return found

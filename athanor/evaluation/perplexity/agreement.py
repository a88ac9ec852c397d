"""The gate at the end of an export: the same held-out text costs every runtime the same."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.errors import GateError, InputError
from athanor.evaluation.perplexity.backends import Evaluator, HuggingFace, Ours, TextScore
from athanor.evaluation.perplexity.binary import Binary, find
from athanor.evaluation.perplexity.server import INSTALL, Absent, Server
from athanor.export.gguf import gguf_name
from athanor.export.parity import FIX, FULL_SCALE, bound, rebuilt
from athanor.export.publish import AGAIN, HF_DIR, exact_file
from athanor.export.source import Source
from athanor.params.export import ExportParams
from athanor.tokenizer.tokenizer import SPACE_MARK, Tokenizer

KEPT, DOCUMENT_CHARS = 256, 4000
LOWEST_BOUND = 1e-6  # smaller differences are other orders of adding, which machines choose
NOISE = 3.0  # standard errors


def check_perplexity(
    folder: Path,
    source: Source,
    documents: Iterable[str],
    params: ExportParams,
    parity: dict[str, Any],
    *,
    threads: int,
    note: Callable[[str], None],
) -> None:
    """Score one text with torch, transformers and llama.cpp; adds to `parity`, GateError where they disagree.

    llama.cpp is its own program where it is found, else the package xllamacpp; where neither is, `note` says so.
    """
    context = source.config.context_tokens
    text = held_out_text(source.tokenizer, documents, context * params.perplexity_chunks)
    ours = Ours(rebuilt(source, "float32"), source.tokenizer)
    wanted = ours.text(text, context, params.perplexity_chunks)
    factor = _scale(ours, wanted, context)
    stored = wanted
    if params.dtype != "float32":
        stored = Ours(rebuilt(source, params.dtype), source.tokenizer).text(text, context, params.perplexity_chunks)
    limits = params.perplexity_tolerance

    def compare(name: str, evaluator: Evaluator, expected: TextScore, tolerance: float, rounds: bool) -> None:
        found = evaluator.text(text, context, params.perplexity_chunks)
        worst = agree(name, found, expected, tolerance, rounds)
        told = {
            "perplexity_difference_below": bound(max(worst, LOWEST_BOUND)),
            "perplexity_tokens": found.measured.tokens,
            "perplexity_by": evaluator.name,
        }
        if isinstance(parity.get(name), dict):
            parity[name] |= told
        else:  # nothing else of this file was checked
            parity[f"perplexity_{name}"] = f"within {told['perplexity_difference_below']:g} by {evaluator.name}"

    compare("transformers", HuggingFace(folder / HF_DIR), stored, limits.f32, False)
    if params.llama_cpp == "off":
        return
    program = find()

    def evaluator(path: Path, exact: bool) -> Evaluator:
        how = {"exact": exact, "threads": threads, "timeout_seconds": params.llama_cpp_timeout_seconds}
        return Server(path, **how) if program is None else Binary(program, path, **how)

    try:
        with exact_file(folder, source) as exact:
            compare("llama_cpp_f32", evaluator(exact, True), wanted, limits.f32, False)
    except Absent:
        why = f"neither llama-perplexity nor the package xllamacpp is here ({INSTALL}, or tools/llama_cpp.py)"
        note(f"perplexity in llama.cpp: NOT CHECKED, {why}; {AGAIN}")
        parity["perplexity_llama_cpp"] = f"not checked: {why}"
        return
    for kind in (name for name in params.gguf_types if name != "f32" and (folder / gguf_name(name)).exists()):
        limit = {"f16": limits.f16, "q8_0": limits.q8_0}.get(kind, limits.k_types)
        compare(f"llama_cpp_{kind}", evaluator(folder / gguf_name(kind), False), wanted, limit * factor, kind != "f16")


def agree(name: str, found: TextScore, expected: TextScore, tolerance: float, rounds: bool) -> float:
    """The relative difference of two perplexities; GateError for other ids or a difference above `tolerance`.

    The digits that a runtime prints end somewhere; half a unit of the last one is no disagreement and is added.
    `rounds`: a type so small that its rounding moves single targets; the
    chance in that is allowed for, by the differences of the targets, up to as much again as `tolerance`.
    """
    gate = f"perplexity in {name}"
    if found.ids is not None and expected.ids is not None and not np.array_equal(found.ids, expected.ids):
        if len(found.ids) != len(expected.ids):
            raise GateError(gate, f"{len(found.ids)} ids where ours are {len(expected.ids)}", fix=FIX)
        place = int(np.flatnonzero(found.ids != expected.ids)[0])
        raise GateError(gate, f"id {place} is {found.ids[place]}, ours {expected.ids[place]}", fix=FIX)
    if found.measured.tokens != expected.measured.tokens:
        counts = f"{found.measured.tokens} targets where ours are {expected.measured.tokens}"
        raise GateError(gate, counts, fix=FIX)
    difference = math.expm1(abs(found.measured.loss - expected.measured.loss))
    allowed = tolerance + found.resolution + expected.resolution
    if rounds and found.nats is not None and expected.nats is not None:
        apart = (found.nats - expected.nats)[np.isfinite(found.nats)]
        if len(apart) > 1:
            allowed += min(tolerance, NOISE * float(apart.std(ddof=1)) / math.sqrt(len(found.nats)))
    if not difference <= allowed:
        figures = f"{found.measured.perplexity:.4f}, ours {expected.measured.perplexity:.4f}"
        raise GateError(gate, f"{figures}: apart by {difference:.2g}, allowed {allowed:.2g}", fix=FIX)
    return difference


def held_out_text(tokenizer: Tokenizer, documents: Iterable[str], tokens: int) -> str:
    """Beginnings of documents, drawn by their content, of `tokens` tokens or somewhat more.

    Too few of them are repeated: what is compared is runtimes, for which any text will do. Documents that hold U+2581,
    which llama.cpp reads as a space, are left out; InputError if no other is there.
    """
    parts = (document[:DOCUMENT_CHARS] for document in documents)
    drawn = heapq.nsmallest(KEPT, {part for part in parts if SPACE_MARK not in part}, key=_rank)
    if not any(drawn):
        fix = "raise download.val_fraction, or add documents"
        raise InputError("no held-out document without U+2581", where="data/clean/val.parquet", fix=fix)
    taken: list[str] = []
    have = 1
    for part in itertools.cycle(drawn):
        if have >= tokens:
            break
        taken.append(part)
        have += len(tokenizer.encode(part))
    return "\n\n".join(taken)


def _rank(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@torch.inference_mode()
def _scale(ours: Ours, wanted: TextScore, context: int) -> float:
    """As for logits: rounding errors grow with them, and so may the difference."""
    logits_BTV = ours.model(torch.from_numpy(wanted.ids[:context].reshape(1, -1)))
    return max(1.0, float(logits_BTV.abs().max()) / FULL_SCALE)

"""The gate at the end of an export: the same held-out text costs every runtime the same."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.base.errors import GateError, InputError
from athanor.export.gguf_writer import gguf_name
from athanor.export.llamacpp.engine import INSTALL, NotInstalled
from athanor.export.params import ExportParams
from athanor.export.parity import FIX, FULL_SCALE, bound, rebuilt
from athanor.export.perplexity import HuggingFace, LlamaCpp, Ours, Scorer, TextScore, TooCoarse
from athanor.export.publish import HF_DIR, RERUN_HINT, exact_file, leave_out
from athanor.export.source import Source
from athanor.tokenizer.tokenizer import SPACE_MARK, Tokenizer

MAX_DOCUMENTS, DOCUMENT_CHARS = 256, 4000
LOWEST_BOUND = 1e-6  # smaller differences are other orders of adding, which machines choose
NOISE = 3.0  # standard errors
COARSE = "leave it out of export.gguf_types, or allow more with export.perplexity_tolerance"


def check_perplexity(
    folder: Path,
    source: Source,
    documents: Iterable[str],
    params: ExportParams,
    parity: dict[str, Any],
    *,
    threads: int,
    note: Callable[[str], None],
    workers: int = 1,
) -> None:
    """Score one text with torch, transformers and llama.cpp; adds to `parity`, GateError where they disagree. A file
    whose rounding costs too much is left out.

    Where xllamacpp is not installed, `note` says that llama.cpp was not asked. It scores `workers` files at a time.
    """
    context, limits = source.config.context_tokens, params.perplexity_tolerance
    text = held_out_text(source.tokenizer, documents, context * params.perplexity_chunks)
    ours = Ours(rebuilt(source, "float32"), source.tokenizer)
    exact_score = stored_score = ours.text(text, context, params.perplexity_chunks)
    if params.dtype != "float32":
        stored = Ours(rebuilt(source, params.dtype), source.tokenizer)
        stored_score = stored.text(text, context, params.perplexity_chunks)
    # As for logits: rounding errors grow with them, and so may the difference.
    with torch.inference_mode():
        logits_TV = ours.model(torch.from_numpy(exact_score.ids[:context].reshape(1, -1)))[0]
    factor = max(1.0, float(logits_TV.abs().max()) / FULL_SCALE)

    def score_of(scorer: Scorer) -> TextScore:
        return scorer.text(text, context, params.perplexity_chunks)

    def compare(
        name: str, scorer: Scorer, score: TextScore, expected: TextScore, tolerance: float, rounds: bool
    ) -> None:
        difference = check_agreement(name, score, expected, tolerance, rounds)
        facts = {
            "perplexity_difference_below": bound(max(difference, LOWEST_BOUND)),
            "perplexity_tokens": score.measured.tokens,
            "perplexity_by": scorer.name,
        }
        if isinstance(parity.get(name), dict):
            parity[name] |= facts
        else:  # nothing else of this file was checked
            parity[f"perplexity_{name}"] = f"within {facts['perplexity_difference_below']:g} by {scorer.name}"

    scorer: Scorer = HuggingFace(folder / HF_DIR)
    compare("transformers", scorer, score_of(scorer), stored_score, limits.f32, False)
    if params.llama_cpp == "off":
        return

    try:
        with exact_file(folder, source), ThreadPoolExecutor(workers) as pool:
            others = (name for name in params.gguf_types if name != "f32" and (folder / gguf_name(name)).exists())
            file_types = ["f32", *others]
            timeout = params.llama_cpp_timeout_seconds
            scorers = [
                LlamaCpp(folder / gguf_name(name), exact=name == "f32", threads=threads, timeout_seconds=timeout)
                for name in file_types
            ]
            scores = list(pool.map(score_of, scorers))
    except NotInstalled:
        reason = f"the package xllamacpp is not here ({INSTALL})"
        note(f"perplexity in llama.cpp: NOT CHECKED, {reason}; {RERUN_HINT}")
        parity["perplexity_llama_cpp"] = f"not checked: {reason}"
        return
    for file_type, scorer, score in zip(file_types, scorers, scores, strict=True):
        limit = {"f16": limits.f16, "q8_0": limits.q8_0}.get(file_type, limits.k_types) * factor
        tolerance = limits.f32 * factor if file_type == "f32" else limit
        try:
            compare(f"llama_cpp_{file_type}", scorer, score, exact_score, tolerance, file_type not in ("f32", "f16"))
        except TooCoarse as error:
            parity[f"llama_cpp_{file_type}"] = leave_out(folder, file_type, error, source, note)


def check_agreement(name: str, score: TextScore, expected: TextScore, tolerance: float, rounds: bool) -> float:
    """The relative difference of two perplexities; GateError for other ids or a difference above `tolerance`.

    `rounds`: a type so small that its rounding moves single targets; the chance in that is allowed for, by the
    differences of the targets, up to as much again as `tolerance`.
    """
    gate = f"perplexity in {name}"
    if len(score.ids) != len(expected.ids):
        raise GateError(gate, f"{len(score.ids)} ids where ours are {len(expected.ids)}", fix=FIX)
    if not np.array_equal(score.ids, expected.ids):
        position = int(np.flatnonzero(score.ids != expected.ids)[0])
        raise GateError(gate, f"id {position} is {score.ids[position]}, ours {expected.ids[position]}", fix=FIX)
    if score.measured.tokens != expected.measured.tokens:
        counts = f"{score.measured.tokens} targets where ours are {expected.measured.tokens}"
        raise GateError(gate, counts, fix=FIX)
    difference = math.expm1(abs(score.measured.loss - expected.measured.loss))
    allowed = tolerance
    if rounds and len(score.nats) > 1:
        differences = score.nats - expected.nats
        allowed += min(tolerance, NOISE * float(differences.std(ddof=1)) / math.sqrt(len(differences)))
    if not difference <= allowed:
        figures = f"{score.measured.perplexity:.4f}, ours {expected.measured.perplexity:.4f}"
        what = f"{figures}: apart by {difference:.2g}, allowed {allowed:.2g}"
        raise TooCoarse(gate, what, fix=COARSE) if rounds else GateError(gate, what, fix=FIX)
    return difference


def held_out_text(tokenizer: Tokenizer, documents: Iterable[str], tokens: int) -> str:
    """Beginnings of documents, drawn by their content, of `tokens` tokens or somewhat more.

    Too few of them are repeated: what is compared is runtimes, for which any text will do. Documents that hold U+2581,
    which llama.cpp reads as a space, are left out; InputError if no other is there.
    """
    excerpts = (document[:DOCUMENT_CHARS] for document in documents)
    drawn = heapq.nsmallest(
        MAX_DOCUMENTS, {excerpt for excerpt in excerpts if SPACE_MARK not in excerpt}, key=_content_hash
    )
    if not any(drawn):
        fix = "raise download.val_fraction, or add documents"
        raise InputError("no held-out document without U+2581", where="data/clean/val.parquet", fix=fix)
    chosen: list[str] = []
    token_count = 1
    for excerpt in itertools.cycle(drawn):
        if token_count >= tokens:
            break
        chosen.append(excerpt)
        token_count += len(tokenizer.encode(excerpt))
    return "\n\n".join(chosen)


def _content_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()

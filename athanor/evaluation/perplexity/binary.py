"""The llama-perplexity program: run it apart, and believe no output that is not complete.

What it does when something is wrong (llama.cpp 0.5.0-dev, each seen by
running it): its logger drops the last lines when the machine is busy, at exit
status 0, so the final figure or every figure may be missing and the last
running value may be of any chunk; a text that is too short, an empty one and
a failed decode also end with status 0; a perplexity may be printed as nan.
The file it writes with --save-all-logits does not pass through the logger: it
holds the ids and log probabilities of 16 bits, and decides where lines are lost.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np

from athanor.errors import GateError, InputError
from athanor.evaluation.perplexity.backends import Evaluator, TextScore
from athanor.evaluation.perplexity.gguf_file import read_facts
from athanor.evaluation.perplexity.windows import Window, first_scored, from_loss, plain, summary, too_short
from athanor.export import binaries

PROGRAM, VARIABLE = "llama-perplexity", "LLAMA_PERPLEXITY"
ATTEMPTS, PINNED_FROM = 6, 3
BATCH_TOKENS = 2048
LOGITS_BYTES = 1 << 28
FIX = f"build the programs with tools/llama_cpp.py, or set {VARIABLE}"
# Waiting threads must sleep: spinning ones slow a shared machine down by a factor of ten.
QUIET = {"LC_ALL": "C", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
_OVER, _CHUNK = re.compile(r"over (\d+) chunks"), re.compile(r"\[(\d+)\]([^,\s\[]+),")
_FINAL = re.compile(r"Final estimate: PPL = (\S+) \+/- (\S+)")
_SHORT = re.compile(r"tokenizes to only (\d+) tokens")


class Lost(Exception):
    """The program ended well and not all of its output arrived."""


@dataclass(frozen=True)
class Printed:
    """A complete answer. stderr is of the perplexity; source: final, last-chunk or logits-file.

    resolution: half a unit of the last printed digit, relative to the perplexity.
    """

    perplexity: float
    stderr: float | None
    chunks: int
    source: str
    resolution: float = 0.0


def find() -> Path | None:
    """The program that $LLAMA_PERPLEXITY names, else where the project finds llama.cpp's programs."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise InputError(f"'{named}' is no program", where=VARIABLE, fix="name llama-perplexity, or unset it")
        return Path(found).resolve()
    return binaries.find(PROGRAM)


class Binary(Evaluator):
    """llama-perplexity on one GGUF file. `exact`: fp32 cache and no flash attention, else its own defaults."""

    name = "llama-perplexity"

    def __init__(
        self,
        program: str | Path,
        path: str | Path,
        *,
        exact: bool,
        threads: int,
        timeout_seconds: float,
        gpu_layers: int = 0,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.program, self.path, self.facts = Path(program), Path(path), read_facts(path)
        self.dtype, self.context_tokens = self.facts.dtype, self.facts.context_tokens
        self.exact, self.threads, self.timeout_seconds = exact, threads, timeout_seconds
        self.gpu_layers, self.attempts = gpu_layers, attempts

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        raise InputError(
            "llama-perplexity reads text and parses no control symbol out of it, so a conversation would be scored"
            " as other tokens than the model was trained on",
            where=str(self.path),
            fix="use --backend xllamacpp, torch or transformers, which take ids",
        )

    def text(self, text: str, context_tokens: int, chunks: int | None = None) -> TextScore:
        if context_tokens > self.context_tokens:  # the program would only warn
            raise InputError(
                f"the model was made for contexts of {self.context_tokens} tokens, not {context_tokens}", where="context"
            )
        deadline = time.monotonic() + self.timeout_seconds
        told = ""
        for attempt in range(1, self.attempts + 1):
            with tempfile.TemporaryDirectory(prefix="athanor-perplexity-") as folder:
                status, out = self._run(Path(folder), plain(text), context_tokens, chunks, attempt, deadline)
                try:
                    logits = read_logits(Path(folder) / "logits.bin", context_tokens)
                    printed = judge(status, out, context_tokens, logits, self.path.name)
                except Lost as lost:
                    told = str(lost)
                    continue
                return self._score(printed, logits, context_tokens, attempt)
        raise GateError(
            PROGRAM,
            f"its output was incomplete in {self.attempts} runs: {told}",
            where=self.path.name,
            fix="run it on a less busy machine, or use --backend xllamacpp",
        )

    def _run(
        self, folder: Path, text: str, context_tokens: int, chunks: int | None, attempt: int, deadline: float
    ) -> tuple[int, str]:
        """Exit status and everything it said; its own folder, no terminal, no more time than there is."""
        (folder / "text.txt").write_bytes(f"{text}\n".encode())
        flags = {
            "-m": self.path.resolve(),
            "-f": "text.txt",
            "-c": context_tokens,
            "-b": BATCH_TOKENS,
            "-t": self.threads,
            "-ngl": self.gpu_layers,
        }
        if self.exact:
            flags |= {"-fa": "off", "-ctk": "f32", "-ctv": "f32"}
        if chunks is not None:
            flags["--chunks"] = chunks
        # Two bytes and more to a token is usual; where it is not, the file is larger than wanted and nothing is wrong.
        expected = min(len(text.encode()) // 2 // context_tokens + 1, chunks or 1 << 30)
        if expected * logits_bytes(1, context_tokens, self.facts.vocab_size) <= LOGITS_BYTES:
            flags["--save-all-logits"] = "logits.bin"
        command = [str(self.program), *(str(word) for pair in flags.items() for word in pair)]
        command += ["--no-warmup", "--no-log-prefix", "--no-log-timestamps"]
        if attempt >= PINNED_FROM and shutil.which("taskset"):  # on one core, its logger keeps up
            core = sorted(os.sched_getaffinity(0))[attempt % len(os.sched_getaffinity(0))]
            command = ["taskset", "-c", str(core), *command]
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            try:
                status = subprocess.run(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=os.environ | QUIET,
                    timeout=max(1.0, deadline - time.monotonic()),
                ).returncode
            except subprocess.TimeoutExpired:
                raise GateError(
                    PROGRAM,
                    f"no answer in {self.timeout_seconds:g} s",
                    where=self.path.name,
                    fix="allow more time, or score fewer chunks",
                ) from None
            except OSError as error:
                raise InputError(f"cannot be run ({error.strerror})", where=str(self.program), fix=FIX) from None
        said = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out.txt", "err.txt")]
        return status, "\n".join(said)

    def _score(self, printed: Printed, logits: Logits | None, context_tokens: int, attempt: int) -> TextScore:
        per_chunk = context_tokens - first_scored(context_tokens)
        tokens, size, ids, nats = printed.chunks * per_chunk, None, None, None
        if logits is not None:
            rows, nats = logits.tokens.copy(), logits.nats
            if self.facts.token_bytes is not None:
                size = int(self.facts.token_bytes[rows[:, first_scored(context_tokens) :]].sum())
            if self.facts.bos is not None:
                rows[:, 0] = self.facts.bos
            ids = rows.reshape(-1)
        loss = math.log(printed.perplexity)
        error = None if printed.stderr is None else printed.stderr / printed.perplexity
        measured = from_loss(loss, error, tokens, printed.chunks, size)
        facts = {"attempts": attempt, "source": printed.source, "build": build(self.program)}
        return TextScore(measured, ids, nats, facts, printed.resolution)


def build(program: Path) -> str:
    """What `--version` says: version and commit."""
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return match[1].strip() if match else "unknown"


def judge(status: int, out: str, context_tokens: int, logits: Logits | None, where: str) -> Printed:
    """The figure, if all of the answer is there; `Lost` if a part is missing, else the error that it is."""
    short = _SHORT.search(out)
    if short:
        raise too_short(int(short[1]), context_tokens)
    if status != 0 or "failed to decode" in out:
        raise GateError(PROGRAM, f"ended with status {status}: {_tail(out)}", where=where, fix="dvc repro export")
    over, final = _OVER.search(out), _FINAL.search(out)
    running = {int(number): value for number, value in _CHUNK.findall(out)}
    count = logits.count if logits else int(over[1]) if over else None
    figures = [*running.values(), *(final.groups() if final else ())]
    if "negative standard deviation" in out or any(not _finite(value) for value in figures):
        raise GateError(PROGRAM, "the perplexity is not a finite number", where=where, fix="dvc repro export")
    # The count is what tells a whole answer from the beginning of one.
    if count is None:
        raise Lost("the number of chunks is missing")
    last = running.get(count)
    if final:
        found = Printed(float(final[1]), float(final[2]), count, "final", _resolution(final[1]))
        if last is not None and float(last) != found.perplexity:
            raise Lost(f"the final figure {final[1]} is not that of the last chunk, {last}")
    elif last is not None:
        found = Printed(float(last), None, count, "last-chunk", _resolution(last))
    elif logits is not None and logits.exact:
        whole = summary([logits.nats], count, None)
        found = Printed(whole.perplexity, whole.stderr, count, "logits-file")
    else:
        raise Lost(f"{len(running)} of {count} chunks and no final figure arrived")
    if logits is not None and logits.exact:
        mean = float(logits.nats.mean())
        if abs(mean - math.log(found.perplexity)) > 1e-3:
            raise Lost(f"its log probabilities say {math.exp(mean):.4f} and its lines {found.perplexity:.4f}")
    return found


@dataclass(frozen=True)
class Logits:
    """What --save-all-logits wrote. tokens: [chunks, context]; nats: of all targets, right to 1e-4, or NaN.

    Nothing further than 16 below the largest logit is kept; exact: no target lies there.
    """

    tokens: np.ndarray
    nats: np.ndarray
    exact: bool

    @property
    def count(self) -> int:
        return len(self.tokens)


def logits_bytes(chunks: int, context_tokens: int, vocab_size: int) -> int:
    """Size of the file, its header of 20 bytes left out."""
    width = 2 * ((vocab_size + 1) // 2) + 4
    return chunks * (4 * context_tokens + 2 * width * (context_tokens - first_scored(context_tokens)))


def read_logits(path: Path, context_tokens: int) -> Logits | None:
    """None when the file is absent or not whole."""
    size = path.stat().st_size if path.is_file() else 0
    if size < 20:
        return None
    with path.open("rb") as file:
        magic, context, vocab, count = struct.unpack("<8siii", file.read(20))
    if magic != b"_logits_" or context != context_tokens or vocab < 1 or count < 1:
        return None
    if size != 20 + logits_bytes(count, context, vocab):
        return None
    width, scored = 2 * ((vocab + 1) // 2) + 4, context - first_scored(context)
    tokens = np.fromfile(path, dtype="<i4", count=count * context, offset=20).astype(np.int64).reshape(count, context)
    rows = np.memmap(path, dtype="<u2", mode="r", offset=20 + 4 * count * context, shape=(count * scored, width))
    head = np.ascontiguousarray(rows[:, :4]).view("<f4")
    targets = tokens[:, first_scored(context) :].reshape(-1)
    steps = np.asarray(rows[np.arange(len(rows)), targets + 4], dtype=np.float64)
    nats = np.where(steps > 0, -(head[:, 0].astype(np.float64) * steps + head[:, 1]), np.nan)
    return Logits(tokens, nats, bool(np.isfinite(nats).all()))


def _resolution(printed: str) -> float:
    """Half a unit of the last digit, relative to the number: equal models may print numbers that far from the truth."""
    value = Decimal(printed)
    return float(Decimal((0, (5,), value.as_tuple().exponent - 1)) / value)


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _tail(out: str) -> str:
    lines = [line.strip() for line in out.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-300:] or "no message"

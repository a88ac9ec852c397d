"""llama.cpp by ids, through the xllamacpp package: slower than the program by far, and it takes conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.errors import GateError, InputError
from athanor.evaluation.perplexity import worker
from athanor.evaluation.perplexity.backends import ByIds, TextScore
from athanor.evaluation.perplexity.binary import QUIET
from athanor.evaluation.perplexity.gguf_file import read_facts
from athanor.evaluation.perplexity.windows import Window
from athanor.export.llamacpp_worker import NOT_INSTALLED

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "pip install xllamacpp"
ATTEMPTS = 4
STALLS = 6  # so many stalls would fill the time allowed; the worker says something after each request
LOWEST = 85.0  # nats; the smallest fp32 probability with all its digits


class Absent(InputError):
    """The package cannot be imported."""


class Server(ByIds):
    """One GGUF file in xllamacpp's server. `exact` as for `Binary`."""

    name = "xllamacpp"

    def __init__(self, path: str | Path, *, exact: bool, threads: int, timeout_seconds: float) -> None:
        self.path, self.facts = Path(path), read_facts(path)
        self.dtype, self.context_tokens = self.facts.dtype, self.facts.context_tokens
        self.bos, self.token_bytes = self.facts.bos, self.facts.token_bytes
        self.exact, self.threads, self.timeout_seconds = exact, threads, timeout_seconds
        self.build = "unknown"

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._ask([text], [])["texts"][0], dtype=np.int64)

    def text(self, text: str, context_tokens: int, chunks: int | None = None) -> TextScore:
        found = super().text(text, context_tokens, chunks)
        return TextScore(found.measured, found.ids, found.nats, {"attempts": 1, "source": "ids", "build": self.build})

    def nats(self, windows: Sequence[Window]) -> list[np.ndarray]:
        found = [np.array(row, dtype=np.float64) for row in self._ask([], windows)["nats"]]
        if any((row > LOWEST).any() for row in found):
            raise GateError(
                self.name, f"a probability below e^-{LOWEST:g}, of which its server tells no digits", where=self.path.name
            )
        return found

    def _ask(self, texts: Sequence[str], windows: Sequence[Window]) -> dict[str, Any]:
        job = {
            "model": str(self.path.resolve()),
            "texts": list(texts),
            "windows": [{"ids": w.ids.tolist(), "targets": w.targets.tolist()} for w in windows],
            "context": self.context_tokens + 1,  # it wants room for the token that it makes
            "vocab_size": self.facts.vocab_size,
            "exact": self.exact,
            "threads": self.threads,
            "timeout_seconds": self.timeout_seconds,
        }
        with tempfile.TemporaryDirectory(prefix="athanor-xllamacpp-") as folder:
            paths = [Path(folder) / name for name in ("job.json", "result.json", "log.txt")]
            paths[0].write_text(json.dumps(job), encoding="utf-8")
            status = self._patiently([sys.executable, "-m", worker.__name__, str(paths[0]), str(paths[1])], paths[2])
            if status == NOT_INSTALLED:
                raise Absent("the package xllamacpp cannot be imported", where="backend", fix=INSTALL)
            if status != 0:
                lines = paths[2].read_text(encoding="utf-8", errors="replace").strip().splitlines()
                told = " / ".join(line.strip(". ") for line in lines[-3:])[-300:] or "no message"
                raise GateError(
                    self.name, f"ended with status {status}: {told}", where=self.path.name, fix="dvc repro export"
                )
            result = json.loads(paths[1].read_text(encoding="utf-8"))
        self.build = result["build"]
        return result

    def _patiently(self, command: Sequence[str], log_path: Path) -> int:
        """Status of the worker, which is started again when nothing comes of it: now and then its server never answers.

        Seen twice in some forty exports on a busy machine, where all of it takes seconds; the next start answered.
        """
        end = time.monotonic() + self.timeout_seconds
        for _ in range(ATTEMPTS):
            process = self._start(command, log_path)
            seen, moved = 0, time.monotonic()
            while (status := process.poll()) is None:
                now, done = time.monotonic(), log_path.stat().st_size
                if done != seen:
                    seen, moved = done, now
                if now > end or now - moved > self.timeout_seconds / STALLS:
                    process.kill()
                    process.wait()
                    break
                time.sleep(0.02)
            if status is not None:
                return status
            if time.monotonic() > end:
                break
        raise GateError(
            self.name,
            f"no answer in {self.timeout_seconds:g} s",
            where=self.path.name,
            fix="allow more time, or score fewer chunks: each target costs it a request",
        )

    def _start(self, command: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log_path.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=log_path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET | {"PYTHONPATH": search},
            )

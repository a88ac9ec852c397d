"""llama.cpp as a black box: start the worker, wait no longer than allowed, bring back its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from athanor.corpus.conversations import Message
from athanor.errors import GateError
from athanor.export import llamacpp_worker


class NotInstalled(Exception):
    """The xllamacpp package cannot be imported."""


def ask(
    path: str | Path,
    *,
    texts: Sequence[str],
    conversations: Sequence[Sequence[Message]],
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    windows: Sequence[Sequence[int]],
    context_tokens: int,
    vocab_size: int,
    exact: bool,
    threads: int,
    timeout_seconds: float,
) -> dict[str, Any]:
    """What llama.cpp makes of a GGUF file.

    texts: their token ids as plain text. conversations: ids of the rendered
    chat. prompts and limits: greedy continuations {"ids", "ended", "top"}.
    windows: for each the log probabilities of all next ids, as (id, logprob).
    NotInstalled without xllamacpp, GateError if it crashes or takes too long.
    """
    job = {
        "model": str(Path(path).resolve()),
        "texts": list(texts),
        "conversations": [[asdict(message) for message in messages] for messages in conversations],
        "prompts": [list(ids) for ids in prompts],
        "limits": list(limits),
        "windows": [list(ids) for ids in windows],
        # One more: llama.cpp wants room for the token that it makes after a full window.
        "context": context_tokens + 1,
        "vocab_size": vocab_size,
        "exact": exact,
        "threads": threads,
        "timeout_seconds": timeout_seconds,
    }
    with tempfile.TemporaryDirectory(prefix="athanor-llamacpp-") as folder:
        job_path, result_path, log_path = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_path.write_text(json.dumps(job), encoding="utf-8")
        # -P: this directory holds a module named like a package that the worker needs.
        command = [sys.executable, "-P", str(llamacpp_worker.__file__), str(job_path), str(result_path)]
        # Waiting threads must sleep: spinning ones slow a shared machine down by a factor of ten.
        environment = os.environ | {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "LC_ALL": "C"}
        try:
            with log_path.open("wb") as log:
                status = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, timeout=timeout_seconds
                ).returncode
        except subprocess.TimeoutExpired:
            status = None
        if status == llamacpp_worker.NOT_INSTALLED:
            raise NotInstalled(_tail(log_path))
        if status != 0:
            what = f"gave no answer in {timeout_seconds:g} s" if status is None else f"ended with status {status}"
            raise GateError(
                "llama.cpp parity",
                f"llama.cpp {what}: {_tail(log_path)}",
                where=Path(path).name,
                fix="raise export.llama_cpp_timeout_seconds on a slow machine, otherwise the file is broken",
            )
        return json.loads(result_path.read_text(encoding="utf-8"))


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-3:]) or "no message"

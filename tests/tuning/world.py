"""A checkout with a tiny Qwen3 as the base of the side graphs, and stages as processes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from transformers import Qwen3Config, Qwen3ForCausalLM

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.strict import read_yaml
from tests.tuning.test_rows import CHATML, tokenizer

ROOT = Path(__file__).resolve().parents[2]
# Ends the process at its n-th row of numbers, as SIGKILL from outside does.
KILL = """
import itertools, os, runpy, signal
from athanor.tuning import trainer
real, rows = trainer.readings, itertools.count(1)
trainer.readings = lambda logs: real(logs) if next(rows) < {row} else os.kill(os.getpid(), signal.SIGKILL)
runpy.run_path("stages/{stage}.py", run_name="__main__")
"""


class World:
    def __init__(self, folder: Path, **sections: Mapping[str, Any]) -> None:
        """`sections` change params.yaml, key by key."""
        self.folder = folder
        for name in ("side", "recipes", "athanor", "stages"):
            (folder / name).symlink_to(ROOT / name)
        params = read_yaml(ROOT / "params.yaml")
        sections = {"side": {"base": "base", "method": "full"}, **sections}
        for name, values in sections.items():
            params[name] |= values
        YAML().dump(params, folder / "params.yaml")
        torch.manual_seed(0)
        tokens = tokenizer(CHATML)
        tokens.pad_token = tokens.eos_token
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": tokens.eos_token_id}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokens), max_position_embeddings=256, **sizes, **heads))
        model.save_pretrained(folder / "base")
        tokens.save_pretrained(folder / "base")

    def data(self, stage: str, version: int, **splits: Iterable[Mapping[str, Any]]) -> None:
        with new_dir(self.folder / "data" / stage) as out:
            for split, rows in splits.items():
                (out / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            counts = {split: len(list(rows)) for split, rows in splits.items()}
            write_manifest(out, kind=f"{stage}-data", version=version, counts=counts, parents={})

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "ATHANOR_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    def kill(self, stage: str, row: int) -> None:
        killed = self.run("-c", KILL.format(stage=stage, row=row))
        assert killed.returncode == -9, killed.stderr

    def killed_and_resumed(self, stage: str) -> dict[str, Any]:
        """The metrics of a training that a kill had interrupted."""
        self.kill(stage, 12)
        again = self.run("-m", f"stages.{stage}")
        assert again.returncode == 0, again.stderr
        assert "continues from" in again.stdout + again.stderr and "from 0 steps" not in again.stdout + again.stderr
        return json.loads((self.folder / f"metrics/{stage}.json").read_text())

    def journal(self, stage: str) -> list[dict[str, Any]]:
        (path,) = self.folder.glob(f".athanor/runs/{stage}-[0-9]*/journal.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

"""How much more or less the planned parameters and the text ask of each stage than those that made what is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.base.strict import build
from athanor.cli.slots import bytes_of
from athanor.runtime import dvc_lock
from athanor.runtime.facts import flatten
from athanor.runtime.schema import schemas
from athanor.sizing.data import conversation_tokens
from athanor.sizing.reference import reference_seconds, text_bytes

# Sections that decide how much there is to do.
READ = ("clean", "download", "instruct", "battery", "classifiers", "tokenizer", "mixture", "sft_data", "model", "eval")


@dataclass(frozen=True)
class Change:
    """From what dvc.lock recorded to what is planned. `planned`: the sections of params.yaml, built."""

    root: Path
    planned: Mapping[str, Any]

    @cached_property
    def _lock(self) -> dict[str, Any]:
        return dvc_lock.stages(self.root / dvc_lock.LOCK)

    @cached_property
    def _before(self) -> Mapping[str, Any] | None:
        """The sections that the stages last ran with; None where one is missing, or is not understood any more."""
        sections: dict[str, Any] = {}
        for row in self._lock.values():
            sections |= row.get("params", {}).get("params.yaml", {})
        try:
            return {name: build(schemas()[name], sections[name], name) for name in READ}
        except (AthanorError, KeyError):
            return None

    @cached_property
    def _text_before(self) -> float | None:
        """Bytes of the text of then: as of now, less what came to corpus/ since."""
        if self._before is None:
            return None
        recorded = [dep for dep in self._lock.get("download", {}).get("deps", ()) if dep["path"] == "corpus"]
        grown = bytes_of(self.root / "corpus") - recorded[0]["size"] if recorded and "size" in recorded[0] else 0
        return max(text_bytes(self._before) - grown, 1.0)

    def params(self, stage: str) -> dict[str, Any]:
        """The parameters of the stage that dvc.lock recorded, flat."""
        return dict(flatten(self._lock.get(stage, {}).get("params", {}).get("params.yaml", {})))

    def factor(self, stage: str) -> float:
        """Times as long as what was recorded; 1 where nothing is known of it."""
        if self._before is None:
            return 1.0
        planned = reference_seconds(stage, self.planned)
        before = reference_seconds(stage, self._before, self._text_before)
        return planned / before if planned and before else 1.0

    def conversation_tokens(self) -> int | None:
        """Tokens of an epoch of fine-tuning: of the rows that are here, by how the parameters differ; None without them."""
        path, counted = self.root / "data" / "sft" / "manifest.json", self.root / "metrics" / "sft_data.json"
        if self._before is None or not path.is_file():
            return None
        rows = read_json(counted).get("sources", {}) if counted.is_file() else {}
        before = conversation_tokens(self._before, {name: facts["read"] for name, facts in rows.items()})
        manifest = read_json(path)
        made = manifest["counts"]["train"]["rows"] * manifest["context_tokens"]
        return int(made * conversation_tokens(self.planned) / max(before, 1))

"""What a stage declares and writes: parameters in, metrics and plots out."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from athanor.base.artifacts import rounded, write_json, write_text
from athanor.base.errors import ParamsError
from athanor.base.strict import build, read_yaml
from athanor.runtime import facts
from athanor.runtime.headlines import HEADLINES, headlines
from athanor.runtime.machine import anchor
from athanor.runtime.redact import redact_params

T = TypeVar("T")
PARAMS = Path("params.yaml")


class Stage:
    """A stage of dvc.yaml in this checkout, with its values of params.yaml."""

    def __init__(self, stage: str, module: str) -> None:
        self.stage, self.module = stage, module
        self.name = stage.replace("-", "_")  # file names and metric prefixes
        self.root, self.anchor = Path.cwd(), anchor()
        self._values = read_yaml(PARAMS)
        self._graph = facts.Graph(self.root)
        self._facts: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}

    def params(self, section: str, schema: type[T]) -> T:
        """One declared section of params.yaml as its dataclass."""
        self._declared(section)
        if section not in self._values:
            raise ParamsError(
                f"section '{section}' is missing", where=str(PARAMS), fix="copy it from presets/default.yaml"
            )
        return build(schema, self._values[section], section)

    def param(self, name: str) -> Any:
        """One declared value of params.yaml, as `section.key`, for a stage that depends on no more of its section."""
        from athanor.runtime.schema import schemas

        section, _, key = name.partition(".")
        self._declared(name, section)
        return getattr(build(schemas()[section], self._values[section], section), key)

    def _declared(self, *names: str) -> None:
        """ParamsError unless the stage declares one of them: DVC would not run it again when the value changes."""
        declared = self._graph.sections(self.stage)
        if declared is not None and not set(names) & set(declared):
            raise ParamsError(f"stage {self.stage} reads '{names[0]}' but does not declare it", where="dvc.yaml")

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Write metrics/<stage>.json, and the headlines of a stage that has some to metrics/summary/<stage>.json.

        Facts that repeat exactly only: DVC hashes the files.
        """
        clean = rounded(values)
        write_json(self.root / "metrics" / f"{self.name}.json", clean)
        if self.stage in HEADLINES:
            write_json(self.root / "metrics" / "summary" / f"{self.name}.json", headlines(self.stage, clean))
        self._metrics = {name: value for name, value in facts.flatten(clean) if ".each." not in name}

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write plots/<name>.tsv from rows with equal keys, in the given order."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rounded(dict(row)) for row in rows)
        path = self.root / "plots" / f"{name}.tsv"
        write_text(path, out.getvalue())
        return path

    def fact(self, **values: Any) -> None:
        """Add to metrics/runs/<stage>.json, the leaf file for timings, hosts and other things that vary."""
        self._facts |= values

    def subject(self) -> dict[str, Any]:
        """What the work is about, as far as DVC has written it down."""
        sections = self._graph.sections(self.stage) or list(self._values)
        values = {name: self._values[name] for name in sections if name in self._values}
        return {"params": redact_params(dict(facts.flatten(values))), "inputs": self._graph.input_hashes(self.stage)}

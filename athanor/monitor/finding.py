"""What a rule of the health monitor says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

INFO, WARNING, CRITICAL = 1, 2, 3
LEVELS = ("ok", "info", "warning", "critical")


@dataclass(frozen=True)
class Finding:
    """`value` broke `threshold` at `step`. `diagnosis`: one sentence with the numbers; `fix`: what to change."""

    rule: str
    level: str
    step: int
    value: float
    threshold: float
    diagnosis: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; JSON has no word for NaN, so such a number travels as text."""
        facts = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Finding:
        values = {field.name: facts[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**values, "value": float(values["value"]), "threshold": float(values["threshold"])})

    def __str__(self) -> str:
        return f"{self.level.upper()} at step {self.step}, {self.rule}: {self.diagnosis} Try: {self.fix}"


@dataclass(frozen=True)
class Event:
    """All findings of one rule. `worst` speaks for them; the first was at `first.step`, the last at `last.step`."""

    first: Finding
    worst: Finding
    last: Finding
    times: int


def events(findings: Iterable[Finding]) -> list[Event]:
    """Findings by rule, ordered by when the rule spoke first."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    rule_events = [
        Event(group[0], max(group, key=lambda finding: LEVELS.index(finding.level)), group[-1], len(group))
        for group in by_rule.values()
    ]
    return sorted(rule_events, key=lambda event: event.first.step)


def status(findings: Iterable[Finding]) -> str:
    """ok, warning or critical; information is no trouble."""
    level = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return LEVELS[level] if level >= WARNING else "ok"

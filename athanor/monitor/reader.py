"""Journal rows in, findings out: what a live run and `athanor health` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from athanor.monitor.finding import Finding
from athanor.monitor.monitor import Monitor
from athanor.monitor.setup import Plan
from athanor.monitor.thresholds import Thresholds
from athanor.training.schedule import Schedule

# Of each stage that trains, the phase whose rules judge it: also the section of params.yaml that it reads.
PHASES = {"pretrain": "pretrain", "sft": "sft", "lora": "sft"}


def plan_facts(
    phase: str,
    schedule: Schedule,
    batch_tokens: int,
    vocab_size: int,
    memory_bytes: int | None,
    cooldown_data: bool = False,
    precision: str | None = None,
) -> dict[str, Any]:
    """What the journal's event `training` says of a run's plan, in JSON types."""
    return {
        "phase": phase,
        "schedule": dataclasses.asdict(schedule),
        "batch_tokens": batch_tokens,
        "vocab_size": vocab_size,
        "memory_bytes": memory_bytes,
        "cooldown_data": cooldown_data,
        "precision": precision,
    }


def plan_of(facts: Mapping[str, Any]) -> Plan:
    """The plan that an event `training` tells."""
    schedule, batch = Schedule(**facts["schedule"]), facts["batch_tokens"]
    return Plan(
        PHASES[facts["phase"]],
        rate=schedule.rate,
        total_steps=schedule.total_tokens // batch,
        batch_tokens=batch,
        peak_lr=schedule.peak,
        warmup_steps=schedule.warmup_tokens // batch,
        other_data_step=schedule.cooldown_start // batch if facts.get("cooldown_data") else None,
        vocab_size=facts["vocab_size"],
        memory_bytes=facts["memory_bytes"],
        precision=facts.get("precision"),
    )


class Reader:
    """Follows one journal. `stage`: what the run is when its journal tells no plan (rules that need one sleep)."""

    def __init__(self, stage: str, thresholds: Thresholds) -> None:
        self.phase, self.thresholds = PHASES[stage], thresholds
        self.monitor: Monitor | None = None
        self.plan: dict[str, Any] | None = None
        self.findings: list[Finding] = []
        self.recorded: list[Finding] = []  # findings that the journal holds already
        self.last_step = 0

    def line(self, row: Mapping[str, Any]) -> list[Finding]:
        """Take in one journal row; returns what the monitor says to it."""
        event, found = row.get("event"), []
        if event == "training" and self.monitor is None:
            self.plan = {key: value for key, value in row.items() if key not in ("t", "event")}
            plan = plan_of(self.plan)
            self.monitor = Monitor(plan.phase, thresholds=self.thresholds, plan=plan)
        elif event == "resumed" and self.monitor is not None:
            self.monitor.resumed()
        elif event == "finding":
            self.recorded.append(Finding.from_dict(row))
        elif "m" in row:
            if self.monitor is None:
                self.monitor = Monitor(self.phase, thresholds=self.thresholds)
            self.last_step = max(self.last_step, row["s"])
            numbers = {name: float(value) for name, value in row["m"].items()}
            found = self.monitor.feed({**numbers, "step": row["s"]})
            self.findings += found
        return found

"""The health monitor: rows of numbers in, findings out. The same code live and over a journal.

Rows come in the order of the journal, in pieces: several rows may have the
same step. A rule looks at a step once, when all of its inputs are there.
Findings depend on nothing but the rows and the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from athanor.monitor import gradient_rules, jump_rules, loss_rules, machine_rules, policy_rules
from athanor.monitor.finding import LEVELS, Finding
from athanor.monitor.rule import NO_READING, Plan, Rule, Shared, losses_of
from athanor.monitor.statistics import Window
from athanor.monitor.thresholds import Thresholds
from athanor.training.schedule import Schedule

# Every rule by its name, in the order in which they look at a step.
RULES: dict[str, type[Rule]] = {
    **loss_rules.RULES,
    **jump_rules.RULES,
    **gradient_rules.RULES,
    **machine_rules.RULES,
    **policy_rules.RULES,
}
# Of each stage that trains, the phase whose rules judge it: also the section of params.yaml that it reads.
PHASES = {name: name for name in ("pretrain", "sft", "tune", "grpo", "dpo")}

# Validations have other names in each phase.
VALIDATIONS = ("val_bpb.all", "val_loss")


class Monitor:
    """Watches one run of a phase. `feed` costs tens of microseconds."""

    def __init__(self, plan: Plan, limits: Thresholds = Thresholds()) -> None:
        self.shared = Shared(plan, limits)
        rules = {name: rule for name, rule in RULES.items() if plan.phase in rule.phases and name not in limits.off}
        self.rules: dict[str, Rule] = {name: rule(self.shared) for name, rule in rules.items()}
        self._step: int | None = None
        self._row: dict[str, float] = {}
        self._cooldown_data = False
        self._last_loss = 0
        self._completed_rules: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[str, Rule]]] = {}

    def feed(self, row: Mapping[str, float]) -> list[Finding]:
        """Look at a row, or at a piece of one: `step` and numbers."""
        step = int(row["step"])
        if "loss" in row:
            if step <= self._last_loss:
                self._rewind(step)
            self._last_loss = step
        if step != self._step:
            self._step, self._row = step, {}
        before = tuple(self._row)
        for name, value in row.items():
            if name in VALIDATIONS:
                self._row["validation"] = value
            elif name != "step":
                self._row[name] = value
        findings = [finding for name, rule in self._complete(before) if (finding := self._check(name, rule, step))]
        if "loss" in row:
            self._enter(step)
        return findings

    def resumed(self) -> None:
        """The run was interrupted here; what follows is another process."""
        for rule in self.rules.values():
            rule.resumed()

    def _rewind(self, step: int) -> None:
        """A step that came already comes again: the run went back to a checkpoint and takes another way."""
        self._step = None
        self.shared.curve.drop_from(step)
        self.shared.rebase()

    def _complete(self, before: tuple[str, ...]) -> list[tuple[str, Rule]]:
        """Rules whose last missing input came with this piece."""
        key = before, tuple(self._row)
        if key not in self._completed_rules:
            inputs_before, inputs_now = set(before), set(self._row)
            self._completed_rules[key] = [
                (name, rule)
                for name, rule in self.rules.items()
                if inputs_now.issuperset(rule.inputs) and not inputs_before.issuperset(rule.inputs)
            ]
        return self._completed_rules[key]

    def _check(self, name: str, rule: Rule, step: int) -> Finding | None:
        row = self._row
        if rule.finite and not all(math.isfinite(row[each]) for each in rule.inputs):
            return None
        verdict = rule.check(step, row)
        if verdict is NO_READING:
            return None
        if verdict is None:
            rule.alarm.see(step, 0)
            return None
        level = rule.alarm.see(step, verdict.level, verdict.at_once)
        if not level:
            return None
        rule.on_finding(step)
        _, value, threshold, diagnosis, fix, _ = verdict
        return Finding(name, LEVELS[level], step, value, threshold, diagnosis, fix)

    def _enter(self, step: int) -> None:
        """Add a step to the history, after every rule saw what was before it."""
        shared, loss, norm = self.shared, self._row["loss"], self._row.get("grad_norm", math.nan)
        start = shared.plan.other_data_step
        if start is not None and not self._cooldown_data and step > start:
            self._cooldown_data = True
            if shared.spike is None:
                shared.rebase()
        if math.isfinite(loss):
            shared.loss.add(loss)
            shared.curve.add(step, loss)
        for name in losses_of(self._row):
            if 0 < self._row[name] < math.inf:
                shared.log_losses.setdefault(name, Window(shared.loss.size)).add(math.log(self._row[name]))
        if math.isfinite(norm) and norm > 0:
            shared.log_norm.add(math.log(norm))
        shared.speed = self._row.get("tokens_per_second", shared.speed)


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
    """The plan in an event `training`."""
    schedule, batch = Schedule(**facts["schedule"]), facts["batch_tokens"]
    return Plan(
        PHASES[facts["phase"]],
        rate=schedule.lr_at,
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
    """Follows one journal. `stage` is the run's stage, for a journal without a plan (rules that need one then sleep)."""

    def __init__(self, stage: str, thresholds: Thresholds) -> None:
        self.phase, self.thresholds = PHASES[stage], thresholds
        self.monitor: Monitor | None = None
        self.plan: dict[str, Any] | None = None
        self.findings: list[Finding] = []
        self.recorded: list[Finding] = []  # findings that the journal holds already
        self.last_step = 0

    def line(self, row: Mapping[str, Any]) -> list[Finding]:
        """Take in one journal row; returns what the monitor says to it."""
        event, findings = row.get("event"), []
        if event == "training" and self.monitor is None:
            self.plan = {key: value for key, value in row.items() if key not in ("t", "event")}
            self.monitor = Monitor(plan_of(self.plan), self.thresholds)
        elif event == "resumed" and self.monitor is not None:
            self.monitor.resumed()
        elif event == "finding":
            self.recorded.append(Finding.from_dict(row))
        elif "m" in row:
            if self.monitor is None:
                self.monitor = Monitor(Plan(self.phase), self.thresholds)
            self.last_step = max(self.last_step, row["s"])
            numbers = {name: float(value) for name, value in row["m"].items()}
            findings = self.monitor.feed({**numbers, "step": row["s"]})
            self.findings += findings
        return findings

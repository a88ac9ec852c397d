"""Rules about the run as a process: learning rate, speed, waiting, memory, checkpoints, disk."""

from __future__ import annotations

from athanor.monitor.finding import CRITICAL, INFO, WARNING
from athanor.monitor.rule import CROSS_ENTROPY, NO_READING, Row, Rule, Verdict
from athanor.monitor.statistics import Window

MIB = 2**20
STEP_PARTS = ("time.data_s", "time.forward_backward_s", "time.optimizer_s")
WAIT = "cpu.wait_share"  # of the time that the run wanted processors, while others had them
BUSY = 0.05  # above, the machine is busy, and its speed says nothing about the run


class LearningRate(Rule):
    """The rate that was used, against the schedule as a pure function of the tokens."""

    inputs = ("lr", "tokens")

    def check(self, step: int, row: Row) -> Verdict | None:
        plan, rate = self.shared.plan, row["lr"]
        if plan.rate is None or plan.peak_lr is None:
            return None
        tokens = int(row["tokens"])
        expected = plan.rate(tokens) * row.get("lr_scale", 1.0)
        error = abs(rate - expected)
        if error <= self.limits.lr_error * expected + 1e-6 * plan.peak_lr:
            return None
        value = error / max(expected, 1e-6 * plan.peak_lr)
        text = f"The learning rate is {rate:.3g} where the schedule says {expected:.3g}"
        fix = "the rate is a function of the tokens, also after a resume: check what the step was given."
        in_steps = plan.rate(step)
        if abs(rate - in_steps) <= self.limits.lr_error * in_steps and step != tokens:
            text += f": it is the rate of token {step}, so steps were counted for tokens."
            return Verdict(CRITICAL, value, self.limits.lr_error, text, fix)
        return Verdict(WARNING, value, self.limits.lr_error, text + ".", fix)


class Throughput(Rule):
    """Median speed against that of the first steps of this process, with the part of a step that grew most.

    Only information where other programs had the processors meanwhile. The speed of a CPU follows its heat and whatever
    shares its caches or its host: 15 % less for half a minute was seen of a run that waited for a processor during 2 % of
    its time. So its limit is lower.
    """

    inputs = ("tokens_per_second",)
    phases = (*CROSS_ENTROPY, "dpo")  # the speed of grpo goes with the length of its answers

    def begin(self) -> None:
        self.skip, self.size = self.shared.span(0.04, 10, 20), self.shared.span(0.1, 25, 50)
        self.alarm.need = self.alarm.window = 2 * self.size
        self.resumed()

    def resumed(self) -> None:
        self.first, self.recent = Window(2 * self.size), Window(self.size)
        self.steps_seen, self.on_cpu = 0, False
        self.part_windows: dict[str, tuple[Window, Window]] = {}

    def check(self, step: int, row: Row) -> Verdict | None:
        self.steps_seen += 1
        self.on_cpu = self.on_cpu or _on_cpu(row)
        if self.steps_seen <= self.skip:
            return None
        filling = len(self.first) < self.first.size
        self.recent.add(row["tokens_per_second"])
        if filling:
            self.first.add(row["tokens_per_second"])
        for name in (*STEP_PARTS, WAIT):
            if name in row:
                start, now = self.part_windows.setdefault(name, (Window(2 * self.size), Window(self.size // 5)))
                now.add(row[name])
                if filling:
                    start.add(row[name])
        if filling:
            return None
        share = self.recent.median / max(self.first.median, 1e-9)
        level, limit = self.level("throughput", share, below=True)
        if level == WARNING and self.on_cpu:
            limit = self.limits.throughput_cpu_warning
        if not level or share >= limit:
            return None
        text = f"The speed is {self.recent.median:,.0f} tokens/s, {share:.0%} of the "
        text += f"{self.first.median:,.0f} at the start"
        growth = {
            name: now.median - start.median
            for name, (start, now) in self.part_windows.items()
            if len(start) and len(now)
        }
        waiting = self.part_windows[WAIT][1].median if growth.pop(WAIT, None) is not None else 0.0
        if growth and max(growth.values()) > 0:
            name = max(growth, key=lambda name: growth[name])
            text += f"; {name} grew most, by {1000 * growth[name]:.1f} ms a step"
        if waiting > BUSY:
            text += f"; it waits for a processor {waiting:.0%} of its time, because other programs have it."
            return Verdict(INFO, share, limit, text, "nothing, or let the other programs end first.")
        fix = "other work on this machine, heat, or disk; machine.yaml threads and micro_batch_tokens."
        return Verdict(level, share, limit, text + ".", fix)


class _Steps:
    """Readings of a stretch of steps. They may come at every step, or only at steps that read the device."""

    min_readings = 3

    def __init__(self, size: int) -> None:
        self.size, self.start = size, 0
        self.values: list[tuple[float, ...]] = []

    def add(self, step: int, *values: float) -> list[tuple[float, ...]]:
        """All readings of the stretch when `step` completes it, else nothing."""
        if not self.values or step <= self.start:  # later steps come again when a run goes back
            self.start, self.values = step, []
        self.values.append(values)
        if step - self.start + 1 < self.size or len(self.values) < self.min_readings:
            return []
        completed, self.values = self.values, []
        return completed


class DataWait(Rule):
    """The share of a step's time that waits for data. That of grpo is drawn from the model, which takes its time."""

    inputs = STEP_PARTS
    phases = ("pretrain", "sft", "dpo")

    def begin(self) -> None:
        self.alarm.calm = 2  # stretches
        self.steps = _Steps(self.shared.span(0.1, 20, 100))

    def check(self, step: int, row: Row) -> Verdict | None:
        seconds = row.get("time.step_s", sum(row[name] for name in STEP_PARTS))
        readings = self.steps.add(step, row["time.data_s"], seconds)
        if not readings:
            return NO_READING
        total = sum(step_seconds for _, step_seconds in readings)
        share = sum(wait for wait, _ in readings) / total if total > 0 else 0.0
        level, limit = self.level("data_wait", share)
        if not level:
            return None
        text = f"Waiting for data takes {share:.0%} of the time of about {self.steps.size} steps."
        fix = f"the data on a local disk, a larger {self.phase}.batch_tokens, fewer processes beside "
        fix += "it (machine.yaml workers)."
        return Verdict(level, share, limit, text, fix)


class _Growth(Rule):
    """Memory that grows in each of three stretches in a row, about evenly; the minimum of a stretch counts."""

    limit_name: str
    memory_name: str
    fix: str
    min_growth_bytes = 32 * MIB

    def begin(self) -> None:
        self.steps = _Steps(self.shared.span(0.05, 10, 100))
        self.alarm.calm = 3  # stretches
        self.resumed()

    def resumed(self) -> None:
        self.minima: list[tuple[int, float]] = []  # (step, bytes)
        self.first = True

    def check(self, step: int, row: Row) -> Verdict | None:
        readings = self.steps.add(step, row[self.inputs[0]])
        if not readings:
            return NO_READING
        low = min(value for (value,) in readings)
        if self.first:  # the first stretch allocates
            self.first = False
            return None
        self.minima = [*[earlier for earlier in self.minima if earlier[0] < step][-3:], (step, low)]
        share, (began, start) = getattr(self.limits, self.limit_name), self.minima[0]
        if len(self.minima) < 4 or low - start < self.min_growth_bytes:
            return None
        pairs = [(before, now) for (_, before), (_, now) in zip(self.minima, self.minima[1:], strict=False)]
        increases = [now - before for before, now in pairs]
        # A jump is no leak: the first validation takes its memory once.
        if min(increases) < max(increases) / 4 or not all(now > before * (1 + share) for before, now in pairs):
            return None
        text = f"{self.memory_name} grew three times in a row, from {start / MIB:,.0f} to {low / MIB:,.0f} "
        text += f"MiB in {step - began} steps"
        return self.judge(step, Verdict(WARNING, low / start - 1, share, text, self.fix))

    def judge(self, step: int, verdict: Verdict) -> Verdict:
        return verdict._replace(diagnosis=f"{verdict.diagnosis}.")


class DeviceMemory(_Growth):
    inputs = ("memory.bytes",)
    limit_name, memory_name = "memory_growth", "Device memory"
    fix = "machine.yaml micro_batch_tokens smaller; a leak ends in a stop that resumes from its checkpoint."

    def check(self, step: int, row: Row) -> Verdict | None:
        # On a CPU both are the process's memory, of which host_memory speaks. Seen: 190 MiB in 50 steps of grpo, whose answers
        # differ in number and length, and then hardly more.
        return None if _on_cpu(row) else super().check(step, row)


def _on_cpu(row: Row) -> bool:
    """Whether the memory of the device is that of the process."""
    return "memory.bytes" in row and row["memory.bytes"] == row.get("memory.host_bytes")


class HostMemory(_Growth):
    inputs = ("memory.host_bytes",)
    limit_name, memory_name = "host_memory_growth", "Host memory"
    fix = "machine.yaml workers fewer; file pages that other processes share are no leak."

    def judge(self, step: int, verdict: Verdict) -> Verdict:
        """Critical when it reaches the machine's memory before the run ends."""
        plan = self.shared.plan
        if plan.memory_bytes and plan.total_steps:
            (began, first), (now, last) = self.minima[0], self.minima[-1]
            end = last + (last - first) / (now - began) * (plan.total_steps - step)
            limit = self.limits.host_memory_critical
            if end > limit * plan.memory_bytes:
                text = f"{verdict.diagnosis}; at this rate {end / MIB:,.0f} MiB at the end, of "
                text += f"{plan.memory_bytes / MIB:,.0f}."
                return verdict._replace(level=CRITICAL, value=end / plan.memory_bytes, threshold=limit, diagnosis=text)
        return super().judge(step, verdict)


class CheckpointCost(Rule):
    """Time spent on saving, of all time in steps and saves; needs ten minutes and three saves to speak."""

    inputs = ("time.checkpoint_s",)
    min_seconds, min_saves = 600.0, 3

    def begin(self) -> None:
        self.before: int | None = None
        self.saving = self.working = 0.0
        self.saves = 0

    def resumed(self) -> None:
        self.before = None

    def check(self, step: int, row: Row) -> Verdict | None:
        seconds, before, self.before = row["time.checkpoint_s"], self.before, step
        per_step = self.shared.seconds_per_step
        if before is None or per_step is None:
            return None
        self.saving, self.saves = self.saving + seconds, self.saves + 1
        self.working += per_step * max(0, step - before)
        total = self.saving + self.working
        if self.saves < self.min_saves or total < self.min_seconds:
            return None
        share = self.saving / total
        if share <= self.limits.checkpoint_cost:
            return None
        text = f"Saving took {share:.1%} of the time, {self.saving / self.saves:.1f} s for each of "
        text += f"{self.saves} checkpoints."
        fix = "machine.yaml save_every_seconds longer, or a faster disk."
        return Verdict(WARNING, share, self.limits.checkpoint_cost, text, fix)


class DiskRunway(Rule):
    """Whether free space lasts to the end at the rate it went so far, and for two more checkpoints.

    Kept and pruned checkpoints make free space go up and down: the least of
    some readings stands for them.
    """

    inputs = ("disk.free_bytes",)
    block = 8  # readings

    def begin(self) -> None:
        self.before = 0.0
        self.drops = Window(16)  # what a checkpoint costs, by the falls of the free space
        self.resumed()

    def resumed(self) -> None:
        self.minima: list[tuple[int, float]] = []  # (step, bytes), of the first block and the last one
        self.readings: list[float] = []

    def check(self, step: int, row: Row) -> Verdict | None:
        free = row["disk.free_bytes"]
        if self.before - free >= MIB:
            self.drops.add(self.before - free)
        self.before = free
        self.readings.append(free)
        fix = "athanor slots prune, dvc gc -w, or another disk for .athanor."
        if len(self.drops) > 1 and free < 2 * self.drops.median:
            checkpoint_bytes = self.drops.median
            text = f"{free / MIB:,.0f} MiB are free, less than two more checkpoints of {checkpoint_bytes / MIB:,.0f} MiB need."
            return Verdict(CRITICAL, free, 2 * checkpoint_bytes, text, fix)
        if len(self.readings) < self.block:
            return NO_READING
        self.minima, self.readings = [*self.minima[:1], (step, min(self.readings))], []
        (began, first), (now, last), total = self.minima[0], self.minima[-1], self.shared.plan.total_steps
        used = first - last
        if total is None or now == began or used < 0.01 * first:
            return None
        free_at_end = last - used / (now - began) * (total - now)
        if free_at_end >= 0:
            return None
        full_step = now + int(last * (now - began) / used)
        text = f"{free / MIB:,.0f} MiB are free and the disk is full at about step {full_step} of {total} at this rate."
        return Verdict(WARNING, free, -free_at_end, text, fix)


RULES = {
    "learning_rate": LearningRate,
    "throughput": Throughput,
    "data_wait": DataWait,
    "device_memory": DeviceMemory,
    "host_memory": HostMemory,
    "checkpoint_cost": CheckpointCost,
    "disk_runway": DiskRunway,
}

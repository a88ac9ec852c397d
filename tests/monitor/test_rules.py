"""Each rule finds its planted fault, once, and no other rule takes it for its own. About 10 s.

Healthy runs of more lengths and noises: test_false_alarms.py.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest

from athanor.monitor import policy_rules
from athanor.monitor.finding import LEVELS, Finding, events
from athanor.monitor.monitor import RULES
from tests.monitor.curves import BATCH, GIB, Rows, change, findings, healthy, schedule, trouble

GENERAL = set(RULES) - set(policy_rules.RULES)  # those have a file of tests of their own


def names(found: list[Finding]) -> list[str]:
    return [finding.rule for finding in found]


def nan(step: int, value: float) -> float:
    return math.nan


# A fault takes the rows of a healthy run and the step of its first quarter.
def plant(
    name: str, how: Callable[[int, float], float], quarters: int = 1, more: int = 10**9
) -> Callable[[Rows, int], Rows]:
    """Other values of one number, from the end of so many quarters on for so many steps more."""
    return lambda rows, at: change(rows, name, how, quarters * at, quarters * at + more)


initial_high = plant("loss", lambda step, value: 1.5 * value, 0, 1)
initial_low = plant("loss", lambda step, value: 0.9 * value, 0, 1)
chance = plant("loss", lambda step, value: math.log(4096) - 0.05 + 0.001 * (step % 7), 0)
above_chance = plant("loss", lambda step, value: 9.5, 0, 1)
nan_loss = plant("loss", nan, more=3)


def nan_everything(rows: Rows, at: int) -> Rows:
    return change(change(nan_loss(rows, at), "grad_norm", nan, at, at + 3), "skipped", lambda s, v: 1.0, at, at + 3)


zero_loss = plant("loss", lambda step, value: 0.0)


def constant_loss(rows: Rows, at: int) -> Rows:
    value = next(row["loss"] for row in rows if row["step"] == at)
    return change(rows, "loss", lambda step, _: value, at)


spike_of_three = plant("loss", lambda step, value: 1.3 * value, more=2)
spike_of_one = plant("loss", lambda step, value: 2.5 * value, more=0)


def drift(rows: Rows, at: int) -> Rows:
    last = int(rows[-1]["step"])
    return change(rows, "loss", lambda step, value: value * (1 + 0.8 * (step - at) / (last - at)), at)


def overfitting(rows: Rows, at: int) -> Rows:
    last = int(rows[-1]["step"])
    best = next(row["val_loss"] for row in rows if "val_loss" in row and row["step"] >= at)
    return change(rows, "val_loss", lambda step, value: best * (1 + 0.025 * (step - at) / (last - at)), at)


def skipped_once(rows: Rows, at: int) -> Rows:
    return change(change(rows, "grad_norm", lambda s, v: math.inf, at, at), "skipped", lambda s, v: 1.0, at, at)


def skipped_in_a_row(rows: Rows, at: int) -> Rows:
    return change(change(rows, "grad_norm", nan, at, at + 4), "skipped", lambda s, v: 1.0, at, at + 4)


refused_often = plant("skipped", lambda step, value: 1.0, more=6)
gradient_burst = plant("grad_norm", lambda step, value: 150.0, more=0)
gradient_twenty = plant("grad_norm", lambda step, value: 20 * value, more=0)
gradient_high = plant("grad_norm", lambda step, value: 40 * value, 0)
gradient_low = plant("grad_norm", lambda step, value: 1e-3 * value, 0)
vanished = plant("grad_norm", lambda step, value: 1e-9 * value)
dead = plant("grad_norm", lambda step, value: 0.0)


def scaled(rows: Rows, scale: float) -> Rows:
    return [{**row, "loss_scale": scale} if "loss" in row else row for row in rows]


def scale_gone(rows: Rows, at: int) -> Rows:
    return change(scaled(rows, 1024.0), "loss_scale", lambda step, value: 0.5, at)


def scale_skips(rows: Rows, at: int) -> Rows:
    skipping = change(scaled(rows, 1024.0), "skipped", lambda step, value: float(step % 25 == 0), at)
    return [{**row, "grad_norm": math.inf} if row.get("skipped") else row for row in skipping]


logits_large = plant("vitals.attention_logit_max", lambda step, value: 120.0)
logits_double = plant("vitals.attention_logit_max", lambda step, value: value + 40.0)
spread = plant("vitals.embedding_spread", lambda step, value: 3.0)
gain = plant("vitals.final_norm_gain", lambda step, value: 5.0)
half_rate = plant("lr", lambda step, value: 0.5 * value)


def rate_of_steps(rows: Rows, at: int) -> Rows:
    rate = schedule(int(rows[-1]["step"])).lr_at
    return change(rows, "lr", lambda step, value: rate(step))


slow = plant("tokens_per_second", lambda step, value: 0.7 * value, 2)
very_slow = plant("tokens_per_second", lambda step, value: 0.2 * value, 2)
waiting = plant("time.data_s", lambda step, value: 0.2 * BATCH / 8000)
starving = plant("time.data_s", lambda step, value: BATCH / 8000, 0)


def leak(name: str, share: float):  # of what is there at the start, over the whole run
    return lambda rows, at: change(rows, name, lambda step, value: value * (1 + share * step / rows[-1]["step"]))


def slow_saves(rows: Rows, at: int) -> Rows:
    slower = change(rows, "tokens_per_second", lambda step, value: value / 100)
    return change(slower, "time.checkpoint_s", lambda step, value: 10.0)


def disk_fills(rows: Rows, at: int) -> Rows:
    return change(rows, "disk.free_bytes", lambda step, value: GIB * max(0.3, 1 - 0.6 * step / (2 * at)))


def disk_full(rows: Rows, at: int) -> Rows:
    return change(rows, "disk.free_bytes", lambda step, value: GIB * (3.2 - (step > at) - 0.9 * (step // 5 % 2)))


near_the_end = plant("vitals.largest", lambda step, value: 5000.0)
at_the_end = plant("vitals.largest", lambda step, value: 30000.0)
underflow = plant("vitals.gradient_tiny", lambda step, value: 0.7)


def grows_fast(rows: Rows, at: int) -> Rows:
    """A third in five steps, for as long as there are four powers of two left."""
    return change(rows, "vitals.largest", lambda step, value: min(4000.0, value * 1.35 ** ((step - at) / 5)), at)


FP16 = ("overflow_ahead", "gradient_underflow")


FAULTS = [
    (initial_high, "pretrain", "initial_loss", "critical"),
    (initial_low, "pretrain", "initial_loss", "warning"),
    (chance, "pretrain", "not_learning", "critical"),
    (nan_loss, "pretrain", "nan_loss", "critical"),
    (nan_everything, "pretrain", "nan_loss", "critical"),
    (zero_loss, "sft", "zero_loss", "critical"),
    (constant_loss, "pretrain", "constant_loss", "critical"),
    (spike_of_three, "pretrain", "loss_spike", "warning"),
    (spike_of_one, "sft", "loss_spike", "critical"),
    (overfitting, "sft", "overfitting", "warning"),
    (skipped_once, "pretrain", "skipped_steps", "warning"),
    (refused_often, "pretrain", "refused_steps", "warning"),
    (gradient_burst, "sft", "gradient_spike", "critical"),
    (gradient_twenty, "pretrain", "gradient_spike", "warning"),
    (gradient_high, "sft", "gradient_band", "warning"),
    (gradient_low, "pretrain", "gradient_band", "warning"),
    (vanished, "pretrain", "vanishing_gradient", "warning"),
    (dead, "sft", "vanishing_gradient", "critical"),
    (scale_gone, "pretrain", "loss_scale", "critical"),
    (scale_skips, "pretrain", "loss_scale", "warning"),
    (near_the_end, "pretrain", "overflow_ahead", "warning"),
    (at_the_end, "sft", "overflow_ahead", "critical"),
    (grows_fast, "pretrain", "overflow_ahead", "warning"),
    (underflow, "pretrain", "gradient_underflow", "warning"),
    (logits_large, "pretrain", "attention_logits", "warning"),
    (logits_double, "pretrain", "attention_logits", "warning"),
    (spread, "pretrain", "embedding_spread", "warning"),
    (gain, "sft", "final_norm_gain", "warning"),
    (half_rate, "pretrain", "learning_rate", "warning"),
    (rate_of_steps, "pretrain", "learning_rate", "critical"),
    (slow, "pretrain", "throughput", "warning"),
    (waiting, "pretrain", "data_wait", "warning"),
    (starving, "sft", "data_wait", "critical"),
    (leak("memory.bytes", 0.5), "pretrain", "device_memory", "warning"),
    (leak("memory.host_bytes", 0.8), "sft", "host_memory", "warning"),
    (leak("memory.host_bytes", 20.0), "sft", "host_memory", "critical"),
    (slow_saves, "pretrain", "checkpoint_cost", "warning"),
    (disk_fills, "pretrain", "disk_runway", "warning"),
    (disk_full, "pretrain", "disk_runway", "critical"),
]


@pytest.mark.parametrize("steps", [490, 1200])
@pytest.mark.parametrize(("fault", "phase", "rule", "level"), FAULTS)
def test_planted_fault_is_found_once_and_by_its_rule(fault, phase, rule, level, steps):
    at = steps // 4
    clean = healthy(steps, seed=3, phase=phase)
    found = trouble(findings(fault(clean, at), steps, phase, precision="fp16" if rule in FP16 else None))
    assert names(found) == [rule], "\n".join(map(str, found))
    assert found[0].level == level and found[0].diagnosis.endswith(".") and found[0].fix.endswith(".")


def test_fine_tuning_that_begins_above_chance_is_no_trouble():
    """A base model of one novel begins at 10 nats, and learns the exercises all the same."""
    (finding,) = findings(above_chance(healthy(490, seed=3, phase="sft"), 122), 490, "sft")
    assert (finding.rule, finding.level) == ("initial_loss", "info") and finding.diagnosis.endswith(".")


def test_every_fix_and_diagnosis_is_a_sentence():
    """Of all planted faults, with what is only information: no words run together, none cut off."""
    told: dict[str, set[str]] = {}
    steps = 490
    cases = [
        (fault(healthy(steps, seed=3, phase=phase), steps // 4), phase, "fp16" if rule in FP16 else None)
        for fault, phase, rule, _ in FAULTS
    ]
    cases += [(fault(healthy(steps, seed=4), steps // 3), "pretrain", None) for fault in (drift, skipped_once)]
    refused_once = change(healthy(steps, seed=4), "skipped", lambda step, value: 1.0, 200, 200)
    lasting = [change(healthy(steps, seed=8), "loss", lambda step, value: 1.6 * value, 200, 200 + n) for n in (40, 400)]
    flat = change(healthy(1500, seed=10), "loss", lambda step, value: 2.8 + 0.01 * math.sin(step**2), 300)
    cases += [(rows, "pretrain", None) for rows in (refused_once, flat, *lasting)]
    for rows, phase, precision in cases:
        for finding in findings(rows, int(rows[-1]["step"]), phase, precision=precision):
            told.setdefault(finding.rule, set()).update((finding.diagnosis, finding.fix))
    assert set(told) >= GENERAL - {"resume_spike", "resume_under_report"}
    check_sentences(sorted(text for texts in told.values() for text in texts))


def check_sentences(texts: list[str]) -> None:
    # Sections of params.yaml, and machine.yaml.
    dotted = {"pretrain", "sft", "grpo", "dpo", "model", "tokenizer", "sft_data", "grpo_data", "side", "machine"}
    for text in texts:
        assert text.endswith(".") and "  " not in text and text.count("(") == text.count(")"), text
        joined = [first for first, _ in re.findall(r"([A-Za-z_]+)\.([A-Za-z_]+)", text) if first not in dotted]
        assert not joined, text
        assert not re.search(r"[A-Za-z][,;:][A-Za-z]", text), text


@pytest.mark.parametrize("phase", ["pretrain", "sft"])
@pytest.mark.parametrize("steps", [490, 1200])
def test_nothing_is_found_where_nothing_is_planted(phase, steps):
    for precision in (None, "fp16"):
        assert trouble(findings(healthy(steps, seed=3, phase=phase), steps, phase, precision=precision)) == []


def test_what_overflows_in_fp16_is_far_from_the_end_in_bf16_and_a_way_back_is_no_growth():
    rows = at_the_end(healthy(490, seed=3), 122)
    assert trouble(findings(rows, 490, precision="bf16")) == []
    again = change(healthy(490, seed=3), "vitals.largest", lambda step, value: 300.0)
    there_and_back = [*again[:300], *change(again[240:300], "vitals.largest", lambda step, value: 400.0)]
    assert trouble(findings(there_and_back, 490, precision="fp16")) == []


@pytest.mark.parametrize("steps", [490, 2000])
def test_silent_divergence_warns_and_then_gets_critical(steps):
    rows = drift(healthy(steps, seed=4), steps // 3)
    found = trouble(findings(rows, steps))
    assert names(found) == ["divergence", "divergence"]
    assert [finding.level for finding in found] == ["warning", "critical"]


def test_worse_throughput_is_told_again():
    found = trouble(findings(very_slow(healthy(1200, seed=5), 300), 1200))
    assert names(found) in (["throughput"], ["throughput"] * 2) and found[-1].level == "critical"
    assert "0.2" not in found[-1].diagnosis and "20% of the" in found[-1].diagnosis


@pytest.mark.parametrize(("speed", "level"), [(0.8, None), (0.6, "warning"), (0.2, "critical")])
def test_the_speed_of_a_cpu_may_swing(speed, level):
    """A default run ended with "pretrain warning": for half a minute it had 85 % of its first speed."""
    rows = change(healthy(1200, seed=5), "tokens_per_second", lambda step, value: speed * value, 300)
    same = [{**row, "memory.host_bytes": row["memory.bytes"]} if "memory.bytes" in row else row for row in rows]
    found = trouble(findings(same, 1200))
    assert {finding.rule for finding in found} == ({"throughput"} if level else set())
    assert [finding.level for finding in found[-1:]] == ([level] if level else [])
    assert "throughput" in names(trouble(findings(rows, 1200)))  # of an accelerator


def test_throughput_names_the_part_that_grew():
    rows = change(healthy(1200, seed=5), "tokens_per_second", lambda step, value: 0.7 * value, 600)
    rows = change(rows, "time.optimizer_s", lambda step, value: value + 0.1, 600)
    assert "time.optimizer_s grew most" in trouble(findings(rows, 1200))[0].diagnosis


def test_memory_that_a_validation_takes_once_is_no_leak():
    """MiB in the stretches of a default run: a heap that creeps, and then the first validation."""
    mib = (466, 473, 483, 492, 651, 651, 652)

    def held(step: int, value: float) -> float:
        return mib[min(len(mib) - 1, (step - 1) // 60)] * 2.0**20

    rows = change(change(healthy(1200, seed=5), "memory.bytes", held), "memory.host_bytes", held)
    assert trouble(findings(rows, 1200)) == []


@pytest.mark.parametrize(("waits", "level"), [(0.5, "info"), (0.0, "critical")])
def test_a_busy_machine_is_no_fault_of_the_run(waits, level):
    """The same slow steps, where other programs have the processors and where nothing else explains them."""
    rows = [{**row, "cpu.wait_share": 0.02} if "time.data_s" in row else row for row in healthy(1200, seed=5)]
    slow = very_slow(change(rows, "cpu.wait_share", lambda step, value: value + waits, 600), 300)
    found = [finding for finding in findings(slow, 1200) if finding.rule == "throughput"]
    assert found[-1].level == level and ("because other programs have it" in found[-1].diagnosis) == bool(waits)


def sourced(
    rows: Rows,
    planted: Callable[[str, int, float], float] = lambda name, step, value: value,
    text: Callable[[int], bool] = lambda step: step % 3 == 0,
) -> Rows:
    """Fine-tuning as it is: batches of answers known by heart, batches of text, and a total that is either."""
    told = []
    for row in rows:
        if "loss" in row:
            step, level = int(row["step"]), row["loss"] / 1.6
            name, cost = ("text", 3.0) if text(step) else ("chat", 0.02)
            loss = planted(name, step, cost * level)
            row = {**row, f"loss.{name}": loss, "loss": loss}
        told.append(row)
    return told


@pytest.mark.parametrize("steps", [490, 1200])
def test_batches_of_other_sources_are_no_spike(steps):
    """The total jumps from 0.02 to 3 whenever a batch is nothing but text, and no source ever jumps."""
    clean = healthy(steps, seed=3, phase="sft")
    assert trouble(findings(sourced(clean), steps, "sft")) == []
    seldom = sourced(clean, text=lambda step: step % 40 < 2)
    assert trouble(findings(seldom, steps, "sft")) == []
    # To a monitor that knows the total alone they are spikes.
    bare = [{key: value for key, value in row.items() if not key.startswith("loss.")} for row in seldom]
    assert "loss_spike" in names(trouble(findings(bare, steps, "sft")))


@pytest.mark.parametrize("name", ["chat", "text"])
def test_a_spike_of_one_source_is_found_and_named_and_its_end_is_seen(name):
    at, steps = 600, 1200
    rows = sourced(
        healthy(steps, seed=3, phase="sft"),
        lambda source, step, value: value * (1.5 if source == name and at <= step < at + 12 else 1.0),
    )
    found = [each for each in findings(rows, steps, "sft") if each.rule != "plateau"]
    assert [each.rule for each in found if each.rule == "loss_spike"] and at <= found[0].step <= at + 6
    assert f"The loss of {name} jumped" in found[0].diagnosis
    assert [(each.rule, each.level) for each in found][-1] == ("spike_recovery", "info")


def test_steps_skipped_in_a_row_get_critical():
    found = trouble(findings(skipped_in_a_row(healthy(490, seed=6), 120), 490))
    assert [(finding.rule, finding.level) for finding in found] == [
        ("skipped_steps", "warning"),
        ("skipped_steps", "critical"),
    ]


def test_skips_of_a_loss_scale_that_settles_are_normal():
    rows = scaled(healthy(490, seed=7), 1024.0)
    rows = change(rows, "skipped", lambda step, value: 1.0, 1, 8)
    rows = [{**row, "grad_norm": math.inf} if row.get("skipped") else row for row in rows]
    assert trouble(findings(rows, 490)) == []


@pytest.mark.parametrize(("lasts", "level"), [(3, "info"), (40, "warning"), (400, "critical")])
def test_recovery_of_a_spike_has_a_class(lasts, level):
    """490 steps: back within 24 is fast, never means 147."""
    rows = change(healthy(490, seed=8), "loss", lambda step, value: 1.6 * value, 200, 200 + lasts)
    found = findings(rows, 490)
    assert [(f.rule, f.level) for f in found if f.rule != "plateau"] == [
        ("loss_spike", "critical"),
        ("spike_recovery", level),
    ]


def test_spikes_far_apart_are_told_each():
    rows = healthy(1200, seed=9)
    for at in (400, 900):
        rows = change(rows, "loss", lambda step, value: 3.0 * value, at, at)
    assert [f.step for f in trouble(findings(rows, 1200))] == [400, 900]


def test_plateau_is_information_only():
    rows = change(healthy(1500, seed=10), "loss", lambda step, value: 2.8 + 0.01 * math.sin(step**2), 300)
    found = findings(rows, 1500)
    assert names(found)[:1] == ["plateau"] and trouble(found) == []


def test_a_mean_that_noise_hides_is_no_plateau():
    """Fine-tuning on short batches of mixed questions: 0.76 ± 0.2 a step, which falls all the while."""
    noise = random.Random(3)
    noisy = change(
        healthy(1284, seed=10), "loss", lambda step, _: 0.8 - 1e-4 * step + 0.2 * noise.uniform(-1.7, 1.7), 60
    )
    assert "plateau" not in names(findings(noisy, 1284, "sft"))


def test_plateau_late_in_the_cooldown_is_no_news():
    rows = healthy(1500, seed=10)
    flat = change(rows, "loss", lambda step, value: 2.0 + 0.01 * math.sin(step**2), 1300)
    assert "plateau" not in names(findings(flat, 1500))


@pytest.mark.parametrize("steps", [490, 2000])
def test_resume_that_lost_state(steps):
    half, later = steps // 2, steps // 2 + steps // 4
    rows = change(healthy(steps, seed=11), "loss", lambda step, value: 1.25 * value, half + 1, later)
    found = trouble(findings(rows, steps, resumes=[steps // 2]))
    assert names(found) == ["resume_spike"]
    # Without the interruption the same rows are a spike.
    assert names(trouble(findings(rows, steps)))[0] == "loss_spike"


def test_resume_that_saw_data_twice():
    steps, at = 1200, 600
    rows = change(healthy(steps, seed=12), "loss", lambda step, value: 0.9 * value, at + 1, at + 90)
    found = trouble(findings(rows, steps, resumes=[at]))
    assert names(found) == ["resume_under_report"]


def test_resume_in_the_fast_fall_at_the_start_is_healthy():
    for at in range(20, 120, 7):
        assert trouble(findings(healthy(490, seed=at), 490, resumes=[at])) == []


def test_other_mixture_in_the_cooldown_is_no_divergence():
    rows = change(healthy(1200, seed=13), "loss", lambda step, value: 1.3 * value, 841)
    assert trouble(findings(rows, 1200, cooldown_data=True)) == []
    assert trouble(findings(rows, 1200))[0].rule == "loss_spike"


def test_overfitting_needs_a_falling_training_loss():
    """Both rise: that is not memorising."""
    rows = overfitting(healthy(1200, seed=14, phase="sft"), 300)
    rows = change(rows, "loss", lambda step, value: 2.0 + step / 1e4)
    assert "overfitting" not in names(findings(rows, 1200, "sft"))


def test_validations_that_arrive_late_are_compared_with_their_own_steps():
    """A record that is filled up after a resume brings all steps first and the validations after them."""
    rows = overfitting(healthy(1200, seed=15, phase="sft"), 300)
    late = [row for row in rows if "val_loss" not in row] + [row for row in rows if "val_loss" in row]
    assert names(trouble(findings(late, 1200, "sft"))) == ["overfitting"]


def test_kept_and_pruned_checkpoints_are_no_loss_of_space():
    rows = change(healthy(1200), "disk.free_bytes", lambda step, value: GIB * (9.9 - step // 5 % 8))
    assert trouble(findings(rows, 1200)) == []


def test_refused_step_is_information_and_no_spike():
    rows = change(healthy(490, seed=16), "loss", lambda step, value: 3 * value, 200, 200)
    rows = change(rows, "grad_norm", lambda step, value: 30 * value, 200, 200)
    found = findings(change(rows, "skipped", lambda step, value: 1.0, 200, 200), 490)
    assert [(each.rule, each.level) for each in found if each.rule != "plateau"] == [("refused_steps", "info")]
    assert names(trouble(findings(rows, 490))) == ["loss_spike", "gradient_spike"]


def test_run_that_goes_back_and_takes_another_way():
    """The loss never came back from step 250 on; at 350 the run goes back to 230 and takes other data."""
    clean = healthy(490, seed=17)
    bad = change(clean, "loss", lambda step, value: 1.7 * value, 250)
    rows = [row for row in bad if row["step"] <= 350] + [row for row in clean if row["step"] > 230]
    found = findings(rows, 490)
    # The old way did not recover: nothing is said of it any more.
    assert [(each.rule, each.level) for each in found if each.rule != "plateau"] == [("loss_spike", "critical")]


def test_readings_at_log_points_only():
    """Parts of a step and memory come once in ten steps; the findings are the same."""

    def sparse(rows: Rows) -> Rows:
        seldom = ("time.", "memory.")
        return [{k: v for k, v in row.items() if not k.startswith(seldom) or row["step"] % 10 == 0} for row in rows]

    clean = healthy(1200, seed=18)
    faults = {"data_wait": waiting, "device_memory": leak("memory.bytes", 0.5)}
    for rule, fault in faults.items():
        assert names(trouble(findings(sparse(fault(clean, 300)), 1200))) == [rule]
    assert trouble(findings(sparse(clean), 1200)) == []


def test_on_a_cpu_where_both_memories_are_one_its_growth_is_told_once():
    rows = leak("memory.host_bytes", 0.8)(healthy(1200, seed=18), 300)
    rows = [{**row, "memory.bytes": row.get("memory.host_bytes")} for row in rows]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    assert names(trouble(findings(rows, 1200))) == ["host_memory"]


BEGAN_WITH = (2.57, 1.44, 2.63, 2.59, 2.58, 1.48, 1.52, 2.57)  # fine-tuning in the default run, reading by reading


@pytest.mark.parametrize(("later", "told"), [(1.0, []), (1.15, []), (1.3, ["embedding_spread"])])
def test_a_spread_that_the_weights_began_with_is_not_of_this_run(later, told):
    def spread_of(step: int, value: float) -> float:
        return BEGAN_WITH[step // 5 % len(BEGAN_WITH)] * (later if step > 200 else 1.0)

    rows = change(healthy(490, seed=3, phase="sft"), "vitals.embedding_spread", spread_of)
    assert names(trouble(findings(rows, 490, "sft"))) == told


def test_weights_that_begin_with_a_hopeless_spread_are_told():
    rows = change(healthy(490, seed=3, phase="sft"), "vitals.embedding_spread", lambda step, value: 7.0)
    assert names(trouble(findings(rows, 490, "sft"))) == ["embedding_spread"]


def test_every_rule_has_a_planted_fault():
    elsewhere = {"divergence", "spike_recovery", "plateau", "resume_spike", "resume_under_report"}
    assert {rule for _, _, rule, _ in FAULTS} | elsewhere == GENERAL


def test_events_gather_findings_of_a_rule():
    found = findings(drift(healthy(490, seed=4), 160), 490)
    (event,) = [each for each in events(found) if each.first.rule == "divergence"]
    assert (event.times, event.worst.level, event.first.level) == (2, "critical", "warning")
    assert LEVELS.index(event.worst.level) == 3

"""Energy from files and a program laid out as drivers lay them out. Below 2 s."""

from __future__ import annotations

import functools
import time

import pytest

from athanor.pipeline.energy import Energy, source


def hwmon(sys, number, name, **files):
    folder = sys / "class" / "hwmon" / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    for file, value in files.items():
        (folder / file).write_text(f"{value}\n")
    return folder


def rapl(sys, name, microjoules, most=1000):
    folder = sys / "class" / "powercap" / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder / "energy_uj"


def test_nothing_tells_nothing(tmp_path):
    hwmon(tmp_path, 0, "k10temp", temp1_input=40000)
    (tmp_path / "class" / "powercap" / "intel-rapl").mkdir(parents=True)
    with Energy(lambda: source(tmp_path, nvidia="/nonexistent/program")) as energy:
        pass
    assert energy.facts() == {}


def test_cards_of_amd(tmp_path):
    first = hwmon(tmp_path, 1, "amdgpu", power1_average=100_000_000)
    hwmon(tmp_path, 2, "amdgpu", power1_input=50_000_000)
    hwmon(tmp_path, 3, "nvme", power1_input=9_000_000)
    rapl(tmp_path, "intel-rapl:0", 0)
    found = source(tmp_path, nvidia="/nonexistent/program")
    assert (found.name, found.spent(0.0)) == ("amdgpu", 0.0)
    (first / "power1_average").write_text("200000000\n")
    assert found.spent(10.0) == pytest.approx(10 * (150 + 250) / 2)
    (first / "power1_average").write_text("unreadable\n")
    assert found.spent(15.0) == 0.0
    (first / "power1_average").write_text("200000000\n")
    assert found.spent(20.0) == pytest.approx(10 * 250)  # the time without a sample is bridged


def test_counters_of_processor_packages_run_over(tmp_path):
    package, second = rapl(tmp_path, "intel-rapl:0", 900), rapl(tmp_path, "intel-rapl:1", 10)
    inside = rapl(tmp_path, "intel-rapl:0:0", 0)
    found = source(tmp_path, nvidia="/nonexistent/program")
    assert (found.name, found.spent(0.0)) == ("rapl", 0.0)
    package.write_text("300\n")
    second.write_text("60\n")
    inside.write_text("700\n")
    assert found.spent(1.0) == pytest.approx((400 + 50) / 1e6)


def test_cards_of_nvidia(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 120.5\necho 79.5\n")
    program.chmod(0o755)
    hwmon(tmp_path, 1, "amdgpu", power1_average=1)
    found = source(tmp_path, nvidia=str(program))
    found.spent(0.0)
    assert (found.name, found.spent(9.0)) == ("nvidia", 1800.0)
    program.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert source(tmp_path, nvidia=str(program)).name == "amdgpu"


def test_a_thread_samples_until_the_end(tmp_path):
    file, clock = rapl(tmp_path, "intel-rapl:0", 0, most=10**12), iter(range(10**9))
    find = functools.partial(source, tmp_path, "/nonexistent/program")
    deadline = time.monotonic() + 60
    with Energy(find, every_seconds=0.001, clock=lambda: float(next(clock))) as energy:
        while not energy.facts() and time.monotonic() < deadline:
            time.sleep(0.001)
        file.write_text("1800000000\n")
        while not energy.joules and time.monotonic() < deadline:
            time.sleep(0.001)
        energy._every = 60.0
        file.write_text("3600000000\n")
    assert energy.facts() == {"energy_kwh": 0.001, "energy_source": "rapl"}

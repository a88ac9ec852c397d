"""Checks of `athanor doctor` that measure: cores for each process, the disk and its clock, NTP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from athanor.cli.doctor import speed
from athanor.cli.doctor.main import Checkout
from athanor.runtime import machine as settings_of
from athanor.troubles.world import ROOT


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """On a machine of eight cores, whose files are below `machine`."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv(ROOT, str(tmp_path / "machine"))
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    for name in ("ATHANOR_LAUNCH", "ATHANOR_THREADS", "ATHANOR_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for module in (speed, settings_of):
        monkeypatch.setattr(module, "cores", lambda: 8)
    return Checkout(tmp_path, (), ())


@pytest.mark.parametrize(
    ("settings", "quota", "told"),
    [
        ("{}", "", ""), ("{}", "max 100000", ""), ("{}", "800000 100000", ""), ("threads: 4", "400000 100000", ""),
        ("launch: {processes: 8}", "", ""),
        ("launch: {processes: 9}", "", "9 processes would train on 8 cores"),
        ("launch: {processes: 4}", "200000 100000", "4 processes would train on 2 cores"),
        ("{}", "200000 100000", "8 threads would compute on 2 cores (the control group allows no more)"),
        ("threads: 16", "", "16 threads would compute on 8 cores (this process may use no more)"),
    ],
)  # fmt: skip
def test_cores_for_each_process(checkout: Checkout, settings: str, quota: str, told: str) -> None:
    (checkout.root / "machine.yaml").write_text(settings)
    if quota:
        group = checkout.root / "machine/sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text(f"{quota}\n")
    found = list(speed.processors(checkout))
    assert [finding.what[: len(told)] for finding in found] == [told] * bool(told)
    assert checkout.measured["processors"]["cores"] == 8


def test_a_disk_is_measured_and_nothing_is_left(checkout: Checkout) -> None:
    before = os.listdir(checkout.root)
    list(speed.disk(checkout))
    measured = checkout.measured["disk"]
    assert measured["write_mib"] > 0 and measured["read_mib"] > 0 and abs(measured["skew_s"]) < speed.SKEW_SECONDS
    assert os.listdir(checkout.root) == before


@pytest.mark.parametrize(
    ("disk", "told"),
    [
        ({}, []), ({"write_mib": 3.0}, ["disk-speed"]), ({"skew_s": -90.0}, ["clock"]), ({"skew_s": 2.0}, ["clock"]),
    ],
)  # fmt: skip
def test_what_is_told_of_a_disk(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, disk: dict, told: list) -> None:
    monkeypatch.setattr(
        speed, "_disk_speed", lambda file: {"write_mib": 200.0, "read_mib": 900.0, "skew_s": 0.0, **disk}
    )
    assert [finding.kind for finding in speed.disk(checkout)] == told


def test_a_file_that_gets_the_time_of_another_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a file server: the kernel's own time of the file is moved."""
    monkeypatch.setattr(speed, "DISK_PIECES", 1)
    real = os.fsync
    for offset in (-90.0, 90.0):
        with open(tmp_path / "f", "w+b") as file:
            moved = lambda fd, by=offset: (real(fd), os.utime(fd, (0, speed.time.time() + by)))  # noqa: E731
            monkeypatch.setattr(speed.os, "fsync", moved)
            assert speed._disk_speed(file)["skew_s"] == pytest.approx(offset, abs=1.0)


def test_the_clock_of_one_of_several_machines(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout.root / "machine.yaml").write_text("launch: {nodes: 2, processes: 1, endpoint: 'a:1'}")
    list(speed.disk(checkout))
    assert checkout.measured["ntp"] in (True, False)
    answers = {"adjtimex": lambda buffer: speed.TIME_ERROR}
    monkeypatch.setattr(
        speed.ctypes, "CDLL", lambda name: type("Libc", (), {"adjtimex": staticmethod(answers["adjtimex"])})
    )
    assert "no NTP sets this machine's clock" in " ".join(finding.what for finding in speed.disk(checkout))

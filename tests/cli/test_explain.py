"""athanor explain, what athanor repro adds to a failure, and the machine's troubles in athanor doctor."""

from __future__ import annotations

import getpass
import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.cli import explain
from athanor.troubles.world import ROOT as MACHINE
from tests.cli.test_repro import HOLD, kill_held
from tests.e2e.clone import environment
from tests.runtime.toy_pipeline import Toy

ROOT = Path(__file__).resolve().parents[2]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def call(folder: Path, *words: str, said: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "athanor", "explain", *words]
    settings = environment(PYTHONPATH=str(ROOT), DVC_ROOT=str(folder), **env)
    return subprocess.run(command, cwd=folder, env=settings, input=said, capture_output=True, text=True)


def failed_run(folder: Path, error: str) -> Path:
    run = folder / ".athanor/runs/pretrain-20261125"
    run.mkdir(parents=True)
    (run / "meta.json").write_text(json.dumps({"stage": "pretrain", "pid": 1, "run": run.name}))
    (run / "end.json").write_text(json.dumps({"status": "FAILED", "ended_ms": 1, "error": error}))
    (run / "journal.jsonl").write_text('{"t": 1, "event": "note", "text": "begins"}\n')
    return run


def test_a_log_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"one\n{OOM}")
    done = call(tmp_path, "log")
    assert done.returncode == 0 and "micro_batch_tokens" in done.stdout and "line 2 of log" in done.stdout
    assert len(done.stdout.splitlines()) == 4
    assert call(tmp_path, "-", said=OOM).stdout.splitlines()[:3] == done.stdout.splitlines()[:3]
    unknown = call(tmp_path, "-", said="it is broken\n")
    assert unknown.returncode == 1 and "athanor explain --bundle" in unknown.stdout
    missing = call(tmp_path, "nowhere")
    assert missing.returncode == 1 and "no such file" in missing.stderr


def test_the_last_failure_of_this_checkout(tmp_path: Path) -> None:
    assert "No run failed here" in call(tmp_path).stdout
    run = failed_run(tmp_path, OOM)
    assert "The card's memory is used up" in call(tmp_path).stdout
    (run / "end.json").unlink()  # it was killed, and could not say so
    assert "A process was killed" in call(tmp_path).stdout


def test_a_bundle_names_nobody_and_tells_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    failed_run(tmp_path, f"broken in {home}/secret-project and /home/alice/x with hf_{'a' * 30}")
    (tmp_path / "params.yaml").write_text("source: https://host/file?sig=abcdefgh12345\n")
    (tmp_path / "machine.yaml").write_text(
        "notify: >-\n  https://discord.com/api/webhooks/123/tokeninpath\nthreads: 2\n"
    )
    (tmp_path / ".athanor/repro.log").write_text("".join(f"line {n} of {platform.node()}\n" for n in range(500)))
    done = call(tmp_path, "--bundle", HF_TOKEN="hf_" + "b" * 30, NCCL_DEBUG="INFO", MY_PASSWORD="correct horse")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / explain.BUNDLE).read_text()
    for secret in ("a" * 30, "b" * 30, "abcdefgh12345", "correct horse", "alice", "tokeninpath", str(tmp_path)):
        assert secret not in text, secret
    assert len(platform.node()) < 3 or platform.node() not in text
    if len(getpass.getuser()) > 2 and getpass.getuser() != "root":
        assert getpass.getuser() not in text
    assert "~/secret-project" in text and "NCCL_DEBUG=INFO" in text and "numpy==" in text and "begins" in text
    assert "line 499" in text and "line 299 " not in text  # the last 200 lines of the log


def test_neither_it_nor_the_look_at_the_machine_loads_torch() -> None:
    code = "import sys, athanor.cli.explain, athanor.cli.doctor.checks, athanor.runtime.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_crash_is_explained_at_the_end_of_repro(toy: Toy) -> None:
    toy.hold(HOLD)
    job = toy.repro()
    kill_held(toy, signal.SIGSEGV)
    assert job.wait() not in (0, 75)
    end = job.text().splitlines()[-4:]
    assert end[0] == "Native code crashed (segmentation fault)" and end[1].startswith("Cause  "), job.text()
    assert end[2].startswith("Fix    ") and "docs/troubles.md#crashed-in-native-code" in end[3]
    assert "most recent call first" in (toy.path / ".athanor/stages/count.trace").read_text()


def test_what_names_its_own_fix_gets_no_second_one(toy: Toy) -> None:
    toy.hold(HOLD)
    job = toy.repro()
    kill_held(toy, signal.SIGKILL)
    assert job.wait() not in (0, 75)
    assert job.text().count("Fix") == 1 and "Cause" not in job.text(), job.text()


def test_doctor_looks_at_the_machine(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MI50 on a faked machine, as somebody has who never saw this project: each trouble is told beforehand."""
    machine = tmp_path / "machine"
    for number in (1, 2):
        node = machine / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text("gfx_target_version 90006\n")
    (machine / "sys/kernel/iommu_groups/7").mkdir(parents=True)
    (machine / "sys/kernel/iommu_groups/7/type").write_text("DMA-FQ\n")
    (machine / "proc").mkdir()
    (machine / "proc/cmdline").write_text("ro quiet splash\n")
    own = toy.environment()
    more = {MACHINE: str(machine), "ATHANOR_LAUNCH": "processes=2", "HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    monkeypatch.setattr(toy, "environment", lambda: {**own, **more})
    status, findings = toy.doctor()
    told = {row["where"]: row for row in findings if row["kind"] == "trouble"}
    assert status == 1 and set(told) >= {"amd-cards-behind-iommu", "override-of-mi50"}
    assert not any(told[name]["note"] for name in ("amd-cards-behind-iommu", "override-of-mi50"))
    # Beside others that depend on the torch that is installed here.
    assert "iommu=pt" in told["amd-cards-behind-iommu"]["command"]
    more["ATHANOR_KNOWN_TROUBLES"] = "amd-cards-behind-iommu override-of-mi50"
    assert toy.doctor()[0] == 0

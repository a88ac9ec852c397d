"""The pretrain stage under `launch`: torchrun (never in this process), signals, exit statuses, two nodes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json
from athanor.base.errors import ParamsError
from athanor.runtime import hosts, launch, presets
from athanor.runtime.machine import Launch, machine
from tests.runtime.nodes import by_srun, two_nodes  # noqa: F401
from tests.runtime.view import ROOT

LIMIT = 150.0  # s for what takes 10 on an idle machine
BATCH, SHORT, LONG = 64, 40, 400  # tokens, steps


def stage_inputs():
    """The module with the small inputs of the training stages."""
    path = ROOT / "tests/stages/test_train_stages.py"
    spec = importlib.util.spec_from_file_location("train_stage_inputs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A checkout's data for runs with steps of some milliseconds."""
    small, root = stage_inputs(), tmp_path_factory.mktemp("inputs")
    small.write_inputs(root)
    for steps in (SHORT, LONG):
        params = presets.values(ROOT / "presets/micro.yaml")
        params["model"] |= small.MODEL
        wanted = {"tokens": BATCH * steps, "batch_tokens": BATCH, "validation_every_tokens": BATCH * steps // 2}
        params["pretrain"] |= small.PRETRAIN | wanted
        YAML().dump(params, root / f"params-{steps}.yaml")
    return root


def checkout(inputs, work, steps):
    shutil.copytree(inputs, work, symlinks=True)
    (work / f"params-{steps}.yaml").rename(work / "params.yaml")
    return work


def environment(**values):
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("ATHANOR_", "DVC_", "SLURM_"))}
    fixed = {"ATHANOR_TRACKING": "off", "ATHANOR_THREADS": "1", "ATHANOR_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return clean | fixed | values


def begin(work, *prefix, **values):
    command = [*prefix, sys.executable, "-m", "stages.pretrain"]
    with open(work / "log.txt", "a") as log:
        return subprocess.Popen(command, cwd=work, env=environment(**values), stdout=log, stderr=log)


def finish(process, work):
    try:
        return process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail((work / "log.txt").read_text())


def members(work):
    """Process ids of the stage in this folder, apart from launchers."""
    processes = psutil.process_iter(["cwd", "environ"])
    return [one.pid for one in processes if one.info["cwd"] == str(work) and "RANK" in (one.info["environ"] or {})]


def until(condition, process, work):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, (work / "log.txt").read_text()
        assert time.monotonic() < deadline, (work / "log.txt").read_text()
        time.sleep(0.02)


def rows(work):
    return sum(path.read_bytes().count(b'"loss"') for path in (work / ".athanor/runs").glob("*/journal.jsonl"))


def numbers(value):
    """All numbers of a nested value, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    return [value] if isinstance(value, (int, float)) else []


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """What one process gives, by the number of steps."""
    found = {}
    for steps in (SHORT, LONG):
        work = checkout(inputs, tmp_path_factory.mktemp("alone") / "work", steps)
        assert finish(begin(work), work) == 0, (work / "log.txt").read_text()
        found[steps] = read_json(work / "metrics/pretrain.json")
    return found


@pytest.fixture
def work(inputs, tmp_path):
    return checkout(inputs, tmp_path / "work", SHORT)


def check(work, alone):
    """Losses agree to 1e-3, after up to 400 steps of sums in another order; counts exactly."""
    found = read_json(work / "metrics/pretrain.json")
    assert numbers(found) == pytest.approx(numbers(alone[found["steps"]]), rel=1e-3, abs=1e-3)
    ends = [read_json(path)["status"] for path in (work / ".athanor/runs").glob("*/end.json")]
    assert ends.count("FINISHED") == 1 and len(list((work / ".athanor/runs").iterdir())) == 1


def test_two_processes_give_the_metrics_of_one(work, alone):
    (work / "machine.yaml").write_text("launch: {processes: 2}\nparallel: fsdp\n")
    assert finish(begin(work), work) == 0, (work / "log.txt").read_text()
    check(work, alone)
    assert (work / "log.txt").read_text().count("pretrain: done") == 1
    assert not members(work)


def test_hung_up_then_a_member_killed_then_the_launcher_then_finished_by_one(inputs, alone, tmp_path):
    """The temporary folder is cleared at first, as some systems do after ten days: it once ended all members."""
    work, temporary = checkout(inputs, tmp_path / "long", LONG), tmp_path / "tmp"
    temporary.mkdir()
    asked = {"ATHANOR_LAUNCH": "processes=2"}
    process = begin(work, **asked, TMPDIR=str(temporary))
    until(lambda: rows(work) > 0, process, work)
    for path in temporary.iterdir():
        shutil.rmtree(path)
    time.sleep(5 * launch.POLL)
    assert process.poll() is None and len(members(work)) == 2, (work / "log.txt").read_text()
    process.send_signal(signal.SIGHUP)
    assert finish(process, work) == 75, (work / "log.txt").read_text()
    assert "the same command goes on from there" in (work / "log.txt").read_text()
    assert len(list(work.glob(".athanor/slots/pretrain/*/step_*"))) == 1 and not members(work)

    before = rows(work)
    process = begin(work, **asked)
    until(lambda: rows(work) > before, process, work)
    os.kill(max(members(work)), signal.SIGKILL)
    assert finish(process, work) == 1
    log = (work / "log.txt").read_text()
    assert "of this node was killed" in log and "Traceback" not in log and "exitcode" not in log

    before = rows(work)
    process = begin(work, **asked)
    until(lambda: rows(work) > before, process, work)
    process.kill()
    process.wait()
    deadline = time.monotonic() + LIMIT
    while members(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(work)

    assert finish(begin(work), work) == 0, (work / "log.txt").read_text()
    check(work, alone)


class Agent:
    """torchrun that runs for some looks, and then ends with a status."""

    def __init__(self, looks, status):
        self.looks, self.status = looks, status

    def poll(self):
        self.looks -= 1
        return None if self.looks > 0 else self.status


def test_a_member_that_has_told_its_status_gets_no_signal(tmp_path):
    """It may be gone, and its process number another program's."""
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for number, child in enumerate(sleeping):
            (tmp_path / f"{number}.pid").write_text(str(child.pid))
        (tmp_path / "0.status").write_text("75")
        threading.Timer(launch.POLL, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert launch._wait("toy", Agent(5, 0), tmp_path) == launch.STOPPED
        assert sleeping[1].wait(10) == -signal.SIGTERM and sleeping[0].poll() is None
    finally:
        for child in sleeping:
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("status", "died"),
    [
        ("1", []),
        ("70", ["a process of this node met an unexpected error"]),
        (None, ["process 1 of this node was killed"]),
    ],
)
def test_which_ends_of_members_are_deaths(monkeypatch, tmp_path, status, died):
    """What `athanor repro --supervise` starts again; a message that one has told is none of them."""
    told = []
    monkeypatch.setattr(launch, "record_death", told.append)
    for number, text in (("0", "1"), ("1", status)):
        (tmp_path / f"{number}.pid").write_text("1")
        if text is not None:
            (tmp_path / f"{number}.status").write_text(text)
    assert launch._wait("toy", Agent(1, 1), tmp_path) == 1
    assert len(told) == len(died) and all(one.startswith(known) for one, known in zip(told, died, strict=True))


def test_an_error_of_the_stage_is_told_once_and_has_status_1(work):
    (work / "models/tokenizer/manifest.json").unlink()
    assert finish(begin(work, ATHANOR_LAUNCH="processes=2"), work) == 1
    assert "Traceback" not in (work / "log.txt").read_text()


def test_two_nodes_give_the_metrics_of_one_process(work, alone, inputs, tmp_path, two_nodes):
    other = checkout(inputs, tmp_path / "other", SHORT)  # as on a disk of its own
    running = []
    for number, (folder, (name, end, _)) in enumerate(zip((work, other), two_nodes, strict=True)):
        wanted = {
            "ATHANOR_LAUNCH": f"processes=1 nodes=2 endpoint={two_nodes[0][2]}:29417 wait_s=100",
            "ATHANOR_LAUNCH_NODE_RANK": str(number),
            "GLOO_SOCKET_IFNAME": end,
        }
        running.append(begin(folder, "ip", "netns", "exec", name, **wanted))
    assert [finish(process, folder) for process, folder in zip(running, (work, other), strict=True)] == [0, 0], (
        work / "log.txt"
    ).read_text() + (other / "log.txt").read_text()
    check(work, alone)
    left = ("metrics", "plots", "models/base", ".athanor/runs", ".athanor/slots")
    assert not any((other / name).exists() for name in left)


def test_a_node_is_started_by_srun_and_gives_the_metrics_of_one_process(work, alone, by_srun):
    """In one folder, as on a shared file system."""
    assert finish(begin(work, *by_srun[0], **by_srun[1]), work) == 0, (work / "log.txt").read_text()
    check(work, alone)
    assert not members(work)


def test_signals_reach_a_host_and_no_process_of_it_outlives_node_0(inputs, alone, tmp_path, by_srun):
    work = checkout(inputs, tmp_path / "long", LONG)
    process = begin(work, *by_srun[0], **by_srun[1])
    until(lambda: rows(work) > 0, process, work)
    assert len(members(work)) == 2
    process.send_signal(signal.SIGTERM)
    assert finish(process, work) == 75 and not members(work), (work / "log.txt").read_text()

    process = begin(work, *by_srun[0], **by_srun[1])
    until(lambda: members(work), process, work)  # but they have not met
    process.send_signal(signal.SIGTERM)
    assert finish(process, work) == 75 and "killed" not in (work / "log.txt").read_text()

    before = rows(work)
    process = begin(work, *by_srun[0], **by_srun[1])
    until(lambda: rows(work) > before, process, work)
    process.kill()
    process.wait()
    deadline = time.monotonic() + LIMIT
    while members(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(work)
    assert finish(begin(work), work) == 0, (work / "log.txt").read_text()
    check(work, alone)


def test_a_node_that_fails_is_named_and_ends_the_stage_at_once(work, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin/srun").chmod(0o755)
    wanted = {"ATHANOR_LAUNCH": "hosts=b endpoint=127.0.0.1:29421", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert finish(begin(work, **wanted), work) == 1
    log = (work / "log.txt").read_text()
    assert "node 1 (b) ended with status 9" in log and "killed" not in log and not members(work)


def test_what_a_node_is_told(monkeypatch):
    monkeypatch.setenv("DVC_STAGE", "sft")
    words, env = hosts.step(Launch(processes=8, hosts=("b", "c"), endpoint="a:1", args=("--x", "--y")), "stages.sft", 2)
    assert words[0] == "srun" and {"--nodelist=c", "--export=ALL"} <= set(words) and words[-2:] == ["-m", "stages.sft"]
    assert env["ATHANOR_LAUNCH_NODE_RANK"] == "2" and "DVC_STAGE" not in env and "hosts" not in env["ATHANOR_LAUNCH"]


def test_settings_come_back_from_their_text(monkeypatch, tmp_path):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    wanted = Launch(4, 3, "a:1", ("b", "c"), wait_s=1.5, args=("--x=1", "--y"))
    monkeypatch.setenv("ATHANOR_LAUNCH", wanted.as_text())
    assert machine().launch == wanted


def test_what_torchrun_is_told(monkeypatch):
    monkeypatch.setenv(launch.NODE_RANK, "3")
    wanted = Launch(nodes=4, endpoint="127.0.0.1:1", args=("--local-ranks-filter=0",))
    several = launch.arguments("sft", "stages.sft", wanted, 8)
    assert {"--nnodes=4", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=athanor-sft", "--nproc-per-node=8"} <= set(several)
    assert several[-3:] == ["--local-ranks-filter=0", "-m", "stages.sft"]
    assert "--standalone" in launch.arguments("sft", "stages.sft", Launch(), 2)
    with pytest.raises(ParamsError, match="machine.launch.endpoint: 2 nodes need a place to meet"):
        launch.arguments("sft", "stages.sft", Launch(nodes=2), 1)


def test_the_number_of_a_node_comes_from_the_user_or_from_slurm():
    assert launch.node_rank({}) == 0
    assert launch.node_rank({"SLURM_NODEID": "2"}) == 2
    assert launch.node_rank({"SLURM_NODEID": "2", launch.NODE_RANK: "1"}) == 1
    with pytest.raises(ParamsError, match="whole number"):
        launch.node_rank({launch.NODE_RANK: "first"})


def test_the_setting_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("ATHANOR_LAUNCH", "processes=4 endpoint=a:1")
    assert machine().launch == Launch(processes=4, endpoint="a:1")
    monkeypatch.setenv("ATHANOR_LAUNCH", "4")
    with pytest.raises(ParamsError, match="key=value"):
        machine()
    monkeypatch.setenv("ATHANOR_LAUNCH", "prozesses=4")
    with pytest.raises(ParamsError, match="ATHANOR_LAUNCH.*did you mean 'launch.processes'"):
        machine()


def test_a_gpu_saves_less_often(monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/kfd")
    assert machine().save_every_seconds == 300
    monkeypatch.setenv("ATHANOR_DEVICE", "cpu")
    assert machine().save_every_seconds == 60


def test_one_process_is_not_launched(monkeypatch, tmp_path):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    assert launch.launch("pretrain", "stages.pretrain") is None and launch.is_main()

"""`athanor launch check`: real ranks, two on each of two nodes in network namespaces; and what is said of numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from athanor.cli.launch import check, measure, member
from athanor.runtime.machine import Launch
from tests.runtime.nodes import two_nodes  # noqa: F401
from tests.runtime.view import ROOT

LIMIT = 120.0  # s for what takes 15 on an idle machine


def begin(folder, *arguments, inside=(), **values):
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("ATHANOR_", "SLURM_", "GLOO_"))}
    fixed = {"ATHANOR_DEVICE": "cpu", "ATHANOR_THREADS": "1", "DVC_ROOT": str(folder)}
    command = [*inside, sys.executable, "-m", "athanor", "launch", "check", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=clean | fixed | values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def begin_on(nodes, folder, *arguments):
    """The same command on both nodes, as a person types it."""
    wanted = ["--nodes=2", "--processes=2", f"--endpoint={nodes[0][2]}:29431", *arguments]
    inside = [("ip", "netns", "exec", name) for name, _, _ in nodes]
    return [begin(folder, *wanted, inside=inside[number], ATHANOR_LAUNCH_NODE_RANK=str(number)) for number in (0, 1)]


def throttle(node, rate):
    name, end, _ = node
    command = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
    done = subprocess.run(["ip", "netns", "exec", name, *command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this kernel cannot slow a link down: {done.stderr}")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Also where a test fails."""
    yield
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("DVC_ROOT") == str(tmp_path):
            process.kill()


def ranks(folder):
    """The ranks of the checks in this folder, by node and local number."""
    found = {}
    for process in psutil.process_iter(["environ"]):
        env = process.info["environ"] or {}
        if env.get("DVC_ROOT") == str(folder) and "RANK" in env:
            found[env.get("ATHANOR_LAUNCH_NODE_RANK"), env["LOCAL_RANK"]] = process
    return found


def until_counted(processes, folder, count):
    deadline = time.monotonic() + LIMIT
    while len(found := ranks(folder)) < count:
        assert time.monotonic() < deadline and all(one.poll() is None for one in processes)
        time.sleep(0.05)
    return found


def line_with(process, words):
    """Read on until a line has the words; what was read."""
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    pytest.fail(f"no {words!r} in:\n{read}")


def test_a_slow_link_is_named(two_nodes, tmp_path):
    throttle(two_nodes[1], "40mbit")
    first, second = begin_on(two_nodes, tmp_path)
    text, other = first.communicate(timeout=LIMIT)[0], second.communicate(timeout=LIMIT)[0]
    assert (first.returncode, second.returncode) == (1, 0), text + other
    assert "4 ranks on 2 nodes, gloo" in text and "of gradients would travel" in text.replace("\n       ", " ")
    wrong = [line for line in text.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1 and "node 1 -> node 0: " in wrong[0] and " MB/s" in wrong[0], text
    assert max(map(len, text.splitlines())) <= 100
    assert not other.strip() and not ranks(tmp_path)


def test_a_stopped_rank_is_named_in_ten_seconds_and_nothing_stays(two_nodes, tmp_path):
    throttle(two_nodes[1], "8mbit")  # so that there is enough to do
    first, second = begin_on(two_nodes, tmp_path)
    found = until_counted((first, second), tmp_path, 4)
    time.sleep(8)
    victim = found["1", "1"]
    victim.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    text = line_with(first, "silent")
    assert time.monotonic() - began < 10, text
    assert f"(node 1, {os.uname().nodename}, process {victim.pid})" in text
    text += first.communicate(timeout=LIMIT)[0]
    second.communicate(timeout=LIMIT)
    assert (first.returncode, second.returncode) == (1, 1), text
    assert time.monotonic() - began < 60 and not ranks(tmp_path)


def test_the_main_rank_is_named_by_another_one(tmp_path):
    process = begin(tmp_path, "--processes=2", "--wait=8")
    found = until_counted([process], tmp_path, 2)
    found[None, "0"].send_signal(signal.SIGSTOP)  # before it has come, or after
    text = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 1 and "for rank 0 (node 0, " in text and not ranks(tmp_path)


def test_a_node_that_never_comes_is_named_in_ten_seconds(tmp_path):
    began = time.monotonic()
    process = begin(tmp_path, "--nodes=2", "--processes=1", "--endpoint=127.0.0.1:29433", "--wait=12")
    text = line_with(process, "is missing")
    assert "of 2 nodes 1 is missing. Fix: the same command there, with ATHANOR_LAUNCH_NODE_RANK=1" in text
    assert time.monotonic() - began < 20  # 3 s of it until torch is imported
    text = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 1 and "did not come together" in text

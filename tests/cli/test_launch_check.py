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
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}  # a user's may lack these
    done = subprocess.run(["ip", "netns", "exec", name, *command], env=env, capture_output=True, text=True)
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
    assert process.returncode == 1 and "did not come together" in text and "killed" not in text


def rank(node, **more):
    versions = {"python": "3.12.1", "torch": "2.13.0", "athanor": "1a2b3c4"}
    about = {
        "node": node,
        "host": f"host{node}",
        "pid": 4711,
        "device": "AMD EPYC",
        "network": "eth0",
        "limit": None,
        "load": 0.5,
    }
    return about | {"versions": versions | more.pop("versions", {})} | more


def report(*ranks, links=(9e8, 9e8), limit=None, seconds=0.001, **more):
    sizes = [{"bytes": size, "seconds": seconds * size / 4000, "bus_bytes_per_second": 9e8} for size in measure.SIZES]
    ends = [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b]
    pairs = [{"from": a, "to": b, "bytes_per_second": speed} for (a, b), speed in zip(ends, links, strict=True)]
    found = {"ranks": [one | {"limit": limit} for one in ranks], "device": "cpu", "all_reduce": sizes, "pairs": pairs}
    return found | {"without_p2p": [], "share": None} | more


def test_ranks_that_differ_are_told_with_the_fix():
    found = report(rank(0), rank(1, versions={"torch": "2.12.1", "athanor": "1a2b3c4 edited"}))
    first, second = check.warnings(found)
    assert "athanor differs: 1a2b3c4 on node 0; 1a2b3c4 edited on node 1. Fix: the same commit" in first
    assert "torch differs: 2.13.0 on node 0; 2.12.1 on node 1. Fix: the same environment" in second
    assert not list(check.warnings(report(rank(0), rank(1))))


def test_a_link_is_slow_beside_the_others_and_below_its_own_limit():
    nodes = [rank(number) for number in range(3)]
    (told,) = check.warnings(report(*nodes, links=(9e8, 9e8, 9e6, 9e8, 9e8, 9e8)))
    assert told.startswith("node 1 -> node 0: 9.00 MB/s, the others reach 900.0 MB/s")
    told = list(check.warnings(report(*nodes[:2], links=(2e8, 2e8), limit=1.25e9)))
    assert len(told) == 2 and all("its link allows 1.25 GB/s" in text for text in told)
    assert "gigabit Ethernet allows" in next(check.warnings(report(*nodes[:2], links=(5e6, 5e6))))
    assert not list(check.warnings(report(rank(0), rank(0), links=(5e6, 5e6))))  # no network between them


def test_a_busy_host_is_not_called_a_bad_cable():
    assert not list(check.warnings(report(rank(0), rank(0), links=(9e8, 1e8))))  # no cable, either
    assert "PCIe" in next(check.warnings(report(rank(0), rank(0), links=(9e8, 1e8), device="cuda")))
    for load in (3.0, 12.0):  # and a tenth of what the other reaches
        found = report(rank(0, load=load), rank(1), links=(9e8, 9e7), limit=1e8, warnings=[])
        assert len(list(check.warnings(found))) == (load == 3)
        assert f"busy, {load} processes for each core" in check.text(found)


def test_each_meets_each_other_one_once_and_nobody_is_in_two_pairs_at_a_time():
    for count in range(1, 9):
        rounds = list(measure.tournament(count))
        met = [frozenset(pair) for pairs in rounds for pair in pairs]
        assert len(met) == len(set(met)) == count * (count - 1) // 2
        assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in rounds)


def test_the_time_of_a_size_between_two_that_were_measured_and_beyond_them():
    rows = [{"bytes": 100, "seconds": 1.0}, {"bytes": 300, "seconds": 2.0}]
    assert [check.seconds_of(rows, size) for size in (50, 100, 200, 600)] == [1.0, 1.0, 1.5, 4.0]


def test_the_share_of_a_step_stands_in_one_line_and_no_line_is_wider_than_a_terminal():
    wide = rank(0, device="AMD EPYC 9654 96-Core Processor and more", host="a-long-name.of.a.cluster.example")
    more = {"share": {"bytes": 943_000_000, "travel_seconds": 0.4, "compute_seconds": 1.7}, "warnings": ["x " * 90]}
    text = check.text(report(wide, rank(1), limit=1.25e9, **more))
    assert "of a step of 2.1 s, 0.4 s (19 %) would be gradients travelling" in text
    assert "72 %" in text and max(map(len, text.splitlines())) <= 100
    more["share"]["compute_seconds"] = None
    other = check.text(report(wide, rank(1), without_p2p=[{"bus_bytes_per_second": 3e8}], **more))
    assert "athanor plan --measure" in other and "without peer-to-peer" in other and "300.0 MB/s" in other


def write(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_links_can_carry_is_read_from_the_system(tmp_path):
    write(tmp_path, **{"sys/class/net/eth0/speed": "10000\n", "sys/class/net/veth0/speed": "10000\n"})
    (tmp_path / "sys/class/net/eth0/device").mkdir()
    assert member.network("eth0", tmp_path) == 1.25e9
    assert member.network("veth0", tmp_path) is None and member.network("", tmp_path) is None
    slot = "sys/bus/pci/devices/0000:03:00.0"
    write(tmp_path, **{f"{slot}/current_link_speed": "16.0 GT/s PCIe\n", f"{slot}/current_link_width": "16\n"})
    assert member.pcie("0000:03:00.0", tmp_path) == pytest.approx(31.5e9, rel=0.01)
    assert member.pcie("0000:04:00.0", tmp_path) is None
    ports = "sys/class/infiniband/mlx5_{}/ports/1"
    write(tmp_path, **{f"{ports.format(0)}/rate": "100 Gb/sec (4X EDR)\n", f"{ports.format(0)}/state": "4: ACTIVE\n"})
    write(tmp_path, **{f"{ports.format(1)}/rate": "400 Gb/sec (4X NDR)\n", f"{ports.format(1)}/state": "1: DOWN\n"})
    assert member.infiniband(tmp_path) == 12.5e9

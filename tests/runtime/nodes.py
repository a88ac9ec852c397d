"""Two nodes on one machine: network namespaces joined by a cable. Imported as a fixture."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

SRUN = """#!/bin/sh
# A node is a network namespace; as srun does, it gets the caller's environment, folder and standard input.
while [ "${1#-}" != "$1" ]; do node=${node:-$(expr "$1" : '--nodelist=\\(.*\\)')}; shift; done
exec ip netns exec "$node" "$@"
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def two_nodes():
    """The name, the end of the cable and the address of each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"athanor-{os.getpid()}-{number}" for number in (0, 1)]
    ends = [f"ath{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        if ip("netns", "add", names[0]).returncode or ip("netns", "add", names[1]).returncode:
            pytest.skip("this machine does not allow network namespaces")
        if ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]).returncode:
            pytest.skip("this machine has no veth devices")
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            for command in (f"addr add 10.77.0.{number + 1}/24 dev {end}", f"link set {end} up", "link set lo up"):
                done = ip("-n", name, *command.split())
                assert done.returncode == 0, done.stderr
        yield [(name, end, f"10.77.0.{number + 1}") for number, (name, end) in enumerate(zip(names, ends, strict=True))]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def by_srun(two_nodes, tmp_path):
    """How a launcher on node 0 starts node 1: the command's beginning, and what its environment says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    (node, _, address), (other, _, _) = two_nodes
    asked = f"processes=1 hosts={other} endpoint={address}:29419 wait_s=100"
    return ("ip", "netns", "exec", node), {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ATHANOR_LAUNCH": asked}

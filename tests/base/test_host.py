"""The one answer to how much memory there is, on files as Linux and container engines lay them out. Below 1 s."""

from __future__ import annotations

import pytest

from athanor.base import host

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """Write files below a root folder: control groups by their paths."""

    def write(groups: str, **limits: tuple[int | str, int, int]):
        files = {"proc/self/cgroup": groups}
        old = "memory:" in groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
        for path, (limit, used, idle) in limits.items():
            folder = f"sys/fs/cgroup/{'memory/' if old else ''}{path.replace('_', '/')}"
            stat = f"anon 1\n{'total_' if old else ''}inactive_file {idle}\n"
            files |= {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": used, f"{folder}/memory.stat": stat}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return write


@pytest.mark.parametrize("groups", ["0::/{}\n", "5:cpu,cpuacct:/{0}\n4:memory:/{0}\n0::/\n"])
def test_limits_of_nested_control_groups_hold(machine, groups):
    """The own group, one around it, and none; pages of files that were only read are free."""
    own = groups.format("job/step")
    assert host.free_memory_bytes(machine(own)) > 100 * MIB
    assert host.free_memory_bytes(machine(own, job_step=(4 * MIB, 3 * MIB, MIB))) == 2 * MIB
    root = machine(own, job_step=(8 * MIB, MIB, 0), job=(3 * MIB, 2 * MIB, MIB // 2))
    assert host.free_memory_bytes(root) == 1.5 * MIB and host.memory_bytes(root) == 3 * MIB
    assert host.free_memory_bytes(machine(own, job=(MIB, 2 * MIB, 0))) == 0


@pytest.mark.parametrize("path", ["/docker/8d1f", "/", "/../../job"])
def test_in_a_container_the_mount_itself_is_the_group(machine, path):
    root = machine(f"0::{path}\n")
    for name, text in {"memory.max": 2 * MIB, "memory.current": MIB, "memory.stat": "anon 1"}.items():
        (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(str(text))
    assert host.free_memory_bytes(root) == MIB


def test_without_a_limit_all_that_is_free_counts(machine):
    assert host.free_memory_bytes(machine("0::/a\n", a=("max", 9 * MIB, 0))) > 100 * MIB
    assert 0 < host.free_memory_bytes() <= host.memory_bytes()

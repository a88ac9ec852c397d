"""What the system tells of its processor and of memory. Linux tells most; where it tells nothing, nothing is known."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def cpuinfo(*names: str) -> str:
    """What Linux says of the first core under the first of these names that it knows; "" elsewhere."""
    rows = []
    with contextlib.suppress(OSError):
        rows = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()]
    return next((value.strip() for wanted in names for name, _, value in rows if name.strip() == wanted), "")


def processor() -> str:
    """The processor's model, as its maker calls it; else its architecture."""
    told = cpuinfo("model name", "Model")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]  # macOS
        told = told or subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return told or platform.processor() or platform.machine()


def peak_bytes(whose: int = resource.RUSAGE_SELF) -> int:
    """The most memory that this process has held, or with RUSAGE_CHILDREN the largest of its children."""
    return resource.getrusage(whose).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_GROUPS = (  # below /sys/fs/cgroup: the folder, a group's limit, what it uses, and which of that the kernel gives up
    ("0", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that is free now, within the limits of this process's control groups (version 1 and 2) and of those around them."""
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        free = 1024 * int(_rows(meminfo)["MemAvailable:"].split()[0])
    else:
        import psutil

        free = int(psutil.virtual_memory().available)
    return max(0, min([free, *(limit - used for limit, used in _group_limits(root))]))


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or what this process's control groups may use of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _group_limits(root))])


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that has a limit: this process's own and its parents, as far as they are seen."""
    own = root / "proc/self/cgroup"
    lines = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    for name, folder, limit, used, idle in _GROUPS:
        paths = [path for number, kinds, path in lines if name in (number, *kinds.split(","))]
        # In a container the mount may begin at the group itself, whatever its path is said to be.
        group = Path(*(part for part in Path((paths or [""])[0]).parts if part not in ("/", "..")))
        for inner in (group, *group.parents):
            place = root / "sys/fs/cgroup" / folder / inner
            with contextlib.suppress(OSError, ValueError):  # no such group, no limit ("max")
                at_most, now = (int((place / file).read_text()) for file in (limit, used))
                # Files that were read once count as used there; the kernel gives their pages up for the asking.
                yield at_most, now - int(_rows(place / "memory.stat").get(idle, 0))


def _rows(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):
        return dict(line.split(None, 1) for line in path.read_text().splitlines())
    return {}

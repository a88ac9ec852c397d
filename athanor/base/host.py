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


def load() -> float:
    """Processes that want to compute, for each core, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that is free now, also by the limits of this process's control groups (version 1 and 2) and those around."""
    free = [_memory("MemAvailable"), *(limit - used for limit, used in _limits(root))]
    return max(0, min(free))


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or what this process's control groups may use of it."""
    return min([_memory("MemTotal"), *(limit for limit, _ in _limits(root))])


def _memory(field: str) -> int:
    """Bytes of the host by a name of /proc/meminfo; elsewhere by psutil, which a rented machine may lack."""
    with contextlib.suppress(OSError, StopIteration):
        rows = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(row.split()[1]) for row in rows if row.startswith(f"{field}:"))
    import psutil

    memory = psutil.virtual_memory()
    return memory.total if field == "MemTotal" else memory.available


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that has a limit: this process's own and its parents, as far as they are seen."""
    own = root / "proc/self/cgroup"
    lines = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            mount, files, idle = "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file "
        elif not controllers:
            mount, files, idle = "", ("memory.max", "memory.current"), "inactive_file "
        else:
            continue
        # In a container the mount may begin at the group itself, whatever its path is said to be.
        group = Path(*(part for part in path.split("/") if part != ".."))
        for folder in (root / "sys/fs/cgroup" / mount / inner for inner in (group, *group.parents)):
            with contextlib.suppress(OSError, ValueError):  # no such group, no limit ("max")
                limit, used = (int((folder / file).read_text()) for file in files)
                rows = (folder / "memory.stat").read_text().splitlines()
                # Files that were read once count as used there; the kernel gives their pages up for the asking.
                yield limit, used - sum(int(row.removeprefix(idle)) for row in rows if row.startswith(idle))

"""What the system tells of its processor and of memory. Linux tells most; where it tells nothing, nothing is known."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
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

"""Energy of a stage, where the machine tells it.

Asked in this order, the first that answers counts, and is named with the
figure, for they cover different things:

    nvidia   board power of every NVIDIA card, from nvidia-smi
    amdgpu   board power of every AMD card, from the driver's files
    rapl     energy counters of the processor's packages, readable by root only on most systems

What a card or package spends on other programs is counted too. Power is
sampled every few seconds by a thread that only sleeps and reads; counters are
read at the same times, because they run over within minutes under load.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

SYS = Path("/sys")
EVERY_SECONDS = 10.0
JOIN_SECONDS = 5.0  # for a last sample, then the figure is without it
JOULES_PER_KWH = 3.6e6


class Power:
    """A source that tells watts; energy is what the mean of neighbouring samples makes of the time between."""

    def __init__(self, name: str, watts: Callable[[], float | None]) -> None:
        self.name, self._watts = name, watts
        self._last: tuple[float, float] | None = None

    def spent(self, now: float) -> float:
        """Joules since the last call, 0 at the first; a sample that fails is bridged by the next."""
        watts = self._watts()
        if watts is None:
            return 0.0
        last, self._last = self._last, (now, watts)
        return 0.0 if last is None else (now - last[0]) * (watts + last[1]) / 2


class Counters:
    """A source that counts microjoules in files that start again at 0 beyond their range."""

    def __init__(self, name: str, domains: list[Path]) -> None:
        self.name, self._domains = name, domains
        self._last: dict[Path, int] = {}

    def spent(self, now: float) -> float:
        total = 0
        for folder in self._domains:
            value = _number(folder / "energy_uj")
            if value is None:
                continue
            change = value - self._last.get(folder, value)
            total += change if change >= 0 else change + (_number(folder / "max_energy_range_uj") or -change)
            self._last[folder] = value
        return total / 1e6


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def nvidia_watts(program: str) -> float | None:
    """Sum over the cards that this process may use; None when the program gives no number."""
    command = [program, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        command.append(f"--id={chosen}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return sum(map(float, done.stdout.split())) if done.returncode == 0 and done.stdout.strip() else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def amdgpu_files(sys: Path) -> list[Path]:
    """Power of every card in microwatts: a running average, or the present value on newer drivers."""
    found = []
    for folder in sorted((sys / "class" / "hwmon").glob("hwmon*")):
        name = folder / "name"
        if not name.is_file() or name.read_text().strip() != "amdgpu":
            continue
        files = [folder / "power1_average", folder / "power1_input"]
        found += [file for file in files if _number(file) is not None][:1]
    return found


def amdgpu_watts(files: list[Path]) -> float | None:
    values = [_number(file) for file in files]
    return None if None in values else sum(values) / 1e6


def source(sys: Path = SYS, nvidia: str | None = None) -> Power | Counters | None:
    """What tells energy here; None where nothing does. `nvidia` is the program to ask instead of the usual one."""
    program = nvidia or shutil.which("nvidia-smi")
    if program and nvidia_watts(program) is not None:
        return Power("nvidia", lambda: nvidia_watts(program))
    files = amdgpu_files(sys)
    if files:
        return Power("amdgpu", lambda: amdgpu_watts(files))
    # Packages only: what is inside them (intel-rapl:0:0) is counted there already.
    folders = sorted((sys / "class" / "powercap").glob("intel-rapl:*"))
    packages = [path for path in folders if path.name.count(":") == 1 and _number(path / "energy_uj") is not None]
    return Counters("rapl", packages) if packages else None


class Energy:
    """A context that counts while it lasts; `facts` is empty where nothing tells energy.

    Its thread also looks for the source, so that a slow program holds up nothing.
    """

    def __init__(
        self,
        find: Callable[[], Power | Counters | None] = source,
        every_seconds: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._every, self._clock = find, every_seconds, clock
        self._found: Power | Counters | None = None
        self.joules, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)

    def __enter__(self) -> Energy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        found = self._find()
        if found is None:
            return
        found.spent(self._clock())
        self._found = found
        while not self._done.wait(self._every):
            self.joules += found.spent(self._clock())
        self.joules += found.spent(self._clock())

    def facts(self) -> dict[str, float | str]:
        if self._found is None:
            return {}
        return {"energy_kwh": round(self.joules / JOULES_PER_KWH, 9), "energy_source": self._found.name}

"""One rank of `athanor launch check`: tells what it is, meets the others, measures the ways between them.

    torchrun ... -m athanor.cli.launch.member

The main rank writes what came out to the file that REPORT names.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from athanor.base.artifacts import read_json, write_json
from athanor.base.errors import AthanorError
from athanor.base.host import load, processor
from athanor.cli.launch.measure import all_reduce, pairs
from athanor.cli.launch.meeting import Meeting
from athanor.model.device import prepare
from athanor.runtime import launch
from athanor.runtime.facts import git
from athanor.runtime.lifetime import end_with
from athanor.runtime.machine import machine
from athanor.runtime.terminal import say
from athanor.training.world import init_world

REPORT = "ATHANOR_CHECK_REPORT"
WITHOUT_P2P = "NCCL_P2P_DISABLE"
TIMEOUT = 60.0  # s for one transfer
CHILD_SECONDS = 120.0
DEVICES = {"mps": "cpu"}  # what gloo carries


def facts(device: torch.device) -> dict[str, Any]:
    """What differs between ranks by mistake, and where this one is."""
    number = max(0, int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    on_gpu = device.type == "cuda"
    several_nodes = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    name = os.environ.get("GLOO_SOCKET_IFNAME", "") if several_nodes else ""
    edited = git(Path.cwd(), "status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.c")
    return {
        "node": launch.node_rank(os.environ),
        "host": platform.node(),
        "pid": os.getpid(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "device": torch.cuda.get_device_name(number) if on_gpu else processor(),
        "network": name,
        "load": load(),
        "limit": _gpu_limit(number, several_nodes) if on_gpu else network(name),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **(_gpu_versions() if on_gpu else {}),
            "athanor": (git(Path.cwd(), "rev-parse", "--short", "HEAD") or "?") + (" edited" if edited else ""),
        },
    }


def _gpu_versions() -> dict[str, str]:
    collectives = "RCCL" if torch.version.hip else "NCCL"
    try:
        driver = Path("/sys/module/amdgpu/version" if torch.version.hip else "/sys/module/nvidia/version").read_text()
    except OSError:  # amdgpu of the kernel itself has no version of its own
        driver = platform.release()
    return {collectives: ".".join(map(str, torch.cuda.nccl.version())), "driver": driver.strip()}


def network(name: str, root: Path = Path("/")) -> float | None:
    """What a network interface can carry in bytes/s; None where no hardware says so."""
    folder = root / "sys/class/net" / name
    try:
        megabits = int((folder / "speed").read_text()) if (folder / "device").exists() else 0
    except (OSError, ValueError):  # wireless, or no cable
        megabits = 0
    return megabits * 1e6 / 8 if megabits > 0 else None


def _gpu_limit(number: int, several_nodes: bool) -> float | None:
    """Bytes/s of the narrowest way of this card: its own slot, or between nodes InfiniBand where there is any."""
    properties = torch.cuda.get_device_properties(number)
    slot = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return infiniband() if several_nodes else pcie(slot)


def pcie(slot: str, root: Path = Path("/")) -> float | None:
    """Bytes/s of a PCIe slot as it is now, after its coding (128 of 130 bits, 8 of 10 up to 5 GT/s)."""
    folder = root / "sys/bus/pci/devices" / slot
    try:
        rate = float((folder / "current_link_speed").read_text().split()[0])
        return rate * 1e9 * int((folder / "current_link_width").read_text()) / 8 * (0.8 if rate <= 5 else 128 / 130)
    except (OSError, ValueError, IndexError):
        return None


def infiniband(root: Path = Path("/")) -> float | None:
    """Bytes/s of the fastest port that is up."""
    ports = [path for path in (root / "sys/class/infiniband").glob("*/ports/*") if (path / "rate").is_file()]
    up = [(port / "rate").read_text() for port in ports if "ACTIVE" in (port / "state").read_text()]
    rates = [float(match[0]) for text in up if (match := re.match(r"[\d.]+", text))]
    return max(rates) * 1e9 / 8 if rates else None


def work() -> None:
    local = machine()
    device = prepare(DEVICES.get(local.device, local.device), threads=1)
    on_gpu = device.type == "cuda"
    meeting = Meeting(facts(device))
    meeting.arrive("the start", local.launch.wait_s)
    ranks = meeting.everybody()
    world = init_world("ddp", device=local.device, timeout_s=TIMEOUT, main=launch.is_main())
    with world.watched():
        found: dict[str, Any] = {"ranks": ranks, "device": device.type, "all_reduce": all_reduce(world, device)}
        nodes = {facts["node"]: rank for rank, facts in reversed(list(enumerate(ranks)))}
        several = len(nodes) > 1
        found["pairs"] = pairs(world, device, [nodes[key] for key in sorted(nodes)] if several else range(len(ranks)))
    found["without_p2p"] = []
    if on_gpu and len(nodes) < len(ranks) and WITHOUT_P2P not in os.environ:
        found["without_p2p"] = _without_p2p()
    meeting.arrive("the end", CHILD_SECONDS + TIMEOUT)
    meeting.leave()
    if launch.is_main():
        write_json(Path(os.environ[REPORT]), found)


def _without_p2p() -> list[dict[str, float]]:
    """The table again, by a process beside each rank: NCCL reads its variables once. Empty on all but the main rank."""
    path = Path(f"{os.environ.get(REPORT, '')}.{os.environ['RANK']}")
    more = {WITHOUT_P2P: "1", REPORT: str(path), "TORCHELASTIC_RESTART_COUNT": "1"}  # other names in the same store
    command = [sys.executable, "-m", "athanor.cli.launch.member", "all-reduce"]
    try:
        status = subprocess.run(command, env={**os.environ, **more}, timeout=CHILD_SECONDS).returncode
    except subprocess.TimeoutExpired:
        status = 1
    rows = read_json(path)["rows"] if launch.is_main() and not status else []
    path.unlink(missing_ok=True)
    return rows


def all_reduce_only() -> int:
    end_with(os.getppid(), 1.0)
    local = machine()
    try:
        world = init_world("ddp", device=local.device, timeout_s=TIMEOUT, main=launch.is_main())
        rows = all_reduce(world, prepare("auto", threads=1))
    except RuntimeError as error:
        say(f"check: nothing measured with {WITHOUT_P2P}=1 ({str(error).splitlines()[0]:.100})")
        return 1
    if world.main:
        write_json(Path(os.environ[REPORT]), {"rows": rows})
    return 0


def main() -> int:
    if sys.argv[1:]:
        return all_reduce_only()
    launch.register()
    status = launch.CRASHED
    try:
        work()
        status = 0
    except AthanorError as error:
        say(f"check: {error}")
        status = 1
    finally:
        status = launch.report_status(status)
    return status


if __name__ == "__main__":
    from athanor.cli.launch.check import check

    launch.end(main() if launch.is_member() else check(machine().launch))

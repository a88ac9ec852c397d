"""How the graphics cards hang together: the way of each through PCIe, and what lies between two of them.

Standard library only; everything is read from sysfs below `root`. What needs the whole configuration space of a
device is unknown to all but root, because Linux shows the others its first 64 bytes.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from athanor.hardware import cards

ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
CONFIG_BYTES, EXTENDED = 4096, 0x100
ACS, REDIRECT = 0x000D, 0x0004 | 0x0008  # PCI Express Base Specification, 7.7.11: requests and completions of peers
UNKNOWN = "unknown without root"


@dataclass(frozen=True)
class Pair:
    """Two cards. between: the last thing that they share.

    ports: where their ways part. acs: whether one of these sends what is for the other card through the processor.
    """

    one: str
    other: str
    between: str
    ports: tuple[str, ...]
    acs: str
    groups: tuple[str, str]

    def __str__(self) -> str:
        groups = " and ".join(self.groups)
        return f"{self.one} and {self.other} meet at {self.between}; ACS redirection {self.acs}; IOMMU groups {groups}"


def ways(root: Path = Path("/")) -> dict[str, list[Path]]:
    """The devices between processor and card, root port first and the card last, by the address of the card."""
    found = [card.address for card in cards.amd(root)]
    found += [path.name.lower() for path in sorted((root / "proc/driver/nvidia/gpus").glob("*"))]
    devices = {address: root / "sys/bus/pci/devices" / address for address in found if address}
    return {
        address: [path for path in reversed([real, *real.parents]) if ADDRESS.fullmatch(path.name)]
        for address, real in ((address, path.resolve()) for address, path in devices.items() if path.exists())
    }


def lanes(root: Path = Path("/")) -> list[int]:
    """The fewest lanes on the way of each card.

    Not those of the card alone: it may sit behind a bridge of its own (Vega, so the MI50), to which it always has 16.
    """
    counts = []
    for way in ways(root).values():
        told = [_text(device / "current_link_width") for device in way]
        counts += [min(map(int, known))] if (known := [text for text in told if text.isdigit() and int(text)]) else []
    return counts


def pairs(root: Path = Path("/")) -> list[Pair]:
    return [_pair(one, other) for one, other in itertools.combinations(ways(root).values(), 2)]


def _pair(one: list[Path], other: list[Path]) -> Pair:
    shared = [a for a, b in zip(one, other, strict=False) if a == b]
    ports = {way[len(shared)] for way in (one, other) if len(way) > len(shared) + 1}  # where the ways part
    if shared:
        between = f"one switch ({shared[-1].name})"
    elif one[0].parent == other[0].parent:
        between = f"one host bridge ({one[0].parent.name}), so in the processor"
    else:
        between = "nothing but the processors' own links (two host bridges)"
    states = {_acs(port / "config") for port in ports}
    acs = next((state for state in ("on", UNKNOWN) if state in states), "off")
    groups = tuple(_group(way[-1]) for way in (one, other))
    names = tuple(sorted(port.name for port in ports))
    return Pair(one[-1].name, other[-1].name, between, names, acs, (groups[0], groups[1]))


def _acs(config: Path) -> str:
    """Whether a port redirects what one peer sends to another."""
    try:
        data = config.read_bytes()[:CONFIG_BYTES]
    except OSError:
        return UNKNOWN
    if len(data) <= EXTENDED:
        return UNKNOWN
    offset, seen = EXTENDED, set[int]()
    while offset >= EXTENDED and offset + 8 <= len(data) and offset not in seen:
        seen.add(offset)
        header, _, control = struct.unpack_from("<IHH", data, offset)
        if header & 0xFFFF == ACS:
            return "on" if control & REDIRECT else "off"
        offset = header >> 20
    return "off"


def _group(device: Path) -> str:
    folder = device / "iommu_group"
    return f"{folder.resolve().name} ({_text(folder / 'type') or 'type unknown'})" if folder.exists() else "none"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

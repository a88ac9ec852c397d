"""The way of each card through PCIe, read from trees as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.hardware import pci

PLAIN = bytes(4096)


def config(control: int) -> bytes:
    """A configuration space whose second extended capability is ACS with this control register."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(space)


def tree(root: Path, *ways: str, spaces: dict[str, bytes] | None = None) -> Path:
    """AMD cards at the ends of these ways, with the configuration spaces of ports on them."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for number, way in enumerate(ways):
        path, address = root / "sys/devices" / way, way.rpartition("/")[2]
        path.mkdir(parents=True)
        for device in (path, *path.parents):
            if pci.ADDRESS.fullmatch(device.name) and not (bus / device.name).exists():
                (bus / device.name).symlink_to(device)
                (device / "config").write_bytes((spaces or {}).get(device.name, PLAIN))
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        place = int(address[5:7], 16) << 8 | int(address[8:10], 16) << 3 | int(address[11])
        node.joinpath("properties").write_text(
            f"gfx_target_version 90006\nlocation_id {place}\ndomain {int(address[:4], 16)}\n"
        )
    return root


ONE, OTHER = "0000:05:00.0", "0000:08:00.0"


@pytest.mark.parametrize(
    ("first", "second", "between", "ports"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0",
         "one switch (0000:01:00.0)", ("0000:02:00.0", "0000:02:01.0")),
        ("pci0000:00/0000:00:01.0", "pci0000:00/0000:00:03.0", "one host bridge (pci0000:00)",
         ("0000:00:01.0", "0000:00:03.0")),
        ("pci0000:00/0000:00:01.0", "pci0000:80/0000:80:03.0", "two host bridges", ("0000:00:01.0", "0000:80:03.0")),
    ],
)  # fmt: skip
def test_what_two_cards_share(tmp_path: Path, first: str, second: str, between: str, ports: tuple[str, str]) -> None:
    (pair,) = pci.pairs(tree(tmp_path, f"{first}/{ONE}", f"{second}/{OTHER}"))
    assert (pair.one, pair.other, pair.ports, pair.groups) == (ONE, OTHER, ports, ("none", "none"))
    assert between in pair.between


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (PLAIN, "off"), (config(0x0001), "off"), (config(0x001D), "on"), (config(0x0008), "on"),
        (PLAIN[:64], pci.UNKNOWN), (config(0x001D)[:256], pci.UNKNOWN), (b"\xff" * 4096, "off"),
    ],
)  # fmt: skip
def test_acs(tmp_path: Path, space: bytes, expected: str) -> None:
    ways = f"pci0000:00/0000:00:01.0/{ONE}", f"pci0000:00/0000:00:03.0/{OTHER}"
    (pair,) = pci.pairs(tree(tmp_path, *ways, spaces={"0000:00:03.0": space}))
    assert pair.acs == expected and f"ACS redirection {expected}" in str(pair)


def test_the_groups_and_the_lanes_of_a_card_behind_its_own_bridge(tmp_path: Path) -> None:
    """Vega20 sits behind two bridges on its board and shows 16 lanes to the nearer one, whatever the slot has."""
    root = tree(
        tmp_path, f"pci0000:00/0000:00:01.0/0000:03:00.0/0000:04:00.0/{ONE}", f"pci0000:00/0000:00:03.0/{OTHER}"
    )
    group = root / "sys/kernel/iommu_groups/14"
    group.mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    devices = root / "sys/bus/pci/devices"
    (devices / ONE / "iommu_group").symlink_to(group)
    for address, width in {ONE: 16, "0000:03:00.0": 1, "0000:04:00.0": 16, OTHER: 8}.items():
        (devices / address / "current_link_width").write_text(f"{width}\n")
    (devices / "0000:00:01.0/current_link_width").write_text("Unknown\n")
    assert pci.lanes(root) == [1, 8]
    assert pci.pairs(root)[0].groups == ("14 (DMA-FQ)", "none")
    (root / "proc/driver/nvidia/gpus/0000:08:00.0").mkdir(parents=True)
    assert list(pci.ways(root)) == [ONE, OTHER]


def test_a_machine_without_cards(tmp_path: Path) -> None:
    assert (pci.ways(tmp_path), pci.lanes(tmp_path), pci.pairs(tmp_path)) == ({}, [], [])

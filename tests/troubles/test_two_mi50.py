"""The walk of somebody with two MI50: each trouble is told at the step where it shows, and a mended machine shows none.

The steps exclude each other in part (a card that is denied and one that is not there), so each is a machine of its own.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.hardware import cards
from athanor.troubles.trouble import BLOCKING, Example, shown, troubles
from athanor.troubles.world import ROOT
from tests.hardware.test_pci import ONE, OTHER, config, tree
from tests.runtime.toy_pipeline import Toy
from tests.troubles.test_troubles import world_of

REPOSITORY = Path(__file__).resolve().parents[2]
WAYS = [f"pci0000:00/0000:00:0{root}.0/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0/{card}"
        for root, bus, card in ((1, 3, ONE), (3, 6, OTHER))]  # fmt: skip
DRM = "/sys/class/drm/card0/device"
MENDED = Example(
    cards=("gfx906", "gfx906"),
    packages={"torch": "2.9.1+rocm6.3"},
    settings={
        "launch.processes": "2", "launch.nodes": "1", "attention": "auto", "params.pretrain.precision": "auto",
        "params.side.base": "models/foreign", "params.side.precision": "fp32",
    },
    env={"NCCL_SOCKET_IFNAME": "enp5"},
    files={
        "/dev/kfd": "", "/dev/dri/renderD128": "", "/sys/class/net/lo/mtu": "1", "/sys/class/net/enp5s0/mtu": "1",
        "/proc/cmdline": "ro quiet iommu=pt", "/sys/kernel/iommu_groups/14/type": "identity",
        "/proc/sys/kernel/osrelease": "6.8.0-60-generic", "/proc/sys/kernel/numa_balancing": "0",
        "/proc/mounts": "/dev/sda2 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0",
        f"{DRM}/mem_info_vis_vram_total": "34342961152", f"{DRM}/power_dpm_force_performance_level": "auto",
        f"{DRM}/hwmon/hwmon3/power1_cap": "225000000", f"{DRM}/hwmon/hwmon3/temp2_input": "78000",
        f"{DRM}/ras/umc_err_count": "ue: 0\nce: 0\n",
        **{f"/sys/devices/{way}/current_link_width": "16" for way in WAYS},
        **{f"/sys/devices/{way.rpartition('/0000:')[0]}/current_link_width": "16" for way in WAYS},
    },
)  # fmt: skip
STEPS = {  # what is changed, without = taken away; what is to be told
    "installed as the package index has it, and one process": (
        {"packages": {"torch": "2.13.0"}, "settings": {"launch.processes": "1", "params.pretrain.precision": "bf16"}},
        {"torch-not-for-amd", "bf16-emulated-on-mi50", "second-amd-card-idle"},
    ),
    "a torch for other cards, and what guides for other cards say": (
        {"packages": {"torch": "2.13.0+rocm7.2"}, "env": {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
         "settings": {"attention": "flash", "params.side.precision": "fp16"}},
        {"rocm-too-new-for-mi50", "override-of-mi50", "fast-attention-on-mi50", "fp16-on-a-foreign-base"},
    ),
    "a user who is in no group": (
        {"denied": ("/dev/kfd", "/dev/dri/renderD128")}, {"kfd-denied", "render-node-denied"},
    ),
    "a container without its options": (
        {"files": {"/dev/kfd": None,
                   "/proc/mounts": "overlay / overlay rw 0 0\nshm /dev/shm tmpfs rw,size=65536k 0 0"}},
        {"container-without-kfd", "shared-memory-small"},
    ),
    "the firmware's and the distribution's defaults": (
        {"files": {"/proc/cmdline": "ro quiet", "/sys/kernel/iommu_groups/14/type": "DMA-FQ",
                   "/proc/sys/kernel/osrelease": "5.15.0-160-generic", "/proc/sys/kernel/numa_balancing": "1",
                   f"{DRM}/mem_info_vis_vram_total": "268435456",
                   f"/sys/devices/{WAYS[0].rpartition('/0000:')[0]}/current_link_width": "1"}},
        {"amd-cards-behind-iommu", "kernel-without-amd-peers", "numa-balancing", "amd-small-window",
         "amd-card-narrow-slot"},
    ),
    "passive cards in a desktop case": (
        {"files": {f"{DRM}/hwmon/hwmon3/temp2_input": "101000", f"{DRM}/hwmon/hwmon3/power1_cap": "90000000",
                   f"{DRM}/power_dpm_force_performance_level": "low", f"{DRM}/ras/umc_err_count": "ue: 1\nce: 9\n"}},
        {"amd-card-hot", "amd-power-capped", "amd-clock-held-low", "amd-uncorrected-memory-errors"},
    ),
    "variables that were left behind": (
        {"env": {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "ib0", "ROCR_VISIBLE_DEVICES": "0,1",
                 "HIP_VISIBLE_DEVICES": "0,1", "AMD_SERIALIZE_KERNEL": "3"}},
        {"peer-transfers-off", "interface-of-another-machine", "amd-cards-hidden-twice", "amd-made-blocking"},
    ),
}  # fmt: skip


def machine_of(changes: dict, root: Path) -> list[str]:
    merged = {key: {**(getattr(MENDED, key) or {}), **value} if isinstance(value, dict) else value
              for key, value in changes.items()}  # fmt: skip
    merged["files"] = {name: text for name, text in merged.get("files", MENDED.files).items() if text is not None}
    tree(root, *WAYS)
    return [trouble.name for trouble in shown(world_of(dataclasses.replace(MENDED, **merged), root))]


@pytest.mark.parametrize("step", STEPS)
def test_each_trouble_is_told_where_it_shows(step: str, tmp_path: Path) -> None:
    changes, told = STEPS[step]
    assert set(machine_of(changes, tmp_path)) == told


def test_a_mended_machine_shows_none(tmp_path: Path) -> None:
    assert machine_of({}, tmp_path) == []


def test_what_would_hang_or_ruin_a_run_stops_it() -> None:
    severe = {trouble.name for trouble in troubles() if trouble.severity in BLOCKING}
    told = set().union(*(told for _, told in STEPS.values()))
    assert told & severe == {"amd-cards-behind-iommu", "override-of-mi50", "amd-uncorrected-memory-errors"}


def test_setup_refuses_a_torch_that_does_not_fit_and_names_the_one_that_does(tmp_path: Path) -> None:
    found = cards.find(root=tree(tmp_path, *WAYS))
    assert [card.arch for card in found] == ["gfx906", "gfx906"] and [card.address for card in found] == [ONE, OTHER]
    for version, hip, cuda in (("2.13.0", "", "13.0"), ("2.13.0+rocm7.2", "7.2.1", ""), ("2.13.0+cpu", "", "")):
        torch = {"version": version, "hip": hip, "cuda": cuda, "archs": []}
        assert "does not fit AMD (gfx906)" in cards.misfit(torch, found), version
    fitting = {"version": "2.9.1+rocm6.3", "hip": "6.3.42134", "cuda": "", "archs": ["gfx906"]}
    assert cards.misfit(fitting, found) == "" and "rocm6.3 make" in cards.advice(found[0])


def test_doctor_as_typed(tmp_path: Path, toy: Toy) -> None:
    """The whole command on such a machine: the hang with what to type, and the way between the cards."""
    root = tree(tmp_path / "machine", *WAYS, spaces={"0000:00:03.0": config(0x001D)})
    for name, text in {"proc/cmdline": "ro quiet", "sys/kernel/iommu_groups/14/type": "DMA-FQ"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    env = {**toy.environment(), ROOT: str(root), "ATHANOR_LAUNCH": "processes=2"}
    for name in ("NCCL_P2P_DISABLE", "HSA_OVERRIDE_GFX_VERSION"):
        env.pop(name, None)
    command = [sys.executable, "-m", "athanor", "doctor"]
    said = subprocess.run(command, cwd=toy.path, env=env, capture_output=True, text=True)
    assert said.returncode == 1, said.stderr
    assert "problem  amd-cards-behind-iommu: " in said.stdout and "Add iommu=pt to GRUB_CMDLINE_LINUX" in said.stdout
    assert f"note     {ONE} {OTHER}: " in said.stdout and "ACS redirection on" in said.stdout
    assert "pci=disable_acs_redir=0000:00:01.0;0000:00:03.0" in said.stdout
    told = json.loads(
        subprocess.run([*command, "--json"], cwd=toy.path, env=env, capture_output=True, text=True).stdout
    )
    assert told["measured"]["pairs"][0]["acs"] == "on"


def test_the_page_of_docs_names_every_trouble_of_the_walk_that_costs_hours() -> None:
    page = (
        (REPOSITORY / "docs/machine.md").read_text(encoding="utf-8").partition("## Two MI50")[2].partition("\n## ")[0]
    )
    for word in ("iommu=pt", "rocm6.3", "HSA_OVERRIDE_GFX_VERSION", "bf16", "render,video", "container run", "Above 4G",
                 "athanor doctor", "processes: 2", "340 s", "fan", "NCCL_P2P_DISABLE", "memory of the machine"):  # fmt: skip
        assert word in page, word

"""Which chip this machine has, and which build of torch has kernels for it: asked before anything is installed.

Standard library only. What pytorch.org's builds hold is read from their release notes and build scripts:
CUDA 12.6 has compute capability 5.0 to 9.0, CUDA 12.8 up to 12.0 (until torch 2.11), CUDA 13 begins at 7.5
(and is what PyPI has from torch 2.11 on); rocBLAS has no kernels for gfx906 since ROCm 6.4, whose torch ends with 2.9.1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
NVIDIA_DRIVER = Path("/dev/nvidiactl")
INDEX = "https://download.pytorch.org/whl/"
CHIPS = ("cpu", "cuda", "rocm")
ON_PYPI = "cu130"
CUDA = (  # build, lowest and highest compute capability, oldest driver
    ("cu130", 75, 999, 580),
    ("cu128", 100, 999, 570),
    ("cu126", 50, 90, 525),
)
DRIVERS = {13: 580, 12: 525}  # that a version of CUDA asks for
ROCM = {"gfx906": "rocm6.3"} | dict.fromkeys(
    "gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151 gfx1200 gfx1201".split(), "rocm7.2"
)
# Builds of llama.cpp, as the description of xllamacpp lists them. Vulkan's is for the other cards.
LLAMA_CPP_INDEX = "https://xorbitsai.github.io/xllamacpp/whl/"
LLAMA_CPP_ROCM = "gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151 gfx1200 gfx1201".split()
LLAMA_CPP_DRIVER = 570  # CUDA 12.8's
NEWEST = {"rocm6.3": "2.9.1", "cu128": "2.11.0"}  # torch of builds that have ended


@dataclass(frozen=True)
class Card:
    """arch: gfx906, sm_86; empty where only the chip was named. driver: NVIDIA's, its first number; 0 if unknown.

    address: on the PCI bus, of AMD's cards.
    """

    chip: str
    arch: str = ""
    name: str = ""
    driver: int = 0
    address: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.arch})" if self.arch else {"cuda": "an NVIDIA card", "rocm": "an AMD card"}[self.chip]
        )


def find(chip: str = "auto", root: Path = Path("/")) -> list[Card]:
    """The cards that torch could compute on, NVIDIA's first: beside them an AMD chip is the processor's own.

    A chip that is named is believed, for machines that build for another one and for builds that this file does not know.
    `root` is another folder where one stands for the machine, which nvidia-smi cannot be asked about.
    """
    if chip != "auto":
        return [] if chip == "cpu" else [Card(chip)]
    return [*(_nvidia() if root == Path("/") else []), *amd(root)]


def _nvidia() -> list[Card]:
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/lib/wsl/lib") or "nvidia-smi"
    query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    rows = re.findall(r"(?m)^(.+), (\d+)\.(\d), (\d+)\.", said)
    cards = [Card("cuda", f"sm_{major}{minor}", name, int(driver)) for name, major, minor, driver in rows]
    return cards or ([Card("cuda")] if NVIDIA_DRIVER.exists() else [])


def amd(root: Path) -> list[Card]:
    """Those that a build of torch is known for: few processors' own graphics are among them."""
    found = []
    for node in sorted((root / NODES.relative_to("/")).glob("*/properties")):
        try:
            told = dict(re.findall(r"(?m)^(\w+) (\d+)$", node.read_text()))
        except OSError:
            continue
        version, domain, place = (int(told.get(key, 0)) for key in ("gfx_target_version", "domain", "location_id"))
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"  # 90010 is gfx90a
        address = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}" if place else ""
        found += [Card("rocm", arch, "AMD", address=address)] if arch in ROCM else []
    return found


def build(card: Card) -> str:
    """The index of pytorch.org whose torch has kernels for the card; empty if none has with its driver."""
    if card.chip == "rocm":
        return ROCM.get(card.arch, "rocm7.2")
    number, driver = int(card.arch[3:] or 75), card.driver or 999
    return next((name for name, low, high, oldest in CUDA if low <= number <= high and oldest <= driver), "")


def llama_cpp_index(card: Card) -> str:
    """The package index whose xllamacpp computes on the card."""
    if card.chip == "rocm":
        return LLAMA_CPP_INDEX + ("rocm-7.2.4" if card.arch in LLAMA_CPP_ROCM else "vulkan")
    return LLAMA_CPP_INDEX + ("cu128" if not card.driver or card.driver >= LLAMA_CPP_DRIVER else "vulkan")


def advice(card: Card) -> str:
    """What to type so that torch fits the card."""
    name = build(card)
    if not name:
        return f"NVIDIA's driver 580 or newer (here is {card.driver}); a card below compute capability 5.0 has no torch any more"
    newest = f"   (torch {NEWEST[name]} is its last)" if name in NEWEST else ""
    return f"TORCH_INDEX={INDEX}{name} make{newest}"


def misfit(torch: dict, cards: list[Card]) -> str:
    """Why a torch (its version, cuda, hip and archs) computes on none of the cards; empty if it does on one."""
    reasons = [_misfit(torch, card) for card in cards]
    return "" if "" in reasons or not cards else f"torch {torch['version']} does not fit {cards[0]}: {reasons[0]}"


def _misfit(torch: dict, card: Card) -> str:
    chip = "rocm" if torch["hip"] else "cuda" if torch["cuda"] else "cpu"
    if chip != card.chip:
        return f"it was built for {chip}"
    if not card.arch:
        return ""
    major, minor = (int(number) for number in re.findall(r"\d+", torch["hip"] or torch["cuda"])[:2])
    if chip == "cuda":
        if 0 < card.driver < DRIVERS.get(major, 0):
            return f"CUDA {major} wants driver {DRIVERS[major]} or newer, here is {card.driver}"
        number = int(card.arch[3:])
        kernels = [(kind, int(of)) for kind, of in re.findall(r"(sm|compute)_(\d+)", " ".join(torch["archs"]))]
        # Code for a chip runs on later ones of its generation, PTX (compute) on all later ones.
        known = any(of <= number and (kind == "compute" or of // 10 == number // 10) for kind, of in kernels)
    else:
        if card.arch == "gfx906" and (major, minor) >= (6, 4):
            return "since ROCm 6.4 rocBLAS has no kernels for gfx906"
        known = card.arch in torch["archs"] or "HSA_OVERRIDE_GFX_VERSION" in os.environ
    return "" if known or not torch["archs"] else f"it has kernels for {' '.join(torch['archs'])} only"

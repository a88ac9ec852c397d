"""Which card is here, which build of torch has kernels for it, and which one is refused."""

from __future__ import annotations

import pytest

from athanor.hardware import cards
from athanor.hardware.cards import Card

HALO = Card("rocm", "gfx1151", "AMD")
# Builds of torch: CUDA, ROCm, kernels.
TORCH = {
    "cpu": (None, None, ""),
    "cu130": ("13.0", None, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
    "cu128": ("12.8", None, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
    "cu126": ("12.6", None, "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
    "ptx": ("12.8", None, "sm_90 compute_90"),
    "rocm7.2": (None, "7.2.26", "gfx906 gfx1100 gfx1151"),
    "rocm6.3": (None, "6.3.4", "gfx906 gfx1100"),
    "unknown": (None, "7.0", ""),
}
# A card with its driver, the build that is advised, all builds that compute on it.
CARDS = """
gfx906 rocm6.3 rocm6.3
gfx1151 rocm7.2 rocm7.2 unknown
gfx1201 rocm7.2 unknown
sm_35/470 -
sm_50/580 cu126 cu126
sm_61/580 cu126 cu126
sm_70/535 cu126 cu126
sm_75/580 cu130 cu130 cu128 cu126
sm_89/550 cu126 cu128 cu126
sm_89/580 cu130 cu130 cu128 cu126
sm_89/470 -
sm_90/580 cu130 cu130 cu128 cu126 ptx
sm_120/550 - cu128 ptx
sm_120/575 cu128 cu128 ptx
sm_120/580 cu130 cu130 cu128 ptx
"""


@pytest.mark.parametrize("line", CARDS.split("\n")[1:-1])
def test_a_card_gets_the_build_that_has_kernels_for_it_and_others_are_refused(line, monkeypatch):
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    name, index, *fitting = line.split()
    arch, _, driver = name.partition("/")
    card = Card("cuda" if driver else "rocm", arch, driver=int(driver or 0))
    assert cards.build(card) == index.strip("-")
    assert (f"TORCH_INDEX={cards.INDEX}{index} make" if index != "-" else "driver 580") in cards.advice(card)
    for build, (cuda, hip, kernels) in TORCH.items():
        torch = {"version": build, "cuda": cuda, "hip": hip, "archs": kernels.split()}
        assert (cards.misfit(torch, [card]) == "") is (build in fitting), build
        # Enough that one card can be computed on; and of one that was only named, the kind counts.
        assert (cards.misfit(torch, [HALO, card]) == "") is (build in fitting or build in ("rocm7.2", "unknown"))
        assert (cards.misfit(torch, [Card(card.chip)]) == "") is bool(hip if card.chip == "rocm" else cuda)


def machine(monkeypatch, tmp_path, smi: str = "", targets: tuple[int, ...] = ()):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<END\n{smi}\nEND\n" if smi else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    for number, target in enumerate(targets):
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        (tmp_path / "nodes" / str(number) / "properties").write_text(f"cpu_cores 0\ngfx_target_version {target}\n")
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(cards, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(cards, "NVIDIA_DRIVER", tmp_path / "nvidiactl")


def test_cards_are_found_and_the_processor_s_own_graphics_are_none(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, "NVIDIA GeForce RTX 5080, 12.0, 580.95.05", (0, 100306, 90010, 110501))
    assert cards.find() == [
        Card("cuda", "sm_120", "NVIDIA GeForce RTX 5080", 580), Card("rocm", "gfx90a", "AMD"), HALO,
    ]  # fmt: skip
    assert cards.find("cpu") == [] and cards.find("rocm") == [Card("rocm")]


def test_a_driver_whose_program_does_not_answer_is_a_card_all_the_same(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path)
    assert cards.find() == []
    cards.NVIDIA_DRIVER.touch()
    assert cards.find() == [Card("cuda")]

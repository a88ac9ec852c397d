"""Which card is here, which build of torch has kernels for it, and which one is refused."""

from __future__ import annotations

import pytest

from athanor.hardware import cards
from athanor.hardware.cards import Card

CPU = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "archs": []}
CUDA = {"version": "2.13.0", "cuda": "13.0", "hip": None, "archs": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120".split()}
ROCM = {"version": "2.13.0+rocm7.2", "cuda": None, "hip": "7.2.26", "archs": ["gfx1100", "gfx1151", "gfx906"]}
OLD_ROCM = ROCM | {"version": "2.9.1+rocm6.3", "hip": "6.3.4", "archs": []}
CU126 = CUDA | {"cuda": "12.6", "archs": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90".split()}
PTX = CUDA | {"archs": ["sm_90", "compute_90"]}
MI50, HALO = Card("rocm", "gfx906", "AMD"), Card("rocm", "gfx1151", "AMD")


@pytest.mark.parametrize("card, index", [
    (MI50, "rocm6.3"), (HALO, "rocm7.2"), (Card("rocm"), "rocm7.2"), (Card("cuda"), "cu130"),
    (Card("cuda", "sm_61", driver=580), "cu126"), (Card("cuda", "sm_70", driver=580), "cu126"),
    (Card("cuda", "sm_75", driver=580), "cu130"), (Card("cuda", "sm_89", driver=550), "cu126"),
    (Card("cuda", "sm_120", driver=580), "cu130"), (Card("cuda", "sm_120", driver=575), "cu128"),
    (Card("cuda", "sm_89", driver=470), ""), (Card("cuda", "sm_35", driver=470), ""),
])  # fmt: skip
def test_the_build_for_a_card(card, index):
    assert cards.build(card) == index
    assert (f"TORCH_INDEX={cards.INDEX}{index} make" if index else "driver") in cards.advice(card)


@pytest.mark.parametrize("torch, card, fits", [
    (CPU, HALO, False), (CPU, Card("cuda"), False), (CUDA, HALO, False), (ROCM, Card("cuda"), False),
    (ROCM, HALO, True), (ROCM, MI50, False), (OLD_ROCM, MI50, True), (ROCM, Card("rocm", "gfx1201"), False),
    (ROCM, Card("rocm"), True), (CUDA, Card("cuda", "sm_61"), False), (CU126, Card("cuda", "sm_61"), True),
    (CUDA, Card("cuda", "sm_89", driver=580), True), (CUDA, Card("cuda", "sm_89", driver=550), False),
    (CU126, Card("cuda", "sm_120"), False), (PTX, Card("cuda", "sm_120"), True), (PTX, Card("cuda", "sm_80"), False),
])  # fmt: skip
def test_a_torch_fits_where_it_has_kernels(torch, card, fits, monkeypatch):
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    assert (cards.misfit(torch, [card]) == "") is fits
    assert cards.misfit(torch, []) == "" and cards.misfit(torch, [card, card]) == cards.misfit(torch, [card])


def test_the_build_that_is_advised_fits(monkeypatch):
    """No advice that leads to the next refusal."""
    for card in [MI50, HALO, *(Card("cuda", f"sm_{n}", driver=580) for n in (50, 61, 70, 75, 86, 89, 90, 100, 120))]:
        torch = {"rocm6.3": OLD_ROCM, "rocm7.2": ROCM, "cu126": CU126, "cu130": CUDA}[cards.build(card)]
        assert not cards.misfit(torch, [card])


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

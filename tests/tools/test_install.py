"""`make` and the card: a torch that does not fit is refused, with the index that has one. With real pip; about 20 s."""

from __future__ import annotations

import json

import pytest

from athanor.hardware.cards import Card
from tests.tools.fake_torch import wheel
from tools import install

PATHS = {"VENV": ".venv", "PYTHON": ".venv/bin/python", "LAUNCHER": ".venv/bin/athanor", "STAMP": ".venv/stamp"}
MI50 = Card("rocm", "gfx906", "AMD")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Beside a PyPI that has the newest torch, for CUDA; `cards` is what the machine holds."""
    (tmp_path / "requirements.txt").write_text("# none\n")
    for name, path in PATHS.items():
        monkeypatch.setattr(install, name, tmp_path / path)
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path / "requirements.txt")
    monkeypatch.setattr(install.sys, "prefix", str(tmp_path))  # a project's environment: its torch is not shared
    for name in ("TORCH_INDEX", "CHIP", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    links = f"extra-index-url = {(tmp_path / 'pypi').as_uri()}\nfind-links = {tmp_path}/pypi/torch"
    (tmp_path / "pip.conf").write_text(f"[global]\n{links}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "pypi").as_uri())
    wheel(tmp_path / "pypi", "2.13.0", cuda="13.0")
    wheel(tmp_path / "rocm", "2.9.1+rocm6.3", hip="6.3.4")
    wheel(tmp_path / "rocm", "2.8.0+rocm6.3", hip="6.3.4")
    cards: list[Card] = []
    monkeypatch.setattr(install.chips, "find", lambda chip: [] if chip == "cpu" else cards)
    return tmp_path, cards


def refused() -> str:
    with pytest.raises(SystemExit) as ended:
        install.main()
    return str(ended.value)


def test_torch_follows_the_card(checkout, monkeypatch, capsys):
    folder, cards = checkout
    cards[:] = [MI50]
    assert "whl/rocm6.3 make" in refused() and install.torch_of(install.PYTHON) == {}  # before gigabytes are fetched

    monkeypatch.setenv("TORCH_INDEX", (folder / "pypi").as_uri())
    assert "does not fit AMD (gfx906): it was built for cuda" in refused() and not install.STAMP.exists()

    # pip would say that versions contradict each other.
    monkeypatch.setenv("TORCH_INDEX", "http://name:secret@nowhere.invalid/whl")
    told = refused()
    assert "TORCH_INDEX http://***@nowhere.invalid/whl cannot be reached" in told and "secret" not in told
    assert "ResolutionImpossible" not in told

    # PyPI's is newer, and the index that was named is asked alone.
    monkeypatch.setenv("TORCH_INDEX", (folder / "rocm").as_uri())
    install.main()
    assert json.loads(install.STAMP.read_text())["torch"]["version"] == "2.9.1+rocm6.3"
    monkeypatch.delenv("TORCH_INDEX")
    capsys.readouterr()
    install.main()
    assert capsys.readouterr().out == ""  # the card is looked at each time, nothing is done

    # The same .venv beside another card, then on purpose for the processor, which is remembered.
    cards[:] = [Card("cuda", "sm_120", "NVIDIA", 580)]
    assert "rocm" in (said := refused()) and "whl/cu130 make" in said
    monkeypatch.setenv("CHIP", "cpu")
    install.main()
    monkeypatch.delenv("CHIP")
    install.main()

    # And back to the card: the torch that is there gives way.
    monkeypatch.setenv("CHIP", "auto")
    monkeypatch.setenv("TORCH_INDEX", (folder / "pypi").as_uri())
    install.main()
    assert install.torch_of(install.PYTHON)["version"] == "2.13.0"

"""The docker and podman commands for each chip, letter by letter."""

from __future__ import annotations

import re
import subprocess

import pytest

from athanor.cli import cli, container
from athanor.hardware import cards
from athanor.hardware.cards import Card
from tests.test_image_context import ROOT

# A command, and below it what it prints.
GOLDEN = (ROOT / "tests/cli/golden/container.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def say(monkeypatch, capsys):
    """What a command prints, on a machine without cards and engines, for a user who is not root."""
    found: list[Card] = []
    real = cards.find
    monkeypatch.setattr(cards, "find", lambda chip="auto": found if chip == "auto" else real(chip))
    monkeypatch.setattr(container, "owners", lambda: ["44", "992"])
    monkeypatch.setattr(container.shutil, "which", lambda name: None)
    monkeypatch.setattr(container.os, "getuid", lambda: 7)
    monkeypatch.setattr(container.os, "getgid", lambda: 8)
    monkeypatch.setattr(container.os, "environ", {})

    def call(line: str, *here: Card) -> str:
        found[:] = here
        assert cli.call("container", container.shlex.split(line)) == 0
        return capsys.readouterr().out

    return call


def command(text: str) -> str:
    return " ".join(re.sub(r"(?m)^#.*\n| \\$", "", text).split())


@pytest.mark.parametrize("line, printed", zip(GOLDEN[::2], GOLDEN[1::2], strict=True))
def test_the_command(say, line, printed):
    text = say(line)
    assert command(text) == printed.strip()
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0
    # A reason for each option that stands in it.
    listed = [option.strip() for option in re.findall(r"(?m)^  (-.*) \\$", text) if not option.startswith("--tag")]
    assert [row for row in listed if f"\n# {row}: " not in text] == [] and len(listed) >= 1


def test_the_chip_and_its_index_are_those_of_the_card_found(say):
    mi50, pascal = Card("rocm", "gfx906", "AMD"), Card("cuda", "sm_61", "NVIDIA", 570)
    assert "/dev/kfd" in say("run", mi50) and "whl/rocm6.3 ." in command(say("build", mi50))
    assert "--gpus all" in say("run", pascal) and "whl/cu126 ." in command(say("build --chip cuda", pascal))
    assert "athanor:cpu" in say("run") and "athanor:cpu" in say("run --chip cpu", mi50)


def test_values_stay_where_they_are(say, monkeypatch):
    secrets = {"HF_TOKEN": "planted", "MLFLOW_TRACKING_PASSWORD": "planted", "TORCH_INDEX": "https://me:planted@x"}
    paths = {"MLFLOW_TRACKING_URI": "sqlite:////home/me/mlflow.db", "ATHANOR_UNTOLD": "/home/me"}
    monkeypatch.setattr(container.os, "environ", secrets | paths | {"NCCL_P2P_DISABLE": "1"})
    said = say("run") + say("build")
    assert "planted" not in said and "--build-arg TORCH_INDEX" in said and "/home/me" not in said
    assert "--env HF_TOKEN --env MLFLOW_TRACKING_PASSWORD --env NCCL_P2P_DISABLE athanor" in command(said)


def test_what_the_cards_want_more(say):
    mi50, strix = Card("rocm", "gfx906", "AMD"), Card("rocm", "gfx1151", "AMD")
    more = [
        {word for word in ("SYS_PTRACE", "AOTRITON_ENABLE_EXPERIMENTAL=1") if word in say("run", *cards)}
        for cards in ((mi50,), (mi50, mi50), (strix,))
    ]
    assert more == [set(), {"SYS_PTRACE"}, {"AOTRITON_ENABLE_EXPERIMENTAL=1"}]
    assert "nvidia-ctk cdi generate" in say("run --chip cuda --engine podman")


def test_a_worktree_takes_the_folder_of_git_along(tmp_path, say):
    """To where the `.git` file points, as seen from /athanor."""
    for told, inside in (("../main/.git/worktrees/w", "/main/.git"), ("/b/.git/worktrees/w", "/b/.git")):
        (tmp_path / ".git").write_text(f"gitdir: {told}\n")
        outside = tmp_path.parent / "main/.git" if inside == "/main/.git" else inside
        assert f":/athanor --volume {outside}:{inside} --user" in command(say(f"run --volume {tmp_path}"))


def test_the_image_has_compilers_and_takes_no_pins_of_its_base():
    assert re.search(
        r"g\+\+ gcc (?s:.*)\nENV PIP_CONSTRAINT=\n(?s:.*)tools/install.py\n", (ROOT / "Dockerfile").read_text()
    )

"""The docker and podman commands for each chip, letter by letter."""

from __future__ import annotations

import re
import subprocess

import pytest

from athanor.cli import cli, container
from athanor.hardware import cards
from athanor.hardware.cards import Card

KEEP = "--rm --stop-timeout 300 --volume athanor:/athanor"
AMD = "--device /dev/kfd --device /dev/dri"
GOLDEN = {
    "run --chip cpu": f"docker run {KEEP} --env HF_TOKEN athanor:cpu athanor repro",
    "run --chip cuda": f"docker run {KEEP} --gpus all --ipc=host --env HF_TOKEN athanor:cuda athanor repro",
    "run --chip rocm": f"docker run {KEEP} {AMD} --group-add 44 --group-add 992 --ipc=host --env HF_TOKEN athanor:rocm "
    "athanor repro",
    "run --chip cuda --engine podman": f"podman run {KEEP} --device nvidia.com/gpu=all --security-opt label=disable "
    "--ipc=host --env HF_TOKEN athanor:cuda athanor repro",
    "run --chip rocm --engine podman": f"podman run {KEEP} {AMD} --group-add keep-groups --security-opt label=disable "
    "--ipc=host --env HF_TOKEN athanor:rocm athanor repro",
    "run --chip cpu --volume /": "docker run --rm --stop-timeout 300 --volume /:/athanor --user 7:8 --env HF_TOKEN "
    "athanor:cpu athanor repro",
    "run --chip cpu --volume / --engine podman": "podman run --rm --stop-timeout 300 --volume /:/athanor "
    "--userns keep-id --user 7:8 --env HF_TOKEN athanor:cpu athanor repro",
    "run --chip cpu --command serve": f"docker run {KEEP} --env HF_TOKEN --publish 127.0.0.1:8080:8080 athanor:cpu "
    "athanor serve --host 0.0.0.0",
    "run --chip cpu --command 'ui --port 9'": f"docker run {KEEP} --env HF_TOKEN --publish 127.0.0.1:9:9 athanor:cpu "
    "athanor ui --port 9 --host 0.0.0.0",
    "build --chip cpu": f"docker build --tag athanor:cpu --build-arg TORCH_INDEX={cards.INDEX}cpu .",
    "build --chip cuda": "docker build --tag athanor:cuda --build-arg CHIP=cuda .",
    "build --chip rocm": "docker build --tag athanor:rocm --build-arg CHIP=rocm "
    f"--build-arg TORCH_INDEX={cards.INDEX}rocm7.2 .",
    "build --chip rocm --base rocm/pytorch:a": "docker build --tag athanor:rocm --build-arg CHIP=rocm "
    "--build-arg BASE=rocm/pytorch:a .",
}  # fmt: skip


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


@pytest.mark.parametrize("line", GOLDEN)
def test_the_command(say, line):
    text = say(line)
    assert command(text) == GOLDEN[line]
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

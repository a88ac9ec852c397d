"""The docker or podman command for this machine's chip, with the reason for each option. Nothing is started.

    python -m athanor container build [--base IMAGE]
    python -m athanor container run [--volume NAME|FOLDER] [--command "serve --port 9000"]

What it prints is shell: `athanor container run | sh` starts it. Any Python 3.11 runs this before anything is installed.
Without a command the container builds what is missing (`athanor repro`); `serve` and `ui` get their port.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from pathlib import Path

from athanor.base.errors import InputError
from athanor.hardware import cards

# Passed on where they are set: what steers a chip, the hub, the tracking server. Paths mean nothing inside.
PASSED = (
    "ATHANOR_",
    "CUDA_VISIBLE",
    "HIP_",
    "HSA_",
    "MLFLOW_TRACKING_",
    "NCCL_",
    "ROCR_",
    "TORCH_ROCM",
    "ANTHROPIC_API",
    "OPENAI_API",
)
PORTS = {"serve": "8080", "ui": "5000"}
Options = list[tuple[str, str]]  # an option as it is typed, and why


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=["build", "run"])
    add("--chip", choices=cards.CHIPS, help="default: the one found here")
    add("--engine", choices=["docker", "podman"], help="default: the one installed here")
    add("--image", help="default: athanor:CHIP")
    add(
        "--base",
        help="build on this image, and keep the torch it has (default: Python's, with torch from PyPI or pytorch.org)",
    )
    add("--volume", default="athanor", help="a volume's name, or the folder of a checkout (default: athanor)")
    add("--command", default="repro", help="athanor's, with its arguments in the same quotes (default: repro)")


def run(args: argparse.Namespace) -> int:
    found = cards.find(args.chip if args.chip == "cpu" else "auto")
    found = [card for card in found if args.chip in (None, card.chip)] or cards.find(args.chip or "cpu")
    card = found[0] if found else None
    engine = args.engine or ("podman" if shutil.which("podman") and not shutil.which("docker") else "docker")
    image = args.image or f"athanor:{card.chip if card else 'cpu'}"
    if args.what == "build":
        chosen, last = build(card, args.base), "."
    else:
        name, *rest = shlex.split(args.command) or ["repro"]
        chosen = [*keep(args.volume, engine), *device(card, engine, len(found)), *environment(), *port(name, rest)]
        rest += ["--host", "0.0.0.0"] if name in PORTS and "--host" not in rest else []
        last = shlex.join([image, "athanor", name, *rest])
    print(f"# for {card or 'the processor; no card that torch computes on was found or named'}")
    print(*(f"# {option.partition('$')[0].strip()}: {reason}" for option, reason in chosen), sep="\n")
    name = [f"--tag {shlex.quote(image)}"] if args.what == "build" else []
    print(" \\\n  ".join([f"{engine} {args.what}", *name, *(option for option, _ in chosen), last]))
    return 0


def build(card: cards.Card | None, base: str | None) -> Options:
    chosen = [(f"--build-arg CHIP={card.chip}", "a build sees no card")] if card else []
    index = cards.build(card) if card else "cpu"
    if not index:
        raise InputError(f"no torch has kernels for it: {cards.advice(card)}", where=str(card), fix="or --chip cpu")
    if base:
        chosen.append((f"--build-arg BASE={shlex.quote(base)}", "its torch stays, if it is of this chip and in range"))
    elif os.environ.get("TORCH_INDEX"):
        chosen.append(("--build-arg TORCH_INDEX", "yours, by name; the image's history will hold it"))
    elif index != cards.ON_PYPI:
        why = "PyPI's torch is for newer NVIDIA cards" if card else "PyPI's torch brings gigabytes of CUDA"
        chosen.append((f"--build-arg TORCH_INDEX={cards.INDEX}{index}", why))
    return chosen


def keep(volume: str, engine: str) -> Options:
    chosen = [
        ("--rm", "all that is worth keeping lies in the volume"),
        ("--stop-timeout 300", "a stage that is stopped saves first, which takes longer than the engine's ten seconds"),
    ]
    why = "one for code, data, models and DVC's cache: hard links do not cross mounts, and copies take the room twice"
    if "/" not in volume and volume != ".":
        return [*chosen, (f"--volume {shlex.quote(volume)}:/athanor", why)]
    folder = Path(volume).resolve()
    if not folder.is_dir():
        raise InputError("there is no such folder", where=volume, fix="make it, or name a volume without a slash")
    same = "--userns keep-id --user" if engine == "podman" and os.getuid() else "--user"
    return [
        *chosen,
        (f"--volume {shlex.quote(str(folder))}:/athanor", why),
        *git_folder(folder),
        (f"{same} {os.getuid()}:{os.getgid()}", "what is made there belongs to you"),
    ]


def git_folder(checkout: Path) -> Options:
    """Git's folder, where a worktree's `.git` is a file that names `.git/worktrees/NAME` in it."""
    if not (checkout / ".git").is_file():
        return []
    pointer = (checkout / ".git").read_text(encoding="utf-8").partition(":")[2].strip()
    mount = ":".join(os.path.normpath(os.path.join(start, pointer, "../..")) for start in (checkout, "/athanor"))
    return [(f"--volume {shlex.quote(mount)}", "Git's own folder, which the worktree's .git file names")]


def device(card: cards.Card | None, engine: str, count: int = 1) -> Options:
    if not card:
        return []
    ipc = ("--ipc=host", "the processes of several cards share memory; a container's own is 64 MB")
    label = [("--security-opt label=disable", "SELinux keeps containers from devices")] if engine == "podman" else []
    if card.chip == "cuda":
        gpus = "--device nvidia.com/gpu=all" if engine == "podman" else "--gpus all"
        first = "; first: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" if engine == "podman" else ""
        return [
            (gpus, f"all cards, by NVIDIA's container toolkit; without it training is on the processor{first}"),
            *label,
            ipc,
        ]
    devices = [("--device /dev/kfd", "ROCm computes through it"), ("--device /dev/dri", "the cards themselves")]
    if engine == "podman" and os.getuid():
        groups = [("--group-add keep-groups", "yours, which own the devices: video, render")]
    else:
        why = "this machine's group of the device; the image may know none, or another number"
        groups = [(f"--group-add {group}", why) for group in owners()]
    more = [("--security-opt seccomp=unconfined", "ROCm maps memory by calls that the engine's filter refuses")]
    if count > 1:
        more.append(("--cap-add=SYS_PTRACE", "RCCL's processes read each other's memory"))
    if card.arch == "gfx1151":
        more.append(("--env TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1", "flash attention of torch on this chip"))
    return [*devices, *groups, *label, *more, ipc]


def owners(root: Path = Path("/dev")) -> list[str]:
    """Groups that may use an AMD card here, by number; where there is none, the names they usually have."""
    nodes = [path for path in (root / "kfd", *root.glob("dri/*")) if not path.is_dir() and path.exists()]
    return sorted({str(node.stat().st_gid) for node in nodes}, key=int) or ["video", "render"]


def environment() -> Options:
    names = [
        name
        for name, value in os.environ.items()
        if name.startswith(PASSED) and not value.startswith(("sqlite", "file", "/"))
    ]
    why = "by name, so that no list of processes and no history shows the value"
    return [(f"--env {name}", why) for name in ["HF_TOKEN", *sorted(names)]]


def port(name: str, rest: list[str]) -> Options:
    if name not in PORTS:
        return []
    number = rest[rest.index("--port") + 1] if "--port" in rest[:-1] else PORTS[name]
    return [(f"--publish 127.0.0.1:{number}:{number}", "the page, for this machine only")]

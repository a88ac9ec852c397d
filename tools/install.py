"""Make .venv with the pinned dependencies. Standard library only: it runs before anything is installed.

    python3 tools/install.py

Torch is handled apart from the rest. One that the interpreter already has is
used as it is; on a machine without a GPU a CPU build is taken whenever the
configured package sources offer one, because the default Linux build pulls
gigabytes of CUDA packages. TORCH_INDEX names an extra package index to look
for torch in (a CPU, CUDA or ROCm one, see pytorch.org). It may hold a password:
pip reads it from the environment, so that no list of processes shows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "athanor-install.json"
REQUIREMENTS = ROOT / "requirements.txt"
TORCH_PIN = "2.13.0"
TORCH_RANGE = "torch>=2.9,<2.14"
EXTRA = "xllamacpp==2026.10.11549"
PROBE = "import torch; v = tuple(int(x) for x in torch.__version__.split('+')[0].split('.')[:2]); assert (2, 9) <= v < (2, 14)"


def wanted() -> str:
    text = REQUIREMENTS.read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    return hashlib.sha256(text).hexdigest()


def installed() -> bool:
    return PYTHON.exists() and STAMP.exists() and json.loads(STAMP.read_text()).get("digest") == wanted()


def has_torch(python: Path | str) -> bool:
    return subprocess.run([str(python), "-c", PROBE], capture_output=True).returncode == 0


def gpu() -> str:
    """ "nvidia", "amd" or "" by the device files that their drivers create."""
    if Path("/dev/nvidiactl").exists():
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else ""


def pip(*args: str, check: bool = True, index: bool = False) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-m", "pip", *args]
    requirements = ""
    if index and os.environ.get("TORCH_INDEX"):
        command += ["-r", "/dev/stdin"]
        requirements = "--extra-index-url ${TORCH_INDEX}\n"
    done = subprocess.run(command, capture_output=True, text=True, input=requirements)
    if check and done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-5:]
        told = re.sub(r"(://)[^\s/@]+@", r"\1***@", "\n".join(errors))
        sys.exit(f"installation failed:\n{told}\ncommand: {' '.join(command)}")
    return done


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def make_venv() -> None:
    if PYTHON.exists():
        return
    # Of another environment only the base would be shared, and not the torch in it.
    shared = sys.prefix == sys.base_prefix and has_torch(sys.executable)
    say("creating .venv" + (" on top of the torch that is already installed" if shared else ""))
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True, system_site_packages=shared).create(VENV)
    except (subprocess.CalledProcessError, OSError):
        sys.exit("cannot create a virtual environment: this Python lacks ensurepip (Debian: apt install python3-venv)")


def install_torch() -> None:
    if has_torch(PYTHON):
        return
    say(f"torch {TORCH_PIN}" + ("" if gpu() else " (CPU build)"))
    if not gpu():
        if pip("install", f"torch=={TORCH_PIN}+cpu", check=False, index=True).returncode == 0:
            return
        plan = pip("install", "--dry-run", "--quiet", "--report", "-", TORCH_RANGE, check=False, index=True)
        names = (
            [item["metadata"]["name"] for item in json.loads(plan.stdout)["install"]] if plan.returncode == 0 else []
        )
        if any(name.startswith(("nvidia", "cuda", "triton")) for name in names):
            say("no CPU build of torch is on offer here; taking the default build, several GB with CUDA packages")
            say("to avoid that: set TORCH_INDEX to the CPU index named on pytorch.org and run again")
    elif gpu() == "amd" and not os.environ.get("TORCH_INDEX"):
        say("an AMD GPU is here: set TORCH_INDEX to the ROCm index named on pytorch.org to use it")
    pip("install", TORCH_RANGE, index=True)


def write_launcher() -> None:
    """`athanor` for `python -m athanor`: runs the code of the directory it is called in, as stages do."""
    launcher = PYTHON.parent / "athanor"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(str(PYTHON))} -m athanor "$@"\n')
    launcher.chmod(0o755)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (whoever runs this may have an older one)
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12")
    if installed():
        return
    started = time.monotonic()
    make_venv()
    install_torch()
    count = sum(1 for line in REQUIREMENTS.read_text().splitlines() if "==" in line)
    say(f"{count} pinned packages, a minute or two")
    pip("install", "-r", str(REQUIREMENTS))
    if pip("install", EXTRA, check=False).returncode:
        say(f"optional {EXTRA} has no build for this platform; exports will not be checked against llama.cpp")
    write_launcher()
    STAMP.write_text(json.dumps({"digest": wanted()}))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

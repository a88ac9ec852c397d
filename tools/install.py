"""Make .venv with the pinned dependencies. Standard library only: it runs before anything is installed.

    python3 tools/install.py

Torch is handled apart from the rest. One that the interpreter already has is
used as it is; on a machine without a GPU a CPU build is taken whenever the
configured package sources offer one, because the default Linux build pulls
gigabytes of CUDA packages. A torch that does not fit the card found is
refused, with the index that has one. TORCH_INDEX names a package index: torch
comes from there and from nowhere else. It may hold a password: pip reads it
from the environment, so that no list of processes shows it. CHIP=cpu, cuda or
rocm names the chip instead of looking for it, and is remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # last: files of the checkout may have the names of Python's modules
from athanor.hardware import cards as chips  # noqa: E402  (the standard library only)
from athanor.runtime.start import refuse_shadows, settle  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LAUNCHER = VENV / "bin" / "athanor"
STAMP = VENV / "athanor-install.json"
REQUIREMENTS = ROOT / "requirements.txt"
TORCH_PIN = "2.13.0"
TORCH_RANGE = "torch>=2.9,<2.14"
ONLY, ALSO = "--index-url", "--extra-index-url"
GIT_INIT = "git init && git add -A && git commit --quiet -m start"
# The head of a console script, in the two forms that pip writes; the second is for paths with spaces and long ones.
HEAD = re.compile(rb"\A#!(?:/bin/sh\n'''exec' )?[^\n]*/\.venv/bin/python[^\n]*\n(?:' '''\n)?")
PROBE = """import json, torch
flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", str)() or ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
                  "archs": [flag.partition(":")[0] for flag in flags.split()]}))"""


def wanted() -> str:
    text = REQUIREMENTS.read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    return hashlib.sha256(text).hexdigest()


def stamp() -> dict:
    return json.loads(STAMP.read_text()) if PYTHON.exists() and STAMP.exists() else {}


def torch_of(python: Path | str) -> dict:
    """Version, CUDA, ROCm and kernels of an interpreter's torch; empty if it has none in range."""
    said = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True)
    torch = json.loads(said.stdout) if said.returncode == 0 else {}
    return torch if torch and (2, 9) <= tuple(map(int, torch["version"].split(".")[:2])) < (2, 14) else {}


def pip(*args: str, check: bool = True, index: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-m", "pip", *args]
    requirements, environment = "", dict(os.environ)
    if index and os.environ.get("TORCH_INDEX"):
        command += ["-r", "/dev/stdin"]
        requirements = f"{index} ${{TORCH_INDEX}}\n"
        if index == ONLY:  # it replaces other indexes, but not a folder of wheels that pip is configured with
            environment["PIP_FIND_LINKS"] = str(VENV)
    # On a terminal pip shows its progress; with --quiet it is asked for a report.
    out = None if sys.stdout.isatty() and "--quiet" not in args else subprocess.PIPE
    done = subprocess.run(
        command, stdout=out, stderr=subprocess.PIPE, text=True, errors="replace", input=requirements, env=environment
    )
    if check and done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-5:]
        # pip gives up on an index that it cannot reach, and then says that versions contradict each other.
        if requirements and (problem := unreachable(os.environ["TORCH_INDEX"])):
            errors = [f"TORCH_INDEX {problem}", "without it, make takes what your own package index has"]
        told = re.sub(r"(://)[^\s/@]+@", r"\1***@", "\n".join(errors))
        sys.exit(f"installation failed:\n{told}\ncommand: {' '.join(command)}")
    return done


def unreachable(index: str) -> str:
    """Why a package index cannot be read, with its address; "" if it can."""
    address, shown = (re.sub(r"(://)[^\s/@]+@", to, index) for to in (r"\1", r"\1***@"))
    try:
        urllib.request.urlopen(address.rstrip("/") + "/torch/", timeout=20).close()
    except urllib.error.HTTPError as error:
        return f"{shown} answers with {error.code} ({error.reason})"
    except (OSError, ValueError) as error:
        return f"{shown} cannot be reached ({getattr(error, 'reason', error)})"
    return ""


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def want_git() -> None:
    """Exit where the checkout is in no Git repository, as in the folder of a ZIP file; on a terminal, offer to make one."""
    if not (ROOT / "dvc.yaml").exists():  # a container's image, whose volume gets one (tools/entry.sh)
        return
    if not shutil.which("git"):
        sys.exit("git is not installed. Fix: sudo apt install git (on a Mac: xcode-select --install)")
    if not subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode or (ROOT / ".git").exists():
        return
    what = f"{ROOT} is not a git repository (a ZIP file?), and DVC works in one only"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.exit(f"{what}; nothing was installed. Fix: {GIT_INIT}, then the same command again")
    if input(f"{what}. Make one here by `{GIT_INIT}`? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.exit("nothing was installed")
    known = not subprocess.run(["git", "config", "user.email"], capture_output=True).returncode
    who = {f"GIT_{role}_{what}": "athanor" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(GIT_INIT, shell=True, cwd=ROOT, check=True, env={**os.environ, **({} if known else who)})


def mend_moved() -> None:
    """Put this path into the scripts of a .venv that was made elsewhere: they name their interpreter by its path."""
    interpreter = os.fsencode(shlex.quote(str(PYTHON)))
    if VENV.is_symlink() or not PYTHON.exists() or not LAUNCHER.exists() or interpreter in LAUNCHER.read_bytes():
        return
    shared = re.search(r"(?m)^include-system-site-packages *= *true", (VENV / "pyvenv.cfg").read_text(encoding="utf-8"))
    options = ["--without-pip", "--symlinks", *(["--system-site-packages"] if shared else [])]
    subprocess.run([str(PYTHON), "-m", "venv", *options, str(VENV)], check=True)  # for `activate`
    head = b"#!/bin/sh\n'''exec' %s \"$0\" \"$@\"\n' '''\n" % interpreter
    for script in PYTHON.parent.iterdir():
        if script.is_file() and not script.is_symlink() and HEAD.match(text := script.read_bytes()):
            script.write_bytes(HEAD.sub(lambda _: head, text))
    write_launcher()
    say("the checkout was moved or copied, and .venv is repaired; in an open shell: . .venv/bin/activate")


def make_venv(cards: list[chips.Card]) -> None:
    if PYTHON.exists():
        return
    # An environment that this user can change is a project's, and its torch may go any day; others belong to the machine.
    project = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    torch = {} if project else torch_of(sys.executable)
    if wrong := torch and chips.misfit(torch, cards):
        say(f"{sys.executable} is not built on: {wrong}")
    shared = bool(torch) and not wrong
    for link in (VENV / "bin").glob("python*"):  # of a Python that was removed or updated since
        if not link.exists():
            link.unlink()
    say("creating .venv" + (f" on top of torch {torch['version']}, which is already installed" if shared else ""))
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True, system_site_packages=shared).create(VENV)
    except (subprocess.CalledProcessError, OSError):
        sys.exit("cannot create a virtual environment: this Python lacks ensurepip (Debian: apt install python3-venv)")
    if shared and sys.prefix != sys.base_prefix:  # an environment on top of another one sees its base only
        (folder,) = VENV.glob("lib/python*/site-packages")
        (folder / "base.pth").write_text("\n".join(site.getsitepackages()) + "\n")


def install_torch(cards: list[chips.Card]) -> dict:
    torch = torch_of(PYTHON)
    if torch and not chips.misfit(torch, cards):
        return torch
    if os.environ.get("TORCH_INDEX"):
        say(f"{TORCH_RANGE} from TORCH_INDEX")
        asked = ["install", "--dry-run", "--quiet", "--report", "-", "--ignore-installed", "--no-deps", TORCH_RANGE]
        report = json.loads(pip(*asked, index=ONLY).stdout)
        # Which one is settled there, because PyPI's may be newer; what it needs may come from both.
        pip("install", f"torch=={report['install'][0]['metadata']['version']}", index=ALSO)
    elif cards:
        if torch or chips.build(cards[0]) != chips.ON_PYPI:
            refuse(torch, cards)
        say(f"torch {TORCH_PIN} for {cards[0]}")
        pip("install", TORCH_RANGE)
    else:
        say(f"torch {TORCH_PIN} (CPU build)")
        if pip("install", f"torch=={TORCH_PIN}+cpu", check=False).returncode:
            plan = pip("install", "--dry-run", "--quiet", "--report", "-", TORCH_RANGE, check=False)
            found = json.loads(plan.stdout)["install"] if plan.returncode == 0 else []
            if any(item["metadata"]["name"].startswith(("nvidia", "cuda", "triton")) for item in found):
                say("no CPU build of torch is on offer here; taking the default build, several GB with CUDA packages")
                say(f"to avoid that: TORCH_INDEX={chips.INDEX}cpu make")
            pip("install", TORCH_RANGE)
    torch = torch_of(PYTHON)
    if not torch or chips.misfit(torch, cards):
        refuse(torch, cards)
    return torch


def refuse(torch: dict, cards: list[chips.Card]) -> NoReturn:
    if not cards:
        sys.exit(f"the torch in .venv cannot be imported: .venv/bin/python -c 'import torch' says why; {TORCH_RANGE}")
    why = chips.misfit(torch, cards) if torch else f"here is {cards[0]}, and no torch for it"
    sys.exit(f"{why}\n  {chips.advice(cards[0])}\nto compute on the processor all the same: CHIP=cpu make")


def write_launcher() -> None:
    """`athanor` for `python -m athanor`: runs the code of the directory it is called in, as stages do."""
    here = f"cd {shlex.quote(str(ROOT))}"
    elsewhere = shlex.quote(f"athanor: this is not the top folder of a checkout. Fix: {here}")
    check = f"[ -f athanor/__main__.py ] || {{ echo {elsewhere} >&2; exit 2; }}"
    LAUNCHER.write_bytes(os.fsencode(f'#!/bin/sh\n{check}\nexec {shlex.quote(str(PYTHON))} athanor "$@"\n'))
    LAUNCHER.chmod(0o755)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (whoever runs this may have an older one)
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12")
    refuse_shadows(str(ROOT))
    want_git()
    mend_moved()
    before = stamp()
    chip = os.environ.get("CHIP") or before.get("chip", "auto")
    if chip not in (*chips.CHIPS, "auto"):
        sys.exit(f"CHIP={chip}: one of {', '.join(chips.CHIPS)}, auto")
    cards = chips.find(chip)
    if before.get("digest") == wanted() and before["chip"] == chip:
        if not chips.misfit(before["torch"], cards):
            return
        if not os.environ.get("TORCH_INDEX"):
            refuse(before["torch"], cards)
    started = time.monotonic()
    make_venv(cards)
    torch = install_torch(cards)
    count = sum(1 for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if "==" in line)
    say(f"{count} pinned packages, a minute or two")
    pip("install", "-r", str(REQUIREMENTS))
    write_launcher()
    STAMP.write_text(json.dumps({"digest": wanted(), "chip": chip, "torch": torch}))
    say(f"done in {time.monotonic() - started:.0f} s")


def warn_of_accents() -> None:
    """Each time until it is cured, because DVC queues an experiment without a word and then fails."""
    config = ROOT / ".dvc" / "config.local"
    if not str(ROOT).isascii() and not (config.is_file() and re.search(r"(?m)^\s*dir\s*=", config.read_text("utf-8"))):
        say("this path is not ASCII, and `dvc exp run` with --temp or --queue fails; the cure: athanor doctor")


if __name__ == "__main__":
    settle()
    main()
    warn_of_accents()

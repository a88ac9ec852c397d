"""Build llama.cpp's own programs, once: llama-perplexity, llama-quantize, llama-server.

    python tools/llama_cpp.py [--jobs N] [--sdist FILE] [--dry-run] [--until download|configure|build]

The source is the one inside the source package of llama-cpp-python on PyPI
(76 MB, pinned by hash), so the same version everywhere and no other site is
asked. Nine CPU minutes, so four to five on two free cores; needs cmake 3.21,
a C++17 compiler and 500 MB. The programs go to .athanor/llama.cpp/bin, where
the project finds them. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
NAME = f"llama_cpp_python-{VERSION}"
PROGRAMS = ("llama-perplexity", "llama-quantize", "llama-server")
ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".athanor" / "llama.cpp"
CMAKE = (3, 21)
# -O1 takes a quarter off the compile time; a small model runs as fast. The web page that the server would show is
# otherwise fetched from a model hub in the middle of the build.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_C_FLAGS_RELEASE": "-O2 -DNDEBUG",
    "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_CCACHE": "ON",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
STEPS = ("download", "configure", "build")


class Failed(Exception):
    """Told in one line."""


def check_tools() -> None:
    """cmake of the right age, and a compiler."""
    if shutil.which("cmake") is None:
        raise Failed("cmake is not installed. Fix: apt install cmake g++, or pip install cmake ninja")
    said = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < CMAKE:
        raise Failed(f"cmake {'.'.join(map(str, CMAKE))} or newer is needed. Fix: pip install cmake")
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        raise Failed("no C++ compiler. Fix: apt install g++ (or set CXX)")


def download(folder: Path, given: str, dry: bool) -> Path:
    """The source package: the file given, or pip's, from whatever index pip is set to; either must have the hash."""
    path = Path(given) if given else folder / f"{NAME}.tar.gz"
    if not given and not (path.is_file() and _sha256(path) == SHA256):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        run([*command, f"llama-cpp-python=={VERSION}", "-d", str(folder)], dry)
    if not dry:
        if not path.is_file():
            raise Failed(f"{path} is not there. Fix: --sdist FILE, or look at what pip said above")
        if _sha256(path) != SHA256:
            raise Failed(f"{path} is not llama-cpp-python {VERSION}: its SHA-256 is {_sha256(path)}, wanted {SHA256}")
    return path


def configure(archive: Path, build: Path, dry: bool) -> None:
    source = HOME / "source"
    if not dry:
        shutil.rmtree(source, ignore_errors=True)
        with tarfile.open(archive) as tar:
            # The filter came with Python 3.11.4; the archive has the pinned hash.
            tar.extractall(source, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    flags = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    run(["cmake", "-S", str(source / NAME / "vendor" / "llama.cpp"), "-B", str(build), *generator, *flags], dry)


def compile_(build: Path, jobs: int, dry: bool) -> None:
    """Only the programs by name: `all` would build everything."""
    run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *PROGRAMS], dry)
    if dry:
        return
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        made = Path(folder) / "bin"
        made.mkdir()
        for name in PROGRAMS:
            shutil.copy2(build / "bin" / name, made / name)
            run([str(made / name), "--version"] if name != "llama-quantize" else [str(made / name), "--help"], dry, quiet=True)
        (made / "built.json").write_text(json.dumps({"version": VERSION, "sha256": SHA256, "options": OPTIONS}) + "\n")
        shutil.rmtree(HOME / "bin", ignore_errors=True)
        os.replace(made, HOME / "bin")
    for scrap in (HOME / "source", build):
        shutil.rmtree(scrap, ignore_errors=True)


def built() -> bool:
    """Whether this very version, built with these options, is there."""
    try:
        told = json.loads((HOME / "bin" / "built.json").read_text())
    except (OSError, ValueError):
        return False
    wanted = {"version": VERSION, "sha256": SHA256, "options": OPTIONS}
    return told == wanted and all((HOME / "bin" / name).is_file() for name in PROGRAMS)


def run(command: list[str], dry: bool, quiet: bool = False) -> None:
    if not quiet:
        print("+ " + shlex.join(command), flush=True)
    if dry:
        return
    said = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if quiet else {}
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, **said).returncode
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from None
    if status not in ((0, 1) if quiet else (0,)):  # llama-quantize shows its help with status 1
        raise Failed(f"`{Path(command[0]).name}` ended with status {status}; what it said is above")


def main() -> int:
    parser = argparse.ArgumentParser(description="build llama-perplexity, llama-quantize and llama-server")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--sdist", default="", help=f"a {NAME}.tar.gz that is here already")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--until", choices=STEPS, default="build", help="stop after this step")
    parser.add_argument("--again", action="store_true", help="build although it has been built")
    args = parser.parse_args()
    if built() and not args.again:
        print(f"already built: {HOME / 'bin'}")
        return 0
    build = HOME / "build"
    try:
        check_tools()
        if not args.dry_run:
            HOME.mkdir(parents=True, exist_ok=True)
        archive = download(HOME, args.sdist, args.dry_run)
        if args.until != "download":
            configure(archive, build, args.dry_run)
        if args.until == "build":
            compile_(build, args.jobs, args.dry_run)
            print(f"{'would be' if args.dry_run else 'programs are'} in {HOME / 'bin'}")
    except Failed as reason:
        print(f"llama_cpp: {reason}", file=sys.stderr)
        return 1
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())

"""The Dockerfile's steps in a clean root, on stand-ins for the bases of CPU, CUDA and ROCm with their traps planted.

Needs root, debootstrap and the package sources that `make setup` needs. About ten minutes, most of it the packages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_image_context import ROOT
from tests.tools.fake_torch import wheel

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
if os.getuid() or not shutil.which("debootstrap", path=PATH):
    pytest.skip("needs root and debootstrap", allow_module_level=True)


# What pip is told on this machine, in files or by the environment, as variables; the files that it names, and what lies
# beside an index.
TOLD = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
OUTSIDE = {
    f"PIP_{key.upper().replace('-', '_')}": value
    for _, key, value in sorted(re.findall(r"(?m)^(:env:|\w+)\.([\w-]+)='(.*)'$", TOLD), reverse=True)
} | {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
NAMED = re.findall(r"(?:'|\s)(/[^\s']+)|file://(/[^\s']+)/", TOLD)
MOUNTED = {"/etc/resolv.conf", *filter(os.path.exists, map("".join, NAMED))}
# Ubuntu's images own the first user's number, from 24.04 on.
UBUNTU = "groupadd --gid 1000 ubuntu && useradd --create-home --uid 1000 --gid 1000 --groups audio,video ubuntu"
INSTALL = "-m pip install --quiet --no-index --no-deps /planted/*/*.whl"
PACKAGES = "ca-certificates,python3-venv,python3-pip"
BASES = {
    "cpu": UBUNTU,
    "cuda": f"{UBUNTU} && python3 {INSTALL} --break-system-packages",  # PyTorch's: in the system's Python
    "rocm": f"{UBUNTU} && python3 -m venv /opt/venv && /opt/venv/bin/python {INSTALL}",  # not in PATH, the worst case
}


TORCH = {"cuda": ("2.10.0+cu130", "13.0", None), "rocm": ("2.10.0+rocm7.2", None, "7.2.2")}
ENTER = """
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=BASE,upperdir=HERE/upper,workdir=HERE/work HERE/root; cd HERE/root
mount -t proc proc proc; mount -t tmpfs tmpfs dev; mkdir -m 1777 dev/shm; ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin
for name in null zero random urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir planted; mount --bind HERE/planted planted
for path in MOUNTED; do
    if [ -d $path ]; then mkdir -p .$path; else mkdir -p .${path%/*}; touch .$path; fi; mount --bind $path .$path
done
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A minimal system of this machine's release: its Python refuses packages (PEP 668)."""
    root = tmp_path_factory.mktemp("base") / "root"
    shell(f". /etc/os-release; debootstrap --variant=minbase --include={PACKAGES} $VERSION_CODENAME {root}")
    assert list(root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"))
    return root


def shell(program: str) -> str:
    """In mounts and processes of its own."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euxc", program]
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, cwd=ROOT, env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


class Image:
    """The shell program that makes an image of a base, and containers of the image."""

    def __init__(self, base: Path, folder: Path, chip: str, requirements: str = "") -> None:
        self.folder, self.user, self.workdir, self.started = folder, "root", "/", []
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **OUTSIDE}
        shell(f"cd {folder}; mkdir upper work root volume context planted; chown 1000:1000 volume")
        shell(f"git ls-files -z | xargs -0 cp --parents -t {folder}/context")
        if requirements:
            (folder / "context" / "requirements.txt").write_text(requirements)
            version, cuda, hip = TORCH[chip]
            wheel(folder / "planted", version, cuda=cuda, hip=hip)
            wheel(folder / "planted", "1.0", name="six")
        enter = ENTER.replace("BASE", str(base)).replace("HERE", str(folder)).replace("MOUNTED", " ".join(MOUNTED))
        self.lines = [enter]
        self.do(BASES[chip])

    def do(self, command: str) -> None:
        env = shlex.join(f"{name}={value}" for name, value in {"HOME": f"/home/{self.user}", **self.env}.items())
        inside = shlex.quote(f"cd {self.workdir} && {command}")
        self.lines.append(f"chroot --userspec={self.user}:{self.user} . env -i {env} sh -c {inside}")

    def build(self, **arguments: str) -> None:
        text = re.sub(r"(?m)^#.*\n|\\\n", "", (ROOT / "Dockerfile").read_text())
        for name, rest in re.findall(r"(?m)^(\w+) +(.*)", text):
            if name in ("ARG", "ENV"):
                for key, _, value in (each.partition("=") for each in shlex.split(rest)):
                    expanded = re.sub(r"\$\{(\w+)\}", lambda found: self.env[found[1]], value)
                    self.env[key] = arguments.get(key, expanded)
            elif name == "USER":
                self.user = rest
            elif name == "WORKDIR":
                self.workdir = rest
            elif name == "COPY":
                _, source, to = rest.split()
                to = f".{self.workdir}/{to}"
                copy = f"mkdir -p {to}; cp -r {self.folder}/context/{source} {to}; chroot . chown -R athanor {self.workdir}"
                self.lines.append(copy)
            elif name == "RUN":
                self.do(rest)
            elif name in ("ENTRYPOINT", "CMD"):
                self.started.append(json.loads(rest))
            else:
                assert name in ("FROM", "VOLUME", "STOPSIGNAL"), f"the test knows no {name}"
        self.lines.append(f"mount --bind {self.folder}/volume athanor")

    def start(self, command: str = "") -> None:
        """As `docker run IMAGE COMMAND` does; without one, the image's own."""
        entry, default = self.started
        self.do(shlex.join([*entry, *(["sh", "-euc", command] if command else default)]))

    def run(self) -> str:
        return shell("\n".join(self.lines))


KEPT = """
python -c 'import torch, six; assert torch.__version__.startswith("2.10.0") and six.__version__ == "1.17.0", torch'
python -c 'import torch; assert not torch.__file__.startswith("/opt/athanor"), torch'
BASE -c 'import six; assert six.__version__ == "1.0"'
test "$(id -u)" = 1000 && test -O /athanor && test "$(pwd)" = /athanor
athanor help
"""
OTHER = """
mkdir -p /tmp/other && cp -r /opt/athanor/tools /opt/athanor/athanor /opt/athanor/requirements.txt /tmp/other
if CHIP=rocm /usr/bin/python3 /tmp/other/tools/install.py 2> /tmp/said; then exit 1; fi
cat /tmp/said
"""
NEWER = (
    "(cd opt/athanor; echo '# {0}' >> dvc.yaml; rm -f README.md; sed -i '/dvc.yaml\\|README/d' .image; "
    "sha256sum ./dvc.yaml >> .image)"
)


def test_the_torch_of_pytorch_s_base_stays(base, tmp_path):
    """User 1000, a Python that refuses packages and has torch, older packages beside it."""
    image = Image(base, tmp_path, "cuda", "six==1.17.0\n")
    image.build(CHIP="cuda")
    image.start(KEPT.replace("BASE", "/usr/bin/python3"))
    image.start(OTHER)  # ROCm's torch was expected there: no other is taken
    assert re.search("2.10.0.cu130 does not fit(?s:.*)TORCH_INDEX=.*/rocm7.2", image.run())


def test_the_torch_of_rocm_s_base_stays_and_a_volume_takes_newer_code(base, tmp_path):
    """User 1000, torch in an environment outside PATH. Then what a volume lives through."""
    image = Image(base, tmp_path, "rocm", "six==1.17.0\n")
    image.build(CHIP="rocm")
    image.start(KEPT.replace("BASE", "/opt/venv/bin/python"))
    image.start("echo '# mine' >> params.yaml; echo x > data/made; mkdir -p .dvc/cache; ln data/made .dvc/cache/made")
    image.lines.append(NEWER.format("second"))
    image.start("grep second dvc.yaml; grep mine params.yaml; test -e data/made; test ! -e README.md")
    image.start("test -z \"$(git status --short -- dvc.yaml)\"; echo '# edited' >> dvc.yaml")
    image.lines.append(NEWER.format("third"))
    image.start("grep edited dvc.yaml; if grep third dvc.yaml; then exit 1; fi; git stash -q")
    image.start("grep third dvc.yaml; rm dvc.yaml")
    image.start("true")
    image.lines[-1] = f"if {image.lines[-1]}; then exit 1; fi"  # a folder of something else is not written to
    assert "mount another one" in image.run()


def test_everything_for_the_processor(base, tmp_path):
    image = Image(base, tmp_path, "cpu")
    image.build(TORCH_INDEX=os.environ.get("TORCH_INDEX", ""))
    image.start("athanor preset use micro")
    image.start()
    image.start('find data models -type f -links +1 | grep .; test -n "$(ls models)"; athanor verify')
    image.run()

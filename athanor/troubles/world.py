"""What is looked at on a machine: files of the system, environment, graphics cards, packages, settings of this machine.

Everything is read and nothing is written. `ATHANOR_MACHINE_ROOT` names a folder that stands for `/`, so that a machine
can be looked at that is not here. Without torch, whose import takes longer than all of it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.metadata
import os
import re
import shutil
import string
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import ParamsError
from athanor.base.strict import param
from athanor.hardware import cards, pci

SUBJECTS = ("file", "mount", "env", "card", "package", "nvidia", "setting", "lanes")
ROOT = "ATHANOR_MACHINE_ROOT"
MAX_CHARS = 200_000  # of a file that is read


def nothing(_: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class World:
    """A machine. card: the architectures of its graphics cards. nvidia: a field of nvidia-smi, for each card."""

    root: Path = Path("/")
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checkout: Path = Path("/")
    cards: Callable[[], Sequence[str]] = tuple
    package: Callable[[str], str] = str
    nvidia: Callable[[str], Sequence[str]] = nothing
    may_use: Callable[[set[Path]], bool] = lambda paths: all(os.access(path, os.R_OK | os.W_OK) for path in paths)

    def paths(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(string.Template(pattern).safe_substitute(self.env).lstrip("/")))

    def values(self, subject: str, name: str) -> list[str] | None:
        """What is there under a name; None where it cannot be told."""
        match subject:
            case "file":
                try:  # a device is there, and not read
                    return [
                        path.read_text(encoding="utf-8", errors="replace")[:MAX_CHARS] if path.is_file() else ""
                        for path in self.paths(name)
                    ]
                except OSError:
                    return None
            case "mount":
                return self._mount(self.checkout if name == "." else Path(name))
            case "card":
                return [arch for arch in self.cards() if re.search(name, arch)]
            case "nvidia":
                return list(self.nvidia(name))
            case "lanes":
                return list(map(str, pci.lanes(self.root)))
            case "setting":
                return [str(self.settings[key]) for key in fnmatch.filter(self.settings, name)]
        value = {"env": self.env.get, "package": self.package}[subject](name)
        return [str(value)] if value else []

    def _mount(self, folder: Path) -> list[str] | None:
        """Type and options of the file system that holds a folder."""
        tables = self.values("file", "/proc/mounts") or [""]
        rows = [line.split() for line in tables[0].splitlines()]
        holding = [row for row in rows if len(row) > 3 and folder.is_relative_to(row[1])]
        return [" ".join(max(holding, key=lambda row: len(row[1]))[2:4])] if holding else None


def here(settings: Mapping[str, str], checkout: Path) -> World:
    """This machine, or the one that ATHANOR_MACHINE_ROOT names. Cards that the settings do not use do not count."""
    root = Path(os.environ.get(ROOT) or "/")
    own = root == Path("/")

    @functools.cache
    def archs() -> tuple[str, ...]:
        return () if settings.get("device") == "cpu" else tuple(card.arch for card in cards.find(root=root))

    @functools.cache
    def nvidia(field: str) -> tuple[str, ...]:
        program = shutil.which("nvidia-smi") if own else None
        if program is None:
            return ()
        query = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        return () if done.returncode else tuple(done.stdout.splitlines())

    return World(root, os.environ, settings, checkout.resolve(), archs, _version, nvidia)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def version(text: str) -> tuple[int, ...]:
    """The first version in a text, for comparing: (6, 14, 0) of 6.14.0-27-generic."""
    match = re.search(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


@dataclass(frozen=True)
class Condition:
    """One subject, and what is asked of it; without a question, that it is there.

    file: files whose path fits a pattern (their text). mount: the file system of a folder, `.` for the checkout (its
    type and options). env: an environment variable. card: graphics cards whose architecture has this expression.
    package: an installed package (its version). nvidia: a field of nvidia-smi. setting: a key of machine.yaml,
    or, where `athanor doctor` asks, params.SECTION.KEY; `*` stands for any part. lanes: PCIe, the fewest on the way to
    each card (`lanes: each`). In the path of a file, $NAME is an environment variable.

    matches: an expression is found in a value; if it has a group, numbers and versions are read from there.
    absent: there are values, and none has this expression. below, above: a number. older, since: a version.
    at_least: so many values fit. missing: there is none that fits. denied: this user may not read and write the file.
    """

    file: str = ""
    mount: str = ""
    env: str = ""
    card: str = ""
    package: str = ""
    nvidia: str = ""
    setting: str = ""
    lanes: str = ""
    matches: str = ""
    absent: str = ""
    below: float | None = None
    above: float | None = None
    older: str = ""
    since: str = ""
    at_least: int = param(min=1, default=1)
    missing: bool = False
    denied: bool = False

    def __post_init__(self) -> None:
        if len([subject for subject in SUBJECTS if getattr(self, subject)]) != 1:
            raise ParamsError("needs one subject", where="when", fix=f"one of {', '.join(SUBJECTS)}")
        for pattern in (self.matches, self.absent, self.card):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ParamsError(f"{pattern!r} is no regular expression ({error})", where="when") from None

    def holds(self, world: World) -> bool:
        subject = next(subject for subject in SUBJECTS if getattr(self, subject))
        name = getattr(self, subject)
        if self.denied:
            paths = set(world.paths(name))
            return bool(paths) and not world.may_use(paths)
        values = world.values(subject, name)
        if values is None:
            return False
        if self.missing:
            return not any(map(self._fits, values))
        if self.absent:
            return bool(values) and not any(re.search(self.absent, value, re.MULTILINE) for value in values)
        return sum(map(self._fits, values)) >= self.at_least

    def _fits(self, value: str) -> bool:
        match = re.search(self.matches, value, re.MULTILINE)
        if match is None:
            return False
        text = match[match.re.groups] if self.matches else value
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text or "")
        if self.below is not None or self.above is not None:
            if not numbers:
                return False
            number = float(numbers[0])
            if not ((self.below is None or number < self.below) and (self.above is None or number > self.above)):
                return False
        told = version(text or "")
        if (self.older or self.since) and not told:
            return False
        return not (self.older and told >= version(self.older) or self.since and told < version(self.since))

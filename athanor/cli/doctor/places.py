"""Checks of `athanor doctor`: where the checkout lies, the names in it, and which programs a shell finds there."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.cli.doctor.checks import cache_folder
from athanor.cli.doctor.main import FIX, Checkout, Finding
from athanor.runtime.facts import check_names, git

ASCII_ONLY = "`dvc exp run` with --temp or --queue fails, since DVC writes its settings there as ASCII"
INTERPRETER = re.compile(
    rb"\A#!(?:/bin/sh\n'''exec' \"?)?(/[^\n\"]*?/python[\d.]*)"
)  # two lines where the path has spaces


def repository(checkout: Checkout) -> Iterator[Finding]:
    if not git(checkout.root, "rev-parse", "--git-dir") and not (checkout.root / ".git").exists():
        what = "is no Git repository (a ZIP file?), and every dvc command fails"
        yield Finding("git", str(checkout.root), what, "git init && git add -A && git commit -m start")


def names(checkout: Checkout) -> Iterator[Finding]:
    try:
        check_names(checkout.root)
    except InputError as error:
        yield Finding("name", error.where, error.what, error.fix)


def programs(checkout: Checkout) -> Iterator[Finding]:
    """Console scripts name their interpreter by its path, and DVC starts stages as `python`."""
    for path in (Path(found) for found in map(shutil.which, ("dvc", "athanor")) if found):
        match = INTERPRETER.match(path.read_bytes()[:1000])
        if match and not os.path.exists(match[1]):
            what = f"starts {os.fsdecode(match[1])}, which is not there: was the checkout moved?"
            yield Finding("programs", str(path), what, "make setup")
    python, own = shutil.which("python"), os.path.dirname(sys.executable)
    if not python or os.path.dirname(python) != own:
        what = (
            f"is {python or 'not found'} in this shell, and `dvc repro` starts stages so; `athanor repro` takes its own"
        )
        folder = ".venv/bin" if own == str(checkout.root / ".venv/bin") else shlex.quote(own)
        yield Finding("programs", "python", what, f". {folder}/activate", note=True)


def experiments(checkout: Checkout) -> Iterator[Finding]:
    """DVC 3.67.1 copies its cache's path and Git's own settings into an experiment's folder by ConfigObj, as ASCII."""
    root, cache, local = checkout.root, cache_folder(checkout.root), checkout.root / ".dvc/config.local"
    if not str(cache).isascii():
        cache = root / ".dvc/cache" if cache == root else cache
        homes = (Path.home() / ".cache", Path("/var/tmp"))
        home = next(home for home in homes if str(home).isascii())
        link = home / f"athanor-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"
        text = local.read_text(encoding="utf-8") if local.is_file() else ""
        own = re.search(r"(?m)^\s*dir\s*=(?!\s*" + re.escape(str(link)) + "$)", text)
        target, name = shlex.quote(str(link)), shlex.quote(str(cache))
        command = (
            f"mkdir -p {shlex.quote(str(home))} && ln -sfn {name} {target} && dvc config --local cache.dir {target}"
        )
        repair = None if own else lambda: _call_by_link(cache, link, local, text)
        what = f"this path is not ASCII: {ASCII_ONLY}"
        yield Finding("experiments", str(cache), what, command if own else FIX, repair)
    for pair in git(root, "config", "--local", "--list", "-z").split("\0"):
        name = pair.partition("\n")[0]
        if not pair.isascii():
            key = shlex.quote(name)
            command = f'git config --global {key} "$(git config {key})" && git config --local --unset-all {key}'
            yield Finding("experiments", f"{name} of .git/config", f"is not ASCII: {ASCII_ONLY}", command)


def _call_by_link(cache: Path, link: Path, config: Path, text: str) -> str:
    """Have DVC reach its cache through a link with an ASCII path. Nothing is moved, and without the link nothing is lost."""
    for folder in (cache, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(cache)
    if str(link) not in text:
        section, line = "[cache]\n", f"    dir = {link}\n"
        head, found, rest = text.partition(section)
        write_text(config, f"{head}{section}{line}{rest}" if found else f"{text}{section}{line}")
    return f"DVC reaches it through {link} (.dvc/config.local)"

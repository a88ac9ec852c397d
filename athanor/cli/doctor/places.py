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

from athanor.base.errors import InputError
from athanor.cli.doctor.main import Checkout, Finding
from athanor.runtime.facts import check_names, git
from athanor.runtime.sharing import cache_folder

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
        what = f"is {python or 'not found'} in this shell, and dvc repro starts stages so; athanor repro takes its own"
        folder = ".venv/bin" if own == str(checkout.root / ".venv/bin") else shlex.quote(own)
        yield Finding("programs", "python", what, f". {folder}/activate", note=True)


def experiments(checkout: Checkout) -> Iterator[Finding]:
    """DVC 3.67.1 copies its cache's path and Git's own settings into an experiment's folder by ConfigObj, as ASCII."""
    root, cache = checkout.root, cache_folder(checkout.root)
    if not str(cache.resolve()).isascii():
        name = f"athanor-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"
        homes = (Path.home() / ".cache", Path("/var/tmp"))
        home = next(home for home in homes if str(home).isascii())
        target, folder = shlex.quote(str(home / name)), shlex.quote(str(home))
        move = (
            f"mkdir -p {folder} && mv {shlex.quote(os.path.relpath(cache, root))} {target} && "
            if cache.is_dir()
            else ""
        )
        command = f"{move}dvc config --local cache.dir {target}"
        yield Finding("experiments", str(cache), f"this path is not ASCII: {ASCII_ONLY}", command)
    for pair in git(root, "config", "--local", "--list", "-z").split("\0"):
        name = pair.partition("\n")[0]
        if not pair.isascii():
            key = shlex.quote(name)
            command = f'git config --global {key} "$(git config {key})" && git config --local --unset-all {key}'
            yield Finding("experiments", f"{name} of .git/config", f"is not ASCII: {ASCII_ONLY}", command)

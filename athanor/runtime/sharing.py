"""Whether an experiment can be pushed with its data: DVC looks for the remote in the experiment's own commit.

One that was made before a remote was committed is pushed without a word as a commit whose data nobody else can get. DVC
also reads a configuration of the user's, and takes that of the checkout for it where a variable says so.
"""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

from athanor.base.artifacts import write_bytes
from athanor.runtime.facts import git

CONFIG = ".dvc/config"
NAME_IT = 'dvc remote add -d store PLACE && git add .dvc/config && git commit -m "DVC remote"'
WITH_DATA = 'DVC_GLOBAL_CONFIG_DIR="$PWD/.dvc"'
EXPERIMENT = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(?P<name>\S+)")


def default_remote(text: str) -> str:
    """The remote that a DVC configuration names as the default, "" for none."""
    config = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        config.read_string(text)
    except configparser.Error:
        return ""
    return config.get("core", "remote", fallback="").strip("\"'")


def users_remote() -> str:
    """The default remote of the user's own configuration, which holds for every commit."""
    from platformdirs import user_config_dir

    path = Path(os.environ.get("DVC_GLOBAL_CONFIG_DIR") or user_config_dir("dvc", "iterative")) / "config"
    return default_remote(path.read_text(encoding="utf-8")) if path.is_file() else ""


def has_remote(root: Path, commit: str) -> bool:
    return bool(default_remote(git(root, "show", f"{commit}:./{CONFIG}")) or users_remote())


def without_data(root: Path) -> list[str]:
    """Names of the experiments that `dvc exp push` would send without their data."""
    listed = git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    found = filter(None, map(EXPERIMENT.fullmatch, listed))
    return sorted({match["name"] for match in found if not has_remote(root, match[0])})


def warning(root: Path, main: Path) -> str:
    """What the first stage says in an experiment from a commit without a remote, once for a commit; "" otherwise."""
    marker, baseline = main / ".athanor" / "no-remote", os.environ.get("DVC_EXP_BASELINE_REV", "")
    said = marker.read_text().split() if marker.is_file() else []
    if not baseline or baseline in said or has_remote(root, baseline):
        return ""
    write_bytes(marker, "\n".join([*said, baseline]).encode())
    return f"the commit of this experiment names no DVC remote: dvc exp push will send it without its data. To share later ones: {NAME_IT}"

"""Whether an experiment can be pushed with its data: DVC looks for the remote in the experiment's own commit.

One that was made before a remote was committed is pushed without a word as a commit whose data nobody else can get. DVC
also reads a configuration of the user's, and takes that of the checkout for it where a variable says so. DVC's settings
are read without DVC, whose import takes a second and which may be broken.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from pathlib import Path

from athanor.base.artifacts import write_bytes
from athanor.runtime import dvc_lock
from athanor.runtime.facts import Graph, git

CONFIG = ".dvc/config"
NAME_IT = 'dvc remote add -d store PLACE && git add .dvc/config && git commit -m "DVC remote"'
EXPERIMENT = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(?P<name>\S+)")


def setting(root: Path, section: str = "core", key: str = "remote", commit: str = "") -> str:
    """What DVC's configurations of the machine, the user and the checkout, or a commit of it, say in this order.

    Of itself the name of the default remote.
    """
    from platformdirs import site_config_dir, user_config_dir

    config = configparser.ConfigParser(strict=False, interpolation=None, inline_comment_prefixes=("#",))
    paths = [
        f"{os.environ.get('DVC_SYSTEM_CONFIG_DIR') or site_config_dir('dvc', 'iterative')}/config",
        f"{os.environ.get('DVC_GLOBAL_CONFIG_DIR') or user_config_dir('dvc', 'iterative')}/config",
    ]
    if not commit:
        paths += [f"{root}/{CONFIG}", f"{root}/{CONFIG}.local"]
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        config.read(paths, encoding="utf-8")
        config.read_string(commit and git(root, "show", f"{commit}:./{CONFIG}"))
    return os.path.expanduser(config.get(section, key, fallback="").strip("\"'"))


def cache_folder(root: Path) -> Path:
    """DVC's cache, which may not exist yet."""
    return root / ".dvc" / (setting(root, "cache", "dir") or "cache")


def lacking(root: Path, rev: str) -> list[str] | None:
    """Outputs of a commit that the default remote does not have; None where that is no folder here, so only DVC can ask.

    Not those that DVC does not keep (`cache: false`).
    """
    url = setting(root, f"'remote \"{setting(root)}\"'", "url").removeprefix("file://")
    if not url or "://" in url:
        return None
    lock = dvc_lock.parsed(git(root, "show", f"{rev}:./dvc.lock").encode()) or {}
    graph = Graph(root)
    return [
        out["path"]
        for stage in graph.stages
        for out in lock.get(stage, {}).get("outs", ())
        if out["path"] not in graph.uncached(stage)
        and (md5 := out.get("md5"))
        and not Path(root, ".dvc", url, "files/md5", md5[:2], md5[2:]).exists()
    ]


def without_data(root: Path) -> list[str]:
    """Names of the experiments that `dvc exp push` would send without their data, and whose data no remote has yet."""
    listed = map(EXPERIMENT.fullmatch, git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split())
    return sorted(
        {row["name"] for row in listed if row and not setting(root, commit=row[0]) and lacking(root, row[0]) != []}
    )


def warning(root: Path, main: Path) -> str:
    """What the first stage says in an experiment from a commit without a remote, once for a commit; "" otherwise."""
    marker, baseline = main / ".athanor" / "no-remote", os.environ.get("DVC_EXP_BASELINE_REV", "")
    said = marker.read_text().split() if marker.is_file() else []
    if not baseline or baseline in said or setting(root, commit=baseline):
        return ""
    write_bytes(marker, "\n".join([*said, baseline]).encode())
    return f"the commit of this experiment names no DVC remote: dvc exp push will send it without its data. To share later ones: {NAME_IT}"

"""Real failures end with the right trouble: what libraries, programs and the kernel say today, not what they once said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.troubles.trouble import search

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "killed_by_the_kernel": "killed-for-memory",
    "crashes": "crashed-in-native-code",
    "aborts": "aborted",
    "instruction_missing": "illegal-instruction",
    "file_cut_short_under_a_map": "bus-error",
    "address_space_used_up": "out-of-memory-in-python",
    "file_too_large": "file-size-limit",
    "too_many_files": "too-many-open-files",
    "disk_full": "disk-full",
    "disk_does_not_read": "disk-does-not-read",
    "read_only": "read-only-file-system",
    "shared_memory_full": "shared-memory-full",
    "database_locked": "database-locked",
    "database_damaged": "database-damaged",
    "port_taken": "port-taken",
    "nobody_at_the_meeting_place": "store-not-reachable",
    "peer_dies": "peer-is-gone",
    "peer_never_comes": "gloo-timed-out",
    "server_port_taken": "port-taken",
    "torch_of_another_chip": "torch-for-the-processor",
    "corrupt_wheel": "damaged-package",
    "no_such_wheel": "no-such-package",
    "weights_are_a_pointer": "weights-not-whole",
    "tokenizer_is_a_pointer": "tokenizer-file-not-whole",
    "hub_switched_off": "hub-offline",
    "name_unknown": "name-not-found",
    "image_of_another_processor": "image-of-another-processor",
    "architecture_of_tomorrow": "architecture-unknown",
    "old_tracking_database": "mlflow-database-older",
    "stage_killed": "killed-for-memory",
    "input_missing": "dependency-missing",
    "output_not_written": "output-not-made",
    "output_in_git": "output-in-git",
    "path_busy": "dvc-path-busy",
    "outside_of_a_checkout": "not-in-a-checkout",
    "git_was_killed": "git-index-locked",
}


@pytest.mark.parametrize("way", EXPECTED)
def test_a_real_failure_is_explained(way: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1", "TMPDIR": str(tmp_path), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.troubles.fail", way],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    if "unavailable" in done.stdout or "unshare:" in done.stdout:
        pytest.skip("this user may not do so here")
    hits = search(done.stdout)
    assert hits and hits[0].trouble.name == EXPECTED[way], done.stdout[-3000:]

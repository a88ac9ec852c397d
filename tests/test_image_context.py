"""What `docker build` sends: the files of the repository, and nothing that a checkout may hold of secrets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECRETS = [
    ".git/config", ".git/credentials", ".dvc/config.local", ".dvc/tmp/creds.json", "machine.yaml", ".env",
    ".env.local", ".envrc", "docs/.env", ".netrc", ".git-credentials", ".pypirc", "docs/.npmrc", "pip.conf",
    ".aws/credentials", ".ssh/id_ed25519", "id_rsa", "docs/id_ecdsa.pub", "server.pem", "tools/tls.key", "store.p12",
    ".config/gcloud/application_default_credentials.json", "gcp-service-account.json", "client_credentials.json",
    ".kube/config", ".cache/huggingface/token", ".huggingface/token", ".hypothesis/examples/x",
    ".athanor/feedback.jsonl", "mlflow.db-wal",
]  # fmt: skip


def context(root: Path) -> set[str]:
    build = pytest.importorskip("docker.utils.build")
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    kept = build.exclude_paths(str(root), [line for line in patterns if line and not line.startswith("#")])
    return {name for name in kept if (root / name).is_file()}


def test_the_context_holds_the_repository_and_no_secret(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[:-1]
    for name in [*tracked, *SECRETS]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    sent = context(tmp_path)
    assert not sent & set(SECRETS)
    # Outputs come from volumes; everything else that Git holds is there, .dvc/config and dvc.lock among it.
    assert set(tracked) - sent <= {"data/README.md", "models/README.md"}

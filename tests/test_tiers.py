"""What `make quick` runs starts no process."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from tests.conftest import TIERS

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]
HEAVY = ("subprocess", "playwright", "make_clone", "toy_pipeline", "guarded_stage", "HTTPServer", "import mlflow")


def test_every_pattern_matches_a_file() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in FILES]
    patterns = [pattern.split("::")[0] for patterns in TIERS.values() for pattern in patterns]
    assert not [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]


def test_a_file_that_starts_processes_is_in_the_table() -> None:
    listed = [pattern.split("::")[0] for patterns in TIERS.values() for pattern in patterns]
    heavy = [path.relative_to(ROOT).as_posix() for path in FILES if any(word in path.read_text() for word in HEAVY)]
    forgotten = [name for name in heavy if not any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)]
    assert not forgotten, "say in tests/tiers.yaml which tests of them are no quick ones"

"""The code stays as small as it is, and the versions of the linters agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools.size import CODE, TESTS, Size, size_of, sizes, total

ROOT = Path(__file__).resolve().parents[1]
SLACK = 1.03
REACHED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]


@pytest.mark.parametrize(("name", "folders"), [("code", CODE), ("tests", TESTS)])
def test_there_is_no_more_of_it(name: str, folders: tuple[str, ...]) -> None:
    tokens = total(sizes(ROOT, folders)).tokens
    assert tokens <= SLACK * REACHED[name], (
        f"make it smaller, or raise tool.size.{name} with a line in CHANGELOG.md that says for what"
    )


def test_files_have_at_most_350_lines_and_stages_150() -> None:
    limits = {"athanor/**/*.py": 350, "tools/**/*.py": 350, "stages/*.py": 150}
    files = [(path, limit) for pattern, limit in limits.items() for path in ROOT.glob(pattern)]
    assert len(files) > 200
    assert not [str(path) for path, limit in files if len(path.read_text(encoding="utf-8").splitlines()) > limit]


def test_layout_comments_and_docstrings_do_not_count() -> None:
    plain = 'def f(a, b):\n    return "x" + a[b]\n'
    dressed = '"""Words."""\n\n\ndef f(\n    a,\n    b,  # why\n):\n    """More\n    words."""\n    # a comment\n    return "x" + a[b]\n'
    assert size_of(plain).tokens == 15 and size_of(dressed) == Size(1, 8, 16)  # a comma more


def test_the_hooks_have_the_versions_of_the_linters() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE))
    hooks = re.findall(r"\[(\w+)==([\d.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in hooks} == {"ruff", "mypy"} and all(pins[name] == version for name, version in hooks)

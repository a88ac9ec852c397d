"""Docs that can fall behind the code are checked against it."""

from __future__ import annotations

import re
from pathlib import Path

from athanor.base.strict import read_yaml
from tools import params_doc

ROOT = Path(__file__).resolve().parents[2]


def test_params_page_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert params_doc.PAGE.read_text() == params_doc.page(), "run python -m tools.params_doc"
    assert "tuple(" not in params_doc.page()  # of choices, what they are, and not how they are written


def test_readme_links_files_that_exist_and_names_every_stage():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    for stage in read_yaml(ROOT / "dvc.yaml")["stages"]:
        assert f"`{stage}`" in text
    for name in re.findall(r"\| `([\w.-]+)` \| [\d.,]+", text):
        assert name in {path.stem for path in (ROOT / "presets").glob("*.yaml")}


def test_ci_calls_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text() and "`make test`" in (ROOT / "README.md").read_text()

"""Code dependencies: what the graph declares is what the code imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.errors import AthanorError
from athanor.pipeline import closure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repo(tmp_path):
    files = {
        "stages/__init__.py": "",
        "stages/train.py": "from athanor.model import net\nfrom athanor.pipeline.run import x\n",
        "athanor/__init__.py": "",
        "athanor/model/__init__.py": "",
        "athanor/model/net.py": "def f():\n    import athanor.model.ops as ops\n",
        "athanor/model/ops.py": "import json\n",
        "athanor/other.py": "",
        "athanor/pipeline/__init__.py": "",
        "athanor/pipeline/run.py": "from athanor import other\n",
        "dvc.yaml": "stages:\n  train:\n    cmd: python -m stages.train  # keep me\n    deps:\n"
        "      - data/x\n      - athanor/other.py\n    outs:\n      - m\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_repository_declares_exactly_its_closure():
    assert closure.compare(ROOT) == []


def test_closure_follows_lazy_imports_and_is_cut_at_pipeline(repo):
    assert closure.closure(repo, "stages.train") == ["athanor/model/net.py", "athanor/model/ops.py", "stages/train.py"]


def test_missing_and_superfluous_are_named_and_fixed_with_comments_kept(repo):
    problems = closure.compare(repo)
    assert "train: missing code dependency athanor/model/ops.py" in problems
    assert "train: superfluous code dependency athanor/other.py" in problems
    closure.compare(repo, fix=True)
    assert closure.compare(repo) == []
    text = (repo / "dvc.yaml").read_text()
    assert "# keep me" in text and "data/x" in text


def test_dynamic_import_is_refused(repo):
    (repo / "athanor/model/ops.py").write_text("import importlib\nimportlib.import_module('athanor.other')\n")
    with pytest.raises(AthanorError, match="dynamic import"):
        closure.closure(repo, "stages.train")


def test_digest_ignores_comments_and_docstrings_but_not_code(repo):
    path = repo / "athanor/model/ops.py"
    before = closure.code_digest(repo, "stages.train")
    path.write_text('"""Doc."""\nimport json  # why\n')
    assert closure.code_digest(repo, "stages.train") == before
    path.write_text("import json\nx = 1\n")
    assert closure.code_digest(repo, "stages.train") != before


def test_nothing_that_makes_outputs_imports_the_pipeline():
    for path in sorted((ROOT / "athanor").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.startswith(("athanor.pipeline", "athanor.commands", "athanor.serving", "athanor.__main__")):
            continue
        assert "athanor.pipeline" not in path.read_text(), path


def test_training_core_needs_only_torch_and_numpy():
    import ast
    import sys

    allowed = set(sys.stdlib_module_names) | {"torch", "numpy"}
    inside = ("athanor.model", "athanor.training", "athanor.data", "athanor.errors", "athanor.artifacts")
    for folder in ("model", "training", "data"):
        for path in sorted((ROOT / "athanor" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.startswith(inside) or name.split(".")[0] in allowed, f"{path} imports {name}"

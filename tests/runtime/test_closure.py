"""Code dependencies: what the graph declares is what the code imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.runtime import closure
from athanor.runtime.headlines import HEADLINES, headlines
from tests.runtime.view import ROOT


@pytest.fixture
def repo(tmp_path):
    files = {
        "stages/__init__.py": "",
        "stages/train.py": "from athanor.model import net\nfrom athanor.runtime.run import x\n",
        "athanor/__init__.py": "",
        "athanor/model/__init__.py": "",
        "athanor/model/net.py": "def f():\n    import athanor.model.ops as ops\n",
        "athanor/model/ops.py": "import json\n",
        "athanor/other.py": "",
        "athanor/runtime/__init__.py": "",
        "athanor/runtime/run.py": "from athanor import other\n",
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


def test_what_a_module_compiles_is_its_code(repo):
    before = closure.code_digest(repo, "stages.train")
    (repo / "athanor/model/ops.c").write_text("int one;")
    digests = [closure.code_digest(repo, "stages.train")]
    assert "athanor/model/ops.c" in closure.closure(repo, "stages.train")
    (repo / "athanor/model/ops.c").write_text("int two;")
    assert len({before, *digests, closure.code_digest(repo, "stages.train")}) == 3


def test_missing_and_superfluous_are_named_and_fixed_with_comments_kept(repo):
    problems = closure.compare(repo)
    assert "train: missing code dependency athanor/model" in problems
    assert "train: superfluous code dependency athanor/other.py" in problems
    closure.compare(repo, fix=True)
    assert closure.compare(repo) == []
    text = (repo / "dvc.yaml").read_text()
    assert "# keep me" in text and read_yaml(repo / "dvc.yaml")["stages"]["train"]["deps"] == [
        "data/x",
        "athanor/model",
        "stages/train.py",
    ]


def test_a_file_that_no_stage_of_its_folder_uses_is_named(repo):
    closure.compare(repo, fix=True)
    (repo / "athanor/model/viewer.py").write_text("x = 1\n")
    assert closure.compare(repo, fix=True) == [
        "athanor/model: no stage that depends on it uses athanor/model/viewer.py"
    ]


def test_a_stage_may_name_files_of_a_folder_instead(repo):
    graph = (repo / "dvc.yaml").read_text()
    (repo / "dvc.yaml").write_text(
        graph.replace("athanor/other.py", "athanor/model/net.py\n      - athanor/model/ops.py")
    )
    (repo / "athanor/model/viewer.py").write_text("x = 1\n")
    assert closure.compare(repo) == ["train: missing code dependency stages/train.py"]


def test_stages_depend_on_few_folders():
    """Seven in the pipeline; the side stages span what several of its stages do: grpo trains, answers and scores."""
    for path in closure.graphs(ROOT):
        most = 7 if path.name == "dvc.yaml" else 11
        for name, stage in read_yaml(path)["stages"].items():
            assert len([dep for dep in stage["deps"] if closure.is_code(dep)]) <= most, name


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
        if module.startswith(
            (
                "athanor.runtime",
                "athanor.sizing",
                "athanor.origins",
                "athanor.cli",
                "athanor.catalog",
                "athanor.serving",
                "athanor.__main__",
            )
        ):
            continue
        assert "athanor.runtime" not in path.read_text(), path


def test_what_stages_take_from_the_pipeline_is_made_there():
    """Library code imported by way of a pipeline module would escape the closure, which is cut there."""
    taken = 0
    for path in sorted((ROOT / "stages").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(closure.CUT):
                source = ast.parse(closure.module_path(ROOT, node.module).read_text())
                imports = [item for item in ast.walk(source) if isinstance(item, (ast.Import, ast.ImportFrom))]
                passed_on = {alias.asname or alias.name for item in imports for alias in item.names}
                for alias in node.names:
                    assert alias.name not in passed_on, f"{path} imports {alias.name} by way of {node.module}"
                    taken += 1
    assert taken > 8


def test_code_in_an_empty_package_file_is_named_as_missing(repo):
    """Empty files are no dependencies; the first line of code in one makes the graph wrong and not the cache."""
    closure.compare(repo, fix=True)
    (repo / "athanor/__init__.py").write_text("X = 1\n")
    (repo / "athanor/model/__init__.py").write_text("X = 1\n")
    assert closure.compare(repo) == ["train: missing code dependency athanor/__init__.py"]
    assert "athanor/model/__init__.py" in closure.closure(repo, "stages.train")


GRAPH = """
stages:
  make:
    cmd: python -m stages.train
    meta:
      terminal: [report]
    deps: [athanor/model/net.py, corpus]
    outs: [metrics/make.json, plots/make.tsv, whole, part, report]
    metrics: [metrics/summary/make.json: {cache: false}]
  use:
    cmd: python -m stages.tune
    deps: [whole, part/manifest.json]
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", None),
        ("    deps: [whole, part/manifest.json]", "    deps: [part/manifest.json]", "make: whole has no consumer"),
        ("part/manifest.json", "parts/manifest.json", "make: part has no consumer"),
        ("terminal: [report]", "terminal: []", "make: report has no consumer"),
        ("terminal: [report]", "terminal: [report, whole]", "make: whole is declared terminal and has a consumer"),
        ("terminal: [report]", "terminal: [report, part]", "make: part is declared terminal and has a consumer"),
        ("terminal: [report]", "terminal: [report, gone]", "make: gone is declared terminal and is no output"),
        ("whole, part, report]", "whole: {persist: true}, part, report]", "make: whole persists"),
        ("make.json: {cache: false}", "make.json: {persist: true}", "make: metrics/summary/make.json persists"),
        ("whole, part, report]", "whole: {cache: false}, part, report]", "make: whole is an uncached output"),
        ("outs: [metrics", 'outs: ["${name}", metrics', "stages.make.outs: ${} hides a parameter"),
        ("  use:", '  "use${x}":', "stages: ${} hides a parameter"),
        ("stages:", "vars: [{x: 1}]\nstages:", "vars: templating hides a parameter"),
        ("  use:\n", "  use:\n    matrix: {a: [1]}\n", "use: matrix hides stages"),
        ("python -m stages.tune", "python use.py", "use: command is 'python use.py'"),
        ("stages.train\n    meta", "stages.train --fast\n    meta", "make: command is 'python -m stages.train --fast'"),
        ("athanor/model/net.py", "athanor", "make: depends on all code, athanor"),
        ("athanor/model/net.py", "./stages", "make: depends on all code, ./stages"),
        ("athanor/model/net.py", ".", "make: depends on all code, ."),
    ],
)
def test_rules_of_the_graph(tmp_path, old, new, problem):
    assert GRAPH.count(old) == 1 or not old
    (tmp_path / "dvc.yaml").write_text(GRAPH.replace(old, new) if old else GRAPH)
    found = closure.problems(tmp_path)
    if problem is None:
        assert found == []
    else:
        assert any(line.startswith(problem) for line in found), found
        assert all("Fix: " in line for line in found)


def test_dvc_has_six_metrics_and_none_is_called_like_a_dependency():
    """`battery` was: DVC then puts the folder's hash into the metric's column of `dvc exp show`."""
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    found = {
        name: [path for path, _ in closure.entries(stage["metrics"])]
        for name, stage in stages.items()
        if "metrics" in stage
    }
    assert found == {name: [f"metrics/summary/{name}.json"] for name in HEADLINES}
    others = {*read_yaml(ROOT / "params.yaml"), *(dep for stage in stages.values() for dep in stage["deps"])}
    assert not others & {short for names in HEADLINES.values() for short in names}
    assert headlines("pretrain", {"parameters": 3}) == {"parameters": 3} and headlines("clean", {"loss": 1}) == {}


def test_side_stages_are_checked_and_mended_in_their_own_file(repo):
    """A file that DVC does not see by its name, so that nothing else would notice a missing dependency."""
    closure.compare(repo, fix=True)
    main = (repo / "dvc.yaml").read_text()
    side = repo / "probes" / "lr.yaml"
    side.parent.mkdir()
    side.write_text(
        "stages:\n  side:\n    wdir: ..  # keep me\n    cmd: python -m stages.train\n    deps:\n      - m\n"
    )
    assert "side: missing code dependency athanor/model" in closure.compare(repo)
    (repo / "probes" / "dvc.yaml").write_text("a copy while it runs")
    closure.compare(repo, fix=True)
    assert closure.compare(repo) == [] and (repo / "dvc.yaml").read_text() == main
    assert "# keep me" in side.read_text() and "      - m\n" in side.read_text()
    found = closure.problems(repo)
    assert found == ["train: m has no consumer. Fix: remove the output, or name it in meta: {terminal: [m]}"]
    side.write_text(side.read_text().replace("wdir: ..", "wdir: .").replace("- m\n", "- athanor\n"))
    found = [line for line in closure.problems(repo) if line.startswith("probes/lr.yaml: side: ")]
    assert len(found) == 2 and "works in ." in found[1] and "all code, athanor" in found[0]


def test_repository_keeps_the_rules_of_the_graph():
    assert closure.problems(ROOT) == []


def test_deps_command_shows_broken_rules_and_does_not_claim_to_fix_them(repo):
    command = [sys.executable, "-m", "athanor", "deps", "--fix"]
    run = {"cwd": repo, "capture_output": True, "text": True, "timeout": 60}
    # -P: the directory with the graph holds a package of the same name.
    command[1:1] = ["-P"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, **run, env=env)
    assert done.returncode == 1 and done.stdout.startswith("train: m has no consumer. Fix: "), done
    path = repo / "dvc.yaml"
    path.write_text(path.read_text() + "    meta: {terminal: [m]}\n")
    done = subprocess.run(command, **run, env=env)
    assert done.returncode == 0 and "fixed: train: missing code dependency stages/train.py" in done.stdout, done
    assert subprocess.run(command[:-1], **run, env=env).returncode == 0


def test_training_core_needs_only_torch_and_numpy():
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy"}
    inside = ("athanor.model", "athanor.training", "athanor.data", "athanor.base")
    core = [
        path for folder in ("model", "training", "data") for path in sorted((ROOT / "athanor" / folder).glob("*.py"))
    ]
    for path in core:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith(inside) or name.split(".")[0] in allowed, f"{path} imports {name}"

"""Edits that change nothing are accepted, all others refused; a real pipeline of two stages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from athanor.base.errors import InputError
from athanor.cli.accept import accept
from athanor.cli.plan.main import make_plan
from athanor.runtime import presets
from tests.cli import toy_pipeline as toy
from tests.e2e.clone import environment

ROOT = Path(__file__).resolve().parents[2]
HELPER = '"""What both stages use."""\n\n\ndef shout(text: str) -> str:\n    return text.upper()\n'
STAGE = '''"""A stage."""

from pathlib import Path

from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages.helper import shout


def run(run: Run) -> None:
    Path("NAME.txt").write_text(shout(Path("INPUT").read_text()) + str(run._values["eval"]["seed"]))
    run.metrics({"size": Path("NAME.txt").stat().st_size})


if __name__ == "__main__":
    stage_main("NAME", run)
'''
QUIET = {"PYTHONPATH": str(ROOT), "ATHANOR_TRACKING": "off"}
INPUTS = {"one": "source.txt", "two": "one.txt"}


def graph(**more: dict[str, object]) -> str:
    stages = {
        name: {
            "cmd": f"python -m stages.{name}",
            "deps": [source, "stages/helper.py", f"stages/{name}.py"],
            "params": ["eval"],
            "outs": [f"{name}.txt"],
            "metrics": [{f"metrics/{path}{name}.json": {"cache": False}} for path in ("", "runs/")],
            **more.get(name, {}),
        }
        for name, source in INPUTS.items()
    }
    return json.dumps({"stages": stages})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accept") / "repo"
    (path / "stages").mkdir(parents=True)
    (path / "stages" / "__init__.py").touch()
    (path / "stages" / "helper.py").write_text(HELPER)
    for name, source in INPUTS.items():
        (path / "stages" / f"{name}.py").write_text(STAGE.replace("NAME", name).replace("INPUT", source))
    (path / "source.txt").write_text("text")
    (path / "params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"))
    (path / "dvc.yaml").write_text(graph())
    dvc = [sys.executable, "-m", "dvc"]
    for command in (["git", "init", "-q"], [*dvc, "init", "-q"], [*dvc, "repro", "-q"]):
        subprocess.run(command, cwd=path, env=environment(**QUIET), check=True)
    return path


@pytest.fixture
def repo(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(built, tmp_path / "repo", symlinks=True)
    monkeypatch.chdir(tmp_path / "repo")
    for name, value in environment(**QUIET).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "repo"


def comment(path: Path, file: str) -> None:
    target = path / file
    target.write_text("# a remark\n\n" + target.read_text().replace('"""A stage."""', '"""Quite a stage."""'))


def change(path: Path, file: str, old: str, new: str) -> None:
    text = (path / file).read_text()
    assert old in text
    (path / file).write_text(text.replace(old, new, 1))


def test_comments_and_docstrings_are_accepted_and_nothing_runs(repo):
    comment(repo, "stages/two.py")
    change(repo, "stages/helper.py", "What both", "All that both")
    outputs = {name: (repo / name).stat().st_mtime_ns for name in ("one.txt", "two.txt", "metrics/runs/two.json")}
    plan = make_plan(repo)
    assert [step.action for step in plan.steps] == [
        "run",
        "run",
    ] and "code of one, two differs in comments" in plan.notes[0]
    one, two = accept(repo)
    assert (one.files, one.refusal) == (("stages/helper.py",), "")
    assert (set(two.files), two.refusal) == ({"stages/helper.py", "stages/two.py"}, "")
    assert not make_plan(repo).work and toy.repro(repo) == {"one": "keep", "two": "keep"}
    assert outputs == {name: (repo / name).stat().st_mtime_ns for name in outputs}


def test_after_it_other_parameters_and_back_are_restored_on_either_side_of_the_edit(repo):
    before = (repo / "stages" / "helper.py").read_text()
    comment(repo, "stages/helper.py")
    accept(repo)
    change(repo, "params.yaml", "eval:\n  seed: 1", "eval:\n  seed: 2")
    assert toy.repro(repo) == {"one": "run", "two": "run"}
    change(repo, "params.yaml", "eval:\n  seed: 2", "eval:\n  seed: 1")
    assert toy.repro(repo) == {"one": "restore", "two": "restore"}
    (repo / "stages" / "helper.py").write_text(before)
    assert toy.repro(repo) == {"one": "restore", "two": "restore"}


def refused(repo: Path, *names: str) -> dict[str, str]:
    """Stage to refusal, having checked that nothing was changed."""
    before = toy.snapshot(repo)
    verdicts = {verdict.stage: verdict.refusal for verdict in accept(repo, names)}
    assert toy.snapshot(repo) == before
    return verdicts


def test_code_that_does_something_else_is_refused_by_name(repo):
    change(repo, "stages/helper.py", "upper", "lower")
    assert not make_plan(repo).notes
    verdicts = refused(repo)
    assert set(verdicts) == {"one", "two"} and all("stages/helper.py" in text for text in verdicts.values())


def test_each_stage_is_judged_alone(repo):
    comment(repo, "stages/one.py")
    change(repo, "stages/two.py", "str(run", "repr(run")
    verdicts = {verdict.stage: verdict.refusal for verdict in accept(repo)}
    assert not verdicts["one"] and "stages/two.py" in verdicts["two"]
    assert [step.action for step in make_plan(repo).steps] == ["keep", "run"]


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("params.yaml", "eval:\n  seed: 1", "eval:\n  seed: 2", "parameter eval.seed: 1 -> 2"),
        ("source.txt", "text", "other", "file source.txt changed"),
        ("one.txt", "TEXT", "HELD", "output one.txt was modified"),
        ("metrics/runs/one.json", '"seconds"', '"hours"', "output metrics/runs/one.json was modified"),
        ("dvc.yaml", "stages.one", "stages.one ", "command:"),
    ],
)
def test_any_other_difference_is_refused_and_told(repo, file, old, new, told):
    """`dvc commit` would record a modified output as the stage's result."""
    comment(repo, "stages/one.py")
    (repo / file).chmod(0o644)
    text = (repo / file).read_text()
    (repo / file).unlink()
    (repo / file).write_text(text.replace(old, new, 1))
    assert told in refused(repo)["one"]


def test_missing_outputs_and_objects_are_refused(repo):
    comment(repo, "stages/one.py")
    (repo / "one.txt").unlink()
    assert "output one.txt is missing" in refused(repo)["one"]
    toy.repro(repo)
    comment(repo, "stages/one.py")
    shutil.rmtree(repo / ".dvc" / "cache" / "files")
    assert "output one.txt is not in the cache" in refused(repo)["one"]


def test_a_python_file_that_is_no_part_of_the_code_is_refused(repo):
    (repo / "table.py").write_text("ROWS = 1\n")
    (repo / "dvc.yaml").write_text(graph(one={"deps": ["source.txt", "stages/helper.py", "stages/one.py", "table.py"]}))
    assert "table.py" in refused(repo, "one")["one"]


def test_a_result_without_a_digest_is_refused(repo):
    path = repo / "metrics" / "runs" / "one.json"
    facts = json.loads(path.read_text())
    del facts["code"]
    path.unlink()
    path.write_text(json.dumps(facts))
    subprocess.run([sys.executable, "-m", "dvc", "commit", "-q", "-f", "one"], cwd=repo, check=True)
    comment(repo, "stages/one.py")
    assert "no digest of the code" in refused(repo)["one"]


def test_code_that_cannot_be_parsed_is_refused(repo):
    change(repo, "stages/one.py", "def run(", "def run((")
    assert "stages/one.py cannot be parsed" in refused(repo)["one"]


def test_stages_without_changed_code(repo):
    assert accept(repo) == []
    change(repo, "params.yaml", "eval:\n  seed: 1", "eval:\n  seed: 2")
    assert refused(repo) == {}
    assert "parameter eval.seed" in refused(repo, "two")["two"]
    with pytest.raises(InputError, match="no stage 'three'"):
        accept(repo, ["three"])


def test_the_command_exits_1_when_a_stage_is_refused(repo):
    comment(repo, "stages/one.py")
    change(repo, "stages/two.py", "str(run", "repr(run")
    command = [sys.executable, "-m", "athanor", "accept"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout.splitlines() == ["one: accepted stages/one.py"]
    assert done.stderr.startswith("two: refused") and len(done.stderr.splitlines()) == 1
    done = subprocess.run([*command, "one"], cwd=repo, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "one: nothing to accept\n")


def test_a_stage_at_work_is_not_accepted(repo):
    """Its outputs are gone while it runs: there is nothing that could be accepted."""
    wait = "while not Path('go').exists():\n        time.sleep(0.05)\n    "
    change(repo, "stages/two.py", "from pathlib", "import time\nfrom pathlib")
    change(repo, "stages/two.py", 'Path("two.txt")', f"Path('begun').touch()\n    {wait}Path(\"two.txt\")")
    child = subprocess.Popen([sys.executable, "-m", "dvc", "repro", "-q"], cwd=repo)
    try:
        deadline = time.monotonic() + 120
        while not (repo / "begun").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        comment(repo, "stages/two.py")
        (verdict,) = accept(repo)
        assert "output two.txt is missing" in verdict.refusal
    finally:
        (repo / "go").touch()
        child.wait(timeout=120)
    assert child.returncode == 0

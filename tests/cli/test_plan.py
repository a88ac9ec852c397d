"""What plan says, compared with what a real `dvc repro` then does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from athanor.base.errors import AthanorError
from athanor.cli.plan.data_path import DataPath
from athanor.cli.plan.forecast import Forecast
from athanor.cli.plan.main import Plan, as_json, as_text, make_plan
from athanor.cli.plan.simulate import FOLLOWS, RUN, Step
from athanor.runtime import presets
from athanor.sources.datapath import Host, first_limit, needs
from tests.cli import toy_pipeline as toy
from tests.e2e.clone import environment

ROOT = Path(__file__).resolve().parents[2]
ENV = environment(PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built at value 1, 2 and 1 again: the run-cache knows both, the lock the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ENV["PATH"])
        path = toy.make(tmp_path_factory.mktemp("toy") / "repo")
        patch.chdir(path)
        assert toy.repro(path) == dict.fromkeys("abc", "run")
        toy.set_param(path, "c.value", 2)
        assert toy.repro(path)["c"] == "run"
        toy.set_param(path, "c.value", 1)
        assert toy.repro(path)["c"] == "restore"
    return path


@pytest.fixture
def repo(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(built, tmp_path / "repo", symlinks=True)
    monkeypatch.chdir(tmp_path / "repo")
    monkeypatch.setenv("PATH", ENV["PATH"])
    return tmp_path / "repo"


def objects(path: Path) -> Path:
    return path / ".dvc" / "cache" / "files" / "md5"


def object_of(path: Path, file: str) -> Path:
    """The cache object that a file of an output has."""
    import hashlib

    digest = hashlib.md5((path / file).read_bytes()).hexdigest()
    return objects(path) / digest[:2] / digest[2:]


def other_and_back(path: Path) -> None:
    toy.set_param(path, "a.value", 7)
    assert toy.repro(path) == dict.fromkeys("abc", "run")
    toy.set_param(path, "a.value", 1)


def other_and_back_without_object(path: Path) -> None:
    victim = object_of(path, "b/main.txt")
    other_and_back(path)
    victim.unlink()


def damage(path: Path) -> None:
    """A cache object with other bytes than its name says, writable as after a copy without modes."""
    victim = object_of(path, "b/main.txt")
    victim.unlink()
    victim.write_text("damaged")
    victim.chmod(0o644)


def same_bytes_and_back(path: Path) -> None:
    """b comes out with its old bytes, c has a result for them, but no one can know before b has run."""
    toy.set_param(path, "b.value", 11)
    toy.set_param(path, "c.value", 2)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "keep keep keep"),
    "parameter of the last": (lambda path: toy.set_param(path, "c.value", 3), "keep keep run"),
    "parameter of the last, known": (lambda path: toy.set_param(path, "c.value", 2), "keep keep restore"),
    "parameter of the first": (lambda path: toy.set_param(path, "a.value", 4), "run follows follows"),
    "parameter with the same result": (lambda path: toy.set_param(path, "a.value", 11), "run follows follows"),
    "parameters of first and last": (
        lambda path: (toy.set_param(path, "a.value", 4), toy.set_param(path, "c.value", 3)),
        "run follows run",
    ),
    "a known result behind a run": (same_bytes_and_back, "keep run follows"),
    "an empty list that is no longer empty": (lambda path: toy.set_param(path, "b.more", [0]), "keep run follows"),
    "other parameters and back": (other_and_back, "restore restore restore"),
    "back, without an object": (other_and_back_without_object, "restore run follows"),
    "code": (lambda path: (path / "b.py").write_text(toy.STAGE + "# more\n"), "keep run follows"),
    "source": (lambda path: (path / "source.txt").write_text("t"), "run follows follows"),
    "output missing": (lambda path: shutil.rmtree(path / "b"), "keep restore keep"),
    "metric missing": (lambda path: (path / "a.json").unlink(), "restore keep keep"),
    "output modified": (lambda path: (path / "a/extra").write_text("x"), "restore keep keep"),
    "object missing": (lambda path: object_of(path, "b/main.txt").unlink(), "keep run follows"),
    "object damaged": (damage, "keep run follows"),
    "output and cache missing": (
        lambda path: (shutil.rmtree(path / "b"), shutil.rmtree(objects(path))),
        "run run run",
    ),
    "lock missing": (lambda path: (path / "dvc.lock").unlink(), "restore restore restore"),
    "lock and run-cache missing": (
        lambda path: ((path / "dvc.lock").unlink(), shutil.rmtree(path / ".dvc/cache/runs")),
        "run run run",
    ),
    "run-cache damaged": (
        lambda path: (
            [file.write_text("{") for file in (path / ".dvc/cache/runs").glob("*/*/*")],
            toy.set_param(path, "c.value", 2),
        ),
        "keep keep run",
    ),
    "command": (
        lambda path: (path / "dvc.yaml").write_text(toy.graph(b={"cmd": "python -X utf8 b.py b a/main.txt"})),
        "keep run follows",
    ),
    "one more dependency": (
        lambda path: (path / "dvc.yaml").write_text(toy.graph(c={"deps": [*toy.COMMANDS["c"][0], "source.txt"]})),
        "keep keep run",
    ),
    "one output less": (lambda path: (path / "dvc.yaml").write_text(toy.graph(c={"metrics": []})), "keep keep keep"),
    "frozen in the middle": (
        lambda path: (
            (path / "dvc.yaml").write_text(toy.graph(b={"frozen": True})),
            toy.set_param(path, "b.value", 5),
            toy.set_param(path, "a.value", 5),
        ),
        "run keep follows",
    ),
    "runs every time": (
        lambda path: (path / "dvc.yaml").write_text(toy.graph(b={"always_changed": True})),
        "keep run follows",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan_says_what_repro_does(repo, case):
    change, expected = CASES[case]
    change(repo)
    before = toy.snapshot(repo)
    plan = make_plan(repo)
    assert toy.snapshot(repo) == before
    told = {step.stage: step.action for step in plan.steps}
    assert " ".join(told[name] for name in "abc") == expected
    did = toy.repro(repo)
    for name, action in told.items():
        assert action == "follows" or did.get(name, "keep") == action, (told, did)
    assert plan.work == any(action != "keep" for action in told.values())
    if case not in ("runs every time", "one output less"):
        again = make_plan(repo)
        assert not again.work and "Nothing to do" in as_text(again)


def test_reasons_name_what_changed(repo, monkeypatch):
    toy.set_param(repo, "a.value", 4)
    toy.set_param(repo, "b.more", [7])
    (repo / "c.py").write_text("changed")
    (repo / "dvc.yaml").write_text(toy.graph(b={"cmd": "python b.py b  a/main.txt"}))
    text = as_text(make_plan(repo))
    assert "parameter a.value: 1 -> 4" in text and "parameter b.more.0: (absent) -> 7" in text
    assert "code changed: c.py" in text and "command: python b.py b a/main.txt -> python b.py b  a/main.txt" in text
    assert "made anew before it: b/part.txt, a/main.txt, a.json" in text
    assert "3 run" in text.splitlines()[-1] and "no past run" in text
    toy.set_param(repo, "a.value", "long " * 40)
    monkeypatch.setattr("athanor.cli.plan.simulate._short_value", str)
    assert max(map(len, as_text(make_plan(repo)).splitlines())) <= 100


def test_a_stage_that_never_ran_is_marked(tmp_path, monkeypatch):
    path = toy.make(tmp_path / "repo")
    monkeypatch.chdir(path)
    whole = json.loads(as_json(make_plan(path)))
    assert [stage["first_run"] for stage in whole["stages"]] == [True] * 3
    assert [stage["action"] for stage in whole["stages"]] == ["run"] * 3
    assert whole["total"]["run"] == 3 and not whole["total"]["seconds_known"]


def test_the_total_is_a_range_when_stages_may_turn_out_to_be_kept():
    steps = [
        Step(stage, action, False, (), (), {}, {}, "python x.py", None)
        for stage, action in (("clean", RUN), ("shard", FOLLOWS), ("sft", FOLLOWS))
    ]
    told = {"clean": Forecast(4.0, None, 1, None, None), "shard": Forecast(10.0, 0.2, 3, None, None, input_known=False)}
    plan = Plan(steps, {**told, "sft": Forecast(60.0, 0.1, 2, None, None)}, [], 1 << 40)
    lines = as_text(plan).splitlines()
    assert "4.0 s to 1 min 14 s" in next(line for line in lines if line.startswith("total"))
    assert "10.0 s (expected)" in lines[2] and "1 min 00 s ±10% of 2" in lines[3] and "(expected): " in lines[-1]
    assert plan.total()["seconds_certain"] == 4.0 and plan.total()["seconds"] == 74.0
    sure = Plan(steps[:1], told, [], 1 << 40)
    assert " to " not in next(line for line in as_text(sure).splitlines() if line.startswith("total"))


def test_the_data_path_is_a_table_with_its_first_limit():
    step = Step("clean", RUN, False, (), (), {}, {}, "python x.py", None)
    host = Host(2, "processes", 20e9, 1e12, 1e4, None, 1e12)
    needed = needs({"web": 2e9}, download_disk=8e8)
    path = DataPath(2e9, needed, first_limit(needed, host), 2)
    text = as_text(Plan([step], {}, [], 1 << 40, path))
    assert "data path: 2.0 GB of text, 2 workers" in text and "nothing is in the way; nearest: shard needs" in text
    (row,) = (line for line in text.splitlines() if line.startswith("clean  ") and "GB" in line)
    assert row.split()[1:4] == ["504", "0.3", "GB"] and "11 min 39 s  5 min 50 s" in row
    tight = replace(path, limit=first_limit(needed, replace(host, disk=3e9)))
    assert "the first limit: clean needs 4.1 GB (disk), 3.0 GB are free. Fix: free" in as_text(
        Plan([step], {}, [], 1 << 40, tight)
    )
    whole = json.loads(as_json(Plan([step], {}, [], 1 << 40, tight)))["data_path"]
    assert whole["limit"]["met"] and [row["stage"] for row in whole["stages"]][2] == "clean"
    assert "data path" not in as_text(Plan([step], {}, [], 1 << 40, replace(path, text_bytes=1e6)))


ONE = '''"""A stage."""

from pathlib import Path

from athanor.runtime.process import stage_main
from athanor.runtime.run import Run


def run(run: Run) -> None:
    Path("one.txt").write_text("1")


if __name__ == "__main__":
    stage_main("one", run)
'''


def test_results_may_be_kept_when_no_statement_differs(tmp_path, monkeypatch):
    deps, leaf = ["stages/one.py", "table.py"], {"metrics/runs/one.json": {"cache": False}}
    stage = {"cmd": "python -m stages.one", "deps": deps, "params": ["eval"], "outs": ["one.txt"], "metrics": [leaf]}
    files = {
        "stages/__init__.py": "",
        "stages/one.py": ONE,
        "table.py": "ROWS = 1\n",
        "params.yaml": presets.complete(ROOT / "presets" / "micro.yaml"),
        "dvc.yaml": json.dumps({"stages": {"one": stage}}),
    }

    def write(**more: str) -> None:
        for name, text in {**files, **more}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).unlink(missing_ok=True)  # outputs are read-only
            (tmp_path / name).write_text(text)

    monkeypatch.chdir(tmp_path)
    for name, value in {**ENV, "ATHANOR_TRACKING": "off"}.items():
        monkeypatch.setenv(name, value)
    dvc = [sys.executable, "-m", "dvc"]
    write()
    for command in (["git", "init", "-q"], [*dvc, "init", "-q"], [*dvc, "repro", "-q"]):
        subprocess.run(command, check=True)
    comment = {"stages/one.py": "# a remark\n" + ONE.replace("A stage", "Quite a stage")}
    params = files["params.yaml"].replace("eval:\n  seed: 1", "eval:\n  seed: 2")
    for more in (
        {"stages/one.py": ONE.replace('"1"', '"2"')},
        {"table.py": "ROWS = 2\n"},
        {"params.yaml": params},
        {"one.txt": "2"},
    ):
        write(**{**comment, **more})
        assert make_plan(tmp_path).work and not any("dvc commit" in note for note in make_plan(tmp_path).notes), more
    write(**comment, **{"one.txt": "1"})
    assert "dvc commit -f one" in as_text(make_plan(tmp_path))
    subprocess.run([*dvc, "commit", "-q", "-f", "one"], check=True)
    assert not make_plan(tmp_path).work
    write(**comment, **{"params.yaml": params})
    assert toy.repro(tmp_path) == {"one": "run"}
    write(**comment)
    assert toy.repro(tmp_path) == {"one": "restore"}


def test_a_missing_source_is_told(repo):
    (repo / "source.txt").unlink()
    step = make_plan(repo).steps[0]
    assert step.action == "run" and "source.txt does not exist" in step.note
    with pytest.raises(Exception, match="failed to reproduce"):
        toy.repro(repo)


def test_data_tracked_by_a_dvc_file(repo):
    from dvc.repo import Repo

    Repo(str(repo)).add(["source.txt"])
    assert not make_plan(repo).work
    (repo / "source.txt").unlink()
    (repo / "source.txt").write_text("t")
    told = {step.stage: step.action for step in make_plan(repo).steps}
    assert told == {"source.txt.dvc": "run", "a": "run", "b": "follows", "c": "follows"}
    assert toy.repro(repo) == dict.fromkeys("abc", "run") and not make_plan(repo).work


def test_a_graph_that_cannot_be_read_is_one_line(repo):
    (repo / "dvc.yaml").write_text("stages: [")
    done = run_plan(repo)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "dvc.yaml" in done.stderr


def test_targets_are_those_of_repro(repo):
    toy.set_param(repo, "c.value", 3)
    assert [step.stage for step in make_plan(repo, ["b"]).steps] == ["a", "b"]
    with pytest.raises(AthanorError, match="nosuch"):
        make_plan(repo, ["nosuch"])


def run_plan(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "athanor", "plan", *words]
    return subprocess.run(command, cwd=path, env=ENV, capture_output=True, text=True, timeout=300)


def test_exit_status_and_json(repo, tmp_path):
    done = run_plan(repo)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 1
    toy.set_param(repo, "c.value", 3)
    done = run_plan(repo, "--json")
    whole = json.loads(done.stdout)
    assert done.returncode == 10 and whole["version"] == 1 and whole["work"]
    stage = whole["stages"][2]
    assert stage["changes"] == [{"kind": "parameter", "name": "c.value", "what": "changed", "old": 1, "new": 3}]
    assert stage["forecast"]["seconds"] is None and stage["forecast"]["runs"] == 0
    outside = tmp_path / "outside"
    outside.mkdir()
    done = run_plan(outside)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_a_mistake_in_params_is_one_line(repo):
    """For a graph of this project's stages params.yaml is checked whole, as the first stage would do it."""
    (repo / "dvc.yaml").write_text(toy.graph(a={"cmd": "python -m stages.a"}))
    text = presets.complete(ROOT / "presets" / "micro.yaml")
    (repo / "params.yaml").write_text(text.replace("batch_tokens: 2048", "batch_token: 2048", 1))
    done = run_plan(repo)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "batch_token" in done.stderr


def test_plan_works_while_repro_runs(repo):
    """DVC holds its locks for the stage at work; a plan takes none and says who is there."""
    wait = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
    (repo / "b.py").write_text("open('begun', 'w').close()\n" + wait + toy.STAGE)
    command = [sys.executable, "-m", "dvc", "repro", "-q"]
    child = subprocess.Popen(command, cwd=repo, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (repo / "begun").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        plan = make_plan(repo)
        assert [step.action for step in plan.steps] == ["keep", "run", "follows"]
        assert any(str(child.pid) in note for note in plan.notes)
    finally:
        (repo / "go").touch()
        output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    assert make_plan(repo).notes == [] and not make_plan(repo).work

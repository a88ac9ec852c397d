"""athanor compare on a small repository with real experiments."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.base.artifacts import write_text
from athanor.cli.compare import Side, _behind, _held_out_rows, compare_values, first_rows, judged
from tests.e2e.clone import Clone, commit

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """
stages:
  sft:
    cmd: mkdir -p models/sft && grep lr params.yaml > models/sft/model.txt
    deps: [measure.py]
    params: [sft]
    outs: [models/sft]
  export:
    cmd: mkdir -p models && echo packed > models/export.txt
    deps: [models/sft]
    params: [export]
    outs: [models/export.txt]
  eval:
    cmd: python measure.py
    deps: [measure.py, data/clean/val.parquet, data/battery, models/sft/model.txt]
    params: [eval]
    outs: [metrics/eval.json, metrics/runs/eval.json]
"""
PARAMS = "sft: {lr: 0.004, sources: [a, b]}\neval: {seed: 1}\nmodel: {layers: 2}\nexport: {name: one}\n"
MEASURE = """
import json, pathlib
from ruamel.yaml import YAML
lr = YAML(typ="safe").load(open("params.yaml"))["sft"]["lr"]
pathlib.Path("metrics/runs").mkdir(parents=True, exist_ok=True)
big, small = lr * 100, lr * 10
scores = {
    "bpb": {"all": {"base": {"bpb": 3.0, "stderr": 0.1}, "sft": {"bpb": 2.0 + big, "stderr": 0.06}}},
    "battery": {"copying": {"score": 0.5 + small, "stderr": 0.07, "n": 48, "correct": 24 + round(48 * small)}},
    "taught": {"talks": {"taught": {"n": 48, "right": 48 - round(5000 * lr)}}},
    "speed": {"words": 7 + lr},
}
json.dump(scores, open("metrics/eval.json", "w"))
json.dump({"run": f"eval-{lr}", "code": "c1"}, open("metrics/runs/eval.json", "w"))
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Clone:
    """A commit with results, and the experiment `lower` on it."""
    clone = Clone(tmp_path_factory.mktemp("compare"))
    for name, text in {
        "dvc.yaml": GRAPH,
        "params.yaml": PARAMS,
        "measure.py": MEASURE,
        "data/clean/val.parquet": "held out",
        "data/battery/items.jsonl": "questions",
        "athanor/model.py": "WIDTH = 1\n",
        ".gitignore": "/.athanor\n/metrics\n",
    }.items():
        (clone.path / name).parent.mkdir(parents=True, exist_ok=True)
        (clone.path / name).write_text(text)
    clone.run("git", "init", "-q", "-b", "main")
    clone.run("git", "config", "user.name", "t")
    clone.run("git", "config", "user.email", "t@localhost")
    clone.dvc("init", "-q")
    clone.dvc("remote", "add", "-q", "store", str(tmp_path_factory.mktemp("remote") / "store"))
    clone.dvc("repro", "-q")
    commit(clone, "first")
    clone.run("git", "tag", "first")
    clone.dvc("exp", "run", "-q", "-n", "lower", "-S", "sft.lr=0.001")
    reset(clone)
    return clone


def reset(clone: Clone) -> None:
    clone.run("git", "checkout", "-q", "--force", "main")
    clone.run("git", "clean", "-qfd")
    clone.dvc("checkout", "-q", "--force")


RUN = """
import sys
sys.argv = ["athanor", "compare", *sys.argv[1:]]
from athanor.cli.cli import main
status = main()
heavy = {"torch", "mlflow", "pandas", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else status)
"""


def compare(clone: Clone, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """This checkout's command in the small repository, which has a folder athanor of its own, hence -P."""
    return clone.run(sys.executable, "-P", "-c", RUN, *words, check=check, PYTHONPATH=str(ROOT))


def facts(clone: Clone, *words: str) -> dict:
    return json.loads(compare(clone, *words, "--json").stdout)


def test_experiment_against_commit(repo):
    found = facts(repo, "first", "lower")
    assert found["params"] == {"sft.lr": [0.004, 0.001]}
    rows = {row["name"]: row for row in found["measures"]}
    assert set(rows) == {"eval.bpb.all.base", "eval.bpb.all.sft", "eval.battery.copying"}
    bpb = rows["eval.bpb.all.sft"]  # 2.4 against 2.1 with 2 * sqrt(2) * 0.06 = 0.17
    assert bpb["beyond_noise"] is True and bpb["better"] is True
    assert math.isclose(bpb["difference"], -0.3) and math.isclose(bpb["noise"], 2 * math.sqrt(2) * 0.06)
    assert rows["eval.battery.copying"]["beyond_noise"] is False  # 0.54 against 0.51 with 0.2
    assert rows["eval.bpb.all.base"]["difference"] == 0
    assert found["metrics"] == {"eval.speed.words": [7.004, 7.001]}  # and not the number of correct answers
    assert found["warnings"] == [] and found["code"] == {"files": [], "stages": []}

    short = compare(repo, "first", "lower").stdout
    assert "eval.sft_bpb" in short and "copying" not in short and "eval.speed" not in short
    assert "talks, your own questions in the words that were taught: 28 of 48 -> 43 of 48" in short
    assert "not shown: 1, of which 0 beyond the noise: athanor compare first lower --all" in short
    text = compare(repo, "first", "lower", "--all").stdout
    assert "sft.lr  0.004 -> 0.001" in text and "equal: 1" in text
    line = next(line for line in text.splitlines() if "eval.sft_bpb" in line)
    assert line.split()[1:8] == ["2.400", "±", "0.060", "2.100", "±", "0.060", "-0.300"]
    assert line.endswith("yes, better")
    assert next(line for line in text.splitlines() if "copying" in line).endswith("within noise")


def test_without_names_the_last_commit_is_compared_with_the_workspace(repo):
    repo.dvc("exp", "apply", "lower")
    try:
        assert facts(repo)["params"] == {"sft.lr": [0.004, 0.001]}
        assert facts(repo, "lower")["params"] == {}
        (repo.path / "params.yaml").write_text(PARAMS.replace("0.004", "0.002").replace("layers: 2", "layers: 3"))
        found = facts(repo)
        assert found["params"] == {"sft.lr": [0.004, 0.002], "model.layers": [2, 3]}
        # No stage used model here, so only sft.lr makes the results old.
        assert found["warnings"] == ["workspace: the results are older than the parameters (sft.lr); run dvc repro"]
    finally:
        reset(repo)


def test_a_model_that_was_not_exported_again_has_no_old_scores(repo):
    try:
        (repo.path / "params.yaml").write_text(PARAMS.replace("name: one", "name: two"))
        assert facts(repo)["warnings"] == []
        # `eval` does not read sft.sources; the stage before it does, through a file in its output folder.
        (repo.path / "params.yaml").write_text(PARAMS.replace("[a, b]", "[a]"))
        assert "sft.sources" in facts(repo)["warnings"][0]
    finally:
        reset(repo)


def test_scores_of_the_run_before_are_not_taken_for_those_of_one_that_is_not_done():
    """A stage whose input was made anew is behind, and so is what reads its outputs; what no score rests on is not told."""
    entry = lambda deps, outs: {  # noqa: E731
        kind: [{"path": path, "md5": md5} for path, md5 in rows.items()]
        for kind, rows in (("deps", deps), ("outs", outs))
    }
    lock = {
        "clean": entry({}, {"data/clean": "new"}),
        "pretrain": entry({"data/clean": "new"}, {"models/base": "new"}),
        "sft": entry({"models/base": "old"}, {"models/sft": "old"}),
        "eval": entry({"models/sft": "old", "data/clean/val.parquet": "old"}, {}),
        "export": entry({"models/sft": "older"}, {}),
    }
    assert _behind(lock) == ["sft", "eval"]
    lock["sft"] = entry({"models/base": "new"}, {"models/sft": "new"})
    assert _behind(lock) == ["eval"]
    lock["eval"] = entry({"models/sft": "new"}, {})
    assert _behind(lock) == []


def test_other_held_out_items_and_another_way_of_measuring_are_said(repo):
    try:
        (repo.path / "data/battery/items.jsonl").write_text("other questions")
        (repo.path / "params.yaml").write_text(PARAMS.replace("seed: 1", "seed: 2"))
        repo.dvc("repro", "-q")
        found = facts(repo)
        assert found["warnings"] == [
            "the battery: measured on other held-out items (data/battery differs)",
            "the section eval differs: part of the difference is the way of measuring",
        ]
        judged = {row["name"]: (row["same_items"], row["better"]) for row in found["measures"]}
        assert judged["eval.battery.copying"] == judged["eval.bpb.all.sft"] == (False, None)  # the seed draws documents
    finally:
        reset(repo)


def test_nothing_is_better_of_other_held_out_texts(repo):
    """Lower bits per byte by far, beyond the noise, of another text: no judgement, in JSON and on the terminal."""
    try:
        (repo.path / "data/clean/val.parquet").write_text("easier text")
        (repo.path / "params.yaml").write_text(PARAMS.replace("0.004", "0.001"))
        repo.dvc("repro", "-q")
        rows = {row["name"]: row for row in facts(repo)["measures"]}
        bpb = rows["eval.bpb.all.sft"]
        assert bpb["difference"] < -0.2 and (bpb["same_items"], bpb["better"], bpb["beyond_noise"]) == (
            False,
            None,
            None,
        )
        assert rows["eval.battery.copying"]["same_items"]
        (line,) = [line for line in compare(repo, "--all").stdout.splitlines() if "eval.sft_bpb" in line]
        assert line.endswith("other held-out items")
    finally:
        reset(repo)


def test_fine_tuning_losses_are_compared_where_the_validation_rows_are_the_same(tmp_path):
    def side(rows: str, *val: str) -> Side:
        listed = [{"relpath": name, "md5": name} for name in (*val, rows)]
        write_text(tmp_path / rows[:2] / rows[2:], json.dumps(listed))
        lock = {"sft": {"deps": [{"path": "data/sft", "md5": rows}]}}
        return Side("x", "", {}, {}, {}, lock, _held_out_rows(tmp_path, rows))

    row = {**compare_values("sft.validation", "loss", (2.0, 0.01, ()), (1.0, 0.01, ()))}
    a = side("aa1.dir", "val_ids.bin")
    assert [judged([row], a, other)[0]["better"] for other in (a, side("bb1.dir", "val_ids.bin"))] == [True, True]
    for other in (side("cc1.dir", "val_other.bin"), Side("x", "", {}, {}, {}, {})):
        assert judged([row], a, other)[0]["better"] is None


def test_code_is_counted_and_stages_named(repo):
    try:
        (repo.path / "athanor/model.py").write_text("WIDTH = 2\n")
        (repo.path / "athanor/new.py").write_text("")
        write_text(repo.path / "metrics/runs/eval.json", '{"run": "eval-0.004", "code": "c2"}')
        found = facts(repo, "lower", "workspace")
        assert found["code"] == {"files": ["athanor/model.py", "athanor/new.py"], "stages": ["eval"]}
        said = compare(repo, "lower").stdout
        assert "files that differ under athanor/ and stages/: 2; stages that ran other code: eval" in said
        commit(repo, "other code")
        (repo.path / "athanor/untracked.py").write_text("")
        assert facts(repo, "HEAD", "lower")["code"]["files"] == ["athanor/model.py", "athanor/new.py"]
    finally:
        repo.run("git", "reset", "-q", "--hard", "first")
        reset(repo)


def test_links_of_runs_or_why_there_is_none(repo):
    assert facts(repo, "first", "lower")["runs"]["eval"]["a"]["why"].startswith("made in another checkout")
    delivered = {"uri": "http://***@host/", "store": "3@9", "mlflow_run": "abc"}
    for run, state in (("eval-0.004", None), ("eval-0.001", delivered)):
        folder = repo.path / ".athanor" / "runs" / run
        folder.mkdir(parents=True)
        if state:
            (folder / "ship.json").write_text(json.dumps(state))
    runs = facts(repo, "first", "lower")["runs"]["eval"]
    assert "athanor ship --wait" in runs["a"]["why"]
    assert runs["b"]["link"] == "http://host/#/experiments/3/runs/abc?workflowType=machine_learning"
    assert facts(repo, "first", "first")["runs"] == {}


@pytest.mark.parametrize(
    "name, near", [("lowr", "lower"), ("mian", "main"), ("worspace", "workspace"), ("frist", "first"), ("--x", "")]
)
def test_unknown_name_is_one_line_with_the_nearest(repo, name, near):
    done = compare(repo, "HEAD", name, check=False)
    if near:
        assert done.returncode == 1 and f"did you mean '{near}'?" in done.stderr
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_name_on_two_baselines_asks_which(repo):
    try:
        repo.dvc("exp", "save", "-n", "same")
        (repo.path / "athanor/model.py").write_text("WIDTH = 3\n")
        commit(repo, "second")
        repo.dvc("exp", "save", "-n", "same")
        repo.run("git", "commit", "-q", "--allow-empty", "-m", "third")
        done = compare(repo, "same", check=False)
        assert done.returncode == 1 and done.stderr.count("refs/exps/") == 2
        exact = done.stderr.split("use ")[1].split()[0]
        assert facts(repo, exact, "workspace")["a"]["commit"]
    finally:
        repo.run("git", "reset", "-q", "--hard", "first")


def test_a_commit_without_results_says_what_to_commit(repo):
    try:
        repo.run("git", "rm", "-q", "dvc.lock")
        commit(repo, "no results")
        for experiments, said in (
            ("", "git add params.yaml dvc.lock metrics"),
            ("lower", "athanor compare before; else git add"),
        ):
            if experiments:
                head = repo.run("git", "rev-parse", "HEAD").stdout.strip()
                repo.run("git", "update-ref", f"refs/exps/{head[:2]}/{head[2:]}/before", "HEAD")
            done = compare(repo, "HEAD", "lower", check=False)
            assert done.returncode == 1 and said in done.stderr and "commits the result of now" in done.stderr
    finally:
        repo.run("git", "reset", "-q", "--hard", "first")


def test_metrics_that_the_cache_lacks_come_from_the_remote(repo, tmp_path):
    repo.run("git", "clone", "-q", str(repo.path), str(tmp_path / "clone"))
    clone = Clone(tmp_path / "clone")
    done = compare(clone, "HEAD", "first", check=False)
    assert done.returncode == 1 and "metrics/eval.json of" in done.stderr and "Fix: dvc push" in done.stderr
    assert "no remote" in done.stderr.lower() and done.stderr.count("\n") == 1
    store = repo.dvc("remote", "list").stdout.split()[1]
    repo.dvc("push", "-q", "-r", "store")
    clone.dvc("remote", "add", "-q", "--local", "-d", "store", store)
    assert facts(clone, "HEAD", "first")["metrics"] == {}
    assert len([path for path in (clone.path / ".dvc/cache/files").rglob("*") if path.is_file()]) == 2


def test_judgement():
    assert compare_values("x", "bpb", (1.0, 0.1, ()), (1.2, None, ()))["beyond_noise"] is None
    assert compare_values("x", "bpb", (1.0, None, ()), (1.0, None, ()))["beyond_noise"] is False
    worse = compare_values("x", "score", (0.5, 0.05, ()), (0.2, 0.05, ()))
    assert worse["beyond_noise"] and worse["better"] is False
    assert compare_values("x", "rate", (0.5, 0.05, ()), (0.1, 0.05, ()))["better"] is None
    # 0.14 against 2 * 0.0707
    assert not compare_values("x", "score", (0.5, 0.05, ()), (0.36, 0.05, ()))["beyond_noise"]


@pytest.mark.parametrize("items, better", [(31, True), (3, True), (2, None), (0, None)])
def test_the_error_of_a_difference_is_taken_item_by_item(items, better):
    """Conversations that are unequally hard, each a little easier for the other model: by the errors of the sides, noise."""
    a = [10.0 * (1 + number % 7) for number in range(items)]
    row = compare_values("sft.validation", "loss", (4.708, 0.3, a), (4.099, 0.34, [x - 6 for x in a]))
    assert (row["better"], row["beyond_noise"], row["paired"]) == (better, bool(better), items > 0)
    if items == 31:
        assert row["noise"] == pytest.approx((2 - 1 / 31) * 0.609 / math.sqrt(31))
    four_more = compare_values("x", "score", (0.5, 0.03, [0] * 300), (0.513, 0.03, [1] * 4 + [0] * 296))
    assert not four_more["beyond_noise"]  # by chance in one of eight


def test_the_first_screen_has_the_categories_that_differ_most_for_their_noise():
    def row(name: str, b: float, items: int) -> dict:
        return compare_values(name, "score", (0.5, 0.1, [0] * items), (b, 0.1, [1] * (items - 9) + [-1] * 9))

    rows = [row("eval.battery.sft.copying", 0.7, 25), row("eval.battery.sft.lists", 0.9, 40)]
    rows += [row("eval.gold.sft.sums", 0.6, 90), row("eval.health.stop", 0.9, 90)]
    assert [each["name"] for each in first_rows(rows)] == ["eval.gold.sft.sums", "eval.battery.sft.lists"]

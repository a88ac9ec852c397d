"""Which models are found: exports, experiments in a real Git and DVC repository, and what --model names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json, write_json, write_manifest
from athanor.base.errors import InputError
from athanor.export.gguf_reader import read_header
from athanor.serving.about import about
from athanor.serving.discover import discover, materialise, problem_of
from athanor.serving.experiments import cached, unexported
from athanor.serving.models import Models
from athanor.serving.running import running
from athanor.serving.terminal import DEFAULT_MODEL, path_of
from tests.evaluation.tiny import make_model, write_tiny_tokenizer
from tests.serving.live import environment
from tests.serving.models_tiny import write_export

NOBODY = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
# Stages that "train", and "export" the model which params.yaml names; `note` changes the parameters and not the result.
STAGE = """
import json, shutil, sys
from pathlib import Path
from ruamel.yaml import YAML
from athanor.base.artifacts import manifest_digest, write_manifest
params = YAML(typ="safe").load(open("params.yaml"))
if sys.argv[1] == "sft":
    Path("models/sft").mkdir(parents=True)
    write_manifest("models/sft", kind="sft", version=1, counts={"lr": params["sft"]["lr"]})
if sys.argv[1] == "eval":
    Path("eval.json").write_text("{}")
if sys.argv[1] == "export":
    shutil.copytree(params["export"]["model"], "models/export")
    write_manifest("models/export", kind="export", version=1, counts={}, parents={"sft": manifest_digest("models/sft")})
"""


def stage(name, deps, params, out):
    return {"cmd": f"python stage.py {name}", "deps": ["stage.py", *deps], "params": params, "outs": [out]}


GRAPH = {
    "stages": {
        "sft": stage("sft", [], ["sft"], "models/sft"),
        "eval": stage("eval", ["models/sft"], [], "eval.json"),
        "export": stage("export", ["models/sft"], ["export"], "models/export"),
    }
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports of three models, and the tokenizer's directory beside them."""
    folder = tmp_path_factory.mktemp("exports")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    for seed, name in enumerate(("one", "two", "three")):
        types = ("f16", "q8_0") if name == "one" else ()
        write_export(folder / name, make_model(tokenizer, seed=seed), tokenizer, folder / "tokenizer", "tiny", types)
        (folder / name / "MODEL_CARD.md").write_text(f"# {name}")
    return folder


@pytest.fixture(scope="module")
def made(exports, tmp_path_factory):
    """A repository whose workspace has model one, with experiments that made one, two and three."""
    root = tmp_path_factory.mktemp("made") / "repo"
    root.mkdir()

    def run(*command):
        env = environment(**NOBODY, DVC_NO_ANALYTICS="1", GIT_CONFIG_GLOBAL=os.devnull)
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]

    def dvc(*words):
        run(sys.executable, "-m", "dvc", *words)

    run("git", "init", "-q", "-b", "main")
    dvc("init", "-q")
    (root / "stage.py").write_text(STAGE)
    (root / "dvc.yaml").write_text(json.dumps(GRAPH))
    (root / "params.yaml").write_text(
        json.dumps({"export": {"model": str(exports / "one"), "note": 0}, "sft": {"lr": 1}})
    )
    (root / ".gitignore").write_text("/models/*\n/.athanor/\n")
    dvc("repro", "-q")
    run("git", "add", "-A")
    run("git", "commit", "-qm", "first")
    for name, change in (
        ("same", "export.note=1"),
        ("wider", f"export.model={exports / 'two'}"),
        ("wider-noted", "export.note=2"),
        ("swept-1", "sft.lr=2"),
        ("swept-2", "sft.lr=3"),
        ("lost", f"export.model={exports / 'three'}"),
    ):
        time.sleep(name == "wider-noted")  # git knows whole seconds, and this one is to be the newer
        dvc("exp", "run", "-q", "-n", name, "-S", change, *(["eval"] if name.startswith("swept") else []))
    run("git", "checkout", "-q", "--", "params.yaml", "dvc.lock")
    dvc("checkout", "-q")
    # The cache loses what only `lost` has.
    md5 = hashlib.md5((exports / "three" / "hf" / "model.safetensors").read_bytes()).hexdigest()
    (root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]).unlink()
    return root


@pytest.fixture
def repo(made, tmp_path):
    root = tmp_path / "repo"
    shutil.copytree(made, root, symlinks=True)
    return root


def ids(found):
    return {one.id for one in found}


def by_id(found):
    return {one.id: one for one in found}


def test_exports_and_experiments_are_found_and_equal_models_are_listed_once(repo):
    found = by_id(discover(repo, []))
    assert set(found) == {"tiny", "tiny-f16", "tiny-q8_0", "wider-noted", "lost"}
    assert found["tiny"].backend == "torch" and found["tiny"].path == str(repo / "models" / "export" / "hf")
    assert found["tiny"].label == "tiny (models/export), also experiment same" and not found["tiny"].problem
    assert found["tiny-q8_0"].backend == "llama.cpp" and found["tiny-q8_0"].bytes > 0
    assert found["wider-noted"].source == "experiment" and not found["wider-noted"].problem
    assert found["wider-noted"].label.endswith("(experiments wider-noted, wider)")
    assert found["wider-noted"].bytes == (repo / "models/export/hf/model.safetensors").stat().st_size
    assert not (repo / ".athanor" / "served").exists()


def test_the_newest_comes_first_and_exact_weights_before_what_was_made_from_them(repo):
    for number, name in enumerate(("hf/athanor.json", "model-f16.gguf", "model-q8_0.gguf")):
        os.utime(repo / "models" / "export" / name, (4e9 + number, 4e9 + number))
    found = discover(repo, [])
    assert [one.id for one in found[:3]] == ["tiny", "tiny-f16", "tiny-q8_0"]


def test_an_experiment_is_never_the_default(repo):
    os.utime(repo / "models" / "export" / "hf" / "athanor.json", (1e9, 1e9))  # older than any experiment
    assert not discover(repo, [])[0].fetch


def test_an_experiment_comes_out_of_the_cache_when_it_is_wanted(repo, exports):
    found = by_id(discover(repo, []))["wider-noted"]
    materialise(repo, found)
    files = {path.name: path for path in Path(found.path).iterdir()}
    card = exports / "two" / "MODEL_CARD.md"
    wanted = {path.name: path.read_bytes() for path in (*(exports / "two" / "hf").iterdir(), card)}
    assert about(repo, found) == {"card": "# two", "topics": [], "commit": found.fetch, "health": {}}
    assert {name: path.read_bytes() for name, path in files.items()} == wanted
    assert all(path.stat().st_nlink > 1 for path in files.values())  # takes no room
    before = files["model.safetensors"].stat().st_mtime_ns, Path(found.path).stat().st_ino
    materialise(repo, found)
    assert before == (files["model.safetensors"].stat().st_mtime_ns, Path(found.path).stat().st_ino)
    assert problem_of(repo, found) == "" and by_id(discover(repo, []))["wider-noted"] == found


def test_a_sweep_that_ends_at_eval_serves_nothing_under_its_names(repo):
    # Its entry of the export in dvc.lock is that of the experiment before it, whose weights are others.
    found = discover(repo, [])
    assert not [one for one in found if "swept" in one.id + one.label]
    assert unexported(repo) == ["swept-2", "swept-1"]
    with pytest.raises(InputError, match="no export of its own.*dvc exp apply swept-1"):
        discover(repo, ["swept-1"])


def test_a_checkout_s_export_of_other_weights_is_no_default(repo, monkeypatch):
    monkeypatch.chdir(repo)
    write_manifest(repo / "models/sft", kind="sft", version=1, counts={"lr": 7})  # trained again, not exported yet
    found = by_id(discover(repo, []))
    local = [one for one in found.values() if one.source == "export"]
    assert len(local) == 3 and all("other weights than those in models/sft" in one.problem for one in local)
    with pytest.raises(InputError, match="other weights than those in models/sft"):  # athanor chat, too
        path_of(DEFAULT_MODEL)
    assert path_of("models/export") == DEFAULT_MODEL
    # What the experiment holds under its own name is its own, though the bytes are those of the checkout's export.
    assert not found["same"].problem and found["same"].source == "experiment"
    assert Models(list(found.values()), memory_bytes=1).default() not in {one.id for one in local}
    (named,) = discover(repo, [str(repo / "models/export")])
    assert not named.problem


def test_files_that_the_cache_lacks_are_a_problem_with_the_command_that_gets_them(repo):
    found = by_id(discover(repo, []))["lost"]
    assert "not in DVC's cache" in found.problem and "dvc exp pull REMOTE lost" in found.problem
    with pytest.raises(InputError, match="dvc exp apply lost"):
        materialise(repo, found)
    assert not Path(found.path).exists()


def test_a_cache_elsewhere_is_found_where_dvc_s_configuration_says(repo, tmp_path):
    (repo / ".dvc" / "cache").rename(tmp_path / "elsewhere")
    assert "not in DVC's cache" in by_id(discover(repo, []))["wider-noted"].problem
    (repo / ".dvc" / "config.local").write_text("[cache]\n    dir = ../../elsewhere\n")
    found = by_id(discover(repo, []))
    assert not found["wider-noted"].problem
    materialise(repo, found["wider-noted"])


def test_names_of_experiments_and_models_choose_and_keep_their_order(repo):
    assert [one.id for one in discover(repo, ["wider", "tiny-f16"])] == ["wider-noted", "tiny-f16"]
    assert [one.id for one in discover(repo, ["same"])] == ["tiny"]
    assert [one.id for one in discover(repo, ["tiny", "same", str(repo / "models/export")])] == ["tiny", "tiny-2"]
    with pytest.raises(InputError, match="did you mean 'wider'"):
        discover(repo, ["widr"])
    with pytest.raises(InputError, match="did you mean '.*/model-f16.gguf'"):
        discover(repo, [str(repo / "models/export/model-f15.gguf")])


def test_twenty_experiments_are_listed_within_a_second(repo):
    commit = subprocess.run(
        ["git", "-C", str(repo), "for-each-ref", "--format=%(objectname) %(refname)", "refs/exps/*/*/wider"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for number in range(20):
        ref = commit[1].removesuffix("wider") + f"copy-{number}"
        subprocess.run(["git", "-C", str(repo), "update-ref", ref, commit[0]], check=True)
    discover(repo, [])  # the first imports DVC
    took = []
    for _ in range(5):
        began = time.process_time()
        found = discover(repo, [])
        took.append(time.process_time() - began)
    assert min(took) < 1.0
    assert sum(one.label.count("copy-") for one in found) == 20


def test_a_model_of_another_template_is_refused_with_both_hashes(repo):
    facts = read_json(repo / "models/export/hf/athanor.json")
    write_json(repo / "models/export/hf/athanor.json", facts | {"template_hash": "0" * 64})
    found = by_id(discover(repo, []))
    assert "0" * 64 in found["tiny"].problem and facts["template_hash"] in found["tiny"].problem
    assert "same" in found  # the workspace has another model now
    assert not found["tiny-f16"].problem
    path = repo / "models/export/model-f16.gguf"
    path.write_bytes(path.read_bytes().replace(facts["template_hash"].encode(), b"1" * 64))
    assert "1" * 64 in by_id(discover(repo, []))["tiny-f16"].problem


def test_a_broken_model_hides_no_other(repo):
    (repo / "models/export/model-f16.gguf").write_bytes(b"GGUF")
    (repo / "models/export/hf/model.safetensors").unlink()
    found = by_id(discover(repo, []))
    assert "model.safetensors is missing" in found["tiny"].problem
    assert "GGUF" in found["model-f16"].problem and not found["tiny-q8_0"].problem and not found["wider-noted"].problem
    (repo / "models/export/hf/athanor.json").write_text("{")
    assert len(discover(repo, [])) == 6


def test_paths_are_told_apart_by_what_is_in_them(exports, tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
    import tiny as foreign

    base = foreign.make_base(tmp_path / "some-base", "llama")
    pickled = tmp_path / "pickled"
    shutil.copytree(base, pickled)
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "stage").mkdir()
    write_manifest(tmp_path / "stage", kind="sft", version=1, counts={})
    lone = tmp_path / "lone.gguf"
    shutil.copyfile(exports / "one" / "model-f16.gguf", lone)
    given = [base, pickled, exports / "two", exports / "one" / "hf", tmp_path / "empty", lone, base / "config.json"]
    given.append(tmp_path / "stage")
    found = discover(tmp_path, [str(path) for path in given])
    assert [one.backend for one in found] == [
        "transformers", "transformers", "torch", "torch", "transformers", "llama.cpp", "llama.cpp", "transformers",
    ]  # fmt: skip
    assert [one.id for one in found][:4] == ["some-base", "pickled", "tiny", "tiny-2"]
    words = ["", "pickle", "", "", "config.json is missing", "tokenizer is not beside it", "no .gguf file"]
    words.append("athanor shrink")
    for one, word in zip(found, words, strict=True):
        assert (word in one.problem) if word else not one.problem, one
    told = [state["context_tokens"] for state in Models(found, memory_bytes=1).states()]  # nothing is loaded
    assert all(told[:4]) and told[5] == told[3] and told[6:] == [None, None]


@pytest.mark.parametrize("name", ["hf//etc/passwd", "hf/../../x", "hf/./a", "hf/a/b", "/hf/a", "hf/.hidden", "hf/"])
def test_a_list_of_files_from_elsewhere_names_no_other_place(tmp_path, name):
    md5, good = "0" * 32, "1" * 32
    (tmp_path / "00").mkdir()
    listing = tmp_path / "00" / f"{'0' * 30}.dir"
    rows = [
        {"relpath": name, "md5": good},
        {"relpath": "hf/config.json", "md5": good},
        {"relpath": "hf/b", "md5": "../x"},
    ]
    listing.write_text(json.dumps(rows))
    assert set(cached(tmp_path, md5)) == {"config.json"}


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "{"])
def test_an_odd_file_is_a_problem_of_its_model_alone(repo, text):
    folder = repo / "models/export/hf"
    folder.chmod(0o755)
    (folder / "athanor.json").unlink()
    (folder / "athanor.json").write_text(text)
    found = {one.path: one for one in discover(repo, [])}
    assert found[str(folder)].problem and any(not one.problem for one in found.values())


def test_a_header_with_an_endless_text_is_torn(tmp_path):
    path = tmp_path / "endless.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**64 - 1) + b"x" * 40)
    with pytest.raises(InputError, match="not a whole GGUF file"):
        read_header(path)
    (one,) = discover(tmp_path, [str(path)])
    assert one.problem


def gguf(*keys):
    """A GGUF file of keys, each (name, type, bytes of the value)."""
    rows = [struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value for name, kind, value in keys]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(keys)) + b"".join(rows)


NESTED = gguf((b"a", 9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQI", 4, 1, 7)))
HUGE = 300 << 20
CRAFTED = {
    "nested arrays": (NESTED, 0),
    "many numbers": (gguf((b"a", 9, struct.pack("<IQ", 0, HUGE - 100))), HUGE),
    "many texts": (gguf((b"a", 9, struct.pack("<IQ", 8, HUGE // 8))), HUGE),
    "a long text": (gguf((b"a", 8, struct.pack("<Q", HUGE - 100))), HUGE),
    "many keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), HUGE),
    "beyond the end": (gguf((b"a", 9, struct.pack("<IQ", 12, 2**61))), 0),
}


def looked(code, repo):
    """What another process says after it has looked."""
    done = subprocess.run([sys.executable, "-c", code, str(repo)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_gguf_costs_little_and_hides_no_other(repo, name):
    content, size = CRAFTED[name]
    path = repo / "models/export/crafted.gguf"
    path.write_bytes(content)
    if size:
        os.truncate(path, size)  # a few KB on the disk
    code = (
        "import resource, sys, time; from pathlib import Path; from athanor.serving.discover import discover;"
        "discover(Path(sys.argv[1]), [sys.argv[1] + '/models/export']);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; began = time.process_time();"
        "found = discover(Path(sys.argv[1]), []);"
        "assert any(not one.problem for one in found) and len(found) == 6;"
        "print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    seconds, kib = map(float, looked(code, repo).split())
    assert seconds < 8 and kib < 400 << 10


@pytest.mark.parametrize("file", ["athanor.json", "config.json", "tokenizer.model"])
def test_deep_and_huge_files_of_a_model_are_a_problem_of_it_alone(repo, file):
    path = repo / "models/export/hf" / file
    path.unlink()
    path.write_text("[" * 200_000)
    assert any(not one.problem for one in discover(repo, []))
    os.truncate(path, 8 << 30)
    found = {one.path: one for one in discover(repo, [])}
    assert any(not one.problem for one in found.values())


ODD = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path),
    "a directory": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a file of nobody": lambda path: path.touch(mode=0),
}
PLACES = ["hf/athanor.json", "hf/config.json", "hf/tokenizer.model", "hf/model.safetensors", "manifest.json", "x.gguf"]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_in_a_file_s_place_neither_blocks_nor_hides_another(repo, place):
    path = repo / "models/export" / place
    path.parent.chmod(0o755)
    path.unlink(missing_ok=True)
    for put in ODD.values():
        put(path)
        found = discover(repo, [])
        assert any(not one.problem for one in found)
        Models(found, memory_bytes=1).states()
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stage": "sft", "step": ""}', '{"stage": 1, "step": 2}', None])
def test_a_damaged_preview_hides_no_other_model(repo, text):
    (folder := repo / ".athanor/previews/odd").mkdir(parents=True)
    if text is None:
        os.mkfifo(folder / "checkpoint.json")
    else:
        (folder / "checkpoint.json").write_text(text)
    assert len(running(repo)) == 0


def test_without_git_or_any_model_nothing_is_found(tmp_path):
    assert discover(tmp_path, []) == []


def test_looking_needs_no_torch_and_neither_does_the_server(repo):
    code = (
        "import sys; from pathlib import Path; import athanor.serving.app, athanor.cli.serve;"
        "from athanor.serving.discover import discover;"
        "print(len(discover(Path(sys.argv[1]), []))); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert looked(code, repo) == "5\n"

"""Which models are found: exports, experiments in a Git repository with DVC's cache, and what --model names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json, write_json, write_manifest
from athanor.base.errors import InputError
from athanor.export.places import EXPORT, PREVIEWS
from athanor.serving.about import about, shape
from athanor.serving.discover import Local, discover, materialise, problem_of
from athanor.serving.experiments import cached, unexported
from athanor.serving.running import running
from athanor.serving.terminal import model_of
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer
from tests.serving.live import environment
from tests.serving.models_tiny import write_export

NOBODY = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def keep(cache: Path, export: Path) -> str:
    """Put an export into DVC's cache; returns the name of its listing."""

    def add(data: bytes, ending: str = "") -> str:
        md5 = hashlib.md5(data).hexdigest()
        (cache / md5[:2]).mkdir(parents=True, exist_ok=True)
        (cache / md5[:2] / f"{md5[2:]}{ending}").write_bytes(data)
        return md5

    files = sorted(path for path in export.rglob("*") if path.is_file())
    rows = [{"relpath": str(path.relative_to(export)), "md5": add(path.read_bytes())} for path in files]
    return add(json.dumps(rows).encode(), ".dir") + ".dir"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository that has model `own`, and experiments of it, of `two`, of one in part, and of none."""
    root = tmp_path_factory.mktemp("made") / "repo"
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")

    def git(*words: str, **more: str) -> str:
        env = environment(**NOBODY, GIT_CONFIG_GLOBAL=os.devnull, **more)
        return subprocess.run(["git", *words], cwd=root, env=env, capture_output=True, text=True, check=True).stdout

    (root / ".dvc").mkdir()
    git("init", "-q")
    cache = root / ".dvc/cache/files/md5"
    # In an experiment that ends before its export, that stage's entry is of the weights that the commit began from.
    for number, (name, seed, made_from) in enumerate(
        (("lost", 2, "a"), ("wider", 1, "a"), ("wider-noted", 1, "a"), ("swept", 1, "b"), ("same", 0, "a"))
    ):
        folder = root / "models/export" if name == "same" else root.parent / name
        write_export(folder, make_model(tokenizer, seed=seed), tokenizer, root / "models/tokenizer", "own", ("q8_0",))
        (folder / "MODEL_CARD.md").write_text(f"card {seed}")
        deps, outs = ([{"path": "models/sft", "md5": md5}] for md5 in (made_from, "a"))
        export = [{"path": "models/export", "md5": keep(cache, folder)}]
        lock = {"stages": {"export": {"deps": deps, "outs": export}, "sft": {"outs": outs}}}
        (root / "dvc.lock").write_text(json.dumps(lock))
        git("add", "dvc.lock")
        date = f"{1_700_000_000 + number} +0000"
        commit = git("commit-tree", git("write-tree").strip(), "-m", name, GIT_COMMITTER_DATE=date).strip()
        git("update-ref", f"refs/exps/{number:02}/{number:038}/{name}", commit)
    weights = (root.parent / "lost/hf/model.safetensors").read_bytes()
    md5 = hashlib.md5(weights).hexdigest()
    (cache / md5[:2] / md5[2:]).unlink()
    return root


@pytest.fixture
def repo(made, tmp_path):
    return shutil.copytree(made, tmp_path / "repo", symlinks=True)


def by_id(root, *requested):
    return {model.id: model for model in discover(root, requested)}


def test_equal_models_are_listed_once_and_no_experiment_comes_first(repo):
    os.utime(repo / EXPORT / "hf/athanor.json", (1e9, 1e9))  # older than any experiment
    found = by_id(repo)
    assert list(found) == ["own", "own-q8_0", "wider-noted", "lost"]
    assert [model.kind for model in found.values()] == ["export", "gguf", "export", "export"]
    assert found["own"].label == "own (models/export), also experiment same"
    assert found["wider-noted"].label == "wider-noted: experiment wider-noted, wider"
    assert [model.id for model in found.values() if model.problem] == ["lost"]
    assert "dvc exp pull REMOTE lost" in found["lost"].problem and unexported(repo) == ["swept"]
    shapes = [shape(Path(found[name].path)) for name in ("own", "own-q8_0", "wider-noted")]
    assert [told.get("context_tokens") for told in shapes] == [128, 128, None]
    with pytest.raises(InputError, match="no export of its own.*dvc exp apply swept"):
        discover(repo, ["swept"])


def test_an_experiment_comes_out_of_the_cache_when_it_is_asked(repo):
    model = by_id(repo)["wider-noted"]
    assert not Path(model.path).exists() and about(repo, model)["card"] == "card 1"
    assert (Path(model.path) / "config.json").is_file() and problem_of(repo, model) == ""
    with pytest.raises(InputError, match="not in DVC's cache"):
        materialise(repo, by_id(repo)["lost"])


def test_names_and_paths_choose_in_their_order(repo):
    assert list(by_id(repo, "wider", "own-q8_0")) == ["wider-noted", "own-q8_0"]
    assert list(by_id(repo, "own", "same", str(repo / EXPORT))) == ["own", "own-2"]
    with pytest.raises(InputError, match="did you mean 'wider'"):
        discover(repo, ["widr"])


def test_an_export_of_other_weights_is_not_served_unless_it_is_named(repo, monkeypatch):
    monkeypatch.chdir(repo)
    for folder, kind, digest in (("models/export", "export", "0" * 64), ("models/sft", "sft", "")):
        (repo / folder).mkdir(exist_ok=True)
        write_manifest(repo / folder, kind=kind, version=1, counts={}, parents={"sft": digest})
    found = by_id(repo)
    assert "other weights than those in models/sft" in found["own"].problem and not found["same"].problem
    with pytest.raises(InputError, match="other weights than those in models/sft"):
        model_of("")
    assert not model_of("models/export").problem and model_of("same").fetch


def test_a_model_of_another_template_is_refused_with_both_hashes(repo):
    facts = read_json(repo / EXPORT / "hf/athanor.json")
    write_json(repo / EXPORT / "hf/athanor.json", facts | {"template_hash": "0" * 64})
    problem = by_id(repo)["own"].problem
    assert "0" * 64 in problem and facts["template_hash"] in problem
    path = repo / EXPORT / "model-q8_0.gguf"
    path.write_bytes(path.read_bytes().replace(facts["template_hash"].encode(), b"1" * 64))
    assert "1" * 64 in by_id(repo)["own-q8_0"].problem


def test_what_is_no_model_says_what_to_name(repo, tmp_path):
    for name, file in (("foreign", "config.json"), ("stage", "manifest.json"), ("text", "x.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    shutil.copy(repo / EXPORT / "model-q8_0.gguf", tmp_path / "alone.gguf")
    adapter = repo / "models/lora-export/adapter.gguf"
    adapter.parent.mkdir()
    adapter.write_bytes(gguf((b"general.type", 8, struct.pack("<Q", 7) + b"adapter")))
    words = {
        "foreign": "no export",
        "stage": "athanor shrink",
        "text/x.txt": "no .gguf file",
        "alone.gguf": "beside it",
    }
    for name, word in words.items():
        assert word in discover(repo, [str(tmp_path / name)])[0].problem
    assert "its base is missing" in by_id(repo)["adapter"].problem
    shutil.copy(repo / EXPORT / "model-q8_0.gguf", adapter.with_name("base.gguf"))
    found = by_id(repo)["adapter"]
    assert not found.problem and found.base == str(adapter.with_name("base.gguf"))


def test_the_list_is_made_again_after_a_change_alone(repo):
    local = Local(repo)
    assert local.changed() is None
    (repo / EXPORT / "x.gguf").symlink_to("nothing")
    assert len(local.changed()) == 3 and local.changed() is None
    tokenizer = write_tiny_tokenizer(repo / "models/tokenizer")
    save(repo / "models/base", make_model(tokenizer), tokenizer)
    assert [model.kind for model in local.changed()] == ["export", "gguf", "gguf", "base"]
    shutil.rmtree(repo / EXPORT)
    assert [(model.id, model.problem) for model in local.changed()] == [("base", "")]


def gguf(*keys):
    """A GGUF file of keys, each (name, type, bytes of the value)."""
    rows = [struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value for name, kind, value in keys]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(keys)) + b"".join(rows)


HUGE = 300 << 20
CRAFTED = {
    "nested arrays": (gguf((b"a", 9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQI", 4, 1, 7))), 0),
    "many numbers": (gguf((b"a", 9, struct.pack("<IQ", 0, HUGE - 100))), HUGE),
    "many texts": (gguf((b"a", 9, struct.pack("<IQ", 8, HUGE // 8))), HUGE),
    "a long text": (gguf((b"a", 8, struct.pack("<Q", HUGE - 100))), HUGE),
    "many keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), HUGE),
    "beyond the end": (gguf((b"a", 9, struct.pack("<IQ", 12, 2**61))), 0),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_gguf_costs_little_and_hides_no_other(repo, name):
    content, size = CRAFTED[name]
    (path := repo / EXPORT / "crafted.gguf").write_bytes(content)
    if size:
        os.truncate(path, size)  # a few KB on the disk
    code = (
        "import resource, sys; from pathlib import Path; from athanor.serving.discover import discover;"
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30)); resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "found = {model.id: model.problem for model in discover(Path(sys.argv[1]), [])};"
        "assert 'crafted' in found and not found['own']; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(repo)], env=environment(), check=True)


ODD = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a file of nobody": lambda path: path.touch(mode=0),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "other JSON": lambda path: path.write_text("null"),
    "a huge file": lambda path: (path.touch(), os.truncate(path, 8 << 30)),
}
PLACES = [
    *(f"{EXPORT}/hf/{name}" for name in ("athanor.json", "config.json", "tokenizer.model", "model.safetensors")),
    *(f"{EXPORT}/{name}" for name in ("manifest.json", "x.gguf", "MODEL_CARD.md")),
    f"{PREVIEWS}/odd/checkpoint.json", ".athanor/slots/sft/a/step_00000001/state.json",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_in_a_file_s_place_neither_blocks_nor_hides_another(repo, place):
    path = repo / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for put in ODD.values():
        put(path)
        found = discover(repo, [])
        assert any(not model.problem for model in found) and running(repo) == []
        assert [about(repo, model)["card"] for model in found]
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", ["hf//etc/passwd", "hf/../../x", "hf/./a", "hf/a/b", "/hf/a", "hf/.hidden", "hf/"])
def test_a_list_of_files_from_elsewhere_names_no_other_place(tmp_path, name):
    (tmp_path / "00").mkdir()
    rows = [(name, "1" * 32), ("hf/config.json", "1" * 32), ("hf/b", "../x")]
    listing = [{"relpath": path, "md5": md5} for path, md5 in rows]
    (tmp_path / "00" / f"{'0' * 30}.dir").write_text(json.dumps(listing))
    assert set(cached(tmp_path, "0" * 32)) == {"config.json"}


def test_without_git_or_any_model_nothing_is_found(tmp_path):
    assert discover(tmp_path, []) == []

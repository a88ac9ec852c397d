"""Which models are found: exports, experiments in a Git repository with DVC's cache, and what --model names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json, write_json, write_manifest
from athanor.base.errors import InputError
from athanor.catalog.discover import cached, discover, materialise, problem_of, unexported
from athanor.catalog.places import EXPORT, PREVIEWS
from athanor.catalog.running import Catalog, running
from athanor.serving.about import about
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer
from tests.serving.live import environment

NOBODY = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
# Name, seed of the weights, and the weights that its export names; in each models/sft is "a".
EXPERIMENTS = (("lost", 2, "a"), ("wider", 1, "a"), ("noted", 1, "a"), ("swept", 1, "b"), ("same", 0, "a"))


def keep(cache: Path, data: bytes, ending: str = "") -> str:
    """Put a file into DVC's cache; returns its name there."""
    md5 = hashlib.md5(data).hexdigest()
    (cache / md5[:2]).mkdir(parents=True, exist_ok=True)
    (cache / md5[:2] / f"{md5[2:]}{ending}").write_bytes(data)
    return md5 + ending


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository that has model `own`, which experiment `same` made, too."""
    root = tmp_path_factory.mktemp("made") / "repo"
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")

    def git(*words: str, **more: str) -> str:
        env = environment(**NOBODY, GIT_CONFIG_GLOBAL=os.devnull, **more)
        return subprocess.run(["git", *words], cwd=root, env=env, capture_output=True, text=True, check=True).stdout

    (root / ".dvc").mkdir()
    git("init", "-q")
    cache = root / ".dvc/cache/files/md5"
    for number, (name, seed, made_from) in enumerate(EXPERIMENTS):
        folder = root / EXPORT if name == "same" else root.parent / name
        write_export(folder, make_model(tokenizer, seed=seed), tokenizer, root / "models/tokenizer", "own", ("q8_0",))
        (folder / "MODEL_CARD.md").write_text(f"card {seed}")
        files = [path for path in folder.rglob("*") if path.is_file()]
        rows = [{"relpath": str(path.relative_to(folder)), "md5": keep(cache, path.read_bytes())} for path in files]
        export = {"path": EXPORT, "md5": keep(cache, json.dumps(rows).encode(), ".dir")}
        deps, outs = ([{"path": "models/sft", "md5": md5}] for md5 in (made_from, "a"))
        lock = {"schema": "2.0", "stages": {"export": {"cmd": "x", "deps": deps, "outs": [export]}}}
        lock["stages"]["sft"] = {"cmd": "x", "outs": outs}
        (root / "dvc.lock").write_text(json.dumps(lock))
        git("add", "dvc.lock")
        date = f"{1_700_000_000 + number} +0000"
        commit = git("commit-tree", git("write-tree").strip(), "-m", name, GIT_COMMITTER_DATE=date).strip()
        git("update-ref", f"refs/exps/{number:02}/{number:038}/{name}", commit)
    md5 = hashlib.md5((root.parent / "lost/hf/model.safetensors").read_bytes()).hexdigest()
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
    assert list(found) == ["own", "own-q8_0", "noted", "lost"] and unexported(repo) == ["swept"]
    assert [found[name].label for name in ("own", "noted")] == ["own (models/export)", "noted (experiment)"]
    assert [model.id for model in found.values() if model.problem] == ["lost"]
    assert "dvc exp pull REMOTE lost" in found["lost"].problem
    assert [found[name].context_tokens for name in ("own", "own-q8_0", "noted")] == [128, 128, None]
    assert list(by_id(repo, "wider", "own-q8_0")) == ["noted", "own-q8_0"]
    assert list(by_id(repo, "own", "same", str(repo / EXPORT))) == ["own", "own-2"]
    with pytest.raises(InputError, match="did you mean 'wider'"):
        discover(repo, ["widr"])


def test_an_experiment_comes_out_of_the_cache_when_it_is_asked(repo):
    model, lost = (by_id(repo)[name] for name in ("noted", "lost"))
    assert not Path(model.path).exists() and about(repo, model)["card"] == "card 1"
    assert (Path(model.path) / "config.json").is_file() and problem_of(repo, model) == ""
    with pytest.raises(InputError, match="not in DVC's cache"):
        materialise(repo, lost)


def test_an_export_of_other_weights_is_not_served_unless_it_is_named(repo):
    for folder, kind, digest in (("models/export", "export", "0" * 64), ("models/sft", "sft", "")):
        (repo / folder).mkdir(exist_ok=True)
        write_manifest(repo / folder, kind=kind, version=1, counts={}, parents={"sft": digest})
    found = by_id(repo)
    assert "other weights than those in models/sft" in found["own"].problem and not found["same"].problem
    assert not discover(repo, [str(repo / EXPORT)])[0].problem


def test_a_model_of_another_template_or_tokenizer_is_refused_with_both_hashes(repo):
    facts = read_json(repo / EXPORT / "hf/athanor.json")
    path = repo / EXPORT / "model-q8_0.gguf"
    for key in ("template_hash", "tokenizer_digest"):
        other = "1" * len(facts[key])
        write_json(repo / EXPORT / "hf/athanor.json", facts | {key: other})
        whole = path.read_bytes()
        path.write_bytes(whole.replace(facts[key].encode(), other.encode()))
        for model in ("own", "own-q8_0"):
            assert other in by_id(repo)[model].problem and facts[key] in by_id(repo)[model].problem
        path.write_bytes(whole)


def test_what_is_no_model_says_what_to_name(repo, tmp_path):
    shutil.copy(repo / EXPORT / "model-q8_0.gguf", tmp_path / "alone.gguf")
    for name in ("foreign/config.json", "stage/manifest.json", "text/x.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="ended before the export.*dvc exp apply swept && dvc repro export"):
        discover(repo, ["swept"])
    words = {
        "foreign": "no export",
        "stage": "athanor shrink",
        "text/x.txt": "no .gguf file",
        "alone.gguf": "its tokenizer is missing",
    }
    for name, word in words.items():
        assert word in discover(repo, [str(tmp_path / name)])[0].problem
    adapter = repo / "models/tune-export/adapter.gguf"
    adapter.parent.mkdir()
    adapter.write_bytes(gguf((b"general.type", 8, struct.pack("<Q", 7) + b"adapter")))
    assert "its base is missing" in by_id(repo)["adapter"].problem
    shutil.copy(repo / EXPORT / "model-q8_0.gguf", adapter.with_name("base.gguf"))
    assert not by_id(repo)["adapter"].problem


def test_the_list_follows_the_checkout(repo, tmp_path):
    listed = Catalog(repo)
    before = listed()
    (repo / EXPORT / "x.gguf").symlink_to("nothing")
    assert [model.id for model in listed()] == ["own", "own-q8_0", "x", "noted", "lost"]
    tokenizer = write_tiny_tokenizer(repo / "models/tokenizer")
    save(repo / "models/base", make_model(tokenizer), tokenizer)
    (repo / EXPORT / "x.gguf").unlink()
    assert [model.id for model in listed()] == ["own", "own-q8_0", "base", "noted", "lost"]
    named = Catalog(repo, [str(repo / EXPORT)])
    shutil.rmtree(repo / EXPORT)
    assert [model.id for model in listed()] == ["base", "same", "noted", "lost"]
    assert [model.path for model in named()] == [before[0].path]  # perhaps it is made again right now
    assert Catalog(tmp_path / "nothing")() == []


def gguf(*keys):
    """A GGUF file of keys, each (name, type, bytes of the value)."""
    rows = [struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value for name, kind, value in keys]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(keys)) + b"".join(rows)


HUGE = 300 << 20
CRAFTED = {
    "nested-arrays": gguf((b"a", 9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQI", 4, 1, 7))),
    "many-numbers": gguf((b"a", 9, struct.pack("<IQ", 0, HUGE - 100))),
    "many-texts": gguf((b"a", 9, struct.pack("<IQ", 8, HUGE // 8))),
    "long-text": gguf((b"a", 8, struct.pack("<Q", HUGE - 100))),
    "many-keys": struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63),
    "beyond-the-end": gguf((b"a", 9, struct.pack("<IQ", 12, 2**61))),
}
LIMITED = """
import resource, sys
from pathlib import Path
from athanor.catalog.discover import discover
from athanor.serving import app, openai_api, page_api  # all of the server: it loads no torch either
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
found = {model.id: model.problem for model in discover(Path(sys.argv[1]))}
assert set(sys.argv[2:]) <= set(found) and not found["own"]
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_crafted_gguf_files_cost_little_and_hide_no_other(repo):
    for name, content in CRAFTED.items():
        (path := repo / EXPORT / f"{name}.gguf").write_bytes(content)
        if name not in ("nested-arrays", "beyond-the-end"):
            os.truncate(path, HUGE)  # a few KB on the disk
    subprocess.run([sys.executable, "-c", LIMITED, str(repo), *CRAFTED], env=environment(), check=True)


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
        found = discover(repo)
        assert any(not model.problem for model in found) and running(repo) == []
        assert [about(repo, model)["card"] for model in found]
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_list_of_files_from_elsewhere_names_no_other_place(repo):
    cache = repo / ".dvc/cache/files/md5"
    names = ["hf//etc/passwd", "hf/../../x", "hf/./a", "hf/a/b", "/hf/a", "hf/.hidden", "hf/", "hf/config.json"]
    rows = [{"relpath": name, "md5": keep(cache, b"{}")} for name in names] + [{"relpath": "hf/b", "md5": "../x"}]
    listed = keep(cache, json.dumps(rows).encode(), ".dir").removesuffix(".dir")
    assert set(cached(repo, replace(discover(repo)[0], path=listed))) == {"config.json"}

"""A foreign model's directory that somebody else made: nothing in it leads out of it, into it or over another file."""

from __future__ import annotations

import json
import shutil

import pytest

from athanor.adapters.export import write_merged
from athanor.adapters.foreign_files import INDEX, base_digests
from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.base.artifacts import sha256_file
from athanor.base.errors import InputError
from athanor.model.tensorfile import read_tensors


@pytest.fixture
def base(bases, tmp_path):
    return shutil.copytree(bases["qwen2"], tmp_path / "base")


def write_index(base, *names):
    keys = sorted(read_tensors(base / "model.safetensors"))
    mapped = {key: names[place % len(names)] for place, key in enumerate(keys)}
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))


def merge(base, folder):
    write_merged(folder, base, ForeignTokenizer(base), {}, 1.0, "bfloat16")


@pytest.mark.parametrize("name", ["{precious}", "../precious/model.safetensors", "config.json", ".", "", "a/../model.safetensors",
                                  "model.safetensors\n", "missing.safetensors", 3, None])  # fmt: skip
def test_an_index_names_files_beside_it_and_nothing_else(base, tmp_path, name):
    precious = tmp_path / "precious" / "model.safetensors"
    precious.parent.mkdir()
    shutil.copyfile(base / "model.safetensors", precious)
    before = sha256_file(precious)
    write_index(base, name.format(precious=precious) if isinstance(name, str) else name)
    for work in (lambda: base_digests(base), lambda: merge(base, tmp_path / "out")):
        with pytest.raises(InputError, match="no name of a safetensors file beside it"):
            work()
    assert sha256_file(precious) == before


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000],
                         ids=["list", "empty", "no names", "list of names", "deep"])  # fmt: skip
def test_an_index_of_another_form_is_refused(base, index):
    (base / INDEX).write_text(index)
    with pytest.raises(InputError, match="no safetensors with weights|not valid JSON"):
        base_digests(base)


@pytest.mark.parametrize("name", ["LICENSE", "generation_config.json", "model.safetensors", "notice.txt"])
def test_a_link_out_of_the_directory_is_refused_and_not_copied(base, tmp_path, name):
    secret = tmp_path / "id_ed25519"
    secret.write_text("-----BEGIN")
    (base / name).unlink(missing_ok=True)
    (base / name).symlink_to(secret)
    for work in (lambda: base_digests(base), lambda: merge(base, tmp_path / "out")):
        with pytest.raises(InputError, match=f"{name}: it is a link to .*id_ed25519, outside the model"):
            work()
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"-----BEGIN" in path.read_bytes()]


def test_links_inside_and_those_of_a_hub_s_cache_are_followed(base, tmp_path):
    plain = base_digests(base)
    (base / "kept").mkdir()
    (base / "tokenizer.json").rename(base / "kept" / "t")
    (base / "tokenizer.json").symlink_to("kept/t")
    assert base_digests(base) == plain
    hub = tmp_path / "models--tiny--tiny"
    snapshot = hub / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for name, digest in plain.items():
        shutil.copyfile(base / name, hub / "blobs" / digest)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    assert base_digests(snapshot) == plain


def test_every_file_of_weights_is_hashed(base):
    shutil.copyfile(base / "model.safetensors", base / "model-00001-of-00002.safetensors")
    (base / "model.safetensors").rename(base / "model-00002-of-00002.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors",
                                                         "b": "model-00002-of-00002.safetensors"}}))  # fmt: skip
    assert {name for name in base_digests(base) if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    }  # fmt: skip

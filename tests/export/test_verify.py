"""`athanor verify`: a whole export matches in every line, and each planted change is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader

from athanor.base.artifacts import sha256_file, write_json
from athanor.base.errors import InputError
from athanor.cli import cli
from athanor.cli.verify import DIFFERS, MATCHES, UNCHECKED, verify
from athanor.export import source as lineage
from athanor.export.gguf_check import contents
from tests.export.conftest import tokenizer_dir  # noqa: F401
from tests.stages.test_export_stage import build, execute

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "project"
    build(root)
    for name in ("athanor", "stages"):
        (root / name).symlink_to(ROOT / name)
    before = Path.cwd()
    patch = pytest.MonkeyPatch()
    patch.delenv("DVC_ROOT", raising=False)
    patch.delenv("ATHANOR_DEVICE", raising=False)
    patch.setenv("ATHANOR_THREADS", "1")
    os.chdir(root)
    try:
        execute(root, "off")
    finally:
        os.chdir(before)
        patch.undo()
    return root


@pytest.fixture
def project(exported, tmp_path, monkeypatch):
    root = tmp_path / "project"
    shutil.copytree(exported, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


def lines(path, status, **options):
    return {f"{line.subject}: {line.detail}" for line in verify(path, **options) if line.status == status}


def one(found, *words):
    """Exactly one of the lines has all of the words."""
    hits = [line for line in found if all(word in line for word in words)]
    assert len(hits) == 1, found


@pytest.mark.parametrize("path", ["models/export", "models/export/hf", "models/export/model-q8_0.gguf"])
def test_what_was_exported_here_matches_in_every_line(path, project):
    found = verify(path)
    assert {line.status for line in found} == {MATCHES}
    told = {line.subject for line in found}
    assert {"data/raw/manifest.json", "metrics/eval.json", "models/sft/manifest.json", "chat template"} <= told


def test_the_list_of_locked_paths_is_what_dvc_records_for_the_stage():
    from athanor.base.strict import read_yaml

    deps = read_yaml(ROOT / "dvc.yaml")["stages"]["export"]["deps"]
    ours = [f.as_posix() if n in lineage.FOLDER_INPUTS else f"{f}/manifest.json" for n, f in lineage.MANIFESTS.items()]
    assert set(ours) | {f"metrics/{name}.json" for name in lineage.METRICS} <= set(deps)


def test_folder_hash_is_the_one_of_dvc(tmp_path):
    from dvc_data.hashfile.build import build as hash_of
    from dvc_data.hashfile.db import HashFileDB
    from dvc_objects.fs.local import LocalFileSystem

    (tmp_path / "f" / "sub").mkdir(parents=True)
    for name, text in (("b", "1"), ("a.txt", "2"), ("sub/c", "3"), ("sub.txt", "4"), ("\u00e9", "5")):
        (tmp_path / "f" / name).write_text(text)
    fs = LocalFileSystem()
    store = HashFileDB(fs, str(tmp_path / "store"))
    *_, obj = hash_of(store, str(tmp_path / "f"), fs, "md5")
    assert lineage.dvc_hash(tmp_path / "f") == obj.hash_info.value


def test_status_and_report_of_the_command(project, monkeypatch, capsys):
    def run(*words):
        return cli.call("verify", words)

    assert run() == 0 and "0 differ, 0 could not be made" in capsys.readouterr().out
    shutil.rmtree("data/raw")
    assert run("models/export/hf") == 0
    out = capsys.readouterr().out
    assert "unchecked  data/raw/manifest.json" in out and "not in this checkout" in out and "1 could not be made" in out
    assert run("models/export/hf", "--strict") == 2
    (project / "metrics" / "eval.json").write_text("{}")
    assert run("models/export/hf", "--strict") == 1 and "DIFFERS    metrics/eval.json" in capsys.readouterr().out


# -- planted changes -----------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_changed_weight_byte_is_named(project):
    path = project / "models/export/model-f16.gguf"
    tensor = next(t for t in GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    flip(path, tensor.data_offset + 100)
    found = lines(path, DIFFERS)
    one(found, "blk.1.ffn_up.weight")
    assert len(found) == 1
    one(lines("models/export", DIFFERS), "model-f16.gguf", "not the hash in manifest.json: changed since")
    flip(project / "models/export/hf/model.safetensors", -9)
    found = lines("models/export/hf", DIFFERS)
    one(found, "hf/model.safetensors", "not the hash in athanor.json")
    one(found, "hf/model.safetensors", "not what this code makes")


def edit_gguf(path: Path, key: str, text: str) -> None:
    """Another text of the same length, in place."""
    old = contents(GGUFReader(path))[key].encode()
    data = path.read_bytes()
    assert len(old) == len(text) and data.count(old) >= 1
    at = data.index(old, data.index(key.encode()))
    path.write_bytes(data[:at] + text.encode() + data[at + len(old) :])


def test_edited_metadata_of_a_gguf_is_named(project):
    path = project / "models/export/model-q8_0.gguf"
    edit_gguf(path, "general.type", "modem")
    found = lines(path, DIFFERS)
    one(found, "model-q8_0.gguf: is not what this code makes", "general.type")
    assert len(found) == 1
    edit_gguf(path, "athanor.lineage.clean", "0" * 64)
    one(lines(path, DIFFERS), "data/clean/manifest.json", "made from 000000000000")


def test_other_claims_than_the_checkout_bears_out_are_named(project):
    path = project / "models/export/model-q8_0.gguf"
    edit_gguf(path, "athanor.lineage.sft", "0" * 64)
    one(lines(path, DIFFERS), "models/sft/manifest.json")
    own = project / "models/export/hf/athanor.json"
    write_json(own, json.loads(own.read_text()) | {"tokenizer_digest": "1" * 64})
    one(lines(own.parent, DIFFERS), "tokenizer", "another tokenizer")
    one(lines(own.parent, DIFFERS), "hf/athanor.json", "not what this code makes")


def test_a_changed_data_manifest_is_named(project):
    path = project / "data/clean/manifest.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1', 1))
    found = lines("models/export/model-f16.gguf", DIFFERS)
    one(found, "data/clean/manifest.json")
    assert len(found) == 1


def test_a_changed_data_file_is_named_when_asked(project):
    path = project / "data/clean/val.parquet"
    flip(path, 40)
    assert not lines("models/export/hf", DIFFERS)
    one(lines("models/export/hf", DIFFERS, data=True), "data/clean/val.parquet", "changed")


def test_edited_metrics_are_named(project):
    path = project / "metrics/eval.json"
    path.write_text(path.read_text().replace("2.6", "1.6"))
    one(lines("models/export/hf", DIFFERS), "metrics/eval.json")


def test_another_tokenizer_is_named(project, tokenizer_dir):
    shutil.rmtree("models/tokenizer")
    shutil.copytree(tokenizer_dir, "models/tokenizer")
    found = lines("models/export/model-f16.gguf", DIFFERS)
    one(found, "models/tokenizer/manifest.json")
    one(found, "tokenizer: ", "another tokenizer")
    one(lines("models/export/model-f16.gguf", UNCHECKED), "cannot be made again", "models/tokenizer")
    shutil.copy(tokenizer_dir / "tokenizer.model", "models/export/hf/tokenizer.model")
    found = lines("models/export/hf", DIFFERS)
    one(found, "hf/tokenizer.model", "not the hash")
    one(found, "tokenizer: models/export/hf/tokenizer.model", "another tokenizer")


def test_a_renamed_file_is_named(project):
    export = project / "models/export"
    (export / "model-f16.gguf").rename(export / "model-q4_k_m.gguf")
    one(lines(export / "model-q4_k_m.gguf", DIFFERS), "renamed: it was written as model-f16.gguf")
    found = lines(export, DIFFERS)
    one(found, "model-f16.gguf", "missing")
    one(found, "model-q4_k_m.gguf", "added or renamed")
    (export / "hf/config.json").rename(export / "hf/config-old.json")
    found = lines(export / "hf", DIFFERS)
    one(found, "hf/config.json: missing")
    one(found, "hf/config-old.json")


def test_files_of_two_exports_in_one_folder_are_named(project):
    path = project / "models/export/model-q8_0.gguf"
    edit_gguf(path, "general.name", "fame")
    one(lines("models/export", DIFFERS), "model-q8_0.gguf", "another model than hf")


def test_a_copy_elsewhere_says_what_cannot_be_checked(project, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(project / "models/export", elsewhere / "copy")
    monkeypatch.chdir(elsewhere)
    found = verify("copy")
    assert not [line for line in found if line.status == DIFFERS]
    unchecked = {line.subject for line in found if line.status == UNCHECKED}
    assert {"data/raw/manifest.json", "metrics/eval.json", "model-f16.gguf"} <= unchecked
    assert len([line for line in found if line.status == MATCHES]) > 12
    flip(elsewhere / "copy/model-f16.gguf", -1)
    one(lines("copy", DIFFERS), "model-f16.gguf", "not the hash in manifest.json")


def test_what_no_export_stage_wrote_is_one_clear_error(project):
    (project / "torn.gguf").write_bytes((project / "models/export/model-f16.gguf").read_bytes()[:5000])
    for path, complaint in (
        ("models/sft", "neither"),
        ("nowhere", "neither"),
        ("torn.gguf", "not a whole GGUF"),
        ("metrics/eval.json", "not a whole GGUF"),
    ):
        with pytest.raises(InputError, match=complaint):
            verify(path)
    (project / "models/export/hf/athanor.json").write_text("[]")
    with pytest.raises(InputError, match=r"athanor.json: not what"):
        verify("models/export/hf")
    assert sha256_file("models/export/model-f16.gguf")  # and nothing was changed on the way

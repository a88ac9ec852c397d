"""K-quants: made by llama.cpp's program where there is one, with our keys; without it refused or announced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gguf import GGUFReader

from athanor.base.artifacts import sha256_file
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.export import gguf_check, gguf_writer, kquants, publish
from athanor.export.llamacpp.engine import NotInstalled
from athanor.export.params import ExportParams, PerplexityTolerance
from athanor.export.parity import Limits, check_llama_cpp

PARAMS = ExportParams(
    name="tiny",
    dtype="float32",
    gguf_types=("q8_0", "q4_k_m"),
    llama_cpp="if_installed",
    llama_cpp_timeout_seconds=120,
    parity_prompts=50,
    parity_new_tokens=16,
    parity_texts=200,
    parity_windows=4,
    parity_positions=3,
    kl_limit=1.0,
    logit_tolerance=1e-4,
    margin_logits=0.1,
    perplexity_chunks=2,
    perplexity_tolerance=PerplexityTolerance(f32=1e-4, f16=1e-2, q8_0=0.05, k_types=0.5),
)


@pytest.fixture
def quantiser():
    return kquants.find() or pytest.skip("no llama-quantize: set LLAMA_CPP_BIN to llama.cpp's build/bin")


@pytest.fixture
def no_quantiser(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLAMA_CPP_BIN", raising=False)
    monkeypatch.setenv("PATH", "")


def made(case, folder, quantiser, file_type="q4_k_m", name=""):
    exact, path = folder / "exact.gguf", folder / (name or gguf_writer.gguf_name(file_type))
    gguf_writer.write_gguf(exact, case.source, "f32")
    kquants.write_quantised(path, exact, case.source, file_type, quantiser, 120)
    return path


@pytest.mark.parametrize("file_type", gguf_writer.K_TYPES)
def test_keys_are_ours_and_weights_are_the_models(case, file_type, quantiser, tmp_path):
    path = made(case, tmp_path, quantiser, file_type)
    gguf_check.check_gguf(path, case.source, file_type)
    found = gguf_check.contents(GGUFReader(path))
    assert found["athanor.lineage.sft"] == "0" * 64 and found["athanor.file"] == path.name
    # Rows of 64 and 128 numbers: nothing here can be packed by 256, and larger types stand in.
    matrices = 15 if case.source.config.tied_embeddings else 16
    assert kquants.unpackable_matrices(case.source) == matrices
    kinds = gguf_check.stored_types(path)
    assert not any(kind.startswith("q4_k") for kind in kinds) and sum(kinds.values()) - kinds["f32"] == matrices
    again = made(case, tmp_path, quantiser, file_type, "again.gguf")
    assert sha256_file(again) == sha256_file(path)


def test_rows_of_256_are_packed_by_k_types(llama, quantiser, tmp_path):
    source, wide = llama.source, {}
    for name, weight in source.weights.items():  # four times as wide, the feed-forward as before
        grown = name.endswith(("o_proj.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "down_proj.weight"))
        shape = (4 if grown else 1, 1 if name.endswith("down_proj.weight") else 4) if weight.ndim == 2 else (4,)
        wide[name] = weight.repeat(shape)
    config = replace(source.config, dim=256, head_dim=64)
    case = replace(llama, source=replace(source, weights=wide, config=config))
    path = made(case, tmp_path, quantiser)
    gguf_check.check_gguf(path, case.source, "q4_k_m")
    kinds = gguf_check.stored_types(path)
    assert kinds["q4_k"] > 0 and kquants.unpackable_matrices(case.source) == 2  # the two ffn_down, with rows of 128


def test_weights_of_another_model_or_order_do_not_pass(llama, quantiser, tmp_path, monkeypatch):
    path = made(llama, tmp_path, quantiser, "q6_k")
    name = "model.layers.1.mlp.up_proj.weight"
    other = {**llama.source.weights, name: llama.source.weights[name].flip(0)}
    with pytest.raises(GateError, match="blk.1.ffn_up.weight"):
        gguf_check.check_gguf(path, replace(llama.source, weights=other), "q6_k")
    monkeypatch.setattr(gguf_writer, "interleave", lambda weight, heads: weight)
    with pytest.raises(GateError, match="attn_[qk].weight"):
        gguf_check.check_gguf(made(llama, tmp_path, quantiser, "q6_k", "wrong.gguf"), llama.source, "q6_k")


def test_llama_cpp_runs_it_and_counts_what_it_costs(case, quantiser, tmp_path):
    pytest.importorskip("xllamacpp")
    path = made(case, tmp_path, quantiser)
    limits = Limits(1e-4, 0.1, kl=1.0)
    options = {"threads": 1, "timeout_seconds": 120, "positions": 3}
    facts = check_llama_cpp(path, "q4_k_m", case.source, case.probe, case.expected, limits, **options)
    assert facts["positions"] == 12 and 0 < facts["kl_mean"] <= facts["kl_max"] and facts["prompts_apart"] <= 25
    with pytest.raises(GateError, match=r"q4_k_m.*mean divergence.*kl_limit"):
        check_llama_cpp(path, "q4_k_m", case.source, case.probe, case.expected, replace(limits, kl=1e-9), **options)


def test_a_quantiser_that_fails_is_told_with_its_words(llama, tmp_path):
    script = tmp_path / "llama-quantize"
    script.write_text("#!/bin/sh\necho out of memory >&2\nexit 7\n")
    script.chmod(0o755)
    with pytest.raises(GateError, match="ended with status 7: out of memory"):
        made(llama, tmp_path, script)
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    exact = tmp_path / "exact.gguf"
    with pytest.raises(GateError, match="did not end in 0.2 s"):
        kquants.write_quantised(tmp_path / "x.gguf", exact, llama.source, "q6_k", script, 0.2)
    assert not (tmp_path / "x.gguf").exists()


def test_a_missing_quantiser_is_an_error_where_llama_cpp_is_required(llama, no_quantiser, tmp_path):
    with pytest.raises(InputError, match="q4_k_m cannot be made: there is no llama-quantize"):
        publish.write_files(tmp_path / "out", llama.source, replace(PARAMS, llama_cpp="required"))


def test_a_missing_quantiser_is_announced_otherwise(llama, no_quantiser, tmp_path):
    pytest.importorskip("xllamacpp")
    publish.write_files(tmp_path / "out", llama.source, PARAMS)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"hf", "model-q8_0.gguf", "Modelfile"}
    notes: list[str] = []
    parity = publish.check_files(tmp_path / "out", llama.source, llama.probe, PARAMS, threads=1, note=notes.append)
    assert len(notes) == 1 and "model-q4_k_m.gguf: NOT WRITTEN" in notes[0]
    assert parity["llama_cpp_q4_k_m"].startswith("not written: there is no llama-quantize")
    assert parity["llama_cpp_q8_0"]["positions"] == 12 and parity["llama_cpp_f32"]["positions"] == 4


def test_a_file_that_diverges_too_far_is_left_out(llama, tmp_path):
    pytest.importorskip("xllamacpp")
    params, notes = replace(PARAMS, gguf_types=("q8_0", "f16"), kl_limit=1e-5), []
    publish.write_files(tmp_path, llama.source, params)
    parity = publish.check_files(tmp_path, llama.source, llama.probe, params, threads=1, note=notes.append)
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["model-f16.gguf"] and len(notes) == 1
    assert "mean divergence" in notes[0] and parity["llama_cpp_q8_0"].startswith("not written: llama.cpp parity")


def test_the_note_names_the_command(llama, no_quantiser, tmp_path, monkeypatch):
    """DVC does not know of programs: once they are installed a plain `dvc repro` would skip the export."""

    def absent(*_, **__):
        raise NotInstalled("xllamacpp")

    monkeypatch.setattr(publish, "check_llama_cpp", absent)
    params, notes = replace(PARAMS, gguf_types=("q4_k_m",)), []
    publish.write_files(tmp_path, llama.source, params)
    publish.check_files(tmp_path, llama.source, llama.probe, params, threads=1, note=notes.append)
    assert [note.split(",")[0] for note in notes] == ["model-q4_k_m.gguf: NOT WRITTEN", "llama.cpp: NOT CHECKED"]
    assert all(note.endswith("then: dvc repro -s -f export") for note in notes)


def test_a_whole_export_with_a_k_type(llama, quantiser, tmp_path):
    pytest.importorskip("xllamacpp")
    publish.write_files(tmp_path, llama.source, PARAMS)
    assert not (tmp_path / "model-f32.gguf").exists()
    notes: list[str] = []
    parity = publish.check_files(tmp_path, llama.source, llama.probe, PARAMS, threads=1, note=notes.append)
    facts = parity["llama_cpp_q4_k_m"]
    assert facts["fallback_tensors"] == 15 and sum(facts["tensors"].values()) == 20
    assert len(notes) == 1 and "15 matrices" in notes[0]


def test_a_k_type_needs_llama_cpp():
    with pytest.raises(ParamsError, match="q4_k_m needs llama.cpp"):
        replace(PARAMS, llama_cpp="off")

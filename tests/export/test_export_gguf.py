from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from athanor.base.errors import GateError
from athanor.export import gguf_check, gguf_writer


@pytest.mark.parametrize("file_type", gguf_writer.FILE_TYPES)
def test_written_file_reads_back(case, file_type, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(path, case.source, file_type)
    gguf_check.check_gguf(path, case.source, file_type)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert ("output.weight" in tensors) == (not case.source.config.tied_embeddings)  # tied: stored once
    norms = [tensor for name, tensor in tensors.items() if "norm" in name]
    assert norms and all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in norms)
    assert tensors["blk.1.ffn_up.weight"].tensor_type.name.lower() == file_type
    assert ("blk.0.attn_q_norm.weight" in tensors) == case.source.config.qk_norm


def test_the_list_of_tensors(case):
    config, names = case.source.config, list(gguf_writer.tensors(case.source))
    ends = ["output_norm.weight"] if config.tied_embeddings else ["output.weight", "output_norm.weight"]
    blocks = (len(gguf_writer.BLOCK) - (0 if config.qk_norm else 2)) * config.layers
    assert names[0] == "token_embd.weight" and names[blocks + 1 :] == ends
    assert all(name.startswith("blk.") for name in names[1 : blocks + 1])


def test_the_output_matrix_is_not_the_embedding(untied, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(path, untied.source, "f32")
    stored = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    for name, weight in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        assert np.array_equal(stored[f"{name}.weight"], untied.source.weights[f"{weight}.weight"].numpy())
    less = {name: array for name, array in gguf_writer.tensors(untied.source).items() if name != "output.weight"}
    other = tmp_path / "other.gguf"
    gguf_writer.write_raw(other, "qwen3", gguf_writer.metadata(untied.source, "f32"), less, "f32")
    with pytest.raises(GateError, match="output.weight"):
        gguf_check.check_gguf(other, untied.source, "f32")


def test_file_of_another_type_or_model_does_not_pass(llama, qwen, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(path, llama.source, "f16")
    with pytest.raises(GateError, match="athanor.file"):
        gguf_check.check_gguf(path, llama.source, "q8_0")
    with pytest.raises(GateError, match="read back"):
        gguf_check.check_gguf(path, qwen.source, "f16")
    name = "model.layers.1.mlp.up_proj.weight"
    changed = llama.source.weights[name].clone()
    changed[3, 4] += 1
    with pytest.raises(GateError, match="blk.1.ffn_up.weight"):
        gguf_check.check_gguf(path, replace(llama.source, weights={**llama.source.weights, name: changed}), "f16")


def test_interleaved_rows_rotated_in_pairs_equal_half_rotation():
    """The reason for the new order, from the two definitions of rotary positions."""
    heads, width, dim, angle = 3, 8, 5, np.linspace(0.1, 2.0, 4)
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(heads * width, dim)), rng.normal(size=dim)
    cos, sin = np.cos(angle), np.sin(angle)

    ours = (weight @ x).reshape(heads, width)
    first, second = ours[:, : width // 2], ours[:, width // 2 :]
    half = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    theirs = (gguf_writer.interleave(weight, heads) @ x).reshape(heads, width)
    even, odd = theirs[:, 0::2], theirs[:, 1::2]
    assert np.allclose(half[:, : width // 2], even * cos - odd * sin)
    assert np.allclose(half[:, width // 2 :], odd * cos + even * sin)


def test_weight_without_a_place_is_refused(llama):
    weights = {**llama.source.weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(GateError, match="q_proj.bias"):
        gguf_writer.tensors(replace(llama.source, weights=weights))


def test_width_that_q8_0_cannot_pack_is_refused(llama, tmp_path):
    weights = {**llama.source.weights, "model.layers.0.mlp.up_proj.weight": torch.zeros(128, 48)}
    source = replace(llama.source, weights=weights)
    with pytest.raises(GateError, match="blk.0.ffn_up.weight has rows of 48"):
        gguf_writer.write_gguf(tmp_path / "model.gguf", source, "q8_0")
    assert not (tmp_path / "model.gguf").exists()


def test_metadata_says_what_llama_cpp_would_guess_wrong(case):
    values = {key: item.value for key, item in gguf_writer.metadata(case.source, "f16").items()}
    tokenizer, arch = case.source.tokenizer, case.source.architecture
    assert arch == ("qwen3" if case.source.config.qk_norm else "llama")
    assert values["tokenizer.ggml.add_space_prefix"] is False and values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.eot_token_id"] == tokenizer.stop != values["tokenizer.ggml.eos_token_id"]
    assert values["tokenizer.ggml.tokens"][tokenizer.encode("\n")[0]] == "\n"
    assert len(set(values["tokenizer.ggml.scores"])) > 100
    assert values[f"{arch}.rope.freq_base"] == 50000.0
    assert values[f"{arch}.attention.layer_norm_rms_epsilon"] == 1e-5

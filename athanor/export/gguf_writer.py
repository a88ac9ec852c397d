"""GGUF files for llama.cpp, written directly.

Everything here that looks redundant was measured to matter: a key that is
missing or a row in another order makes a file that loads, answers, and is
wrong by 5 to 70 % perplexity without a word (see the notes at each place).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, quants

from athanor.base.errors import GateError
from athanor.export.source import Source
from athanor.export.vocabulary import USER_DEFINED
from athanor.model.config import ModelConfig

# The types that are written here, and those that llama.cpp's own quantiser makes of an f32 file.
FILE_TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
K_TYPES = {
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k_m": LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
}
_U32, _F32, _BOOL, _STR = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL, GGUFValueType.STRING
_LIST = GGUFValueType.ARRAY

TOP_LEVEL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
UNTIED = {"lm_head.weight": "output.weight"}  # where it is absent, llama.cpp takes the embedding
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Value:
    type: GGUFValueType
    value: Any


def gguf_name(file_type: str) -> str:
    return f"model-{file_type}.gguf"


def metadata(source: Source, file_type: str) -> dict[str, Value]:
    """Every key of the file, in the order it is written."""
    file_type_number = K_TYPES[file_type] if file_type in K_TYPES else FILE_TYPES[file_type][1]
    config, arch, controls = source.config, source.architecture, source.controls
    pieces = source.vocabulary.pieces
    values = {
        "general.type": Value(_STR, "model"),
        "general.name": Value(_STR, source.name),
        "general.file_type": Value(_U32, int(file_type_number)),
        "general.quantization_version": Value(_U32, 2),
        # Greedy, as evaluated: llama.cpp's server takes this for its default.
        "general.sampling.temp": Value(_F32, 0.0),
        f"{arch}.vocab_size": Value(_U32, config.vocab_size),
        f"{arch}.context_length": Value(_U32, config.context_tokens),
        f"{arch}.embedding_length": Value(_U32, config.dim),
        f"{arch}.block_count": Value(_U32, config.layers),
        f"{arch}.feed_forward_length": Value(_U32, config.ffn_dim),
        f"{arch}.attention.head_count": Value(_U32, config.heads),
        f"{arch}.attention.head_count_kv": Value(_U32, config.kv_heads),
        f"{arch}.attention.key_length": Value(_U32, config.head_dim),
        f"{arch}.attention.value_length": Value(_U32, config.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": Value(_F32, config.norm_eps),
        f"{arch}.rope.dimension_count": Value(_U32, config.head_dim),
        f"{arch}.rope.freq_base": Value(_F32, config.rope_theta),  # absent means 10000
        "tokenizer.ggml.model": Value(_STR, "llama"),  # SentencePiece BPE; "t5" would be unigram
        "tokenizer.ggml.pre": Value(_STR, "default"),
        # User-defined pieces are matched on the raw text, so they carry real spaces.
        "tokenizer.ggml.tokens": Value(_LIST, [p.plain if p.type == USER_DEFINED else p.text for p in pieces]),
        "tokenizer.ggml.scores": Value(_LIST, [float(p.score) for p in pieces]),  # absent: all merges tie
        "tokenizer.ggml.token_type": Value(_LIST, [int(p.type) for p in pieces]),
        "tokenizer.ggml.bos_token_id": Value(_U32, controls["bos"]),
        "tokenizer.ggml.eos_token_id": Value(_U32, controls["eos"]),
        "tokenizer.ggml.eot_token_id": Value(_U32, controls["stop"]),
        "tokenizer.ggml.unknown_token_id": Value(_U32, source.vocabulary.unk),
        "tokenizer.ggml.padding_token_id": Value(_U32, controls["pad"]),
        "tokenizer.ggml.add_bos_token": Value(_BOOL, True),
        "tokenizer.ggml.add_eos_token": Value(_BOOL, False),
        # Absent means true: a space would appear at the start and after every newline.
        "tokenizer.ggml.add_space_prefix": Value(_BOOL, False),
        "tokenizer.ggml.remove_extra_whitespaces": Value(_BOOL, False),
        "tokenizer.chat_template": Value(_STR, source.template),  # absent means ChatML
        "athanor.file": Value(_STR, gguf_name(file_type)),
        "athanor.tokenizer_digest": Value(_STR, source.tokenizer.digest),
        "athanor.template_hash": Value(_STR, source.template_hash),
    }
    values |= {f"athanor.lineage.{name}": Value(_STR, digest) for name, digest in source.lineage.items()}
    values |= {f"athanor.lock.{path}": Value(_STR, md5) for path, md5 in source.lock.items()}
    return values


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Names of a model's weights, in transformers and here, and in llama.cpp."""
    modules = {
        name: theirs for name, theirs in BLOCK.items() if config.qk_norm or not name.endswith(("q_norm", "k_norm"))
    }
    return (TOP_LEVEL if config.tied_embeddings else TOP_LEVEL | UNTIED) | {
        f"model.layers.{n}.{ours}.weight": f"blk.{n}.{theirs}.weight"
        for n in range(config.layers)
        for ours, theirs in modules.items()
    }


def tensors(source: Source) -> dict[str, np.ndarray]:
    """Weights under llama.cpp's names, fp32, in file order. A weight without a place there is an error."""
    heads = {"q_proj": source.config.heads, "k_proj": source.config.kv_heads}
    names, arrays = tensor_names(source.config), {}
    for name, tensor in source.weights.items():
        if name not in names:
            raise GateError("mapped weights", f"'{name}' has no place in a {source.architecture} file")
        array, module = tensor.numpy(), name.split(".")[-2]
        interleaved = source.architecture == "llama" and module in heads
        arrays[names[name]] = interleave(array, heads[module]) if interleaved else array
    return dict(sorted(arrays.items(), key=lambda item: _file_order(item[0])))


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, from half rotation to neighbouring pairs.

    llama.cpp's `llama` rotates rows (2i, 2i+1) of a head where we rotate
    (i, i + E/2); its `qwen3` rotates as we do and needs no change. weight: [heads * E, D].
    """
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def encode(array: np.ndarray, file_type: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """A tensor's bytes in the file: norms stay fp32 (llama.cpp aborts on others), matrices take the file's type."""
    tensor_type = GGMLQuantizationType.F32 if array.ndim == 1 else FILE_TYPES[file_type][0]
    return quants.quantize(np.ascontiguousarray(array), tensor_type), tensor_type


def write_gguf(path: str | Path, source: Source, file_type: str) -> None:
    """Write one file. Equal sources make equal bytes."""
    arrays = tensors(source)
    block = 32 if file_type == "q8_0" else 1
    for name, array in arrays.items():
        if array.ndim == 2 and array.shape[1] % block:
            raise GateError(
                "exportable shape",
                f"{name} has rows of {array.shape[1]} numbers and q8_0 packs {block} at a time",
                fix="make dim, heads * head_dim and ffn_dim multiples of 32, or drop q8_0 from export.gguf_types",
            )
    write_raw(path, source.architecture, metadata(source, file_type), arrays, file_type)


def write_raw(
    path: str | Path, arch: str, values: Mapping[str, Value], arrays: Mapping[str, np.ndarray], file_type: str
) -> None:
    """Write given keys and tensors as they are; `write_gguf` decides what they must be."""
    write_encoded(path, arch, values, {name: encode(array, file_type) for name, array in arrays.items()})


def write_encoded(
    path: str | Path,
    arch: str,
    values: Mapping[str, Value],
    stored: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
) -> None:
    """Write keys, and tensors whose bytes are ready: (bytes, type)."""
    writer = GGUFWriter(path, arch)
    for key, entry in values.items():
        writer.add_key_value(key, entry.value, entry.type)
    for name, (data, tensor_type) in stored.items():
        writer.add_tensor(name, data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _file_order(name: str) -> tuple[int, int, str]:
    match = re.match(r"blk\.(\d+)\.", name)
    return (1, int(match[1]), name) if match else (0 if name.startswith("token_embd") else 2, 0, name)

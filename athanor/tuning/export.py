"""Export of a side graph's model: merged for transformers, the adapter for peft, both for llama.cpp; each is checked.

Weights keep the base's own type. GGUF files need the base's own GGUF: it has the keys, and in llama.cpp it shows whether
the order of rows is right.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, GGUFValueType, get_tensor_name_map, quants
from safetensors.torch import load_file
from torch import Tensor

from athanor.base import artifacts
from athanor.base.errors import GateError
from athanor.base.templates import markdown
from athanor.export.gguf_reader import read_header
from athanor.export.gguf_writer import Value, interleave, write_raw
from athanor.export.huggingface import FACTS_FILE
from athanor.export.params import ExportParams
from athanor.export.perplexity import HuggingFace, LlamaCpp, Scorer, Window
from athanor.tuning.model import base_digests, load_tokenizer
from athanor.tuning.rows import Template
from athanor.tuning.trainer import KIND, VERSION

TEXT = "What is 2 + 3?\n\n2 + 3 = 5. The days are Monday, Tuesday, Wednesday and\n\tdef f(x):\n\t\treturn x\ne\u0301\u00a0\u3042"
# That log-probabilities may be apart, mean: llama.cpp looks GELU up in a table of 16 bits, and its types round.
FINE_NATS, COARSE_NATS = 0.005, 0.05
WRITTEN = ("f32", "f16", "bf16", "q8_0")  # types that the converter and the gguf package write
OTHERS = shutil.ignore_patterns("*.safetensors*", "*.gguf", "*.bin*", "*.pt*", "onnx", ".*")  # weights in other forms


def export(run: Any, method: str) -> None:
    """Write models/METHOD-export from models/METHOD and side.base; nothing appears before every check has passed."""
    params, base, trained = run.params("export", ExportParams), Path(run.param("side.base")), Path("models", method)
    made, config = artifacts.read_manifest(trained, KIND, VERSION), artifacts.read_json(base / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    template, gguf = Template(load_tokenizer(str(base)), str(base)), base_gguf(base)
    ids = np.array(template.ids(TEXT))
    window = Window(ids, np.arange(1, len(ids)))
    merged, expected = merge(base, trained, made["method"], window)
    llama_cpp = {"exact": True, "threads": torch.get_num_threads(), "timeout_seconds": params.llama_cpp_timeout_seconds}
    with artifacts.new_dir(f"models/{method}-export") as folder:
        hf, adapter, model = folder / "hf", folder / "adapter", folder / "model.gguf"
        merged.to(getattr(torch, dtype)).save_pretrained(hf)
        shutil.copytree(base, hf, ignore=OTHERS, dirs_exist_ok=True)
        artifacts.write_text(hf / "chat_template.jinja", template.tokenizer.chat_template)
        if (own := hf / FACTS_FILE).is_file():  # of our own model; the manifest has the hashes
            artifacts.write_json(own, artifacts.read_json(own) | {"name": f"{params.name}-{method}", "files": {}})
        stored = HuggingFace(hf)
        check(hf, stored, window, expected, params.logit_tolerance if dtype == "float32" else COARSE_NATS)
        scorers, fine = {}, ("f32", "f16") if dtype == "float32" else ()
        if made["method"] == "lora":
            shutil.copytree(trained, adapter)
        if made["method"] == "lora" and gguf is not None:
            write_adapter(adapter / "adapter.gguf", trained, gguf)
            scorers[adapter] = LlamaCpp(gguf, lora=[adapter / "adapter.gguf"], **llama_cpp)
        if gguf is not None and LlamaCpp(gguf, **llama_cpp).dtype in WRITTEN:
            write_model(model, gguf, dict(stored.model.named_parameters()))  # tied ones once
            scorers[model] = LlamaCpp(model, **llama_cpp)
        for file, scorer in scorers.items():
            scorer.context_tokens = len(ids)
            if params.llama_cpp != "off":
                check(file, scorer, window, expected, FINE_NATS if scorer.dtype in fine else COARSE_NATS)
        facts = {
            "scores": artifacts.read_json(f"metrics/{method}.json"),
            "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
            "digests": base_digests(str(base)),
        }
        card = markdown("athanor.tuning", "card.md.j2").render(method=method, params=params, made=made, **facts)
        artifacts.write_text(folder / "MODEL_CARD.md", card)
        parents = {method: artifacts.manifest_digest(trained)}
        artifacts.write_manifest(folder, kind="side-export", version=1, counts={}, parents=parents)
    run.metrics({"ggufs": len(scorers)})


def merge(base: Path, trained: Path, method: str, window: Window) -> tuple[Any, np.ndarray]:
    """The trained model, fp32, without adapters, and its log-probabilities with them, negated."""
    from peft import PeftModel

    scorer = HuggingFace(base)
    if method == "lora":
        scorer.model = PeftModel.from_pretrained(scorer.model, trained).eval()
    else:
        scorer.model = type(scorer.model).from_pretrained(trained, dtype=torch.float32)
    (expected,) = scorer.nats([window])
    return scorer.model.merge_and_unload() if method == "lora" else scorer.model, expected


def check(file: Path, scorer: Scorer, window: Window, expected: np.ndarray, limit: float) -> None:
    apart = float(np.abs(scorer.nats([window])[0] - expected).mean())
    if not apart <= limit:
        what = f"log-probabilities are {apart:.3g} nats from those of base and adapter (limit {limit:g})"
        raise GateError("export", what, where=file.name, fix="report it with the base's name")


def base_gguf(base: Path) -> Path | None:
    """The base as GGUF: of llama.cpp's converter in its directory, or of our export beside it."""
    names = ("base.gguf", "../model-f32.gguf", "../model-f16.gguf")
    return next((base / name for name in names if (base / name).is_file()), None)


def converted(weights: Mapping[str, Tensor], gguf: Path) -> dict[str, np.ndarray]:
    """Weights, or factors of a LoRA (their names end in .lora_a or .lora_b), as llama.cpp's converter writes them."""
    header = read_header(gguf)
    arch = header["general.architecture"]
    heads = header[f"{arch}.attention.head_count"]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, header[f"{arch}.block_count"])
    arrays = {}
    for key, tensor in weights.items():
        stem, factor, kind = key.partition(".lora_")
        name, array = names.get_name(stem, (".weight", ".bias")) or stem, tensor.detach().float().numpy()
        part = name.split(".")[-2]
        if kind == "a":
            pass  # the columns of a matrix keep their order
        elif arch == "llama" and part in ("attn_q", "attn_k"):  # it rotates neighbouring rows
            array = interleave(array, heads if part == "attn_q" else header[f"{arch}.attention.head_count_kv"])
        elif arch == "gptneox" and part == "attn_qkv":  # transformers has query, key and value of a head together
            array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        elif arch.startswith("gemma") and part.endswith("norm"):
            array = array + 1
        arrays[name + factor + kind] = array
    return arrays


def write_adapter(path: Path, trained: Path, gguf: Path) -> None:
    """A LoRA for the model in `gguf`: llama.cpp adds alpha / rank · B A x to each matrix that the file names."""
    weights = {}
    for key, tensor in sorted(load_file(trained / "adapter_model.safetensors").items()):
        module, kind = key.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
        weights[f"{module}.weight.lora_{kind.lower()}"] = tensor
    texts = {"general.type": "adapter", "adapter.type": "lora"}
    values = {key: Value(GGUFValueType.STRING, text) for key, text in texts.items()}
    alpha = float(artifacts.read_json(trained / "adapter_config.json")["lora_alpha"])
    values["adapter.lora.alpha"] = Value(GGUFValueType.FLOAT32, alpha)
    write_raw(path, read_header(gguf)["general.architecture"], values, converted(weights, gguf), "f32")


def write_model(path: Path, gguf: Path, weights: Mapping[str, Tensor]) -> None:
    """The file `gguf` with other weights in the places and types of its own."""
    arrays = converted(weights, gguf)
    shutil.copyfile(gguf, path)
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in arrays:
            tensor.data[:] = quants.quantize(arrays.pop(tensor.name), tensor.tensor_type)
    if arrays:
        raise GateError("GGUF", f"no place for {min(arrays)}", where=str(gguf), fix="make it again from side.base")
    reader.data.flush()

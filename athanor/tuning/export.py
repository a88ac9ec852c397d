"""Export of a side graph's model: merged for transformers, the adapter for peft, both for llama.cpp; each is checked.

Weights keep the base's own type. GGUF files need the base's own GGUF: it has the keys, and in llama.cpp it shows whether
the order of rows is right.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
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
from athanor.export.llamacpp.asking import ask
from athanor.export.params import ExportParams
from athanor.tuning import model, trainer
from athanor.tuning.rows import Template

TEXT = "What is 2 + 3?\n\n2 + 3 = 5. The days are Monday, Tuesday, Wednesday and\n\tdef f(x):\n\t\treturn x\ne\u0301\u00a0\u3042"
ROUNDED_NATS = 0.05  # that log-probabilities may be apart where weights are in 8 or 16 bits
OTHERS = shutil.ignore_patterns("*.safetensors*", "*.gguf", "*.bin*", "*.pt*", "onnx", ".*")  # weights in other forms
PEFT = "adapter_config.json"


def export(run: Any, method: str) -> None:
    """Write models/METHOD-export from models/METHOD and side.base; nothing appears before every check has passed."""
    params, base, trained = run.params("export", ExportParams), run.param("side.base"), Path("models", method)
    template, gguf = Template(model.load_tokenizer(base), base), base_gguf(Path(base))
    ids = template.ids(TEXT)
    asked = params.llama_cpp == "required" or (params.llama_cpp == "if_installed" and find_spec("xllamacpp"))
    with artifacts.new_dir(f"models/{method}-export") as folder:
        hf = folder / "hf"
        expected = write_merged(hf, Path(base), trained, ids)
        artifacts.write_text(hf / "chat_template.jinja", template.tokenizer.chat_template)
        if (own := hf / FACTS_FILE).is_file():  # of our own model; the manifest has the hashes
            artifacts.write_json(own, artifacts.read_json(own) | {"name": f"{params.name}-{method}", "files": {}})
        merged = load(hf)
        check(hf, log_probabilities(merged, ids), expected, merged.config.dtype == torch.float32, params)
        if (trained / PEFT).is_file():
            shutil.copytree(trained, folder / "adapter")
        for file, lora in write_ggufs(folder, gguf, merged.state_dict()).items():
            if asked:
                check_llama_cpp(file, lora, ids, expected, params)
            else:
                run.note(f"{file.name}: NOT CHECKED in llama.cpp")
        facts = {
            "made": artifacts.read_manifest(trained, trainer.KIND, trainer.VERSION),
            "scores": artifacts.read_json(f"metrics/{method}.json"),
            "files": sorted(path.name for path in folder.iterdir()),
            "digests": model.base_digests(base),
        }
        card = markdown("athanor.tuning", "card.md.j2").render(method=method, params=params, **facts)
        artifacts.write_text(folder / "MODEL_CARD.md", card)
        parents = {method: artifacts.manifest_digest(trained)}
        artifacts.write_manifest(folder, kind="side-export", version=1, counts={}, parents=parents)
    run.metrics({"files": facts["files"]})


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **model.OFFLINE)


def write_merged(hf: Path, base: Path, trained: Path, ids: list[int]) -> np.ndarray:
    """Write the directory; returns the log-probabilities of `ids` with the adapter beside the base."""
    from peft import PeftModel

    lora = (trained / PEFT).is_file()
    causal = PeftModel.from_pretrained(load(base), trained) if lora else load(trained)
    expected = log_probabilities(causal.eval(), ids)
    config = artifacts.read_json(base / "config.json")
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    (causal.merge_and_unload() if lora else causal).to(dtype).save_pretrained(hf)
    shutil.copytree(base, hf, ignore=OTHERS, dirs_exist_ok=True)
    return expected


@torch.inference_mode()
def log_probabilities(causal: Any, ids: list[int]) -> np.ndarray:
    """Nats of each id but the first."""
    logits_TV = causal(torch.tensor([ids])).logits[0]
    return logits_TV.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()


def check(file: Path, found: np.ndarray, expected: np.ndarray, exact: bool, params: ExportParams) -> None:
    """GateError where log-probabilities are apart, of `exact` weights by more than export.logit_tolerance."""
    apart, limit = float(np.abs(found - expected).mean()), params.logit_tolerance if exact else ROUNDED_NATS
    if not apart <= limit:
        what = f"log-probabilities are {apart:.3g} nats from those of base and adapter (limit {limit:g})"
        raise GateError("export", what, where=file.name, fix="report it with the base's name")


def check_llama_cpp(
    file: Path, lora: list[Path], ids: list[int], expected: np.ndarray, params: ExportParams
) -> None:
    threads, seconds = torch.get_num_threads(), params.llama_cpp_timeout_seconds
    options = {"context_tokens": len(ids), "exact": True, "threads": threads, "timeout_seconds": seconds}
    (rows,) = ask(file, {"score": [[ids]]}, lora=lora, **options)["score"]
    exact = all(tensor.tensor_type == 0 for tensor in GGUFReader(file).tensors)
    check([file, *lora][-1], np.array([row[1] for row in rows]), expected, exact, params)


def base_gguf(base: Path) -> Path | None:
    """The base as GGUF: of llama.cpp's converter in its directory, or of our export beside it."""
    ours = [base.parent / f"model-{kind}.gguf" for kind in ("f32", "f16") if base.name == "hf"]
    return next((path for path in (base / "base.gguf", *ours) if path.is_file()), None)


def write_ggufs(folder: Path, gguf: Path | None, weights: Mapping[str, Tensor]) -> dict[Path, list[Path]]:
    """The files that are made of the base's, each with the adapter that belongs to it."""
    files = {}
    if gguf is not None:
        if (folder / "adapter").is_dir():
            write_adapter(folder / "adapter.gguf", folder / "adapter", gguf)
            files[gguf] = [folder / "adapter.gguf"]
        write_model(folder / "model.gguf", gguf, weights)
        files[folder / "model.gguf"] = []
    return files


def converted(weights: Mapping[str, Tensor], gguf: Path) -> dict[str, np.ndarray]:
    """Weights (or the B of their LoRA) by llama.cpp's names, with rows and values as its converter writes them."""
    header = read_header(gguf)
    arch = header["general.architecture"]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, header[f"{arch}.block_count"])
    heads = header[f"{arch}.attention.head_count"]
    kv_heads = header.get(f"{arch}.attention.head_count_kv", heads)
    arrays = {}
    for key, tensor in weights.items():
        name, array = names.get_name(key, (".weight", ".bias")) or key, tensor.float().numpy()
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):  # it rotates neighbouring rows
            array = interleave(array, heads if "attn_q" in name else kv_heads)
        elif arch == "gptneox" and "attn_qkv" in name:  # transformers has query, key and value of a head together
            array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        arrays[name] = array
    return arrays


def write_adapter(path: Path, trained: Path, gguf: Path) -> None:
    """A LoRA for the model in `gguf`: llama.cpp adds alpha / rank · B A x to each matrix that the file names."""
    factors = load_file(trained / "adapter_model.safetensors")
    a = {key.removeprefix("base_model.model.").replace(".lora_A", ""): key for key in factors if ".lora_A." in key}
    b = converted({name: factors[key.replace("lora_A", "lora_B")] for name, key in a.items()}, gguf)
    arrays = {}
    for key, (name, array) in zip(a.values(), b.items(), strict=True):
        arrays |= {f"{name}.lora_a": factors[key].float().numpy(), f"{name}.lora_b": array}
    texts = {"general.type": "adapter", "adapter.type": "lora"}
    values = {key: Value(GGUFValueType.STRING, text) for key, text in texts.items()}
    alpha = Value(GGUFValueType.FLOAT32, float(artifacts.read_json(trained / PEFT)["lora_alpha"]))
    arch = read_header(gguf)["general.architecture"]
    write_raw(path, arch, {**values, "adapter.lora.alpha": alpha}, dict(sorted(arrays.items())), "f32")


def write_model(path: Path, gguf: Path, weights: Mapping[str, Tensor]) -> None:
    """The file `gguf` with other weights in the places and types of its own."""
    arrays = converted(weights, gguf)
    shutil.copyfile(gguf, path)
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in arrays:
            tensor.data[:] = quants.quantize(arrays.pop(tensor.name), tensor.tensor_type)
    if arrays.keys() - {"output.weight"}:  # tied to the embedding
        raise GateError("GGUF", f"no place for {min(arrays)}", where=str(gguf), fix="make it again from side.base")
    reader.data.flush()

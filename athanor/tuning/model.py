"""The base of a side graph: its directory, tokenizer and model, loaded by transformers and adapted by peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, read_json, sha256_file
from athanor.base.errors import InputError, ParamsError
from athanor.tuning.params import SideParams

INSTALL = "pip install -r requirements-side.txt"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "query_key_value", "dense", "c_attn", "qkv_proj", "out_proj"]
OFFLINE = {"local_files_only": True, "trust_remote_code": False}


def libraries(*names: str) -> None:
    """InputError unless these packages are installed; called before any time is spent."""
    from importlib.util import find_spec

    for name in names:
        if find_spec(name) is None:
            fix = f"pip install {name}" if name == "bitsandbytes" else INSTALL
            raise InputError(f"{name} is not installed", where="side", fix=fix)
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|peft")
    warnings.filterwarnings("ignore", "You are using 'rollout_func'")  # experimental: the version is pinned
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "datasets" in names:
        import datasets

        datasets.disable_progress_bars()


def base_digests(base: str) -> dict[str, str]:
    """SHA-256 of each file of the base that decides a result; InputError for a directory that is none."""
    folder = Path(base)
    config = folder / "config.json"
    if not config.is_file():
        fix = "athanor repro makes models/export/hf; for another model name the directory that you downloaded it to"
        raise InputError("no Hugging Face model (config.json)", where=f"side.base: {base}", fix=fix)
    if not list(folder.glob("*.safetensors")):
        fix = "download the safetensors version, or save it once more with save_pretrained"
        raise InputError("no weights as .safetensors", where=base, fix=fix)
    if read_json(config).get("quantization_config"):
        raise InputError("the weights are quantised", where=base, fix="use the full weights with side.quantise: nf4")
    files = sorted(path for suffix in ("json", "safetensors", "jinja", "model") for path in folder.glob(f"*.{suffix}"))
    return {path.name: sha256_file(path) for path in files}


def base_digest(base: str) -> str:
    return digest(base_digests(base))


def load_tokenizer(base: str) -> Any:
    """The base's own tokenizer, with a pad token; no code of the directory is run."""
    libraries("transformers")
    from transformers import AutoTokenizer

    base_digests(base)
    tokenizer = AutoTokenizer.from_pretrained(base, **OFFLINE)
    tokenizer.model_max_length = 10**9  # rows have their own limit
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        fix = "set pad_token in its tokenizer_config.json to a special token that the model knows"
        raise InputError("the tokenizer has neither a pad nor an eos token", where=base, fix=fix)
    return tokenizer


def precision_of(side: SideParams) -> str:
    """fp32, bf16 or fp16. auto: bf16 on a card that computes it natively, else fp32.

    Never fp16 by itself: models trained in bf16 overflow there (Qwen2.5 gave NaN on two MI50).
    """
    import torch

    if side.precision != "auto":
        return side.precision
    native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def load_model(side: SideParams, context_tokens: int = 0) -> Any:
    """The base as transformers' causal model, in the form that it is trained in.

    ParamsError where `context_tokens` is beyond what the model was made for.
    """
    libraries("transformers", "peft", *(["bitsandbytes"] if side.quantise == "nf4" else []))
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision_of(side))
    # Trained weights are fp32 masters under autocast; a frozen base may be stored in 16 bits.
    stored = half if half is not None and side.method == "lora" else torch.float32
    options: dict[str, Any] = {
        "dtype": stored,
        "attn_implementation": side.attention,
        "use_safetensors": True,
        **OFFLINE,
    }
    if side.quantise == "nf4":
        compute = {"bnb_4bit_compute_dtype": half or torch.float32, "bnb_4bit_use_double_quant": True}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **compute)
    model, info = AutoModelForCausalLM.from_pretrained(side.base, output_loading_info=True, **options)
    for kind in ("missing_keys", "unexpected_keys"):
        if info.get(kind):
            what = (
                f"the weights do not fit config.json: {kind.replace('_', ' ')}, first {sorted(map(str, info[kind]))[0]}"
            )
            raise InputError(what, where=side.base, fix="download the model again")
    limit = getattr(model.config, "max_position_embeddings", None) or context_tokens
    if context_tokens > limit:
        what = f"rows of {context_tokens} tokens, the base was made for {limit}"
        raise ParamsError(what, where="tune.context_tokens", fix=f"use at most {limit}")
    model.config.use_cache = False
    return model


def lora_config(side: SideParams, model: Any) -> Any:
    """peft's configuration, or None where all weights are trained."""
    if side.method == "full":
        return None
    from peft import LoraConfig

    lora = side.lora
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = "all-linear" if lora.targets == "all" else sorted(names & set(ATTENTION))
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )

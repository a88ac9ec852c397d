"""A LoRA as files: merged for transformers, alone for peft, and as GGUF beside a base in real llama.cpp.

Adapters here are random and as strong as the base, so that an adapter left out, scaled wrongly or with its rows in
another order is far off. Logits of about 10; fp32 sums of 64 terms in another order agree to 1e-4.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from athanor.adapters import gguf_lora, lora
from athanor.adapters.export import check_merged, generation_config, write_merged
from athanor.adapters.foreign import load_foreign
from athanor.adapters.foreign_files import base_digests
from athanor.adapters.lora import LoraSettings
from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.base.artifacts import read_json
from athanor.base.errors import GateError
from athanor.model.tensorfile import read_tensors, write_tensors
from tests.adapters import base_gguf

SETTINGS = LoraSettings(rank=4, alpha=12.0, dropout=0.1, targets="all")
CLOSE = 2e-4
WINDOWS = [[5, 17, 90, 200, 31, 8], [260, 44, 44, 3], list(range(40))]


def adapted(base):
    """A model whose adapters are set, and not trained: these tests are about files."""
    model = load_foreign(base, SETTINGS, 64, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.15, generator=generator)
    return model


def detached(model):
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def made(request, bases, tmp_path_factory):
    """base, model, folder with what is exported of it."""
    base, folder = bases[request.param], tmp_path_factory.mktemp(request.param)
    model = adapted(base)
    adapters = detached(model)
    (folder / "adapter").mkdir()
    lora.save_adapter(folder / "adapter", adapters, SETTINGS, str(base))
    write_merged(folder / "hf", base, ForeignTokenizer(base), adapters, SETTINGS.scale, "float32")
    gguf_lora.write_lora(folder / "adapter.gguf", adapters, request.param, model.config, SETTINGS.alpha, "tiny")
    return base, model, folder


def logits(model, ids):
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    return (out.logits if hasattr(out, "logits") else out)[0].numpy()


def test_merged_logits_are_those_of_base_and_adapter(made):
    from transformers import AutoModelForCausalLM

    base, model, folder = made
    merged = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    for ids in WINDOWS:
        assert np.abs(logits(merged, ids) - logits(model, ids)).max() < CLOSE
        assert np.abs(logits(plain, ids) - logits(model, ids)).max() > 1.0
        with model.without_adapters():
            assert np.abs(logits(plain, ids) - logits(model, ids)).max() < 1e-6


def test_peft_reads_the_adapter(made):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, model, folder = made
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter").eval()
    for ids in WINDOWS:
        assert np.abs(logits(again, ids) - logits(model, ids)).max() < 1e-5
    assert {n: t.numpy().tobytes() for n, t in lora.read_adapter(folder / "adapter").items()} == {
        n: w.detach().numpy().tobytes() for n, w in model.named_parameters()
    }


def test_llama_cpp_with_the_adapter_says_what_the_merged_model_says(made, tmp_path):
    base, model, folder = made
    base_gguf.write(tmp_path / "base.gguf", base)
    told = base_gguf.ask(tmp_path / "base.gguf", folder / "adapter.gguf", WINDOWS)
    wanted = np.stack([torch.tensor(logits(model, ids)[-1]).log_softmax(-1).numpy() for ids in WINDOWS])
    assert np.abs(told - wanted).max() < CLOSE
    # The test can fail: another alpha, and for llama rows that were left in transformers' order.
    adapters, arch = lora.read_adapter(folder / "adapter"), read_json(base / "config.json")["model_type"]
    gguf_lora.write_lora(tmp_path / "wrong.gguf", adapters, arch, model.config, 2 * SETTINGS.alpha, "tiny")
    if arch == "llama":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_lora, "interleave", lambda weight, heads: weight)
            gguf_lora.write_lora(tmp_path / "wrong.gguf", adapters, arch, model.config, SETTINGS.alpha, "tiny")
    off = base_gguf.ask(tmp_path / "base.gguf", tmp_path / "wrong.gguf", WINDOWS)
    assert np.abs(off - wanted).max() > 0.1


def test_the_adapter_file_is_read_back_and_a_wrong_one_is_refused(made, tmp_path):
    base, model, folder = made
    adapters, arch = lora.read_adapter(folder / "adapter"), read_json(base / "config.json")["model_type"]
    gguf_lora.check_lora(folder / "adapter.gguf", adapters, arch, model.config, SETTINGS.alpha)
    with pytest.raises(GateError, match="alpha"):
        gguf_lora.check_lora(folder / "adapter.gguf", adapters, arch, model.config, 1.0)
    other = adapters | {"model.layers.1.self_attn.q_proj.lora_B.weight": torch.zeros(32, 4)}
    with pytest.raises(GateError, match=r"blk.1.attn_q.weight.lora_b"):
        gguf_lora.check_lora(folder / "adapter.gguf", other, arch, model.config, SETTINGS.alpha)


def test_the_directory_has_one_template_and_ends_where_a_turn_does(made):
    from transformers import AutoTokenizer

    base, _, folder = made
    ours = ForeignTokenizer(base)
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.chat_template == ours.template
    assert "another one" not in (folder / "hf/tokenizer_config.json").read_text()
    assert read_json(folder / "hf/generation_config.json")["eos_token_id"][0] == ours.stop
    assert ForeignTokenizer(folder / "hf").template_hash == ours.template_hash
    assert set(base_digests(base)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_decoding_is_plain_greedy_whatever_the_base_says(bases, tmp_path):
    """Qwen2.5-Instruct ships a penalty on repetition, by which greedy answers shun the words of the question."""
    base = shutil.copytree(bases["qwen2"], tmp_path / "base")
    said = {"repetition_penalty": 1.05, "top_k": 20, "num_beams": 4, "do_sample": True, "temperature": 0.7}
    said |= {"pad_token_id": 3, "bos_token_id": 5, "eos_token_id": [7], "no_repeat_ngram_size": 3, "min_p": 0.1}
    (base / "generation_config.json").write_text(json.dumps(said))
    tokenizer = ForeignTokenizer(base)
    found = generation_config(base, tokenizer)
    assert found == {"bos_token_id": 5, "pad_token_id": 3, "eos_token_id": [tokenizer.stop, 7], "do_sample": False}


def test_activations_beyond_fp16_are_seen(bases, tmp_path):
    """The weights fit, the products do not: such a file loads, is right in fp32, and answers NaN in its own type."""
    base = shutil.copytree(bases["qwen2"], tmp_path / "base")
    weights = read_tensors(base / "model.safetensors")
    for name in (name for name in weights if "up_proj" in name):
        weights[name] = weights[name] * 2**15
    write_tensors(base / "model.safetensors", weights, {"format": "pt"})
    adapters = {name: 0.1 * weight.detach() for name, weight in adapted(base).named_parameters()}
    windows = [torch.tensor([ids]) for ids in WINDOWS]
    for dtype in ("bfloat16", "float16"):
        folder = tmp_path / dtype
        write_merged(folder, base, ForeignTokenizer(base), adapters, SETTINGS.scale, dtype)
        if dtype == "bfloat16":
            check_merged(folder, base, SETTINGS, adapters, windows, dtype, 1e-3)
        else:
            with pytest.raises(GateError, match=r"overflow float16.*export.dtype to bfloat16"):
                check_merged(folder, base, SETTINGS, adapters, windows, dtype, 1e-3)


def test_equal_inputs_make_equal_files(made, tmp_path):
    base, model, folder = made
    adapters = lora.read_adapter(folder / "adapter")
    lora.save_adapter(tmp_path, adapters, SETTINGS, str(base))
    write_merged(tmp_path / "hf", base, ForeignTokenizer(base), adapters, SETTINGS.scale, "float32")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / "adapter" / name).read_bytes()
    for path in (folder / "hf").iterdir():
        assert path.read_bytes() == (tmp_path / "hf" / path.name).read_bytes()


def test_weights_in_several_files_are_merged_file_by_file(bases, tmp_path):
    base = shutil.copytree(bases["qwen2"], tmp_path / "base")
    model = adapted(base)
    adapters = detached(model)
    weights = read_tensors(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    parts = {f"model-0000{n}-of-00002.safetensors": dict(sorted(weights.items())[n - 1 :: 2]) for n in (1, 2)}
    for name, part in parts.items():
        write_tensors(base / name, part, {"format": "pt"})
    places = {key: name for name, part in parts.items() for key in part}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_merged(tmp_path / "hf", base, ForeignTokenizer(base), adapters, SETTINGS.scale, "bfloat16")
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert merged.dtype == torch.bfloat16
    off = np.abs(logits(merged.float(), WINDOWS[0]) - logits(model, WINDOWS[0])).max()
    assert CLOSE < off < 0.5  # bf16 rounds the sum


def test_an_adapter_for_a_weight_that_the_base_lacks_is_refused(bases, tmp_path):
    base = bases["qwen2"]
    adapters = detached(adapted(base))
    adapters = {name.replace("layers.1.", "layers.7."): weight for name, weight in adapters.items()}
    with pytest.raises(GateError, match=r"no weight for 'model.layers.7"):
        write_merged(tmp_path / "hf", base, ForeignTokenizer(base), adapters, 1.0, "float32")

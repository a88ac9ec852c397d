"""Messages of the libraries of fine-tuning, raised by them on tiny models, are explained: an update may change words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from athanor.troubles.trouble import search

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def model(folder: Path, **changes: Any) -> Any:
    """A random Llama that is written to a folder and read from there, after `changes` of its config.json."""
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[UNK]")


def spoiled(folder: Path, change: Callable[[Path], object]) -> None:
    tokenizer().save_pretrained(folder)
    change(folder / "tokenizer.json")
    transformers.AutoTokenizer.from_pretrained(folder)


def full_of_nan(folder: Path) -> Any:
    broken = model(folder)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    return broken


def logged(folder: Path) -> None:
    options = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    arguments = transformers.TrainingArguments(output_dir=str(folder / "out"), save_strategy="no", **options)
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    transformers.Trainer(full_of_nan(folder), arguments, train_dataset=rows).train()


def recomputed(results: list[Callable[[Any], Any]]) -> None:
    from torch.utils.checkpoint import checkpoint

    checkpoint(lambda x: results.pop()(x), torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def unused() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    layers.forward = lambda x: layers["used"](x)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(layers)
        for _ in range(2):
            parallel(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


ONE = torch.tensor([[1]])
WAYS: dict[str, list[Callable[[Path], Any]]] = {
    "no-pad-token": [lambda folder: tokenizer()(["a", "a a"], padding=True)],
    "no-chat-template": [lambda folder: tokenizer().apply_chat_template([{"role": "user", "content": "a"}])],
    "no-fast-tokenizer": [lambda folder: spoiled(folder, Path.unlink)],
    "tokenizer-of-tomorrow": [lambda folder: spoiled(folder, lambda path: path.write_text(path.read_text().replace("WordLevel", "New")))],
    "weights-of-other-shapes": [lambda folder: model(folder, vocab_size=300)],
    "no-causal-model": [lambda folder: model(folder, model_type="t5")],
    "no-lora-targets": [
        lambda folder, names=names: peft.get_peft_model(model(folder), peft.LoraConfig(target_modules=names))
        for names in (["c_attn"], [])
    ],
    "token-without-a-row": [lambda folder: model(folder)(300 * ONE)],
    "loss-zero-gradient-nan": [logged],
    "nan-while-answering": [lambda folder: full_of_nan(folder).generate(ONE, do_sample=True)],
    "recomputation-differs": [
        lambda folder: recomputed([torch.sin, lambda x: x.sin().exp()]),
        lambda folder: recomputed([lambda x: x[:1].sin(), torch.sin]),
    ],
    "numpy-has-no-bf16": [lambda folder: ONE.bfloat16().numpy()],
    "parameters-unused": [lambda folder: unused()],
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_real_message_is_explained(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for way in WAYS[name]:
        message = ""
        try:
            way(tmp_path)
        except Exception as error:  # libraries raise what they like
            message = f"{type(error).__name__}: {error}"
        said = capfd.readouterr()
        hits = search(f"{said.out}{message}")
        assert hits and hits[0].trouble.name == name, f"{message}{said.out}{said.err}"[-2000:]

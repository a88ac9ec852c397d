"""An external base: a causal model of transformers (Llama, Qwen2 or Qwen3) with the interface of our own model.

The loop, the loss, checkpoints, health and validation ask a model for
`hidden`, `head_weight`, `config` and its named parameters. Here they get those
of a transformers model with a LoRA on it, of which the parameters are A and B
alone: that is what has gradients, optimiser state and a place in checkpoints.
transformers and peft are loaded when a model is, never before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from athanor.adapters import lora
from athanor.adapters.foreign_files import read_config, trained_in_bf16
from athanor.adapters.lora import LoraSettings
from athanor.base.errors import GateError, InputError
from athanor.model.config import ModelConfig
from athanor.model.loss import Targets, token_losses
from athanor.model.precision import AUTOCAST, autocast, rounds_products
from athanor.model.transformer import block_mask
from athanor.training.attention import DEFAULT, VARLEN, attention
from athanor.training.heap import keep_heap
from athanor.training.memory import StepFootprint, training_bytes
from athanor.training.preflight import check_accumulation, check_reach, check_targets, narrowed
from athanor.training.setup import Choices

INSTALL = "pip install peft accelerate"


@dataclasses.dataclass(frozen=True)
class ForeignConfig(ModelConfig):
    """A foreign model's shape. `base_count`: its own parameters; `adapters`: those of the LoRA; `half_count`: how many
    of its own are held in 16 bits."""

    base_count: int = 0
    adapters: int = 0
    half_count: int = 0

    def parameter_count(self) -> int:
        return self.base_count

    def stored_bytes(self) -> int:
        return 4 * (self.base_count + self.adapters) - 2 * self.half_count


def adjust_precision(choices: Choices, base: str | os.PathLike[str], *, requested: str) -> tuple[Choices, list[str]]:
    """Adjust the choices to what a foreign model can run with; returns them and notes on what was changed.

    A model that was trained in bf16 has activations beyond fp16's range: Qwen2.5 gave NaN in fp16 on cards without
    bf16, and fp32 was what helped (a report on two MI50). So `auto` never means fp16 for it.
    """
    notes = []
    if requested == "auto" and choices.precision == "fp16" and trained_in_bf16(read_config(base)):
        choices = dataclasses.replace(choices, precision="fp32")
        notes.append("precision fp32: the base was trained in bf16, and fp16 cannot hold its activations")
    if choices.compile:
        choices = dataclasses.replace(choices, compile=False)
        notes.append("blocks of a foreign model are not compiled")
    if choices.attention == VARLEN:
        choices = dataclasses.replace(choices, attention=DEFAULT)
        notes.append("attention default: a foreign model takes documents by a mask")
    return choices, notes


def shape(folder: str | os.PathLike[str], settings: LoraSettings, context_tokens: int) -> ForeignConfig:
    """The shape of a foreign model with its LoRA, counted without its weights."""
    values = read_config(folder)
    _check_context(values, context_tokens, folder)
    with torch.device("meta"):
        causal = _transformers().AutoModelForCausalLM.from_config(_hf_config(folder), attn_implementation="sdpa")
        base_count = sum(weight.numel() for weight in causal.parameters())
        lora.inject(causal, settings, lora.DropoutSeeds())
    return _config(causal, context_tokens, base_count)


def with_half_storage(config: ForeignConfig, precision: str, device: torch.device) -> ForeignConfig:
    """The same config, with the count of weights that are stored in 16 bits in this precision.

    Weights that never change need no fp32 master: autocast would round the
    blocks' matrices for each product. Embeddings, norms and the LoRA stay fp32,
    and the residual stream with them.
    """
    stores_half = AUTOCAST[precision] is not None and not rounds_products(precision, device)
    attention_rows = config.head_dim * 2 * (config.heads + config.kv_heads)
    matrices = config.layers * (config.dim * attention_rows + 3 * config.dim * config.ffn_dim)
    return dataclasses.replace(config, half_count=matrices if stores_half else 0)


class Foreign(nn.Module):
    """A transformers model with a LoRA, used like `Transformer`. Its parameters are those of the LoRA."""

    def __init__(
        self, causal: nn.Module, config: ForeignConfig, dropout_seeds: lora.DropoutSeeds, settings: LoraSettings
    ) -> None:
        super().__init__()
        self.causal, self.config, self.dropout_seeds, self.settings = causal, config, dropout_seeds, settings
        self._adapters = dict(lora.named_adapters(causal))

    @property
    def model(self) -> Any:
        """The decoder: `embed_tokens`, `layers` and `norm`, named as in our own."""
        return self.causal.model

    @property
    def head_weight(self) -> Tensor:
        return self.causal.lm_head.weight

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of every layer: what training works on, checkpoints hold and processes exchange."""
        return iter(self._adapters.items())

    def frozen_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        adapter_ids = {id(weight) for weight in self.parameters()}
        return ((name, weight) for name, weight in self.causal.named_parameters() if id(weight) not in adapter_ids)

    def begin_step(self) -> None:
        """Called before each optimiser step, in every process."""
        if self.settings.dropout:
            self.dropout_seeds.begin_step()

    def hidden(self, ids_BT: Tensor, *, document_BT: Tensor | None = None) -> Tensor:
        """Final hidden states [B, T, D]; `document_BT` confines attention to equal numbers, positions run on."""
        T = ids_BT.shape[1]
        if T > self.config.context_tokens:
            raise ValueError(f"{T} tokens exceed the context of {self.config.context_tokens}")
        if self.dropout_seeds.step is not None and torch.is_grad_enabled():
            self.dropout_seeds.set_rows(ids_BT)
        mask = None if document_BT is None else block_mask(document_BT)
        return self.model(input_ids=ids_BT, attention_mask=mask, use_cache=False).last_hidden_state

    def forward(self, ids_BT: Tensor, *, document_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]."""
        return F.linear(self.hidden(ids_BT, document_BT=document_BT), self.head_weight)

    @torch.no_grad()
    def block_rows(self, rows: int) -> list[Tensor]:
        """The first rows of every adapted matrix with its LoRA added: W + scale · B A."""
        merged_rows = []
        for layer in lora.layers(self.causal).values():
            a_RD, b_DR = (module[lora.ADAPTER].weight for module in (layer.lora_A, layer.lora_B))
            merged_rows.append(lora.merged(layer.base_layer.weight[:rows], a_RD, b_DR[:rows], self.settings.scale))
        return merged_rows

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Within the context the adapters are off, so the model is the base."""
        layers = list(lora.layers(self.causal).values())
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            for weight in self.parameters():
                weight.requires_grad_(True)


def load_foreign(
    folder: str | os.PathLike[str],
    settings: LoraSettings,
    context_tokens: int,
    seed: int,
    precision: str = "fp32",
    device: torch.device = torch.device("cpu"),
) -> Foreign:
    """The model of a directory, with a fresh LoRA drawn from the seed; no code of the directory is run."""
    values = read_config(folder)
    _check_context(values, context_tokens, folder)
    # As stored first, so that a large checkpoint is never in memory as fp32 that nobody asked for.
    options = {"dtype": "auto", "attn_implementation": "sdpa", "use_safetensors": True, "output_loading_info": True}
    options |= {"local_files_only": True, "trust_remote_code": False, "ignore_mismatched_sizes": True}
    auto = _transformers().AutoModelForCausalLM
    causal, loading_info = auto.from_pretrained(str(folder), config=_hf_config(folder), **options)
    for mismatch in (
        "missing_keys",
        "unexpected_keys",
        "mismatched_keys",
    ):  # an error, or the tensor would be made up or left out
        if loading_info.get(mismatch):
            name = min(key if isinstance(key, str) else str(key[0]) for key in loading_info[mismatch])
            mismatch = mismatch.replace("_", " ")
            fix = "fetch the checkpoint again, or save it with transformers: save_pretrained"
            raise InputError(f"weights do not fit config.json: {mismatch}, first {name}", where=str(folder), fix=fix)
    base_count = sum(weight.numel() for weight in causal.parameters())
    storage_dtype = AUTOCAST[precision] if not rounds_products(precision, device) else None
    for name, weight in causal.named_parameters():
        in_block = ".layers." in name and weight.dim() == 2
        weight.data = weight.data.to(storage_dtype if storage_dtype is not None and in_block else torch.float32)
    dropout_seeds = lora.DropoutSeeds()
    lora.inject(causal, settings, dropout_seeds)
    for _, weight in lora.named_adapters(causal):
        weight.data = weight.data.float()
    lora.initialise(causal, seed)
    config = with_half_storage(_config(causal, context_tokens, base_count), precision, device)
    return Foreign(causal, config, dropout_seeds, settings).to(device).eval()


@contextlib.contextmanager
def tuned(model: Foreign, choices: Choices, footprint: StepFootprint) -> Iterator[None]:
    """Within the context the model runs as chosen. Its blocks are not ours, so they are never compiled."""
    device = model.head_weight.device
    if device.type == "cpu":
        keep_heap(training_bytes(model.config, footprint, device))
    if choices.checkpointing:
        # Without state of random numbers: dropout is a function of the row, and there is no other.
        checkpoint_options = {"use_reentrant": False, "preserve_rng_state": False}
        model.causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_options)
        model.train()  # what transformers makes it depend on; nothing else here does
    try:
        with attention(choices.attention, device):
            yield
    finally:
        if choices.checkpointing:
            model.causal.gradient_checkpointing_disable()
            model.eval()


def preflight(model: Foreign, batch: Targets, precision: str) -> dict[str, float]:
    """Checks before the first step, on the model itself: a large one has no room for a copy.

    A and B are put back to the bit. GateError names the first check that fails.
    """
    check_targets(batch)
    original = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step, model.dropout_seeds.step = model.dropout_seeds.step, None
    try:
        with autocast(precision, model.head_weight.device):
            with torch.no_grad():
                initial_loss = float(token_losses(model, batch).mean())
                # At B = 0 no gradient reaches A.
                for name, weight in model.named_parameters():
                    if name.endswith("lora_B.weight"):
                        weight.add_(torch.linspace(-1e-3, 1e-3, weight.numel(), device=weight.device).view_as(weight))
            check_reach(model, batch.ids_BT)
            model.zero_grad(set_to_none=True)
            token_losses(model, batch).mean().backward()
            check_gradients(model)
            if precision == "fp32":
                check_accumulation(model, narrowed(batch))
    finally:
        model.zero_grad(set_to_none=True)
        model.dropout_seeds.step = step
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(original[name])
    return {"initial_loss": initial_loss}


def check_gradients(model: Foreign) -> None:
    """GateError unless A and B have finite gradients and nothing else has any."""
    for name, weight in model.named_parameters():
        if weight.grad is None or not bool(weight.grad.any()) or not bool(torch.isfinite(weight.grad).all()):
            raise GateError("gradients", f"{name} gets none, or one that is not finite", fix="check the batch")
    for name, weight in model.frozen_parameters():
        if weight.requires_grad or weight.grad is not None:
            raise GateError("gradients", f"{name} of the base would be trained", fix="freeze it")


def _config(causal: Any, context_tokens: int, base_count: int) -> ForeignConfig:
    values = causal.config
    heads = values.num_attention_heads
    return ForeignConfig(
        vocab_size=values.vocab_size,
        layers=values.num_hidden_layers,
        dim=values.hidden_size,
        heads=heads,
        kv_heads=values.num_key_value_heads,
        head_dim=getattr(values, "head_dim", None) or values.hidden_size // heads,
        ffn_dim=values.intermediate_size,
        context_tokens=context_tokens,
        rope_theta=float((getattr(values, "rope_parameters", None) or {}).get("rope_theta", 0.0)) or values.rope_theta,
        norm_eps=values.rms_norm_eps,
        qk_norm=values.model_type == "qwen3",
        tied_embeddings=values.tie_word_embeddings,
        base_count=base_count,
        adapters=sum(weight.numel() for _, weight in lora.named_adapters(causal)),
    )


def _check_context(values: dict[str, Any], context_tokens: int, folder: str | os.PathLike[str]) -> None:
    max_tokens = values.get("max_position_embeddings") or context_tokens
    if context_tokens > max_tokens:
        raise InputError(
            f"rows of {context_tokens} tokens, the model was made for {max_tokens}",
            where=str(folder),
            fix=f"set sft_data.context_tokens to {max_tokens} or less",
        )


def _hf_config(folder: str | os.PathLike[str]) -> Any:
    config = _transformers().AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    config.attention_dropout = 0.0  # random numbers of its own, which no checkpoint would know
    config.use_cache = False
    return config


def _transformers() -> Any:
    try:
        import peft  # noqa: F401
        import transformers
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", where="sft.base", fix=INSTALL) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers

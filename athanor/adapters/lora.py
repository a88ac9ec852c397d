"""LoRA (Hu et al. 2021, arXiv:2106.09685) on an external base: injected by peft, stored alone, merged at the end.

`y = W x + (alpha / rank) · B A dropout(x)`; W stays, A and B learn. peft does
the arithmetic and owns the file format. Two things are ours, because a run
must give the same bytes however often it was interrupted and however many
processes it had: A is drawn from the seed alone, and dropout is a function of
the step, the row and the layer instead of a stream of random numbers.
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.model.tensorfile import read_tensors, write_tensors

ADAPTER = "default"  # peft's name for the one adapter
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of every tensor in peft's file
TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float
    dropout: float
    targets: str  # all: every matrix of the blocks; attention: only the four of attention

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class DropoutSeeds:
    """The seeds of dropout: a number for the step, and a hash for each row of the present micro-batch."""

    def __init__(self) -> None:
        self.step: int | None = None  # None: no dropout
        self.rows: list[bytes] = []

    def begin_step(self) -> None:
        """The only random number of a step, from torch's generator, whose state is part of every checkpoint.

        Every process of a world makes it at the same place, so all have the same.
        """
        self.step = int(torch.randint(2**62, (), dtype=torch.int64))

    def set_rows(self, ids_BT: Tensor) -> None:
        self.rows = [hashlib.sha256(row.tobytes()).digest() for row in ids_BT.cpu().numpy()]


class RowDropout(nn.Module):
    """Dropout whose mask depends on step, row and layer only: not on which process works on the row, nor on how often.

    So blocks can be run again in the backward pass without a state of random numbers to keep.
    """

    def __init__(self, probability: float, layer: int, dropout_seeds: DropoutSeeds) -> None:
        super().__init__()
        self.probability, self.layer, self.dropout_seeds = probability, layer, dropout_seeds

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self.probability or self.dropout_seeds.step is None or not torch.is_grad_enabled():
            return x_BTD
        uniform_BTD = torch.empty(x_BTD.shape, dtype=torch.float32, device=x_BTD.device)
        generator = torch.Generator(x_BTD.device)
        for number, row in enumerate(self.dropout_seeds.rows):
            text = f"{self.dropout_seeds.step} {self.layer} ".encode() + row
            generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7]))
            uniform_BTD[number].uniform_(generator=generator)
        return x_BTD * (uniform_BTD >= self.probability).to(x_BTD.dtype) / (1 - self.probability)


def peft_config(settings: LoraSettings, base: str) -> Any:
    """peft's own configuration with every option stated, so that no later default of peft can change it."""
    from peft import LoraConfig

    alpha = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=list(TARGETS[settings.targets]),
        bias="none",
        use_rslora=False,
        use_dora=False,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def inject(causal: nn.Module, settings: LoraSettings, dropout_seeds: DropoutSeeds) -> None:
    """Wrap the target layers of a transformers model; everything but A and B is frozen."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(settings, ""), causal, adapter_name=ADAPTER)
    for weight in causal.parameters():
        weight.requires_grad_(False)
    for number, layer in enumerate(layers(causal).values()):
        layer.lora_dropout[ADAPTER] = RowDropout(settings.dropout, number, dropout_seeds)
        for matrix in (layer.lora_A, layer.lora_B):
            matrix[ADAPTER].weight.requires_grad_(True)


def layers(causal: nn.Module) -> dict[str, Any]:
    """The wrapped layers by their names in the model, in order."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in causal.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def initialise(causal: nn.Module, seed: int) -> None:
    """Draw A uniformly within 1/sqrt(inputs), as peft does, from the seed alone; B is zero, so nothing changes yet."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers(causal).values():
        a_RD = layer.lora_A[ADAPTER].weight
        bound = 1 / math.sqrt(a_RD.shape[1])
        a_RD.copy_(torch.empty(a_RD.shape).uniform_(-bound, bound, generator=generator))
        layer.lora_B[ADAPTER].weight.zero_()


def named_adapters(causal: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A and B of every layer, named as in peft's file without its prefix."""
    for name, layer in layers(causal).items():
        yield f"{name}.lora_A.weight", layer.lora_A[ADAPTER].weight
        yield f"{name}.lora_B.weight", layer.lora_B[ADAPTER].weight


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: LoraSettings, base: str) -> None:
    """The two files that `peft.PeftModel.from_pretrained` reads. Equal weights and settings make equal bytes."""
    prefixed = {PREFIX + name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()}
    write_tensors(folder / WEIGHTS, prefixed, {"format": "pt"})
    values = peft_config(settings, base).to_dict()
    values |= {"inference_mode": True, "target_modules": sorted(values["target_modules"])}
    write_json(folder / CONFIG, {name: _json_value(value) for name, value in values.items()})


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """A and B by name, without peft's prefix."""
    path = Path(folder) / WEIGHTS
    tensors = read_tensors(path)
    unexpected = sorted(name for name in tensors if not name.startswith(PREFIX) or ".lora_" not in name)
    if unexpected:
        raise InputError(f"'{unexpected[0]}' is no weight of a LoRA", where=str(path), fix="dvc repro lora")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A [rank, inputs], B [outputs, rank]) by the name of the layer."""
    names = sorted({name.rpartition(".lora_")[0] for name in tensors})
    return {name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]) for name in names}


@torch.no_grad()
def merged(weight: Tensor, a_RD: Tensor, b_DR: Tensor, scale: float) -> Tensor:
    """W + scale · B A in fp32."""
    return weight.float().addmm(b_DR.float(), a_RD.float(), alpha=scale)


def _json_value(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    return value.value if isinstance(value, enum.Enum) else value

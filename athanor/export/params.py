"""Parameters of the export: which files to publish and how strictly the runtimes must agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True)
class PerplexityTolerance:
    """By type of the file; for q8_0 and K types three standard errors of the targets' own differences come on top, at
    most as much again.

    f32: also of the Hugging Face directory; a wrong epsilon of the norms costs a trained model some 1e-4 and shows at 1e-5.
    In llama.cpp what its sum over the vocabulary loses comes on top.
    """

    f32: float = param(min=1e-9, max=1, default=1e-5)
    f16: float = param(min=1e-9, max=1, default=1e-3)
    q8_0: float = param(min=1e-9, max=1, default=2e-3)
    k_types: float = param(min=1e-9, max=1, default=0.05)


@dataclass(frozen=True, kw_only=True)
class ExportParams:
    """name: goes into the GGUF files and the model card.

    dtype: of the weights in the Hugging Face directory; the parity check rounds our own weights the same way.
    gguf_types: f32, f16 and q8_0 are written here, the K types by llama.cpp's program llama-quantize.
    llama_cpp: `required` fails without the xllamacpp package (or, for a K type, without llama-quantize);
        `if_installed` says loudly what was not checked or not written.
    parity_prompts: held-out prompts that every runtime decodes greedily, `parity_new_tokens` each.
    parity_texts: random texts, besides a fixed list of nasty ones, whose token ids must agree.
    parity_windows: windows of held-out text (full context) whose logits are compared.
    parity_positions: positions of each window, evenly spread, at which llama.cpp is asked for all probabilities;
        transformers is compared at every position.
    kl_limit: largest mean divergence KL(model || file) over those positions, in nats per token, of any GGUF file.
        A q8_0 or K-type file above it, or above its tolerance of the perplexity, is left out while another is there.
    logit_tolerance: largest |logit difference| between torch and transformers; for llama.cpp at f32 the largest
        |difference| of a log probability.
    margin_logits: f16 may pick another token only where the two best logits are closer than this; where q8_0 or a
        K type does is counted, not limited.
    perplexity_chunks: contexts of held-out text that torch, transformers and llama.cpp score alike.
    perplexity_tolerance: relative difference of the perplexity that each type may show.
    Limits of logits, margins and perplexities hold for logits up to 10 and grow in proportion for a model with larger
    ones; that of the Hugging Face directory's perplexity stays.
    """

    name: str
    dtype: str = param(choices=("float32", "float16", "bfloat16"))
    gguf_types: tuple[Literal["f32", "f16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"], ...]
    llama_cpp: str = param(choices=("required", "if_installed", "off"))
    llama_cpp_timeout_seconds: float = param(min=1, max=86400, default=120.0)
    parity_prompts: int = param(min=1, max=10000, default=50)
    parity_new_tokens: int = param(min=1, max=4096, default=32)
    parity_texts: int = param(min=1, max=100000, default=500)
    parity_windows: int = param(min=1, max=1000, default=8)
    parity_positions: int = param(min=1, max=4096, default=12)
    kl_limit: float = param(min=0, max=100, default=0.1)
    logit_tolerance: float = param(min=1e-9, max=1, default=1e-4)
    margin_logits: float = param(min=0, max=10, default=0.1)
    perplexity_chunks: int = param(min=2, max=10000, default=4)
    perplexity_tolerance: PerplexityTolerance = PerplexityTolerance()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ParamsError(f"'{self.name}' is not a plain name", where="name", fix="use letters, digits, . _ -")
        # llama.cpp changes how it tokenises around special tokens for models with such a name.
        if re.search(r"phi-?3|jina", self.name.lower()):
            raise ParamsError(f"llama.cpp treats a model named '{self.name}' specially", where="name")
        if not self.gguf_types or len(set(self.gguf_types)) != len(self.gguf_types):
            raise ParamsError("expected one or more different file types", where="gguf_types", fix="[f16, q8_0]")
        k_types = [name for name in self.gguf_types if name not in ("f32", "f16", "q8_0")]
        if k_types and self.llama_cpp == "off":
            raise ParamsError(f"{k_types[0]} needs llama.cpp and llama_cpp is off", where="gguf_types", fix="drop it")

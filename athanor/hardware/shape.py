"""Advice before a run about widths that a device multiplies slowly and proportions that a model learns slowly.

Matrix units work on tiles; a width that is no multiple of the tile pays for
the whole tile and, on NVIDIA's cards, may fall back to a slower kernel
(NVIDIA, "Matrix Multiplication Background", 2023: multiples of 64 elements of
16 bits, 128 best, on an A100).
"""

from __future__ import annotations

from athanor.model.config import ModelConfig

VOCABULARY = 64
TILE = {"cpu": 16, "mps": 32, "cuda": 64}  # elements: a cache line of fp32; a SIMD group; a tile of 16-bit numbers
HEAD = {"cpu": 8, "mps": 16, "cuda": 64}
FFN = 8 / 3  # of the width: as many weights as an MLP of 4 · width without a gate (Shazeer 2020, arXiv:2002.05202)
FFN_RANGE = (2.0, 4.5)
# Smallest rotary base by context (Men et al. 2024, arXiv:2405.14591, table 2), beyond what the params refuse.
THETA_FLOOR = ((65_536, 2.1e6), (131_072, 7.8e6), (262_144, 3.6e7), (524_288, 6.4e7), (1_048_576, 5.1e8))


def advice(config: ModelConfig, device: str = "cuda") -> list[str]:
    """One sentence for each width or proportion that costs speed or quality on this kind of device; often none."""
    tile, lines = TILE.get(device, 64), []
    if config.vocab_size % VOCABULARY:
        lines.append(
            f"a vocabulary of {config.vocab_size} is no multiple of {VOCABULARY}, which slows the output layer down:"
            f" {round_up(config.vocab_size, VOCABULARY)} costs nothing"
        )
    for name, value in (("dim", config.dim), ("ffn_dim", config.ffn_dim)):
        if value % tile:
            near = " or ".join(str(size) for size in sorted({max(tile, value // tile * tile), round_up(value, tile)}))
            lines.append(f"{name} {value} is no multiple of {tile} ({device}): {near}")
    if config.head_dim % HEAD.get(device, 64):
        sizes = " or ".join(str(size) for size in (64, 128)) if device == "cuda" else str(round_up(config.head_dim, 16))
        lines.append(f"head_dim {config.head_dim} is slow in fused attention ({device}): {sizes}")
    ratio = config.ffn_dim / config.dim
    if not FFN_RANGE[0] <= ratio <= FFN_RANGE[1]:
        best = round_up(round(FFN * config.dim), tile)
        lines.append(f"ffn_dim is {ratio:.2g} times dim, 8/3 is usual for a gated MLP: {best}")
    floor = next((theta for context, theta in THETA_FLOOR if config.context_tokens <= context), THETA_FLOOR[-1][1])
    if config.context_tokens > 32_768 and config.rope_theta < floor:
        lines.append(
            f"rope_theta {config.rope_theta:g} is too small for a context of {config.context_tokens}:"
            f" distant positions look alike below {floor:g}"
        )
    return lines


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step

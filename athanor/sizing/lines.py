"""A recipe as lines of params.yaml: what differs from the file that it begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from athanor.sizing.data import Data
from athanor.sizing.laws import learning_rate, matrix_weights
from athanor.sizing.optimiser import Recipe as OptimiserRecipe
from athanor.sizing.optimiser import derive
from athanor.sizing.solve import Recipe

Key = tuple[str | int, ...]
MEASURED = OptimiserRecipe(1_000_000, 2048, 0.004, 0.9, 0.97, 0.1, 60_000)  # the default's (docs/decisions.md)
WARMUP = 0.06  # of the run, as there
MAX_SFT_LR = 0.005
VALIDATIONS = 2  # in a run of minutes; one more for each hour
EMBEDDING_FACTORS = (12.0, 4.0)  # of pretrain and sft, times lr, where the output matrix is one of its own
# As the default's. Where a preset has a mixture for its cooldown, its schedule stays as well.
_SCHEDULE: dict[Key, Any] = {
    ("pretrain", "schedule"): "wsd",
    ("pretrain", "cooldown_fraction"): 0.65,
    ("pretrain", "cooldown_shape"): "linear",
}


def lines_of(recipe: Recipe, values: Mapping[str, Any], data: Data) -> dict[Key, Any]:
    """The values that make `values` (a whole params file) this recipe, by their paths."""
    config, tied = recipe.config, recipe.config.tied_embeddings
    scaled = derive(MEASURED, batch_tokens=recipe.batch_tokens, tokens=recipe.tokens)
    decay = scaled.weight_decay * scaled.lr / recipe.lr  # its timescale stays the same share of the run
    every = recipe.tokens // max(VALIDATIONS, round(recipe.seconds["pretrain"] / 3600))
    sft_lr = min(MAX_SFT_LR, learning_rate(matrix_weights(config), recipe.sft_epochs * data.sft_tokens))
    wanted: dict[Key, Any] = {
        ("model", "layers"): config.layers,
        ("model", "dim"): config.dim,
        ("model", "heads"): config.heads,
        ("model", "kv_heads"): config.kv_heads,
        ("model", "head_dim"): config.head_dim,
        ("model", "ffn_dim"): config.ffn_dim,
        ("model", "context_tokens"): config.context_tokens,
        ("model", "rope_theta"): config.rope_theta,
        ("model", "qk_norm"): config.qk_norm,
        ("model", "tied_embeddings"): tied,
        ("sft_data", "context_tokens"): config.context_tokens,
        ("pretrain", "tokens"): recipe.tokens,
        ("pretrain", "batch_tokens"): recipe.batch_tokens,
        ("pretrain", "lr"): recipe.lr,
        ("pretrain", "embedding_lr_factor"): 1.0 if tied else EMBEDDING_FACTORS[0],
        ("pretrain", "warmup_tokens"): int(WARMUP * recipe.tokens),
        ("pretrain", "optimizer"): "muon",
        ("pretrain", "beta2"): round(scaled.beta2, 4),
        ("pretrain", "weight_decay"): float(f"{min(decay, 1.0):.2g}"),
        ("pretrain", "bigram_tokens"): 0 if tied or data.cuttable else 1_000_000,  # tried with small vocabularies alone
        ("pretrain", "validation_every_tokens"): every,
        ("pretrain", "sample_every_tokens"): every,
        ("sft", "batch_tokens"): recipe.sft_batch_tokens,
        ("sft", "lr"): sft_lr,
        ("sft", "embedding_lr_factor"): 1.0 if tied else EMBEDDING_FACTORS[1],
        ("sft", "optimizer"): "muon",
        ("sft", "epochs"): max(1.0, recipe.sft_epochs) if data.cuttable else recipe.sft_epochs,
        # A question has to fit beside its answer.
        ("eval", "max_new_tokens"): min(values["eval"]["max_new_tokens"], config.context_tokens // 2),
        **dict(_of_hub(recipe, values, data) if data.cuttable else _SCHEDULE),
    }
    return {key: value for key, value in wanted.items() if _at(values, key) != value}


def _of_hub(recipe: Recipe, values: Mapping[str, Any], data: Data) -> Iterator[tuple[Key, Any]]:
    """Budgets of hub sources, cut to what the recipe reads; never more than the preset asks for."""
    share = min(1.0, recipe.tokens / values["pretrain"]["tokens"])
    yield ("tokenizer", "vocab_size"), recipe.config.vocab_size
    yield ("model", "vocab_size"), None
    yield ("download", "val_fraction"), float(f"{min(0.01, values['download']['val_fraction'] / share):.2g}")
    for number, source in enumerate(values["download"]["sources"]):
        for name in ("max_bytes", "min_bytes", "min_documents"):
            if source.get(name):
                yield ("download", "sources", number, name), max(1, _round(source[name] * share))
    for name in ("train_tokens", "cooldown_tokens"):
        if values["shard"].get(name):
            yield ("shard", name), _round(values["shard"][name] * share)
    sample = min(values["tokenizer"]["sample_bytes"], recipe.tokens * data.bytes_per_token / 4)
    yield ("tokenizer", "sample_bytes"), _round(sample)
    rows = min(1.0, recipe.sft_epochs)
    for number, source in enumerate(values["instruct"]["sources"]):
        for name in ("max_rows", "min_rows"):
            if isinstance(source.get(name), int):
                yield ("instruct", "sources", number, name), max(1, _round(source[name] * rows))


def _round(value: float) -> int:
    """Three digits are enough for a budget."""
    return int(float(f"{value:.3g}"))


def _at(values: Any, key: Key) -> Any:
    for part in key:
        values = values[part] if isinstance(part, int) else (values or {}).get(part)
    return values

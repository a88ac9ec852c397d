"""The `shard` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.strict import param


@dataclass(frozen=True, kw_only=True)
class ShardParams:
    train_tokens: int | None = param(min=1)  # length of the training stream at most; null for all that the caps allow
    cooldown_tokens: int | None = param(
        min=1, default=None
    )  # of the stream of mixture.cooldown at most; null for all the caps allow
    shard_tokens: int = param(min=1000)  # a shard is closed by the document that reaches this
    share_tolerance: float = param(
        min=0, max=0.5, default=0.02
    )  # how far a source's realised share may be from its target

"""The model card: what the model is, was made from, can do and cannot, all of it read from manifests and metrics.

The text is in card.md.j2. No times, hosts or commits: equal inputs make an equal card. The tracking run that made it
knows those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from athanor.base.templates import markdown
from athanor.export.source import Source

CLEAR_STDERRS = 3.0  # a score counts as above its floor from this many standard errors on


@dataclass(frozen=True)
class CardInputs:
    """manifests, metrics, params: by stage or artifact name, as read. files: name to size and SHA-256. digests: SHA-256
    of every manifest and metrics file that the card draws on."""

    manifests: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Mapping[str, Any]]
    params: Mapping[str, Mapping[str, Any]]
    parity: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    digests: Mapping[str, str]


def model_card(source: Source, inputs: CardInputs) -> str:
    """The card as Markdown."""
    scores = sorted(inputs.metrics["eval"]["battery"]["sft"].items(), key=lambda item: (item[0] == "all", item[0]))
    single = {name: row for name, row in scores if name != "all"}
    constant = [name for name, row in single.items() if row["floor"] == 1]
    sources = inputs.manifests["raw"]["sources"]
    # A shard's stream may hold a source several times, and training may read a part of it, or all of it again.
    shards, read = inputs.manifests["shards"], inputs.metrics["pretrain"]
    streams = [
        (
            "Pretraining mixture: tokens of each source, its share of the stream, and how often training read them.",
            shards,
            read["epochs"],
        )
    ]
    if "cooldown" in shards:
        streams.append(("Mixture of the cooldown.", shards["cooldown"], read["cooldown_epochs"]))
    health = inputs.metrics["eval"].get("health", {}).get("sft", {})
    return markdown("athanor.export", "card.md.j2").render(
        source=source,
        config=source.config,
        inputs=inputs,
        eval=inputs.metrics["eval"],
        **inputs.manifests,
        scores=scores,
        rates=[(name, row) for name, row in sorted(health.items()) if isinstance(row, Mapping)],
        constant=constant,
        weak=[n for n, row in single.items() if n not in constant and row["margin_stderrs"] <= CLEAR_STDERRS],
        clear_stderrs=CLEAR_STDERRS,
        nothing={"documents": 0, "bytes": 0},
        origins={name: {k: v for k, v in facts.items() if k != "license"} for name, facts in sources.items()},
        streams=streams,
        ggufs=sorted(name for name in inputs.files if name.endswith(".gguf")),  # none without a quantiser
    )

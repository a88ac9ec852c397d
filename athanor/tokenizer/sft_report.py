"""What the SFT data is made of, for its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from athanor.corpus.instruct.choosing import FILTERS
from athanor.params.sft_data import SftDataParams
from athanor.tokenizer.sft_gates import check_shares
from athanor.tokenizer.sft_rows import Encoded

# In the order in which they take place.
REASONS = (*FILTERS, "in_better_source", "duplicates", "too_long", "truncated", "contaminated", "over_cap")


def supervised_tokens(rows: Sequence[Encoded], params: SftDataParams, names: Iterable[str]) -> dict[str, int]:
    """Supervised training tokens of each source in `names`, repeats counted."""
    tokens = dict.fromkeys(names, 0)
    for row in rows:
        source = row.conversation.source
        if row.conversation.split == "train":
            tokens[source] += row.supervised * params.sources[source].repeats
    return tokens


def of_sources(
    params: SftDataParams, read: Mapping[str, int], losses: Mapping[str, Counter[str]], supervised: Mapping[str, int]
) -> dict[str, Any]:
    """What each source had and lost, and its share; GateError if one source makes up too much."""
    shares = check_shares(supervised, params.max_source_share)
    return {
        "supervised_tokens": sum(supervised.values()),
        "contaminated": sum(lost["contaminated"] for lost in losses.values()),
        "sources": {
            name: {
                "read": read[name],
                **{reason: losses[name][reason] for reason in REASONS},
                "supervised_tokens": supervised[name],
                "supervised_share": shares[name],
            }
            for name in losses
        },
    }

"""Time to the first id of a conversation's second and fifth turn: the whole of it read again, over the new ids alone.

    python -m tools.bench_turns

Random weights. A question takes a fortieth of the context and an answer an
eighth. Processor time on one thread, in pairs of alternating order.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from athanor.decoding.folded import FusedDecoder
from athanor.decoding.sampling import GREEDY
from athanor.model.transformer import Transformer
from athanor.serving.backends.keeping import KeepingEngine
from tools.bench_decode import ratios, tell
from tools.bench_train import SHAPES

MODELS = (
    replace(SHAPES["default"], qk_norm=True, tied_embeddings=False),
    replace(SHAPES["30m"], context_tokens=2048),
    replace(SHAPES["30m"], context_tokens=2048, layers=16, dim=640, heads=10, kv_heads=5, ffn_dim=1792),
)
PAIRS = 9


def milliseconds(model: FusedDecoder, turn: int, keep_bytes: int) -> float:
    question, answer = model.config.context_tokens // 40, model.config.context_tokens // 8
    ids = torch.randint(model.config.vocab_size, (turn * (question + answer) - answer,)).tolist()
    engine = KeepingEngine(model, rows=1, stop_ids=(), keep_bytes=keep_bytes)
    engine.add_requests([(0, ids[:-question], 1, GREEDY)])
    began = time.process_time()
    engine.add_requests([(1, ids, 1, GREEDY)])
    return 1000 * (time.process_time() - began)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for config in MODELS:
        model = FusedDecoder(Transformer.fresh(config, 0).eval())
        print(f"{config.parameter_count():,} parameters, a context of {config.context_tokens}")
        for turn in (2, 5):
            whole, new = (partial(milliseconds, model, turn, keep_bytes) for keep_bytes in (0, 1 << 30))
            whole()
            tell(f"turn {turn}, whole / new", "ms", ratios(whole, new, PAIRS))

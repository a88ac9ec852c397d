"""What a server tells Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts answers, tokens and seconds by model."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.answers = Counter("athanor_answers", "Answers, by how they ended", ["model", "end"], registry=registry)
        self.prompts = Counter("athanor_prompt_tokens", "Tokens read", ["model"], registry=registry)
        self.tokens = Counter("athanor_generated_tokens", "Tokens made", ["model"], registry=registry)
        self.first_text_seconds = Histogram(
            "athanor_first_text_seconds",
            "Request to first text, loading included",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.under_way = Gauge("athanor_answers_under_way", "Answers being made or waiting", registry=registry)
        self.memory = Gauge("athanor_worker_bytes", "Memory of a model's process", ["model"], registry=registry)

    async def counted(self, model: str, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer, passed on."""
        started_at, tokens, end = time.monotonic(), 0, "left"  # the caller went away
        self.under_way.inc()
        try:
            async with aclosing(events) as opened:
                async for event in opened:
                    match event["type"]:
                        case "start":
                            self.prompts.labels(model).inc(event["prompt_tokens"])
                        case "text":
                            if not tokens:
                                self.first_text_seconds.labels(model).observe(time.monotonic() - started_at)
                            tokens = event["tokens"]
                        case "end":
                            tokens, end = event["tokens"], event["reason"]
                        case "error":
                            end = f"{event['kind']} error"
                    yield event
        finally:
            self.under_way.dec()
            self.tokens.labels(model).inc(tokens)
            self.answers.labels(model, end).inc()

    def text(self, memory: Mapping[str, int]) -> bytes:
        """The page of GET /metrics; `memory`: bytes by model."""
        self.memory.clear()
        for model, size in memory.items():
            self.memory.labels(model).set(size)
        return generate_latest(self.registry)

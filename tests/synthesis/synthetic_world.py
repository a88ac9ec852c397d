"""Parameters, requests and a run of the collector for tests of synthetic conversations."""

from __future__ import annotations

from athanor.base.strict import build
from athanor.runtime import presets
from athanor.synthesis.collect import Collector
from athanor.synthesis.endpoint import Endpoint, Key
from athanor.synthesis.ledger import Ledger
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request
from tests.e2e.clone import ROOT
from tests.synthesis.model_server import ModelServer

PARAMS = presets.values(ROOT / "presets/micro.yaml")["synthetic"]
KEY = Key("zq9-0123456789/abc+DEF=")


def params(**changes) -> SyntheticParams:
    nested = {name: PARAMS.get(name, {}) | changes.pop(name, {}) for name in ("budget", "gates")}
    values = PARAMS | {"model": "m", "requests": 12, "max_output_tokens": 400, "timeout_seconds": 20.0} | nested
    return build(SyntheticParams, values | changes, "synthetic")


def requests(count: int) -> list[Request]:
    return [Request("c", "system", f"question {n}", 1, None, f"{n:032x}") for n in range(count)]


def run(server: ModelServer, folder, made, api="anthropic", stop=lambda: False, tick=lambda *_: None, **changes):
    """Send requests as the stage does; returns how it ended and the ledger."""
    values = params(api=api, base_url=server.url, **changes)
    with Ledger(folder, values.name, values.budget, values.max_output_tokens) as ledger:
        ask = Endpoint(values, KEY).ask
        how = {"concurrency": values.concurrency, "max_tries": values.max_tries, "tick": tick, "stop": stop}
        return Collector(ask=ask, ledger=ledger, first_pause=0.001, **how).collect(made), ledger

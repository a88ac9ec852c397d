"""`athanor launch check`: the same rendezvous as that of a training, and what it tells of the machines and their links."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError
from athanor.cli.launch.measure import GIGABIT, SIZES, SLOW, slow_links
from athanor.cli.render import fill_template, size
from athanor.model.flops import training_flops
from athanor.runtime import facts, launch
from athanor.runtime.machine import Launch, anchor
from athanor.runtime.schema import check_file
from athanor.sizing import speeds
from athanor.training.parallel import BUCKET_BYTES

MODULE = "athanor.cli.launch.member"
PARAMS = Path("params.yaml")
COLUMNS = 100
GLOO_BYTES_PER_SECOND = 1.25e9  # not more is asked of gloo, whose sums a processor makes
FIXES = {
    "athanor": "the same commit on every node: git pull, or one checkout on a shared file system",
    "driver": "the same driver on every node",
    "device": "the same kind of processor or card on every rank: sums in another order differ, and a training stops at that",
}
CABLE = "its cable, port and interface (ethtool NAME, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or leave the node out"
SLOT = "its PCIe slot, and what lies between the cards (athanor doctor)"
SAME_PACKAGES = "the same environment on every node: make setup with the same requirements.txt"


def check(settings: Launch, as_json: bool = False) -> int:
    """Run it on this node; the report is printed by node 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        os.environ["ATHANOR_CHECK_REPORT"] = str(path)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about names that addresses do not have
        status = launch.launch("check", MODULE, settings)
        if status is None:
            raise InputError(
                "one process has nobody to meet",
                where="launch check",
                fix="--processes 2, --nodes 2, or launch in machine.yaml",
            )
        if not path.is_file():  # another node than 0, or it ended before
            return status
        found = read_json(path)
    found["warnings"] = list(warnings(found))
    found["share"] = share(found)
    print(json.dumps(found, indent=2) if as_json else text(found))
    return 1 if found["warnings"] else status


def warnings(found: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong, each with its fix."""
    ranks = found["ranks"]
    names = {name for rank in ranks for name in rank["versions"]}
    for name in ("device", *sorted(names)):
        values: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            value = rank["device"] if name == "device" else rank["versions"].get(name, "none")
            values.setdefault(str(value), []).append(number)
        if len(values) > 1:
            told = "; ".join(f"{value} on {_places(ranks, numbers)}" for value, numbers in values.items())
            yield f"{name} differs: {told}. Fix: {FIXES.get(name, SAME_PACKAGES)}"
    several, limit, slow = _nodes(ranks) > 1, _limit(found), SLOW / busy(ranks)
    cables = several or found["device"] == "cuda"  # between processes on a CPU there is only its memory
    for link, measure in slow_links(found["pairs"] if cables else (), (limit or GIGABIT) if several else None, slow):
        usual = (
            "its link allows"
            if measure == limit
            else "gigabit Ethernet allows"
            if measure == GIGABIT
            else "the others reach"
        )
        yield (
            f"{_place(ranks, link['from'], several)} -> {_place(ranks, link['to'], several)}:"
            f" {size(link['bytes_per_second'])}/s, {usual} {size(measure)}/s. Fix: {CABLE if several else SLOT}"
        )
    best = max(row["bus_bytes_per_second"] for row in found["all_reduce"])
    if limit and best < slow * limit:
        yield f"all-reduce reaches {size(best)}/s, its link allows {size(limit)}/s. Fix: NCCL_DEBUG=INFO tells the way that is taken"


def busy(ranks: Sequence[Mapping[str, Any]]) -> float:
    """How many times slower a measurement may be for the load of the hosts: processes for each core, 1 at least."""
    return max(1.0, *(rank["load"] for rank in ranks))


def _limit(found: Mapping[str, Any]) -> float | None:
    limits = [rank["limit"] for rank in found["ranks"] if rank["limit"]]
    limit = min(limits, default=None)
    return min(limit, GLOO_BYTES_PER_SECOND) if limit and found["device"] == "cpu" else limit


def _nodes(ranks: Sequence[Mapping[str, Any]]) -> int:
    return len({rank["node"] for rank in ranks})


def _place(ranks: Sequence[Mapping[str, Any]], rank: int, several: bool) -> str:
    return f"node {ranks[rank]['node']}" if several else f"rank {rank}"


def _places(ranks: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> str:
    nodes = sorted({ranks[number]["node"] for number in numbers})
    whole = {number for number, rank in enumerate(ranks) if rank["node"] in nodes} == set(numbers)
    kind, listed = ("node", nodes) if whole and _nodes(ranks) > 1 else ("rank", list(numbers))
    return f"{kind}{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"


def share(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Bytes and seconds of the gradients in a step of this checkout's model, and its other seconds; None without params."""
    if not PARAMS.is_file():
        return None
    try:
        built = check_file(PARAMS)
    except AthanorError:
        return None
    model, batch = built["model"], built["pretrain"].batch_tokens
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    total = 4 * config.parameter_count()  # fp32
    each = seconds_of(found["all_reduce"], min(total, BUCKET_BYTES))
    token = token_seconds(config)
    ranks = found["ranks"]
    # On processors a training alone has all threads of a node, on cards one card.
    parts = len(ranks) if found["device"] == "cuda" else _nodes(ranks)
    computing = token * batch / parts if token else None
    return {"bytes": total, "travel_seconds": total / min(total, BUCKET_BYTES) * each, "compute_seconds": computing}


def seconds_of(rows: Sequence[Mapping[str, float]], wanted: float) -> float:
    """The time of an all-reduce of so many bytes: on the line between two that were measured, beyond them by proportion."""
    below = [row for row in rows if row["bytes"] <= wanted]
    above = [row for row in rows if row["bytes"] > wanted]
    if not below or not above:
        nearest = below[-1] if below else above[0]
        return nearest["seconds"] * (wanted / nearest["bytes"] if below else 1.0)
    low, high = below[-1], above[0]
    along = (wanted - low["bytes"]) / (high["bytes"] - low["bytes"])
    return low["seconds"] + along * (high["seconds"] - low["seconds"])


def token_seconds(config: Any) -> float | None:
    """Seconds for a token of training on this machine: measured, or of the last run of this shape."""
    measured = speeds.load(anchor())
    if measured and config in measured.seconds:
        return measured.seconds[config]
    try:
        last, result = read_json(facts.leaf(Path.cwd(), "pretrain")), read_json(Path("metrics/pretrain.json"))
        same = abs(last["planned_flops"] / result["tokens"] / training_flops(config, config.context_tokens) - 1) < 1e-6
        return last["train_seconds"] / last["trained_tokens"] if same else None
    except (AthanorError, KeyError):
        return None


def text(found: Mapping[str, Any]) -> str:
    ranks = found["ranks"]
    versions = ranks[0]["versions"]
    same = {name: value for name, value in versions.items() if all(r["versions"].get(name) == value for r in ranks)}
    several = _nodes(ranks) > 1
    pairs = found["pairs"]
    speeds_found = [pair["bytes_per_second"] for pair in pairs]
    filled = fill_template(
        "launch_check.txt.j2",
        found=found,
        nodes=_nodes(ranks),
        busy=busy(ranks),
        same=same,
        limit=_limit(found),
        size=size,
        sizes=len(SIZES),
        unit="nodes" if several else "ranks",
        slowest=min(pairs, key=lambda pair: pair["bytes_per_second"]),
        median=statistics.median(speeds_found),
        place=lambda rank: _place(ranks, rank, several),
    ).rstrip("\n")
    return "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent=" " * 7) or line for line in filled.split("\n"))

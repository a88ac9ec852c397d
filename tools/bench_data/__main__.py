"""What cleaning costs, beside datatrove on the same documents, and how well near duplicates are found.

    make bench-data [BENCH="--memory"]
    python -m tools.bench_data [--folder FOLDER] [--megabytes 120] [--sample 20] [--repeats 3] [--pairs 600]
                               [--no-datatrove] [--memory]

Everything lies in FOLDER and is made once: the corpus, the sample and
datatrove's environment. Results: a table, and FOLDER/results.json. With
--memory also the peak memory for a tenth of the corpus and for all of it, with
one and with two workers.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_json
from athanor.base.errors import AthanorError
from athanor.runtime.facts import hardware
from athanor.text.documents import read_sources
from tools.bench_data import corpus, planted, sides, usage

PARAMS = sides.ROOT / "presets" / "default.yaml"
PLANTED_SEED = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_data", description="what cleaning costs, beside datatrove")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "athanor-bench-data")
    parser.add_argument("--megabytes", type=float, default=120, help="text of the whole corpus")
    parser.add_argument("--sample", type=float, default=20, help="megabytes that datatrove and ours both clean")
    parser.add_argument("--repeats", type=int, default=3, help="of both on the sample, alternating")
    parser.add_argument("--pairs", type=int, default=600, help="planted duplicates of each similarity")
    parser.add_argument("--no-datatrove", action="store_true", help="ours alone: no package is installed")
    parser.add_argument("--memory", action="store_true", help="peak memory by size of the corpus and workers")
    args = parser.parse_args()
    try:
        found = bench(args)
    except (AthanorError, usage.CommandFailed) as error:
        print(f"bench-data: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(found)))
    print(f"\nAll numbers: {args.folder / 'results.json'}")
    return 0


def bench(args: argparse.Namespace) -> dict[str, Any]:
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    whole, sample = folder / f"corpus-{args.megabytes:g}", folder / f"sample-{args.megabytes:g}-{args.sample:g}"
    say(f"corpus of {args.megabytes:g} MB in {whole}")
    size = corpus.total_bytes(corpus.make(whole, args.megabytes, PARAMS)) / 1e6
    sample_size = corpus.total_bytes(corpus.sample(whole, sample, args.sample, PARAMS)) / 1e6
    for place in (whole, sample):
        sides.prepare(place)
    found: dict[str, Any] = {"machine": hardware(), "megabytes": size, "sample_megabytes": sample_size}

    say("near duplicates planted in a part of the corpus")
    texts = [document.text for document in read_sources(whole / "data" / "raw")]
    found["planted"] = planted.measure(*planted.plant(spread(texts, 20 * args.pairs), args.pairs, PLANTED_SEED))
    del texts

    say("our clean stage on the whole corpus")
    found["whole"] = sides.ours(whole)
    runs: dict[str, list[Any]] = {"ours": [], "datatrove": [], "datatrove_every": []}
    python = None
    if not args.no_datatrove:
        say("environment of datatrove")
        python, versions = sides.trove_environment(folder / "datatrove")
        found["versions"] = {name: versions[name] for name in ("datatrove", "spacy", "numpy", "pyarrow")}
    for number in range(args.repeats):
        say(f"the sample, round {number + 1} of {args.repeats}")
        turn = list(runs) if python else ["ours"]
        for side in turn if number % 2 == 0 else reversed(turn):
            if side == "ours":
                runs[side].append(sides.ours(sample, train=number == 0))
            else:
                raw = sample / "data" / "raw"
                runs[side].append(sides.trove(python, raw, sample / side, "--every" * (side == "datatrove_every")))
    found["sample"] = runs
    write_json(folder / "results.json", found)
    if args.memory:
        found["memory"] = memory(folder, whole, args.megabytes, size)
        write_json(folder / "results.json", found)
    return found


def memory(folder: Path, whole: Path, megabytes: float, size: float) -> list[dict[str, Any]]:
    tenth = folder / f"sample-{megabytes:g}-{megabytes / 10:g}"
    small = corpus.total_bytes(corpus.sample(whole, tenth, megabytes / 10, PARAMS)) / 1e6
    sides.prepare(tenth)
    rows = []
    for place, text in ((tenth, small), (whole, size)):
        for workers in (1, 2):
            say(f"memory: {text:.0f} MB, workers {workers}")
            rows.append({"megabytes": text, "workers": workers, **sides.ours(place, workers, train=False)["used"]})
    return rows


def spread(texts: list[str], count: int) -> list[str]:
    """About `count` texts from all over the corpus."""
    return texts[:: max(1, len(texts) // count)]


def table(found: dict[str, Any]) -> list[str]:
    """Markdown."""
    size, whole = found["megabytes"], found["whole"]
    clean = whole["used"]
    lines = [
        f"{found['machine']['cpu']}, Python {platform.python_version()}; one worker, one thread",
        "",
        "| what | text | CPU seconds | MB per CPU-second | peak memory |",
        "|---|---|---|---|---|",
        row("ours, whole corpus", size, [clean["cpu_seconds"]], clean),
    ]
    names = {
        "ours": "ours, sample",
        "datatrove": "datatrove, dropped documents leave",
        "datatrove_every": "datatrove, every document through every step",
    }
    spent = {}
    for side, runs in found["sample"].items():
        if runs:
            spent[side] = [run["used"]["cpu_seconds"] for run in runs]
            lines.append(row(names[side], found["sample_megabytes"], spent[side], runs[0]["used"]))
    for side in ("datatrove", "datatrove_every"):
        if side in spent:
            ratios = [theirs / mine for mine, theirs in zip(spent["ours"], spent[side], strict=True)]
            lines.append(f"| ratio to ours: {names[side]} | | | {spread_of(ratios)} | |")
    if whole["training"]:
        lines += ["", f"Training of the classifiers, once: {whole['training']['cpu_seconds']:.1f} CPU seconds."]
    kept = [f"ours {found['sample']['ours'][0]['documents']:,}"]
    kept += [f"{names[side]} {found['sample'][side][0]['documents']:,}" for side in spent if side != "ours"]
    lines += ["", f"Documents of the sample that are left: {'; '.join(kept)}.", *DIFFERENCES, ""]
    lines += ["| planted similarity | pairs | found |", "|---|---|---|"]
    quality = found["planted"]
    for target in sorted(quality["recall"], reverse=True):
        lines.append(f"| {target} | {quality['pairs_due'][target]} | {quality['recall'][target]:.4f} |")
    lines.append("")
    lines.append(
        f"Precision {quality['precision']:.4f} of {quality['reported']} reported; bias of the estimate"
        f" {quality['bias']:+.5f} ({quality['bias_sigmas']:+.2f} standard errors)."
    )
    if "memory" in found:
        lines += ["", "| text | workers | coordinator | largest worker |", "|---|---|---|---|"]
        for facts in found["memory"]:
            peaks = f"{facts['peak_bytes'] / 1e6:.0f} MB | {facts['worker_peak_bytes'] / 1e6:.0f} MB"
            lines.append(f"| {facts['megabytes']:.0f} MB | {facts['workers']} | {peaks} |")
    return lines


DIFFERENCES = (
    "",
    "Ours: normalisation, rules by kind, quality and toxicity scores, PII, exact duplicates, MinHash with every pair"
    " verified, validation against training exhaustively, decontamination, audit of the result; every document gets"
    " every measure.",
    "datatrove: Gopher repetition and quality, C4, FineWeb, PII (e-mail and IP), MinHash without verification; no exact"
    " duplicates, no decontamination, no classifier (its language filter needs a model from the network).",
)


def row(name: str, megabytes: float, seconds: list[float], facts: dict[str, Any]) -> str:
    peak = max(facts["peak_bytes"], facts["worker_peak_bytes"]) / 1e6
    rates = [megabytes / value for value in seconds]
    return f"| {name} | {megabytes:.1f} MB | {spread_of(seconds)} | {spread_of(rates)} | {peak:.0f} MB |"


def spread_of(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def say(text: str) -> None:
    print(f"bench-data: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

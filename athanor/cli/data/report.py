"""One page about the corpus: funnel, mixture, scores, lengths, duplicates, licences, examples.

The page is one file that loads nothing, and the same corpus gives the same bytes. It is shown with the clean run
in MLflow as well, where this checkout has that run's journal.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, write_text
from athanor.base.errors import AthanorError
from athanor.cleaning import rules
from athanor.cleaning.pii import CATEGORIES
from athanor.cli import render
from athanor.cli.data.gather import LIMITS, gather
from athanor.cli.data.read import Corpus
from athanor.runtime.attach import attach_later
from athanor.runtime.machine import anchor

OUT = Path(".athanor/data-report.html")
LANGUAGE = (rules.NOT_ENGLISH, "few_stop_words", "not_ascii")
WEAKENED = ("quality", "quality_classifier", "toxicity")  # scores that a classifier has a part in


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default {OUT}, which Git ignores")
    parser.add_argument("--open", action="store_true", help="in the browser")
    parser.add_argument("--no-attach", action="store_true", help="do not show it with the clean run in MLflow")


def run(args: argparse.Namespace) -> int:
    text = page(gather(Corpus(Path.cwd())))
    write_text(args.out, text)
    link = args.out.resolve().as_uri()
    print(f"{link}  ({len(text.encode()) / 1e6:.1f} MB)")
    if not args.no_attach:
        print(attach(Path.cwd(), text))
    if args.open:
        webbrowser.open(link)
    return 0


def refresh(root: Path) -> Path | None:
    """Make the page anew when the corpus below `root` is younger than it; None where there is no corpus."""
    out = root / OUT
    made = [path for name in ("clean", "shard") if (path := root / "metrics" / "runs" / f"{name}.json").is_file()]
    if len(made) < 2:
        return None
    if not out.is_file() or out.stat().st_mtime < max(path.stat().st_mtime for path in made):
        try:
            text = page(gather(Corpus(root)))
            write_text(out, text)
            attach(root, text)
        except AthanorError:  # `athanor data report` says what is missing
            return None
    return out


def page(facts: dict[str, Any]) -> str:
    """The page about what `gather` found."""
    names = {
        "LIMITS": LIMITS,
        "WEAKENED": WEAKENED,
        "CATEGORIES": CATEGORIES,
        "LANGUAGE": LANGUAGE,
        "drift_of": drift_of,
    }
    return render.fill_template("report.html.j2", cut=render.cut, differences=render.differences, facts=facts, **names)


def drift_of(stream: dict[str, Any]) -> dict[str, Any]:
    """The share of each source in each token file, and how far the worst is from the target."""
    counts, worst = dict(sorted(stream["per_shard"].items())), []
    colours = {name: f"var(--c{number})" if number else "var(--kept)" for number, name in enumerate(counts)}
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    shares = {name: [n / total for n, total in zip(row, totals, strict=True)] for name, row in counts.items()}
    for name, row in shares.items():
        drift = max(abs(share - stream["sources"][name]["target_share"]) for share in row)
        worst.append((name, f"{min(row):.2%}", f"{max(row):.2%}", f"{100 * drift:.2f}"))
    files = []
    for number in range(len(totals)):
        label = ", ".join(f"{name} {row[number]:.1%}" for name, row in shares.items())
        parts = [(name, row[number], colours[name]) for name, row in counts.items()]
        files.append((f"file {number:05d}: {label}", parts))
    return {"worst": worst, "files": files, "colours": colours}


def attach(root: Path, text: str) -> str:
    """Show the page with the run that made data/clean; says what was done."""
    leaf = root / "metrics" / "runs" / "clean.json"
    run = read_json(leaf)["run"] if leaf.is_file() else ""
    if run and attach_later(anchor(), run, OUT.name, text.encode()):
        return f"shown in MLflow with the run {run} (athanor ui)"
    return "not shown in MLflow: the journal of the run that made data/clean is not in this checkout"

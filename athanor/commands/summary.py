"""What the pipeline made, for a person: stages with times, scores with errors, where things are.

    python -m athanor summary
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json
from athanor.pipeline.facts import Graph
from athanor.pipeline.progress import duration


def leaf(root: Path, stage: str) -> dict[str, Any] | None:
    """metrics/runs/<stage>.json, or None before the stage ever ran."""
    path = root / "metrics" / "runs" / f"{stage.replace('-', '_')}.json"
    return read_json(path) if path.is_file() else None


def runs(root: Path) -> dict[str, str]:
    """Stage to the id of the run that made what is in the workspace."""
    leaves = {stage: leaf(root, stage) for stage in Graph(root).stages}
    return {stage: facts["run"] for stage, facts in leaves.items() if facts}


def outcome(stage: str, before: dict[str, str], after: dict[str, str], since_ms: int) -> str:
    """ran, kept (nothing to do), restored (from DVC's run cache) or missing."""
    if stage not in after:
        return "missing"
    if before.get(stage) == after[stage]:
        return "kept"
    stamp = re.search(r"-(\d{13})-", after[stage])
    # A resumed run keeps its first id, so age alone cannot tell it from a restored one.
    return "ran" if stamp and int(stamp[1]) >= since_ms else "restored"


def text(root: Path, before: dict[str, str] | None = None, since_ms: int = 0) -> str:
    after = runs(root)
    lines, ran, rested = ["", "Stages"], 0.0, False
    for stage in Graph(root).stages:
        facts = leaf(root, stage)
        seconds = duration(facts["seconds"]) if facts else "-"
        state = "" if before is None else outcome(stage, before, after, since_ms)
        if state == "restored" and facts and facts.get("ended_ms", 0) >= since_ms > 0:
            state = "ran (resumed)"
        lines.append(f"  {stage:<17} {state:<14} {seconds:>14}")
        if facts and (before is None or state.startswith("ran")):
            ran += facts["seconds"]
        else:
            rested = True
    lines.append(f"  {'all that ran' if rested else 'all':<17} {'':<14} {duration(ran):>14}")
    lines += _scores(root)
    if (root / "models" / "export" / "MODEL_CARD.md").is_file():
        lines += ["", "Model     models/export  (hf/ for transformers, *.gguf for llama.cpp, MODEL_CARD.md)"]
        lines += ["Chat      make chat", "Runs      make ui      (MLflow: parameters, curves, every stage of every run)"]
    return "\n".join(lines) + "\n"


def _scores(root: Path) -> list[str]:
    path = root / "metrics" / "eval.json"
    if not path.is_file():
        return []
    metrics = read_json(path)
    bpb = metrics["bpb"]
    lines = ["", "Held-out text, bits per byte (± standard error); lower is better"]
    for source, row in [*sorted(bpb["sources"].items()), ("all", bpb["all"])]:
        models = "   ".join(f"{name} {row[name]['bpb']:.3f} ± {_error(row[name]['stderr'])}" for name in ("base", "sft"))
        lines.append(f"  {source:<17} {models}   gzip {row['gzip']:.3f}   xz {row['xz']:.3f}")
    verdict = "below" if bpb["beats_xz"]["base"] else "not below"
    lines.append(f"  the base model is {verdict} xz on each document alone")
    lines += ["", "Battery, held-out items (± standard error; floor = best constant answer)"]
    for category, row in sorted(metrics["battery"]["sft"].items(), key=lambda pair: (-pair[1]["score"], pair[0])):
        lines.append(
            f"  {category:<20} {row['score']:6.1%} ± {row['stderr']:5.1%}   floor {row['floor']:6.1%}   n {row['n']}"
        )
    stop = metrics["health"]["sft"]["stop"]
    lines.append(f"  answers that end by themselves: {stop['rate']:.1%} of {stop['n']}")
    return lines


def _error(value: float | None) -> str:
    """A standard error; one held-out document has none."""
    return "?" if value is None else f"{value:.3f}"


def main() -> int:
    sys.stdout.write(text(Path.cwd()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

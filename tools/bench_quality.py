"""Quality for each second: our pretraining recipe beside nanochat's, on the same token files.

    git clone https://github.com/karpathy/nanochat PATH
    python -m tools.bench_quality --nanochat PATH [--seeds 1,2,3] [--contenders ours,nanochat,ours@main,ours:700000]

Every contender has a process of its own, and they train in turns of a few
steps, so that a slow minute of the machine is everybody's. Its clocks stand
still while it waits, compiles, or is scored: one scorer for all, bits per byte
of our held-out documents, softmax in fp32, every model in the numerics that it
trains in. What counts is our time to the bits per byte that nanochat ends with.

`ours` is stages/pretrain.py itself with the checkout's params.yaml (`ours@COMMIT`:
of that commit, `:TOKENS`: trained for so many); its time holds all that the
loop does, checkpoints too. `nanochat` is the model, the optimiser, the
schedules and the rules that scale them, taken out of the clone at run time;
there is one for each of `--scales` and `--numerics`. A scale multiplies the
learning rates of its command line, in the place of its own rule for the batch
(the square root of its share in half a million tokens: a sixteenth at 2,048);
`rule` among the scales is that rule.

Its rows are our sampler's windows in our order. Its loader of today would keep
the first 256 tokens of a document and drop the rest, and says itself that
plain rows suit scarce text and long documents better. `--rows bestfit` has that
loader instead, fed with our documents in the order of the files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from athanor.base.strict import read_yaml
from athanor.runtime.machine import cores
from tools.child import Child
from tools.quality_contenders import CLOCKS, DTYPES, batches

ROOT = Path(__file__).resolve().parents[1]
# As in its own script for CPUs (runs/runcpu.sh): heads of 64, and no sliding window, for which it has no kernel here.
NANOCHAT_ARGS = (
    "--depth 4 --aspect-ratio 48 --head-dim 64 --window-pattern L"
    " --max-seq-len 256 --total-batch-size 2048 --device-batch-size 8"
)
SAVE_EVERY_SECONDS = 60  # of its own time, as our stage does by default
BAR = 0.8  # of nanochat's time; the aim is 0.5


class Point(NamedTuple):
    """How far a contender was after so much of its own time."""

    tokens: int
    cpu: float
    wall: float
    bpb: float


class Entry(NamedTuple):
    """A recipe that takes part. `commit`: "" for this checkout; `tokens`: 0 for as many as all."""

    recipe: str
    commit: str = ""
    tokens: int = 0
    numerics: str = ""
    scale: str = ""

    def __str__(self) -> str:
        if self.recipe == "nanochat":
            return f"nanochat {self.numerics} x{self.scale}"
        return self.recipe + (f"@{self.commit}" if self.commit else "") + (f":{self.tokens}" if self.tokens else "")


def entries(contenders: str, numerics: Sequence[str], scales: Sequence[str]) -> list[Entry]:
    """What the names of `--contenders` stand for."""
    result = []
    for name in contenders.split(","):
        found = re.fullmatch(r"ours(?:@([^:]+))?(?::(\d+))?", name)
        if name == "nanochat":
            result += [Entry(name, numerics=kind, scale=scale) for kind in numerics for scale in scales]
        elif found:
            result.append(Entry("ours", found[1] or "", int(found[2] or 0)))
        else:
            raise SystemExit(f"--contenders: '{name}' is not ours, ours@COMMIT, ours:TOKENS or nanochat")
    return result


def write_held_out(path: Path, args: argparse.Namespace) -> None:
    """The documents that pretraining would validate on, as one file for all contenders."""
    from athanor.data.shards import open_val
    from athanor.training.pretraining import HeldOut
    from athanor.training.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(args.tokenizer)
    chosen = HeldOut(open_val(args.data), args.score_bytes, vocabulary.token_bytes).documents.values()
    documents = [document for part in chosen for document in part]
    text_bytes = sum(int(vocabulary.token_bytes[document].sum()) for document in documents)
    print(f"scored on {len(documents)} held-out documents, {text_bytes:,} bytes, windows of {args.window}", flush=True)
    arrays: dict[str, Any] = {"text_bytes": text_bytes, "vocab_size": vocabulary.size}
    pairs = batches(documents, args.window)
    for number, (ids_BT, next_BT) in enumerate(pairs):
        arrays |= {f"ids{number}": ids_BT, f"next{number}": next_BT}
    np.savez(path, parts=len(pairs), **arrays)


class Contender(Child):
    def __init__(self, entry: Entry, seed: int, folder: Path, tree: Path, together: int, args: Any) -> None:
        self.entry, self.points = entry, []
        tokens = entry.tokens or args.tokens
        every = max(1, args.tokens // args.evals)
        job = {"recipe": entry.recipe, "seed": seed, "tokens": tokens, "every": every, "threads": args.threads}
        job |= {"numerics": entry.numerics, "scale": entry.scale, "rows": args.rows, "turn_tokens": args.turn_tokens}
        job |= {"nanochat": str(args.nanochat), "nanochat_args": args.nanochat_args, "data": str(args.data)}
        job |= {"held_out": str(args.held_out)}
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "PYTHONPATH": str(tree), "ATHANOR_THREADS": str(args.threads)}
        if entry.recipe == "ours":
            _lay_out(folder, tree, args, {"seed": seed, "tokens": tokens, "validation_every_tokens": every})
            # Its clock runs while the others have their turns.
            environment["ATHANOR_SAVE_EVERY_SECONDS"] = str(SAVE_EVERY_SECONDS * together)
        environment["ATHANOR_DEVICE"] = "cpu"
        environment.pop("DVC_ROOT", None)
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or every contender keeps processes for it
        command = [sys.executable, "-P", str(ROOT / "tools" / "quality_contenders.py")]
        super().__init__(entry, (folder / "errors.txt").open("w+"), command, cwd=folder, env=environment)
        self.facts = self.told()

    def turn(self) -> bool:
        """A turn; False after the last one."""
        told = super().turn()
        if "bpb" in told:
            self.points.append(Point(*(told[name] for name in Point._fields)))
            print(f"{self.entry}: {told['tokens']:,} tokens, {told['bpb']:.4f}", file=sys.stderr)
        return "end" not in told


def _lay_out(folder: Path, tree: Path, args: Any, changes: dict[str, int]) -> None:
    """A working directory for the stage: the inputs, the code for its fingerprint, and params.yaml with `changes`."""
    from ruamel.yaml import YAML

    params = read_yaml(tree / "params.yaml")
    params["pretrain"] |= {**changes, "sample_every_tokens": 0}
    YAML().dump(params, folder / "params.yaml")
    linked = {"data/shards": args.data, "models/tokenizer": args.tokenizer, "athanor": tree / "athanor"}
    for name, target in {**linked, "stages": tree / "stages"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)


@contextlib.contextmanager
def trees(taking_part: Sequence[Entry], folder: Path) -> Iterator[dict[str, Path]]:
    """A checkout for every commit that is named; they are taken away in the end."""
    found, git = {"": ROOT}, ["git", "-C", str(ROOT), "worktree"]
    try:
        for commit in sorted({entry.commit for entry in taking_part} - {""}):
            found[commit] = folder / f"tree{len(found)}"
            subprocess.run([*git, "add", "--detach", str(found[commit]), commit], check=True, stdout=sys.stderr)
        yield found
    finally:
        for commit in found.keys() - {""}:
            subprocess.run([*git, "remove", "--force", str(found[commit])], check=False)


def race(taking_part: Sequence[Entry], seed: int, folder: Path, found: dict[str, Path], args: Any) -> list[Contender]:
    """The contenders of a seed, in turns whose order changes, to the end; one that fails is left out."""
    contenders: list[Contender] = []
    try:
        for number, entry in enumerate(taking_part):
            place = folder / f"{seed}-{number}"
            with told_of_failure():
                contenders.append(Contender(entry, seed, place, found[entry.commit], len(taking_part), args))
                print(f"seed {seed}: {entry} is ready: {json.dumps(contenders[-1].facts)}", flush=True)
        running, finished = list(contenders), []
        while running:
            for one in list(running):
                goes_on = False
                with told_of_failure():
                    goes_on = one.turn()
                    if not goes_on:
                        finished.append(one)
                if not goes_on:
                    running.remove(one)
            running = running[1:] + running[:1]
    finally:
        for one in contenders:
            one.stop()
    return finished


@contextlib.contextmanager
def told_of_failure() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        print(error, file=sys.stderr)


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Seconds until a curve of (seconds, bits per byte) first reaches `target`; infinite where it does not.

    Straight between two points. What the first point has reached already took at most as long as that.
    """
    for number, (seconds, bpb) in enumerate(curve):
        if bpb <= target:
            if not number:
                return seconds
            earlier, above = curve[number - 1]
            return earlier + (seconds - earlier) * (above - target) / (above - bpb)
    return math.inf


Curves = dict[Entry, dict[int, list[Point]]]  # of each seed


def ratio(mine: Sequence[Point], theirs: Sequence[Point], clock: str) -> float:
    """My time to their last bits per byte, as a share of all of their time."""
    curve = [(getattr(point, clock), point.bpb) for point in mine]
    return time_to(curve, theirs[-1].bpb) / getattr(theirs[-1], clock)


def opponent(curves: Curves) -> Entry | None:
    """Of nanochat's fastest numerics the best scale, by medians over the seeds."""

    def median(entry: Entry, field: str) -> float:
        return statistics.median(getattr(points[-1], field) for points in curves[entry].values())

    best: dict[str, Entry] = {}
    for entry in [entry for entry in curves if entry.recipe == "nanochat"]:
        so_far = best.setdefault(entry.numerics, entry)
        if median(entry, "bpb") < median(so_far, "bpb"):
            best[entry.numerics] = entry
    return min(best.values(), key=lambda entry: median(entry, "wall")) if best else None


def summary(curves: Curves) -> list[str]:
    """What each ends with, and the table of ratios, with the pair that settles it marked."""
    chosen, lines = opponent(curves), ["bits per byte in the end: each seed, then the median"]
    for entry, seeds in curves.items():
        ends = [points[-1].bpb for _, points in sorted(seeds.items())]
        lines.append(f"  {entry}: {'  '.join(f'{end:.4f}' for end in ends)}; median {statistics.median(ends):.4f}")
    lines.append("our time to their final bits per byte, of their time: each seed, then the median")
    for mine in [entry for entry in curves if entry.recipe == "ours"]:
        for theirs in [entry for entry in curves if entry != mine and (entry.recipe == "nanochat" or entry.commit)]:
            for clock in CLOCKS:
                both = sorted(curves[mine].keys() & curves[theirs].keys())
                shares = [ratio(curves[mine][seed], curves[theirs][seed], clock) for seed in both] or [math.nan]
                told = "  ".join(f"{share:.3f}" for share in shares)
                line = f"  {mine} to {theirs}, {clock}: {told}; median {statistics.median(shares):.3f}"
                lines.append(line + (f"  <- counts, at most {BAR}" if theirs == chosen and not mine.commit else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, help="a clone of it")
    parser.add_argument("--nanochat-args", default=NANOCHAT_ARGS, help="for its own command line")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "shards")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "tokenizer")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--scales", default="0.25,0.5,1", help="of nanochat's learning rates; 'rule' for its own")
    parser.add_argument("--numerics", default="fp32,bf16", help="of nanochat; ours has them in params.yaml")
    parser.add_argument("--contenders", default="ours,nanochat")
    parser.add_argument("--rows", choices=("windows", "bestfit"), default="windows", help="of nanochat")
    parser.add_argument("--evals", type=int, default=20)
    parser.add_argument("--score-bytes", type=int, default=60_000, help="of held-out text, per source")
    parser.add_argument("--window", type=int, default=256, help="ids that are scored at once")
    parser.add_argument("--turn-tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--json", type=Path, help="a file for all curves")
    args = parser.parse_args()
    numerics, seeds = args.numerics.split(","), [int(seed) for seed in args.seeds.split(",")]
    taking_part = entries(args.contenders, numerics, args.scales.split(","))
    if unknown := sorted(set(numerics) - set(DTYPES)):
        parser.error(f"--numerics: {unknown[0]} is none of {', '.join(DTYPES)}")
    if args.nanochat is None and any(entry.recipe == "nanochat" for entry in taking_part):
        parser.error("--nanochat: name a clone of it, or leave it out of --contenders")
    for name in ("nanochat", "data", "tokenizer"):
        setattr(args, name, getattr(args, name) and getattr(args, name).resolve())
    facts: dict[str, Any] = {
        "threads": args.threads,
        "torch": importlib.metadata.version("torch"),
        "machine": platform.platform(),
    }
    for name, root in (("ours", ROOT), ("nanochat", args.nanochat)):
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        facts[name] = root and subprocess.run(head, capture_output=True, text=True).stdout.strip()
    print(json.dumps(facts), flush=True)
    curves: Curves = {entry: {} for entry in taking_part}
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as temporary:
        folder = Path(temporary)
        args.held_out = folder / "held_out.npz"
        write_held_out(args.held_out, args)
        with trees(taking_part, folder) as found:
            for seed in seeds:
                for one in race(taking_part, seed, folder, found, args):
                    curves[one.entry][seed] = one.points
                    print(
                        f"\nseed {seed}: {one.entry}\n{'tokens':>12}{'processor s':>14}{'wall s':>10}{'bits/byte':>12}"
                    )
                    for point in one.points:
                        print(f"{point.tokens:>12,}{point.cpu:>14.1f}{point.wall:>10.1f}{point.bpb:>12.4f}", flush=True)
                if args.json:
                    told = [
                        {"entry": str(e), "seed": s, "points": p} for e, of in curves.items() for s, p in of.items()
                    ]
                    args.json.write_text(
                        json.dumps({"facts": facts, "arguments": vars(args), "curves": told}, default=str)
                    )
    print("\n" + "\n".join(summary({entry: of for entry, of in curves.items() if of})))


if __name__ == "__main__":
    main()

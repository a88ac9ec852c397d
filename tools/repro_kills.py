"""Kill the whole process group of `athanor repro` or `dvc repro` between stages, again and again, and run it again.

    python -m tools.repro_kills [--kills 30] [--command athanor|dvc] [--targets STAGE ...] [--seed S] [--keep DIR]

In a clone with the micro preset. Each kill is a SIGKILL to DVC and all that it started, at a chosen moment between the
end of a stage's work and the next stage: every third while DVC writes dvc.lock, which it has emptied before (its write is made
long enough to aim at), the others at random moments of the two seconds in which DVC hashes, caches and records. After each
kill the same command is run again, with nothing done by hand; when all stages are done, everything is removed and the next
round begins. The files of each round must be those of a run without kills. Exit status 1 when a command did not continue
or files differ.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from athanor.runtime import dvc_lock
from tools.scratch import environment, hashes, micro_clone

TARGETS = ("shard", "sft-data")  # every stage that does not train, so that a round is short
COMMANDS = {"athanor": ["athanor", "repro"], "dvc": ["dvc", "repro"]}
WINDOW_SECONDS = 2.0
LIMIT_SECONDS = 600.0
# In the processes of DVC: emptying dvc.lock and filling it again takes as long as somebody needs to aim.
SLOW_WRITE = """
import builtins, os, time
plain, flag = builtins.open, os.environ.get("REPRO_KILLS_FLAG", "")
def slow(path, mode="r", *args, **how):
    file = plain(path, mode, *args, **how)
    if "w" in mode and str(path).endswith("dvc.lock") and os.path.exists(flag):
        os.rename(flag, flag + ".reached")
        time.sleep(60)
    return file
builtins.open = slow
"""


class Clone:
    """A checkout with micro parameters, the command that is killed in it, and what it has done so far."""

    def __init__(self, root: Path, base: Path, command: str, targets: list[str]) -> None:
        self.path, self.flag, self.log = base / "clone", base / "flag", base / "log"
        self.words = [sys.executable, "-m", *COMMANDS[command], *targets]
        (base / "python").mkdir(parents=True)
        (base / "python" / "sitecustomize.py").write_text(SLOW_WRITE)
        settings = {"PYTHONPATH": str(base / "python"), "REPRO_KILLS_FLAG": str(self.flag)}
        roles = [f"GIT_{role}_{what}" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
        who = dict.fromkeys(roles, "t@localhost")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = environment(DVC_SITE_CACHE_DIR=str(base / "site"), PATH=path, OMP_NUM_THREADS="1", **settings, **who)
        micro_clone(root, self.path, self.env)

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen(self.words, cwd=self.path, env=self.env, start_new_session=True, **streams)

    def ended_stages(self) -> dict[str, int]:
        """When each stage last said that it was done."""
        return {path.name: path.stat().st_mtime_ns for path in (self.path / "metrics" / "runs").glob("*.json")}

    def recorded(self) -> set[str]:
        return set(dvc_lock.stages(self.path / dvc_lock.LOCK))

    def begin_anew(self) -> None:
        for words in (["reset", "-q", "--hard"], ["clean", "-qfdx"]):  # DVC adds dvc.lock to Git's index
            subprocess.run(["git", *words], cwd=self.path, env=self.env, check=True)
        shutil.rmtree(self.path / ".dvc" / "cache", ignore_errors=True)


def kill_between_stages(clone: Clone, draw: random.Random, aimed: bool) -> str:
    """Run the command until it is killed; "" when it was, "done" when it ended well before, else what it said."""
    clone.flag.with_name("flag.reached").unlink(missing_ok=True)
    clone.flag.unlink(missing_ok=True)
    if aimed:
        clone.flag.touch()
    before, after = clone.ended_stages(), draw.uniform(0, WINDOW_SECONDS)
    child, due, limit = clone.start(), float("inf"), time.monotonic() + LIMIT_SECONDS
    try:
        while child.poll() is None:
            now = time.monotonic()
            if not aimed and due == float("inf") and clone.ended_stages() != before:
                due = now + after
            if now > limit or now > due or clone.flag.with_name("flag.reached").exists():
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return "" if now <= limit else f"did not end in {LIMIT_SECONDS:.0f} s"
            time.sleep(0.002)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return "done" if child.returncode == 0 else clone.log.read_text(errors="replace")[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.repro_kills", description="kill repro between stages")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--command", choices=sorted(COMMANDS), default="athanor")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), help=f"stages (default: {' '.join(TARGETS)})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and keep it")
    args = parser.parse_args()
    base = (args.keep or Path(tempfile.mkdtemp(prefix="athanor-repro-kills-"))).resolve()
    draw, started = random.Random(args.seed), time.monotonic()
    clone = Clone(Path.cwd(), base, args.command, args.targets)
    if clone.start().wait():
        print(f"a run without kills failed: {clone.log.read_text()[-2000:]}", file=sys.stderr)
        return 1
    wanted, stages = hashes(clone.path), len(clone.recorded())
    clone.begin_anew()
    kills = torn = rounds = 0
    problems: list[str] = []
    while kills < args.kills and not problems:
        said = kill_between_stages(clone, draw, aimed=kills % 3 == 2)
        if said == "":
            kills += 1
            hit = bool(list(dvc_lock.torn(clone.path)))
            torn += hit
            print(f"kill {kills}: {'while dvc.lock was written' if hit else 'at a random moment'}", flush=True)
        if said == "done" or kills == args.kills:
            if said != "done" and (status := clone.start().wait()):
                problems.append(f"the last run ended with {status}: {clone.log.read_text(errors='replace')[-1000:]}")
            found, rounds = hashes(clone.path), rounds + 1
            problems += [
                f"round {rounds}: {name} differs"
                for name in wanted.keys() | found.keys()
                if wanted.get(name) != found.get(name)
            ]
            clone.begin_anew()
        elif said:
            problems.append(f"after kill {kills} the command did not continue: {said}")
    told = (
        f"{args.command} repro, {stages} stages: {kills} kills of the process group, {torn} of them left dvc.lock torn,"
    )
    compared = f"{rounds} rounds to the end, {len(wanted)} files compared in each, {len(problems)} problems"
    print(f"{told} {compared}, {time.monotonic() - started:.0f} s")
    for problem in problems:
        print(f"  {problem}")
    if not args.keep:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

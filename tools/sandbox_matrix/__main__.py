"""Every attack of attacks.py on our sandbox and on other runners, as root and as a user, with namespaces and without.

    python -m tools.sandbox_matrix [--earlier SANDBOX.py] [--code-eval EXECUTE.py] [--python PATH] [--only TEXT] [--contexts TEXT]
    python -m tools.sandbox_matrix --verdicts SANDBOX.py [--count 1000]

The first prints a table: attacks that reached their goal, by class, runner and context, and their names below it. It
needs root, to become a user too. `--python` is an interpreter that a user may run, if this one is in root's home.
A context without namespaces is this system behind a filter that refuses unshare, setns, mount and clone with a
namespace, as a container's default profile does. The second compares verdicts of an earlier sandbox.py and ours on
right and wrong functions. Attacks are real: they fill memory, make processes and write files in temporary folders.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from athanor.evaluation import sandbox, sandbox_child
from athanor.sources.exercises.code import python_functions
from athanor.sources.exercises.exercise import Draw

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60.0
SLOW_SECONDS = 30.0
FAILED, PASSED = 40, 41  # exit statuses: nothing that an attack writes can be taken for a verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sandbox_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--earlier", type=Path, help="sandbox.py of an earlier version")
    parser.add_argument("--code-eval", type=Path, help="execute.py of the metric code_eval of huggingface/evaluate")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that a user may run")
    parser.add_argument("--only", default="", help="attacks whose class or name holds this text")
    parser.add_argument("--contexts", default="", help="contexts whose name holds this text")
    parser.add_argument("--verdicts", type=Path, help="compare verdicts with this sandbox.py instead")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--context", help=argparse.SUPPRESS)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        return cell()
    if args.verdicts:
        return compare(args.verdicts, args.count)
    runners = {"ours": ""}
    runners |= {"earlier": str(args.earlier.resolve())} if args.earlier else {}
    runners |= {"code_eval": str(args.code_eval.resolve())} if args.code_eval else {}
    if args.context:
        return context(runners, args.only)
    return table(runners, args)


def cell() -> int:
    """One attack on one runner, in a process that it may end."""
    task = json.loads(sys.stdin.read())
    build = {"ours": lambda path: ours, "earlier": earlier, "code_eval": code_eval}
    passes = build[task["runner"]](task["path"])
    code = task["code"].replace("{evaluation}", str(os.getpid()))
    os._exit(PASSED if passes(code, task["tests"]) else FAILED)


def context(runners: dict[str, str], only: str) -> int:
    """Every attack on every runner as the user that we are; a line of JSON for each."""
    from athanor.evaluation.sandbox import isolation
    from tools.sandbox_matrix.attacks import ATTACKS
    from tools.sandbox_matrix.world import World

    namespaces = subprocess.run(["unshare", "--net", "--map-root-user", "true"], capture_output=True).returncode == 0
    emit({"uid": os.getuid(), "namespaces": namespaces, "isolation": isolation()})
    world = World()
    try:
        for (kind, name), (goal, code) in ATTACKS.items():
            if only in kind or only in name:
                for runner, path in runners.items():
                    emit({"kind": kind, "name": name, "runner": runner, **attempt(world, runner, path, goal, code)})
    finally:
        world.close()
    return 0


def emit(row: dict[str, Any]) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


def attempt(world: Any, runner: str, path: str, goal: str, code: str) -> dict[str, Any]:
    """How an attack ended: what it reached (nothing: it was held), and the seconds."""
    from tools.sandbox_matrix.attacks import PRELUDE

    expected = "NONCE-" + secrets.token_hex(16)
    told = world.reset(expected)
    wanted = {"secret": world.secret, "expected": expected}.get(goal, "done")
    head = f"W = {told!r}\nW['evaluation'] = {{evaluation}}\n{PRELUDE}"
    task = {"runner": runner, "path": path, "code": head + code, "tests": [f"assert f() == {wanted!r}"]}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tools.sandbox_matrix", "--cell"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=world.folder,
        env={"PYTHONPATH": str(ROOT), "SECRET": world.secret, "PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
    )  # fmt: skip
    reached = []
    try:
        process.communicate(json.dumps(task).encode(), LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        reached.append("the scorer did not end")
    seconds = time.monotonic() - start
    if process.returncode == PASSED:
        reached.append("passed")
    elif process.returncode != FAILED:
        reached.append("the scorer ended")
    if seconds > SLOW_SECONDS:
        reached.append("it took too long")
    return {"reached": reached + world.changes(), "seconds": round(seconds, 2)}


def table(runners: dict[str, str], args: argparse.Namespace) -> int:
    """The contexts one after the other, and the Markdown table of them. Status 1 if something reached its goal on ours."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, (user, spaces) in CONTEXTS.items():
        if args.contexts not in name:
            continue
        if user and os.geteuid():
            print("left out (needs root):", name)
            continue
        facts, *rows[name] = run_context(args, user, spaces)
        walls = facts["isolation"] or "code is not run"
        print(f"- {name}: uid {facts['uid']}, namespaces {'yes' if facts['namespaces'] else 'no'}; ours: {walls}")
    columns = [(runner, name) for runner in runners for name in rows]
    print("\n| class | " + " | ".join(f"{runner}: {name}" for runner, name in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    every = [(row | {"context": name}) for name, group in rows.items() for row in group]
    count = Counter((row["kind"], row["runner"], row["context"]) for row in every)
    lost = Counter((row["kind"], row["runner"], row["context"]) for row in every if row["reached"])
    for kind in dict.fromkeys(row["kind"] for row in every):
        print(f"| {kind} | " + " | ".join(f"{lost[kind, *at]} of {count[kind, *at]}" for at in columns) + " |")
    sums = [[sum(n for key, n in part.items() if key[1:] == at) for part in (lost, count)] for at in columns]
    print("| **all** | " + " | ".join(f"{first} of {second}" for first, second in sums) + " |\n")
    for row in every:
        if row["reached"]:
            print(f"  {row['runner']} | {row['context']} | {row['kind']}: {row['name']}: {', '.join(row['reached'])}")
    return int(any(row["reached"] for row in every if row["runner"] == "ours"))


def run_context(args: argparse.Namespace, user: int, spaces: bool) -> Iterator[dict[str, Any]]:
    options = ["--context", "x", "--only", args.only]
    for option, path in (("--earlier", args.earlier), ("--code-eval", args.code_eval)):
        options += [option, str(path.resolve())] if path else []
    process = subprocess.Popen(
        [args.python if user else sys.executable, "-m", "tools.sandbox_matrix", *options],
        stdout=subprocess.PIPE, cwd=ROOT, user=user or None, group=user or None, extra_groups=[] if user else None,
        preexec_fn=None if spaces else without_namespaces,
    )  # fmt: skip
    for line in process.stdout:
        yield json.loads(line)
    if process.wait():
        raise SystemExit(
            f"a context ended with status {process.returncode}. Fix: --python with one that a user may run"
        )


# -- the runners that are compared, each asked for one verdict, and the contexts they run in ------------------------------

CONTEXTS = {  # name -> (user, whether namespaces may be made)
    "root, namespaces": (0, True),
    "root, none": (0, False),
    "user, namespaces": (65534, True),
    "user, none": (65534, False),
}
# unshare, setns, mount, clone, clone3: as a container's default profile, refuse what makes or enters a namespace.
DENIED = {"x86_64": (272, 308, 165, 56, 435), "aarch64": (97, 268, 40, 220, 435)}
NEW_NAMESPACES, NO_SUCH_CALL, FIRST_ARGUMENT = 0x7E020000, 0x00050026, 16


def load(path: str) -> ModuleType:
    """A module from a file anywhere."""
    spec = importlib.util.spec_from_file_location("other_runner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(code: str, tests: Sequence[str]) -> bool:
    return sandbox.passes(code, tests)


def earlier(path: str) -> Callable[[str, Sequence[str]], bool]:
    """A sandbox.py of another version of this project."""
    return load(path).passes


def code_eval(path: str) -> Callable[[str, Sequence[str]], bool]:
    """`execute.py` of the metric code_eval (huggingface/evaluate), called as the metric calls it; lm-evaluation-harness
    scores HumanEval and MBPP with it."""
    check = load(path).check_correctness
    return lambda code, tests: check(code + "\n" + "\n".join(tests), 3.0, 0, 0)["passed"]


def without_namespaces() -> None:
    """From here on no process of ours can make a namespace: a filter that lets everything else pass."""
    machine = os.uname().machine
    unshare, setns, mount, clone, clone3 = DENIED[machine]
    lines = [(sandbox_child.LOAD, 0, 0, sandbox_child.NUMBER)]
    for number, answer in (
        (unshare, sandbox_child.REFUSE),
        (setns, sandbox_child.REFUSE),
        (mount, sandbox_child.REFUSE),
        (clone3, NO_SUCH_CALL),
    ):
        lines += [(sandbox_child.EQUAL, 0, 1, number), (sandbox_child.RETURN, 0, 0, answer)]
    lines += [
        (sandbox_child.EQUAL, 0, 3, clone), (sandbox_child.LOAD, 0, 0, FIRST_ARGUMENT), (sandbox_child.ANY_BIT, 0, 1, NEW_NAMESPACES),
        (sandbox_child.RETURN, 0, 0, sandbox_child.REFUSE), (sandbox_child.RETURN, 0, 0, sandbox_child.ALLOW),
    ]  # fmt: skip
    sandbox_child.install(b"".join(struct.pack("=HBBI", *line) for line in lines))


# What a model gets wrong, as a change of the text.
MUTATIONS = (
    ("return ", "return not "), ("return ", "return str("), ("return ", "print("), (" + ", " - "), (" % ", " // "),
    (" > ", " >= "), ("min", "max"), (":\n    return", ":\n    import re, math, json, collections\n    return"),
    ("def ", "import datetime, itertools, typing\ndef "), ("return ", "raise ValueError #"), ("\n    ", "\n"),
    ("[", "list(reversed("), ("def ", "import nothing_of_that_name\ndef "),
)  # fmt: skip


def functions(count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    rng = Draw(1)
    rng.battery = True
    produced = 0
    while True:
        exercise = python_functions(rng).item
        code = exercise.accepted[0]
        texts = [*exercise.accepted, *exercise.rejected]
        texts += [code.replace(old, new) for old, new in rng.sample(MUTATIONS, 4) if old in code]
        for text in texts:
            yield sandbox.extract_code(text), tuple(exercise.tests)
            produced += 1
            if produced == count:
                return


def compare(path: Path, count: int) -> int:
    """Print how many verdicts differ and the milliseconds of each; status 1 if any differs."""
    earlier, tasks = load(str(path)), list(functions(count))
    found, spent = [], []
    for runner in (earlier, sandbox):
        start = time.monotonic()
        found.append(runner.passes_many(tasks))
        spent.append(1000 * (time.monotonic() - start) / count)
    differing = [task for task, *pair in zip(tasks, *found, strict=True) if pair[0] != pair[1]]
    print(f"{count} functions, {sum(found[1])} right; differing verdicts: {len(differing)}")
    print(f"ms each, two at a time: earlier {spent[0]:.1f}, ours {spent[1]:.1f}")
    for code, _ in differing:
        print(code, end="\n\n")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())

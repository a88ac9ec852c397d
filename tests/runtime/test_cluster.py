"""Work on shards on several machines: a Ray cluster of two nodes.

Ray (pip install -r requirements-cluster.txt) is optional; tests that need it are skipped without. The machines are
processes here: two raylets on the loopback.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from athanor.base.errors import GateError, InputError, Interrupted
from athanor.runtime.executor import Executor
from athanor.runtime.ray_cluster import TASKS_PER_CORE
from tests.runtime.shard_toy import ROOT, ShardToy, alive, done, until
from tests.runtime.toy_work import SHARDS, NumbersOfNames, began, contents, score, where_am_i

NO_RAY = "Ray is not installed: pip install -r requirements-cluster.txt"


def with_ray(test: Any) -> Any:
    test = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY)(test)
    return pytest.mark.extra(test)


@pytest.fixture
def toy(raw_shards: tuple[Path, dict[str, str]], tmp_path: Path) -> ShardToy:
    (tmp_path / "control").mkdir()
    return ShardToy(raw_shards[0], tmp_path / "control", tmp_path, raw_shards[1])


def times(toy: ShardToy) -> dict[int, int]:
    return {int(shard): len(pids) for shard, pids in began(toy.control).items()}


# -- Ray ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_env() -> Iterator[dict[str, str]]:
    """Ray keeps its token in the home directory unless it is told one, and its sessions in /tmp/ray for ever."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets are made below it
    env = {
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # two nodes of one machine, also on macOS
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        yield env
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def two_nodes(ray_env: dict[str, str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        yield cluster
    finally:
        cluster.shutdown()


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


@with_ray
def test_two_nodes_lose_a_worker_and_then_a_machine_and_nothing_is_lost(toy: ShardToy, two_nodes: Any) -> None:
    out = toy.tmp / "out"
    head, second = raylet(two_nodes.head_node), raylet(next(iter(two_nodes.worker_nodes)))
    toy.order("hold", *range(2, SHARDS))
    job = toy.start(out, "--kind", "ray", RAY_ADDRESS=two_nodes.address)

    def on(machine: int) -> dict[int, int]:
        """Shards that hang on a machine, and their workers."""
        last = {int(shard): pids[-1] for shard, pids in began(toy.control).items() if int(shard) >= 2}
        return {shard: pid for shard, pid in last.items() if alive([pid]) and psutil.Process(pid).ppid() == machine}

    try:
        until(lambda: done(out) == 2 and on(head) and on(second), "both machines hold a shard")
        ((first_shard, worker),) = on(head).items()
        ((second_shard, other),) = on(second).items()
        os.kill(worker, signal.SIGKILL)
        until(lambda: on(head), "the first machine has a new worker with a shard")
        os.kill(second, signal.SIGKILL)  # the machine is gone: its raylet and its workers
        if alive([other]):
            os.kill(other, signal.SIGKILL)
        toy.withdraw("hold")
        assert job.wait(180) == 0, job.stderr.read()
    finally:
        job.kill()
        job.wait()
    assert contents(out) == toy.serial
    assert times(toy) == {n: 2 if n in (first_shard, second_shard) else 1 for n in range(SHARDS)}


@with_ray
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_coordinator_leaves_no_ray_behind_and_is_resumed(
    toy: ShardToy, ray_env: dict[str, str], number: signal.Signals
) -> None:
    out = toy.tmp / "out"
    toy.order("hold", *range(2, SHARDS))
    job = toy.start(out, "--kind", "ray")
    children: list[int] = []
    try:
        until(lambda: done(out) == 2 and len(began(toy.control)) == 4, "two done, two held")
        children += [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
        assert len(children) > 3
        job.send_signal(number)
        assert job.wait(60) == (75 if number == signal.SIGTERM else -number)
        # Ray's agents, which do no work, may outlive a kill for minutes.
        workers = [pid for shard in ("00002", "00003") for pid in began(toy.control)[shard]]
        until(lambda: not alive(children if number == signal.SIGTERM else workers), "Ray's processes have ended")
    finally:
        for pid in [*children, job.pid]:
            if alive([pid]):
                os.kill(pid, signal.SIGKILL)
        job.wait()
    toy.withdraw("hold")
    Executor(2)(score, toy.tasks(), out)  # begun with Ray, ended without
    assert {path: hashed for path, hashed in contents(out).items() if ".probe-" not in path} == toy.serial
    assert times(toy) == {n: 2 if n in (2, 3) else 1 for n in range(SHARDS)}


@with_ray
def test_ray_on_one_machine(toy: ShardToy, ray_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    executor = Executor(2, kind="ray")
    try:
        executor(score, toy.tasks(), toy.tmp / "out")
        assert contents(toy.tmp / "out") == toy.serial
        found = executor(where_am_i, {"a": None}, toy.tmp / "here")["a"]
        assert found["pid"] != os.getpid() and found["threads"] == ["1", "1", "1"]
        assert (found["cwd"], found["code"]) == (str(Path.cwd()), str(ROOT / "athanor" / "__init__.py"))
        assert before == {number: signal.getsignal(number) for number in before}, "Ray took a signal from the stage"
        toy.order("fail", 4)
        with pytest.raises(GateError, match="gate 'toy' failed: shard 00004 is bad. Fix: mend it"):
            executor(score, toy.tasks(), toy.tmp / "failed")
        toy.order("die", 5)
        toy.withdraw("fail")
        with pytest.raises(InputError, match="a worker was killed 3 times, probably .*: shard 'toy/00005'"):
            executor(score, toy.tasks(), toy.tmp / "killed")
        tasks = NumbersOfNames([f"toy/{number}" for number in range(50)])
        with pytest.raises(Interrupted):
            Executor(2, kind="ray", stop=lambda: True)(where_am_i, tasks, toy.tmp / "many")
        assert tasks.made == 2 * TASKS_PER_CORE, "tasks are submitted as others end"
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with pytest.raises(InputError, match="RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers"):
            executor(score, toy.tasks(), toy.tmp / "nowhere")
    finally:
        ray.shutdown()


@with_ray
def test_a_machine_that_does_not_share_the_files_is_named(toy: ShardToy, two_nodes: Any) -> None:
    """The second node is started again with an empty folder in place of the shared one."""
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(toy.tmp)]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a machine with files of its own needs the right to mount")
    two_nodes.remove_node(next(iter(two_nodes.worker_nodes)))
    start = f"{sys.executable} -m ray.scripts.scripts start --address={two_nodes.address} --num-cpus=4 --block"
    inside = f"mount -t tmpfs none {toy.tmp} && exec {start} --object-store-memory=80000000"
    node = subprocess.Popen(["unshare", "-m", "sh", "-c", inside], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        import ray

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", two_nodes.address)
            until(lambda: len(psutil.Process(node.pid).children(recursive=True)) >= 2, "the node has started")
            toy.order("hold", *range(SHARDS))  # or the first machine would have done it all before
            with pytest.raises(InputError, match="of the Ray cluster does not see this folder. Fix: put"):
                Executor(2, kind="ray")(score, toy.tasks(), toy.tmp / "out")
        ray.shutdown()
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def test_without_ray_it_says_what_to_install(toy: ShardToy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Ray is installed here or not: a test that waits for a machine without it was never run by CI."""
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    with pytest.raises(InputError, match="Ray, which is not installed. Fix: pip install -r requirements-cluster.txt"):
        Executor(2, kind="ray")(score, toy.tasks(), toy.tmp / "out")

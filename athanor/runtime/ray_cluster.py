"""Work on shards as tasks of a Ray cluster: the one of RAY_ADDRESS, or one that is started on this machine.

Plain tasks, because Ray gives a task whose worker or machine died to another.
joblib's Ray backend holds its workers as actors; with it the first that died
ended the whole run (ActorDiedError of Ray 2.60, joblib 1.6).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.runtime.executor import KILLS, ONE_THREAD, SHARED_FS_WAIT, Call, TaskResults, worker_killed

POLL = 0.2  # s
TASKS_PER_CORE = 4  # submitted; Ray holds each with its arguments in the memory of this process
STORE_BYTES = 100_000_000  # answers are small and go past the store; the default takes a third of the memory


def in_ray(names: Iterable[str], call_of: Callable[[str], Call], workers: int, folder: Path) -> TaskResults:
    """`workers` counts on a local cluster only; another has the cores that its machines offer."""
    with _kept_signals():
        try:
            import ray
        except ImportError:
            what = "machine.yaml asks for Ray, which is not installed"
            raise InputError(what, fix="pip install -r requirements-cluster.txt, or executor: processes") from None
        if not ray.is_initialized():
            _connect(ray, workers)
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()

    @ray.remote(num_cpus=1, max_retries=KILLS - 1)
    def task(
        call: tuple, probe: str, timeout_s: float
    ) -> dict | BaseException | None:  # sent as it stands: its machine may not see the checkout
        import os
        import socket
        import time

        deadline = time.monotonic() + timeout_s
        while not os.path.exists(probe):
            if time.monotonic() > deadline:
                return {"unseen": socket.gethostname()}
            if os.path.isdir(os.path.dirname(probe)):
                os.listdir(os.path.dirname(probe))  # makes NFS look again
            else:
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.1)
        from athanor.runtime.executor import Call, run_call

        return run_call(Call(*call))

    waiting, running = iter(names), {}
    try:
        while True:
            cores = max(1, int(ray.cluster_resources().get("CPU", 0)))  # machines come and go
            for name in itertools.islice(waiting, max(0, TASKS_PER_CORE * cores - len(running))):
                # As a plain tuple, which can be read where athanor cannot be imported.
                running[task.remote(tuple(call_of(name)), str(probe), SHARED_FS_WAIT)] = name
            if not running:
                break
            ray.wait(list(running), timeout=POLL)
            ended, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            for ref in ended:
                name = running.pop(ref)
                try:
                    result = ray.get(ref)
                except ray.exceptions.RayTaskError:
                    raise  # of our own function above; the work's errors are answers
                except ray.exceptions.RayError as error:
                    raise worker_killed(f"shard '{name}' on the Ray cluster ({type(error).__name__})") from None
                if isinstance(result, dict) and "unseen" in result:
                    raise InputError(
                        f"machine '{result['unseen']}' of the Ray cluster does not see this folder",
                        where=str(folder),
                        fix="put the checkout on a file system that all machines share, under the same path",
                    )
                yield name, result
            yield None
    except BaseException:
        with _kept_signals():
            ray.shutdown()  # ends the tasks that run
        raise
    finally:
        probe.unlink(missing_ok=True)


def _connect(ray: Any, workers: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tells nobody
    address = os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        try:  # Ray itself would try for seven minutes
            socket.create_connection((host, int(port)), timeout=30).close()
        except OSError as error:
            raise _no_cluster(address, error) from None
    path = os.pathsep.join(folder for folder in (str(Path.cwd()), os.environ.get("PYTHONPATH")) if folder)
    try:
        ray.init(
            address=address,
            num_cpus=workers if address == "local" else None,
            include_dashboard=False if address == "local" else None,
            object_store_memory=STORE_BYTES if address == "local" else None,
            runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": path}},
            log_to_driver=False,
            configure_logging=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> InputError:
    what = f"no Ray cluster answers ({str(error).splitlines()[0]})"
    return InputError(what, where=f"RAY_ADDRESS={address}", fix="start one: ray start --head, see docs/cluster.md")


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and would end the stage without saving."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError):  # not in the main thread, where Ray cannot either
                signal.signal(number, handler)

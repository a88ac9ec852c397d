"""Runs work on shards: in this process, in several, or on other machines; resumable shard by shard.

The result of a task is a folder that appears whole or not at all, with the
facts that the function returned in `facts.json`. A task whose folder is there
is done. So an interrupted stage goes on where it stopped, and every way of
running gives the same bytes, because the function sees its task only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.artifacts import new_dir, read_json, write_json
from athanor.corpus.work import Work
from athanor.errors import Interrupted

FACTS = "facts.json"


class Executor:
    """A `MapShards`. `advance` gets the bytes of each task as it ends; `stop` is asked between tasks."""

    def __init__(
        self,
        workers: int = 1,
        advance: Callable[[int], None] = lambda size: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.workers, self.advance, self.stop = workers, advance, stop

    def __call__(
        self, work: Work, tasks: Mapping[str, Any], folder: Path, *, desc: str = "", sizes: Mapping[str, int] | None = None
    ) -> dict[str, dict[str, Any]]:
        facts = {name: read_json(folder / name / FACTS) for name in tasks if (folder / name / FACTS).is_file()}
        left = {name: task for name, task in tasks.items() if name not in facts}
        for name in facts:
            self.advance((sizes or {}).get(name, 0))
        for name, found in self._run(work, left, folder):
            facts[name] = found
            self.advance((sizes or {}).get(name, 0))
            if self.stop():
                raise Interrupted(f"stopped after {len(facts)} of {len(tasks)} shards ({desc}); run again to continue")
        return {name: facts[name] for name in tasks}

    def _run(self, work: Work, tasks: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        jobs = [(work, name, task, folder.absolute()) for name, task in tasks.items()]
        if self.workers == 1 or len(jobs) < 2:
            yield from (run_task(*job) for job in jobs)
            return
        from joblib import Parallel, delayed

        parallel = Parallel(n_jobs=min(self.workers, len(jobs)), return_as="generator_unordered")
        yield from parallel(delayed(run_task)(*job) for job in jobs)


def run_task(work: Work, name: str, task: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """Do one task and publish its folder; what another process has finished meanwhile stands."""
    done = folder / name / FACTS
    if not done.is_file():
        with new_dir(folder / name) as out:
            write_json(out / FACTS, work(task, out))
    return name, read_json(done)

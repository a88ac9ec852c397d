"""A stage's run: parameters in, journal and metrics out.

Stages get one from `stage_main` (athanor/runtime/process.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import read_json, write_json
from athanor.base.errors import Interrupted
from athanor.base.host import memory_bytes
from athanor.base.strict import read_yaml
from athanor.base.work import Facts, Work
from athanor.runtime import dvc_lock, facts, intact
from athanor.runtime.closure import file_digests
from athanor.runtime.executor import from_machine
from athanor.runtime.guards import Guards
from athanor.runtime.journal import Journal, Record, finished, now_ms
from athanor.runtime.lifetime import record_death
from athanor.runtime.machine import machine
from athanor.runtime.notify import FAILED, STALL, notify
from athanor.runtime.profiling import Profiler
from athanor.runtime.progress import Progress, duration
from athanor.runtime.redact import redact
from athanor.runtime.slots import Code, Slot
from athanor.runtime.stage import PARAMS, Stage, T
from athanor.runtime.terminal import say
from athanor.runtime.watchdog import Watch

if TYPE_CHECKING:
    from athanor.runtime.watch import Health

MIN_BYTES_PER_WORKER = 4_000_000
CODE = "code.json"  # in a finished run's folder: the files of its code, each with the digest of its syntax tree
RESUME_HINT = "The same command goes on from the last checkpoint"


class Run(Stage):
    """What a stage body gets to work with. Created by `stage_main`."""

    main = True  # False in processes that only help this one
    _slot_kind = Slot

    def __init__(self, stage: str, module: str) -> None:
        super().__init__(stage, module)
        self.started, self.started_ms = time.monotonic(), now_ms()
        self._stopping, self._stop_reason = False, ""
        self._journal: Journal | None = None
        self._notes: list[str] = []  # of the time before the journal is open
        self._slots: list[Slot] = []
        self._input_snapshot: intact.InputSnapshot | None = None
        self._health: Health | None = None
        local = machine()
        self._guards = Guards(self.anchor / ".athanor", self.root, local, main=self.main)
        self._profiler = Profiler(self.anchor / ".athanor", self.note, main=self.main)
        end = self.give_up if self.main else None
        self._watch = Watch(local.hang_seconds, self._guards.slots, self._on_hang, end)

    # -- results ------------------------------------------------------------

    def plot(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write plots/<name>.tsv from rows with equal keys, in the given order, and keep a copy with the run."""
        self.attach(self.table(name, rows))

    def attach(self, path: str | os.PathLike[str]) -> None:
        """Keep a copy of a small file with the run; it becomes a tracking artifact."""
        shutil.copyfile(path, self.journal.folder / "files" / Path(path).name)

    # -- while working ------------------------------------------------------

    def log(self, step: int, **values: float) -> None:
        """Append numbers at a step to the journal; they become curves in the tracking UI."""
        self._watch.step_number = step
        fresh = self.journal.scalars(step, {**values, **self._guards.scalars()})
        if fresh and self._health is not None:
            self._health.see(step, fresh)

    def watch_health(
        self,
        schedule: Any,
        batch_tokens: int,
        vocab_size: int,
        cooldown_data: bool = False,
        precision: str | None = None,
    ) -> None:
        """Have the health monitor follow what is logged from now on; a stage that trains calls this within its slot.

        `cooldown_data`: the cooldown trains on a mixture of its own, so its loss says nothing about the one before.
        """
        from athanor.monitor.monitor import plan_facts
        from athanor.monitor.thresholds import load
        from athanor.runtime.watch import Health

        plan = plan_facts(self.stage, schedule, batch_tokens, vocab_size, memory_bytes(), cooldown_data, precision)
        self._health = Health(self.journal, self._say, load(self.root, self.anchor), plan)

    def rewind(self, step: int, bar: Progress, amount: float, **facts: Any) -> None:
        """The training went back to a step: reset the journal's numbers, and the bar, whose steps are `amount` each."""
        self.journal.rewind(step, **facts)
        bar.resume_at(step * amount)

    def note(self, text: str) -> None:
        """Tell the user something worth knowing, on the terminal and in the journal."""
        self._say(text)
        if self._journal is None:  # a slot may hold the one to continue
            self._notes.append(text)
        else:
            self._journal.event("note", text=text)

    def _say(self, text: str) -> None:
        say(f"{self.stage}: {text}")

    def progress(self, total: float | None, desc: str = "", unit: str = "") -> Progress:
        self._watch.bar = Progress(total, desc or self.stage, unit)
        return self._watch.bar

    def stop_requested(self) -> bool:
        """True once a signal arrived or a guard says so: save and raise `Interrupted`. Cheap, to be called often."""
        self._watch.beat()
        for slot in self._slots:
            slot.tick()
        if not self._stopping and (stop := self._guards.stop()):
            if not stop.save:
                raise Interrupted(f"{stop.why}; stopped without saving, for which there is no room. {RESUME_HINT}")
            self._stop_because(stop.why)
        return self._stopping

    def save_requested(self) -> bool:
        """True when a checkpoint is requested now. Called after each step of training, so it is a sign of life, too."""
        self._watch.step()
        self._profiler.after_step(self._watch.step_number, lambda: self.journal.folder)
        return self._guards.save()

    def long_operation(self, phase: str, work: Callable[..., T]) -> Callable[..., T]:
        """Wrap `work` so that the watchdog and the heartbeat know that it may take much longer than a step."""
        return self._watch.long_operation(phase, work)

    def slot(self, params: Mapping[str, Any], inputs: Mapping[str, str]) -> Slot:
        """The checkpoint slot for these result-deciding parameters and digests of inputs.

        A resumed slot continues the journal it was begun with, so that the
        tracking UI shows one run however often it was interrupted. Its lock is
        held until the run has ended, journal and leaf file included: a process
        that waits for it must not find them half-written.
        """
        settings = {"held": True, "before_done": self.check_unchanged}
        slot = self._slot(params, inputs, on_enter=self._adopt_journal, **settings)
        self._guards.slots.append(slot.path)
        self.fact(slot=slot.fingerprint)
        return slot

    def trunk(self, params: Mapping[str, Any], inputs: Mapping[str, str]) -> Slot:
        """A slot for the part of the work that runs with other parameters share; pruning leaves it alone."""
        slot = self._slot(params, inputs, "trunk", pinned=True, shared=True)
        self._guards.slots.append(slot.path)
        self.fact(trunk=slot.fingerprint)
        return slot

    def sub_slot(self, name: str, module: str, params: Mapping[str, Any], inputs: Mapping[str, str]) -> Slot:
        """A slot for a part of the work that depends on less than the whole stage: these parameters, this module."""
        code = self._code if module == self.module else Code(module, file_digests(self.root, module))
        slot = self._slot(params, inputs, name, code=code, shared=True)
        self.fact(**{f"slot_{name}": slot.fingerprint})
        return slot

    def codes(self) -> dict[str, Any]:
        """For a manifest: the digests of all versions of the code that worked in a slot of this run, if several did."""
        several = {slot.fingerprint: list(slot.digests) for slot in self._slots if len(slot.digests) > 1}
        return {"codes": several} if several else {}

    def map_shards(
        self,
        work: Work,
        tasks: Mapping[str, Any],
        folder: Path,
        *,
        desc: str = "",
        sizes: Mapping[str, int] | None = None,
    ) -> Mapping[str, Facts]:
        """Do work on shards as this machine does it (a `MapShards`), with its progress shown."""
        total, local = sum(sizes.values()) if sizes else len(tasks), machine()
        if sizes and local.executor == "processes":
            # Starting a process costs a second or two: nothing is gained for less than that of work.
            local = dataclasses.replace(local, workers=min(local.workers, 1 + total // MIN_BYTES_PER_WORKER))
        with self.progress(total, f"{self.stage}: {desc}", "B" if sizes else "shards") as bar:
            run_shards = from_machine(local, bar.update, self.stop_requested, resumed=bar.resume_at)
            return run_shards(work, tasks, folder, desc=desc, sizes=sizes)

    def _slot(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, str],
        part_name: str = "",
        code: Code | None = None,
        **settings: Any,
    ) -> Slot:
        # Apart, so that a parameter section and an input of one name cannot hide each other.
        facts = {"params": dict(params), "inputs": dict(inputs), **({"part": part_name} if part_name else {})}
        folder = self.anchor / ".athanor" / "slots" / self.name
        slot = self._slot_kind(folder, facts, code=code or self._code, note=self.note, **settings)
        self._slots.append(slot)
        return slot

    @functools.cached_property
    def _code(self) -> Code:
        """The stage's code as it was when first asked for."""
        return Code(self.module, file_digests(self.root, self.module))

    @property
    def code(self) -> str:
        return self._code.digest

    def _adopt_journal(self, slot: Slot) -> None:
        marker = slot.path / "run.json"
        if marker.is_file() and self._journal is None:
            earlier = self.anchor / ".athanor" / "runs" / read_json(marker)["run"]
            if not finished(earlier):
                begun = (earlier / "meta.json").is_file()
                (earlier / "end.json").unlink(missing_ok=True)
                self._open_journal(earlier.name)
                if begun:
                    self.journal.event("resumed", pid=os.getpid())
                return
        # The name is written before the run is created: after a kill in between, the next process begins the run of
        # that name, and no empty run is left.
        write_json(marker, {"run": self._run_id if self._journal is None else self.journal.folder.name})
        if self._journal is None:
            self._open_journal(self._run_id)

    # -- life cycle ---------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """Opened at first use, because a slot may hold an earlier journal to continue."""
        if self._journal is None:
            self._open_journal(self._run_id)
        return self._journal

    @property
    def _run_id(self) -> str:
        return f"{self.name}-{self.started_ms}-{os.getpid()}"

    def _open_journal(self, run_id: str) -> None:
        self._journal = Journal(self.anchor / ".athanor" / "runs" / run_id)
        elsewhere = self.root != self.anchor  # an experiment's temporary directory
        identification = {"stage": self.stage, "started_ms": self.started_ms, "elsewhere": elsewhere}
        made_by = functools.partial(self._graph.makers, self.stage)
        self._journal.begin(
            lambda: {
                **identification,
                **self.subject(),
                "made_by": made_by(),
                **facts.provenance(self.root, self._values),
            }
        )
        self._watch.use_folder(self._journal.folder)
        while self._notes:
            self._journal.event("note", text=self._notes.pop(0))

    def on_signal(self, *_: object) -> None:
        if not self._stopping:
            self._stop_because("")

    def _stop_because(self, reason: str) -> None:
        self._stopping, self._stop_reason = True, reason
        self._say(f"{f'{reason}: ' if reason else ''}stopping after this step, progress is kept")

    def _on_hang(self, text: str, facts: Mapping[str, Any]) -> None:
        self._say(text)
        notify(STALL, f"{self.stage}: {text}", wait=False)
        if self._journal is not None:
            self._journal.event("hang", text=text, **facts)

    def give_up(self, text: str) -> None:
        """Record why, before the watchdog ends the process."""
        record_death(text)
        self.report("KILLED", text, 75)
        notify(STALL, f"{self.stage}: {text}")

    def why(self, error: Interrupted) -> str:
        """What ended a run that saved and stopped."""
        return f"{self._stop_reason}: {error}" if self._stop_reason else str(error)

    def begin(self) -> None:
        """Remember the code and parameters that this process runs with, and watch over it."""
        self._watch.begin()
        for text in self._guards.stale():
            self._say(text)
        if self.main and self.root == self.anchor:  # a temporary checkout has a dvc.lock that nobody will miss
            dvc_lock.keep(self.root)
            dvc_lock.watch(self.root)
        if self.main:
            self.fact(**intact.check(self._graph, self.stage, self._say))
        self._input_snapshot = intact.InputSnapshot.now(self.root, self.module)
        self._code = Code(self.module, self._input_snapshot.code)

    def check_unchanged(self) -> None:
        """InputError when code or parameters of the stage were edited while it ran."""
        if self._input_snapshot is not None:
            sections = self._graph.sections(self.stage) or ()
            self._input_snapshot.check(self._values, read_yaml(PARAMS), sections)

    def finish(self) -> None:
        self._watch.close()  # it may have last words for the journal
        seconds = time.monotonic() - self.started
        hardware = Record(self.journal.folder / "meta.json")["hardware"]
        leaf = {"run": self.journal.folder.name, "seconds": round(seconds, 2), "ended_ms": now_ms(), "code": self.code}
        leaf |= {"facts": redact(self._facts), **self.codes()}
        leaf |= {name: hardware[name] for name in ("host", "cpu", "python")}
        write_json(facts.leaf(self.root, self.stage), leaf)
        write_json(self.journal.folder / CODE, dict(self._code.files))
        self.journal.close("FINISHED", metrics=self._metrics, facts=facts.scalars(self._facts), seconds=seconds)
        self._release()
        self._say(f"done in {duration(seconds)}")

    def report(self, status: str, message: str, code: int) -> int:
        """End the run with a message to the journal and the terminal; returns the exit status `code`."""
        suffix = ""
        try:
            self.fail(status, redact(message))
        except OSError as error:  # the disk may be full; the message is what matters
            suffix = f" (and the journal could not be closed: {error})"
        if self.main or code != 75:
            self._say(message + suffix)
        if status == "FAILED" and self.main:
            notify(FAILED, f"{self.stage}: {message}")
        return code

    def fail(self, status: str, message: str) -> None:
        try:
            self._watch.close()
            self.journal.event("error", text=message)
            self.journal.close(status, metrics=self._metrics, error=message, seconds=time.monotonic() - self.started)
        finally:
            self._release()

    def _release(self) -> None:
        self._profiler.close()
        self._guards.close()
        self._watch.close()
        for slot in self._slots:
            slot.release()

"""Settings of this machine that cannot change results beyond floating-point reassociation.

They live in `machine.yaml` (git-ignored) or the environment, never in
params.yaml: moving to another computer must not make the cache stale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.errors import ParamsError
from athanor.base.strict import build, param, read_yaml


@dataclass(frozen=True)
class Launch:
    """Processes that train together (docs/scale-out.md).

    processes: on each node, 0 for one per accelerator.
    nodes: machines that take part; the same command is started on each.
    endpoint: host:port of node 0, where several nodes meet.
    hosts: the other nodes of a Slurm job, which this one, node 0, starts by srun.
    wait_s: how long a node waits for the others at the start.
    timeout_s: how long a process waits for another one in the middle of a step before it gives up.
    args: further arguments for torchrun.
    """

    processes: int = param(min=0, max=1024, default=1)
    nodes: int = param(min=1, max=65536, default=1)
    endpoint: str = ""
    hosts: tuple[str, ...] = ()
    wait_s: float = param(min=1, default=600.0)
    timeout_s: float = param(min=1, default=600.0)
    args: tuple[str, ...] = ()

    def as_text(self) -> str:
        """The settings as ATHANOR_LAUNCH has them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = {key: " ".join(value) if isinstance(value, tuple) else str(value) for key, value in values.items()}
        return " ".join(f"{key}={shlex.quote(text)}" for key, text in texts.items() if text)


def _launch_value(key: str, text: str) -> Any:
    default = getattr(Launch, key, "")
    if isinstance(default, tuple):
        return text.split()
    return int(text) if text.isdigit() else float(text) if isinstance(default, float) else text


@dataclass(frozen=True)
class Machine:
    """How this machine runs a stage.

    device: auto, cpu, cuda, mps (auto takes an NVIDIA or AMD card when torch sees one).
    threads: compute threads, 0 for every core this process may use.
    workers: processes for data work, 0 for one per core.
    executor: who runs data work: processes of this machine, or a ray cluster (docs/cluster.md).
    micro_batch_tokens: tokens per forward pass, 0 to let the trainer choose.
    attention: the attention kernel; auto takes the hardware profile's choice.
    compile: whether transformer blocks are compiled; auto where it pays by the profile.
    checkpointing: whether activations are computed again in the backward pass; auto where memory needs it.
    overlap: whether the next batch is read and checkpoints are written beside the steps; auto on an accelerator.
    deterministic: whether a training on a GPU uses only algorithms that give the same bits each time; slower.
    log_every_steps: how often training scalars are fetched from the device.
    save_every_seconds: how often a long stage writes a checkpoint; 0 for 60, or 300 where there is a GPU to train on.
    max_minutes: a stage that ran so long saves and ends, 0 for no limit.
    min_free_gib: a stage stops when the disk has less left (scaled down on a small disk), 0 to never look.
    hang_seconds: without a step for so long, the stacks are dumped; -1 for ten usual steps, 0 to never look.
    notify: a command or an address that is told of critical findings, stalls and ends (docs/machine.md).
    launch: how many processes train together; in the environment "processes=4 nodes=2 ...".
    parallel: what they keep of the model: all of it (ddp), a share (fsdp), a share of one for each node (hsdp), or
        whichever fits (auto).
    score_checkpoints: checkpoints of `athanor side` are scored by other processes (docs/machine.md), and the training
        itself validates nothing.
    known_troubles: names of docs/troubles.md that do not stop a training here, and are notes of `athanor doctor`.
    """

    device: str = param(choices=("auto", "cpu", "cuda", "mps"), default="auto")
    threads: int = param(min=0, max=1024, default=0)
    workers: int = param(min=0, max=1024, default=0)
    executor: str = param(choices=("processes", "ray"), default="processes")
    micro_batch_tokens: int = param(min=0, default=0)
    attention: str = param(choices=("auto", "flash", "efficient", "cudnn", "math", "varlen"), default="auto")
    compile: str = param(choices=("auto", "on", "off"), default="auto")
    checkpointing: str = param(choices=("auto", "on", "off"), default="auto")
    overlap: str = param(choices=("auto", "on", "off"), default="auto")
    deterministic: str = param(choices=("on", "off"), default="off")
    log_every_steps: int = param(min=1, default=10)
    save_every_seconds: float = param(min=0, default=0.0)
    max_minutes: float = param(min=0, default=0.0)
    min_free_gib: float = param(min=0, default=1.0)
    hang_seconds: float = param(min=-1, default=-1.0)
    notify: str = ""
    launch: Launch = Launch()
    parallel: str = param(choices=("auto", "ddp", "fsdp", "hsdp"), default="auto")
    score_checkpoints: str = param(choices=("on", "off"), default="off")
    known_troubles: tuple[str, ...] = ()


def anchor() -> Path:
    """The main checkout, also from inside DVC's temporary experiment directories.

    DVC exports DVC_ROOT to every stage; it names the main repository even when
    the stage runs in a clone under `.dvc/tmp`, so slots, journals and the
    tracking database that hang off it are shared by all experiments.
    """
    return Path(os.environ.get("DVC_ROOT") or Path.cwd()).resolve()


def cores() -> int:
    """Cores this process may use; respects taskset and containers' cpusets."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> Machine:
    """Settings from ATHANOR_<NAME> variables, else machine.yaml, else the defaults."""
    path = anchor() / "machine.yaml"
    values = read_yaml(path, may_be_empty=True) if path.exists() else {}
    for field in dataclasses.fields(Machine):
        text = os.environ.get(f"ATHANOR_{field.name.upper()}")
        if text is None:
            continue
        kind: Any = type(field.default)
        try:
            if kind is Launch:
                pairs = [setting.split("=", 1) for setting in shlex.split(text)]
                values[field.name] = {key: _launch_value(key, value) for key, value in pairs}
            else:
                values[field.name] = text.split() if kind is tuple else kind(text)
        except ValueError:
            what = f"expected {'key=value ...' if kind is Launch else kind.__name__}, found {text!r}"
            raise ParamsError(what, where=f"environment ATHANOR_{field.name.upper()}") from None
    try:
        settings = build(Machine, values, "machine")
    except ParamsError as error:
        key = error.where.removeprefix("machine.")
        variable = f"ATHANOR_{key.partition('.')[0].upper()}"
        where = f"environment {variable}" if variable in os.environ else f"machine.yaml: {key}"
        raise ParamsError(error.what, where=where, fix=error.fix.replace("machine.", "")) from None
    # Drivers of NVIDIA, AMD and WSL2: asking torch would import it.
    drivers = map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    gpu = settings.device in ("cuda", "mps") or (settings.device == "auto" and any(drivers))
    save_every = settings.save_every_seconds or (300.0 if gpu else 60.0)
    threads, workers = settings.threads or cores(), settings.workers or cores()
    return dataclasses.replace(settings, threads=threads, workers=workers, save_every_seconds=save_every)


def step_back(niceness: int = 19) -> None:
    """Give every other process precedence on the cores; for a process that leads a session of its own.

    Where Linux groups processes by session (sched(7), "The autogroup feature"), nice counts inside a session only: a
    second session gets as much of a full machine as the training, whatever its nice. Measured on one core: 299 ticks
    each with nice 19, 299 to 5 with this. So the group steps back as well, unless it is somebody else's.

    Not SCHED_IDLE: beside a trainer on every core that gets a fifth of nice's share.
    """
    os.nice(niceness)
    rank_session(niceness)


def rank_session(niceness: int) -> None:
    """Rank this process's session below (19) or level with (0) others; unlike nice, anyone may take that back."""
    if os.getpid() == os.getsid(0):
        with contextlib.suppress(OSError):  # no groups here
            Path("/proc/self/autogroup").write_text(str(niceness))

"""One process of several that train the micro model together, started by tests as torchrun would start it:

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 python tests/training/micro_world.py JOBS.json

Jobs are done one after the other by the same processes, each in a new group: starting Python costs more than a job.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.base.errors import AthanorError, GateError
from athanor.model.transformer import Transformer
from athanor.model.validation import sequence_nats
from athanor.runtime import launch
from athanor.training import cpu_replicas, parallel, step
from athanor.training import world as worlds
from athanor.training.loop import Hooks, train
from athanor.training.world import init_world
from tests.training import micro

TIMEOUT = 300.0  # s; beside other work a process takes a minute to import torch
REPLICA_COUNT, BUCKET_BYTES, POLL = cpu_replicas.replica_count, parallel.BUCKET_BYTES, worlds._POLL


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; returns what this process has to tell of it."""
    os.environ["MASTER_PORT"] = str(job["port"])
    rank = int(os.environ["RANK"])
    main = rank == job.get("main", 0)
    # As on an accelerator: one replica, and gradients travel in several buckets while backward runs.
    cpu_replicas.replica_count = (lambda *_: 1) if job.get("overlap") else REPLICA_COUNT
    parallel.BUCKET_BYTES = 2048 if job.get("overlap") else BUCKET_BYTES
    # Seconds between a process's looks for the main one, which is long gone by the second look.
    worlds._POLL = (job["poll"],) * 2 if "poll" in job else POLL
    world = init_world(job["strategy"], device="cpu", timeout_s=job.get("timeout", TIMEOUT), main=main)
    # Weights come from the main process, whatever the others begin with.
    model = micro.make_model(seed=0 if main else 7, tied_embeddings=job.get("tied", True))
    rows, here = [], job.get("at", {}).get(str(rank), {})
    backends: list[parallel.Single] = []
    step.gradient_backend = lambda *of: backends.append(parallel.gradient_backend(*of)) or backends[-1]
    steps, scored = 0, []

    def on_resume(tokens: int) -> None:
        nonlocal steps
        steps = tokens // micro.SETTINGS.batch_tokens

    def should_stop() -> bool:
        nonlocal steps
        steps += 1
        if steps == here.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == here.get("freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if steps == here.get("raise"):
            raise GateError("planted", "an error of one process")
        if steps == here.get("drift"):
            with torch.no_grad():  # the part of the first matrix that this process trains
                next(weight for _, weight in backends[-1].named_parameters() if weight.numel()).flatten()[0] += 1e-3
        return steps == here.get("stop")

    def validate(model: Transformer) -> dict[str, Any]:
        texts = [np.arange(length) % 64 for length in (5, 17, 40, 9)]
        count = model.model.norm.register_forward_hook(lambda *_: scored.append(1))
        nats = sequence_nats(model, texts, None, 16, 32, world=world)[0]
        count.remove()
        return micro.validate(model) | {"nats": nats.tolist()}

    hooks = Hooks(validate=validate, on_step=rows.append, should_stop=should_stop, on_resume=on_resume)
    settings = dataclasses.replace(micro.SETTINGS, **job.get("settings", {}))
    folder = Path(job["folder"]) if main else Path(job["folder"]) / "nobody"
    sampler, error, told = micro.CountingSampler(job.get("masked", False)), None, {}
    try:
        optimizer = dataclasses.replace(micro.ADAMW, name=job.get("optimizer", "adamw"))
        how = {"world": world, "selection_key": micro.near(job["near"]) if "near" in job else None}
        result = train(model, sampler, optimizer, micro.SCHEDULE, settings, folder, hooks, **how)
    except AthanorError as caught:
        error = f"{type(caught).__name__}: {caught}"
        if "planted" in error or "lost" in error:
            raise
        world.destroy()
    else:
        told = {"curve": result.curve, "validations": result.validations, "supervised": result.supervised_tokens}
        told["chosen"] = result.chosen_step
        told["weights"] = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
    return told | {"rows": rows, "error": error, "wrote": folder.exists(), "scored": sum(scored)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    try:
        for number, job in enumerate(jobs):
            Path(sys.argv[1]).with_name(f"told-{number}-{os.environ['RANK']}.json").write_text(json.dumps(work(job)))
            gc.collect()  # the job's group ends here, as it does with a stage's process
    except AthanorError as lost:
        print(lost, file=sys.stderr)
        launch.end(1)  # as a stage does

"""One process of several that train the micro model together, started by tests as torchrun would start it:

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 python tests/training/micro_world.py JOBS.json

Jobs are done one after the other by the same processes, each in a new group: starting Python costs more than a job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import micro

from athanor.errors import GateError, Interrupted
from athanor.training.loop import Hooks, train
from athanor.training.world import join

TIMEOUT = 60.0


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; returns what this process has to tell of it."""
    os.environ["MASTER_PORT"] = str(job["port"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main = rank == job.get("main", 0) % world_size
    world = join(job["strategy"], device="cpu", timeout_s=job.get("timeout", TIMEOUT), main=main)
    world.sharded = job["strategy"] == "fsdp"
    settings = dataclasses.replace(micro.SETTINGS, **job.get("settings", {}))
    model, rows, here = micro.make_model(seed=0 if main else 7), [], job.get("at", {}).get(str(rank), {})
    step = 0

    def on_resume(tokens: int) -> None:
        nonlocal step
        step = tokens // settings.batch_tokens

    def should_stop() -> bool:
        nonlocal step
        step += 1
        if step == here.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == here.get("raise"):
            raise GateError("planted", "one process has an error")
        if step == here.get("drift"):
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-3
        return step == here.get("stop")

    hooks = Hooks(validate=micro.validate, on_step=rows.append, should_stop=should_stop, on_resume=on_resume)
    sampler, folder = micro.CountingSampler(job.get("masked", False)), Path(job["folder"])
    if not main:
        folder = folder / "of-nobody"
    told: dict[str, Any] = {"main": main, "modules": "torch.distributed.fsdp" in sys.modules, "error": None}
    try:
        result = train(model, sampler, micro.ADAMW, micro.SCHEDULE, settings, folder, hooks, world=world)
    except (Interrupted, GateError) as error:
        told["error"] = str(error)
        if world.size > 1 and isinstance(error, Interrupted):
            world.dist.destroy_process_group()
        elif world.size > 1:
            raise
    else:
        told |= {"curve": result.curve, "validations": result.validations, "supervised": result.supervised_tokens}
        told["weights"] = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
    return told | {"rows": rows, "nobody": (folder.exists() and not main)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for number, job in enumerate(jobs):
        told = work(job)
        np.save(Path(sys.argv[1]).parent / f"weights-{number}-{os.environ['RANK']}.npy", np.array(told.pop("weights", [])))
        Path(sys.argv[1]).with_name(f"told-{number}-{os.environ['RANK']}.json").write_text(json.dumps(told))

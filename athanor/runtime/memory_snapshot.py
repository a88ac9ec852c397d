"""What held the memory when there was no more of it: a file that a run leaves behind by itself.

`files/memory-<when>.json` of the run's journal: what the allocator and the
system say, and the largest tensors that were alive, with the names of weights,
gradients and the optimiser's state. What backward keeps inside of torch has no
name in Python: it is `unnamed_bytes` of an accelerator. There torch's own
snapshot lies beside it, `memory-<when>.pickle` for
https://docs.pytorch.org/memory_viz; nothing of ours reads that file.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import write_json

if TYPE_CHECKING:
    from athanor.runtime.run import Run

LISTED, NAMED = 40, 3  # tensors in the file, and on the terminal
MIB = 2**20


def leave_snapshot(run: Run, when: str, names: Mapping[str, Any] | None = None) -> None:
    """Write the snapshot; `names` are tensors by name. Called where memory has run out, so it must never fail itself."""
    if not run.main:
        return
    try:
        path = run.journal.folder / "files" / f"memory-{when}.json"
        snapshot = take(names or {})
        write_json(path, snapshot)
        _dump(path.with_suffix(".pickle"))
    except Exception as error:
        run.note(f"no snapshot of the memory: {error!r}")
        return
    largest = [f"{_title(row)} {row['bytes'] / MIB:,.1f} MiB" for row in snapshot["tensors"][:NAMED]]
    run.note(f"what held the memory is in {path}; the largest: {', '.join(largest) or 'no tensor'}")


def take(names: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the allocator and the system, and the tensors that are alive: equal ones as one row, the largest first."""
    import psutil
    import torch

    known = {tensor.untyped_storage().data_ptr(): name for name, tensor in names.items()}
    gradients = ((f"{name}.grad", tensor.grad) for name, tensor in names.items() if tensor.is_leaf)
    known |= {tensor.untyped_storage().data_ptr(): name for name, tensor in gradients if tensor is not None}
    storages: dict[tuple[str, int], tuple[Any, ...]] = {}
    # Exact types: a shard (DTensor) is counted by the tensor inside of it.
    kinds = (torch.Tensor, torch.nn.Parameter)
    for tensor in [each for each in gc.get_objects() if type(each) in kinds]:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            continue
        storage, device = tensor.untyped_storage(), str(tensor.device)
        key = device, storage.data_ptr()
        if storage.nbytes() > storages.get(key, (0,))[0]:
            facts = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), device
            storages[key] = storage.nbytes(), known.get(storage.data_ptr(), ""), *facts
    alike = Counter(storages.values())
    rows = [
        {"bytes": size * count, "count": count, "name": name, "shape": shape, "dtype": dtype, "device": device}
        for (size, name, shape, dtype, device), count in alike.items()
    ]
    rows.sort(key=lambda row: (-row["bytes"], row["name"], row["shape"]))
    process, host = psutil.Process().memory_info(), psutil.virtual_memory()
    facts_of = {"process_bytes": process.rss, "available_bytes": host.available, "total_bytes": host.total}
    listed = sum(row["bytes"] for row in rows)
    snapshot: dict[str, Any] = {"host": facts_of, "tensor_bytes": listed}
    if torch.cuda.is_available():
        snapshot["device"] = dict(torch.cuda.memory_stats())
        on_device = sum(row["bytes"] for row in rows if row["device"].startswith("cuda"))
        snapshot["unnamed_bytes"] = torch.cuda.memory_allocated() - on_device
    return {**snapshot, "tensors": rows[:LISTED]}


def _dump(path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(path))


def _title(row: Mapping[str, Any]) -> str:
    name = row["name"] or f"{row['dtype']} {list(row['shape'])}"
    return f"{row['count']} of {name}" if row["count"] > 1 else str(name)

"""Two ways to run a transformer's blocks: compiled, or with activation recomputation in the backward pass.

Both are applied to a model from outside: the model's file knows of neither,
the names of weights stay, and copies of the model (the CPU replicas) keep the mode.

    python -m athanor.training.compiling JSON      a trial: compile as the JSON says, print the error if there is one
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from athanor.base.artifacts import digest, write_json
from athanor.model import varlen
from athanor.model.config import ModelConfig
from athanor.model.device import make_deterministic
from athanor.model.precision import autocast, products
from athanor.model.transformer import Block, Cache, Transformer
from athanor.training.attention import DEFAULT, attention

TRIAL_SECONDS = 600.0  # a wide model for a GPU, with one core to compile on
_GRAPHS = 64  # variants of a block before torch gives up; shapes are let in by name, so few are ever made


@dataclass(frozen=True)
class Shapes:
    """The input shapes of a block: (rows, tokens) of the micro-batches, and if rows hold several documents."""

    rows_tokens: frozenset[tuple[int, int]]
    documents: bool

    @classmethod
    def of(
        cls, micro_batch_rows: int, row_tokens: int, batch_tokens: int, documents: bool, processes: int = 1
    ) -> Shapes:
        """Shapes of a process's rows of a batch, cut into micro-batches; the last of them may have fewer rows."""
        shares = {batch_tokens // row_tokens // processes, -(-batch_tokens // row_tokens // processes)}
        sizes = {size for rows in shares for size in (min(rows, micro_batch_rows), rows % micro_batch_rows)} - {0}
        return cls(frozenset((size, row_tokens) for size in sizes), documents)


@dataclass(frozen=True, eq=False)
class _BlockMode:
    compiled: Callable[..., Tensor] | None = None
    rows_tokens: frozenset[tuple[int, int]] = frozenset()
    recompute: bool = False  # activations, in the backward pass

    def __deepcopy__(self, memo: object) -> _BlockMode:
        return self


class TunedBlock(Block):
    """A block that runs compiled or with recomputation where gradients are needed; everywhere else it is the plain one.

    Compiled code serves the shapes it was made for alone: preflight and
    validation would have every new width compiled, at many seconds each.
    """

    how: _BlockMode

    def forward(self, x_BTD: Tensor, table: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        mode = self.how
        if cache is not None or not torch.is_grad_enabled():
            return Block.forward(self, x_BTD, table, mask, cache)
        run, block = Block.forward, self
        if mode.compiled is not None and tuple(x_BTD.shape[:2]) in mode.rows_tokens:
            # Compiled code is guarded by the block's class, which FSDP replaces by one of its own: it gets a plain
            # block that shares everything with this one.
            run, block = mode.compiled, object.__new__(Block)
            block.__dict__ = self.__dict__
            if mask is not None and mask.dim() == 1:  # starts of documents, another number in each batch
                torch._dynamo.maybe_mark_dynamic(mask, 0)
        if not mode.recompute:
            return run(block, x_BTD, table, mask, None)
        from torch.utils.checkpoint import checkpoint

        # Nothing here draws random numbers, so there is no state of theirs to keep.
        return checkpoint(run, block, x_BTD, table, mask, None, use_reentrant=False, preserve_rng_state=False)


def tune_blocks(models: Sequence[Transformer], **changes: Any) -> None:
    for block in (block for model in models for block in model.model.layers):
        block.how = dataclasses.replace(getattr(block, "how", _BlockMode()), **changes)
        block.__class__ = TunedBlock


def admit_rows(models: Sequence[Transformer], rows: int) -> None:
    """Let compiled blocks serve micro-batches of `rows` rows as well; code for them is compiled in the next step."""
    how = getattr(models[0].model.layers[0], "how", None)
    if how is not None and how.compiled is not None:
        tune_blocks(models, rows_tokens=how.rows_tokens | {(rows, tokens) for _, tokens in how.rows_tokens})


def untune(models: Sequence[Transformer]) -> None:
    """Make the blocks plain ones again."""
    for block in (block for model in models for block in model.model.layers):
        block.__dict__.pop("how", None)
        block.__class__ = Block


def checkpoint_blocks(models: Sequence[Transformer]) -> None:
    """Keep only each block's input for the backward pass, and recompute its activations there.

    A third more work for memory that no longer grows with what is inside a block.
    """
    tune_blocks(models, recompute=True)


def compile_blocks(
    models: Sequence[Transformer],
    shapes: Shapes,
    *,
    precision: str,
    cache: Path,
    one_thread: bool,
    note: Callable[[str], None],
    kernel: str = DEFAULT,
    should_stop: Callable[[], bool] = lambda: False,
    limit_seconds: float = TRIAL_SECONDS,
) -> bool:
    """Compile the blocks of all `models`, which may share weights, as one kernel graph; False if they stay as they are.

    Blocks are alike, so one is compiled and serves all (regional compilation). Call it inside `attention(kernel, ...)`:
    the kernel is part of the compiled code, and a change of it later has no effect.
    `one_thread`: micro-batches run side by side, each on one core (CPU replicas). The
    first time on a machine a process of its own tries it, because a compiler
    may hang or crash; what it made in `cache` is then used here.
    """
    model = models[0]
    device = model.head_weight.device
    threads = 1 if one_thread else torch.get_num_threads()
    trial = {
        "config": {**model.config.to_dict(), "layers": 1},
        "shapes": sorted(shapes.rows_tokens),
        "documents": shapes.documents,
        "attention": kernel,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": precision,
        "device": str(device),
        "threads": threads,
        "torch": torch.__version__,
        "seconds": limit_seconds,
    }
    use_cache(cache)
    started = time.monotonic()
    key = {name: value for name, value in trial.items() if name != "seconds"}
    passed = cache / "passed" / f"{digest(key)[:16]}.json"
    problem = "" if passed.is_file() else try_in_subprocess(trial, cache, should_stop)
    if not problem:
        try:
            compiled = compile_block(models, shapes, precision, threads, kernel)
        except Exception as error:  # a compiler's errors are of any type
            problem = first_line(error)
    if problem:
        note(f"blocks are not compiled ({problem}); training goes on without, the result is as good")
        return False
    tune_blocks(models, compiled=compiled, rows_tokens=shapes.rows_tokens)
    if not passed.is_file():
        write_json(passed, key)
    note(f"blocks compiled in {time.monotonic() - started:.0f} s")
    return True


def use_cache(cache: Path) -> None:
    """Have torch keep compiled code in a folder that outlives the process, unless the user named one."""
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def graphs() -> int:
    """How many graphs this process compiled: one for each shape, with and without documents, or it recompiles."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_kernel = ""  # that this process compiled blocks with


def compile_block(
    models: Sequence[Transformer], shapes: Shapes, precision: str, threads: int, kernel: str = DEFAULT
) -> Callable[..., Tensor]:
    """The compiled block, with code for every shape made now and not in the middle of a step."""
    import torch._dynamo.config
    import torch._inductor.config

    global _kernel
    # Neither Dynamo's guards nor the keys of the persistent caches hold the choice of a kernel (pytorch#185449).
    if _kernel not in ("", kernel):
        torch._dynamo.reset()
    _kernel = kernel
    if hasattr(torch.compiler.config, "cache_key_tag"):  # in some releases not yet
        torch.compiler.config.cache_key_tag = kernel

    for limit in ("recompile_limit", "cache_size_limit"):  # the newer name, the older one
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, _GRAPHS)
            break
    # Also part of the guards: code for two threads is not used by a replica, which has one.
    torch._inductor.config.cpp.threads = threads
    torch.set_num_threads(threads)
    compiled = torch.compile(Block.forward, fullgraph=True, dynamic=False)
    model = models[0]
    tune_blocks([model], compiled=compiled, rows_tokens=shapes.rows_tokens)
    try:
        for rows, tokens in sorted(shapes.rows_tokens):
            ids_BT = torch.zeros(rows, tokens, dtype=torch.int64, device=model.head_weight.device)
            for documents in _documents(rows, tokens, shapes.documents, ids_BT.device):
                _run_once(model, ids_BT, documents, precision)
    except BaseException:
        untune([model])
        raise
    return compiled


def _documents(rows: int, tokens: int, several: bool, device: torch.device) -> list[dict[str, Tensor]]:
    """Each form in which `Transformer.hidden` gets the documents of micro-batches."""
    half_BT = (torch.arange(tokens) >= tokens // 2).expand(rows, tokens)
    if several and varlen.active():
        return [{"starts_M": torch.from_numpy(varlen.document_starts(half_BT.numpy())).to(device)}]
    return [{}, {"document_BT": half_BT.long().to(device)}] if several else [{}]


def _run_once(model: Transformer, ids_BT: Tensor, documents: Mapping[str, Tensor], precision: str) -> None:
    """Forward and backward that leave no gradient behind; of the decoder, an output matrix of its own has no part in it."""
    with products(precision, ids_BT.device):
        with autocast(precision, ids_BT.device):
            total = model.hidden(ids_BT, **documents).float().sum()
        torch.autograd.grad(total, list(model.model.parameters()))


def try_in_subprocess(trial: Mapping[str, Any], cache: Path, should_stop: Callable[[], bool] = lambda: False) -> str:
    """Compile in a process of its own, at most `trial["seconds"]`; "" or why it did not work."""
    arguments = [json.dumps({**trial, "cache": str(cache)})]
    return run_in_subprocess("athanor.training.compiling", arguments, trial["seconds"], should_stop)[1]


def run_in_subprocess(
    module: str, arguments: Sequence[str], seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> tuple[str, str]:
    """What a module's process printed, and why it did not end well ("" when it did); killed after `seconds`."""
    # A session of its own: its compilers end with it.
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    deadline = time.monotonic() + seconds
    while True:
        try:
            output, _ = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            stopping = should_stop()
            if not stopping and time.monotonic() < deadline:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "", "asked to stop" if stopping else f"it took longer than {seconds:.0f} s"
    last = (output.strip().splitlines() or [""])[-1]
    return output, "" if process.returncode == 0 else last or f"it ended with status {process.returncode}"


def first_line(error: BaseException) -> str:
    """The type and first line of an error, short enough for a note."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


def main() -> int:
    trial = json.loads(sys.argv[1])
    signal.alarm(int(trial["seconds"]) + 1)  # should nobody be left to end this
    use_cache(Path(trial["cache"]))
    torch.set_num_threads(trial["threads"])
    if trial["deterministic"]:
        make_deterministic(torch.device(trial["device"]))
    shapes = Shapes(frozenset((rows, tokens) for rows, tokens in trial["shapes"]), trial["documents"])
    model = Transformer.fresh(ModelConfig.from_dict(trial["config"]), 0).to(torch.device(trial["device"]))
    try:
        with attention(trial["attention"], model.head_weight.device):
            compile_block([model], shapes, trial["precision"], trial["threads"], trial["attention"])
    except Exception as error:
        print(first_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

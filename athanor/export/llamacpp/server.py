"""llama.cpp's server inside this process, by way of the package xllamacpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEP_TOKENS = 512  # of prompts that it computes before it looks for other requests; its micro-batch, so no slower


def start_server(
    path: str | Path,
    *,
    context_tokens: int,
    threads: int,
    rows: int = 1,
    exact: bool = False,
    accelerator: bool = False,
    socket: str = "",
    lora: Sequence[str] = (),
    template: str = "",
) -> Any:
    """A server for `rows` answers side by side; it ends when nobody refers to it any more. ImportError without xllamacpp.

    exact: fp32 cache and no flash attention, otherwise llama.cpp's own defaults. accelerator: it may use one. socket: the
    path of a Unix socket, without one it listens on a port; a file that is left there makes the start fail. lora: GGUF
    files of adapters. template: for chats, in place of the file's.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(Path(path).resolve())
    # One token more: llama.cpp wants room for the token that it makes after a full window.
    params.n_ctx, params.n_parallel = (context_tokens + 1) * rows, rows
    params.n_batch = STEP_TOKENS
    params.n_threads_http = 2 * rows + 2  # reading, asking and cancelling must not wait for each other
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # idle threads sleep
    params.fit_params, params.warmup, params.ui, params.ctx_shift = False, False, False, False
    params.cont_batching, params.kv_unified = True, False
    params.cache_ram_mib, params.verbosity = 0, 1
    if socket:
        params.hostnames = [socket]
        params.endpoint_slots = params.endpoint_metrics = True
    if template:
        params.chat_template = template
    adapters = []
    for adapter in lora:
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = adapter, 1.0
        adapters.append(info)
    if adapters:
        params.lora_adapters = adapters
    if not accelerator:
        params.n_gpu_layers, params.no_op_offload = 0, True
    if exact:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)

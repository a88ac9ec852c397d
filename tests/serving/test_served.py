"""The list of a server: loaded once when asked, made into GGUF where they are none, as many as memory holds."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.catalog.running import Catalog
from athanor.serving.models import MemoryHeld, Models, NoModel, fit_cache
from athanor.tuning.export import write_adapter
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, write_tiny_tokenizer


def export(root, seed=0):
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    model = make_model(tokenizer, seed=seed)
    write_export(root / "models/export", model, tokenizer, root / "models/tokenizer", types=("f16",))
    return model


def run(root, work, memory_bytes=1 << 33):
    async def within():
        models = Models(Catalog(root), root, memory_bytes, rows=2)
        try:
            return await work(models)
        finally:
            await models.close()

    return asyncio.run(within())


async def load(models, name):
    async with models.using(name):
        return models.engines().keys()


async def greedy(served):
    body = {"prompt": [served.tokenizer.bos], "n_predict": 9, "temperature": 0, "return_tokens": True}
    return (await served.engine.ask("/completion", body))["tokens"]


def test_an_export_is_made_into_gguf_once_and_requests_share_its_load(tmp_path):
    async def work(models):
        async with models.using("tiny") as exact, models.using("tiny") as again, models.using("tiny-f16") as f16:
            assert exact is again and exact.defaults["temperature"] == 0
            states = {row["id"]: row["state"] for row in models.states()}
            assert states == {"tiny": "ready", "tiny-f16": "ready"} and models.engines().keys() == states.keys()
            path = exact.engine.job.path
            return path, os.stat(path).st_mtime_ns, await greedy(exact), await greedy(f16)

    export(tmp_path)
    assert run(tmp_path, work) == run(tmp_path, work)


def test_models_that_do_not_fit_make_idle_ones_leave_and_never_those_in_use(tmp_path):
    async def work(models):
        for name in ("tiny-f16", "tiny"):
            assert await load(models, name) == {name}
        async with models.using("tiny") as served:  # before its first row is asked for
            with pytest.raises(MemoryHeld, match="tiny"):
                await load(models, "tiny-f16")
            assert await greedy(served)

    async def too_large(models):
        with pytest.raises(InputError, match="more than the 1 MiB of all models"):
            await load(models, "tiny")
        return models.states()[0]["state"]

    export(tmp_path)
    run(tmp_path, work, memory_bytes=100 << 20)
    assert run(tmp_path, too_large, memory_bytes=1 << 20) == "failed"


def test_an_export_that_is_made_again_is_loaded_for_the_next_request(tmp_path):
    async def work(models):
        async with models.using("tiny") as old:
            before = await greedy(old)
            await asyncio.to_thread(export, tmp_path, 1)
            async with models.using("tiny") as new:
                assert new is not old and await greedy(new) != before == await greedy(old)
        assert new.engine.alive and not old.engine.alive
        shutil.rmtree(tmp_path / "models/export")
        with pytest.raises(NoModel, match="no model 'tiny'"):
            await load(models, "tiny")
        assert not new.engine.alive

    export(tmp_path)
    run(tmp_path, work)


def test_a_lora_brings_its_own_template(tmp_path):
    folder = tmp_path / "models/tune-export"
    export(tmp_path)
    (folder / "hf").mkdir(parents=True)
    (folder / "hf/chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    shutil.move(tmp_path / "models/export/model-f16.gguf", folder / "base.gguf")
    weights = {"A": torch.zeros(1, 32), "B": torch.zeros(32, 1)}
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_{kind}.weight": weight for kind, weight in weights.items()}
    save_file(factors, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {"lora_alpha": 1})
    write_adapter(folder / "adapter.gguf", folder, folder / "base.gguf")

    async def work(models):
        async with models.using("adapter") as served:
            return await served.engine.ask("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})

    assert run(tmp_path, work)["prompt"] == "<hi>"


def test_a_cache_fits_fewer_answers_before_a_shorter_context():
    header = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.embedding_length": 256}
    header |= {"llama.block_count": 8, "llama.context_length": 4096}
    token = 8 * 4 * 128 * 2
    for tokens, context, rows in ((8 * 4096, 4096, 8), (3 * 4096, 4096, 3), (1000, 1000, 1), (1, 512, 1)):
        assert fit_cache(header, 8, tokens * token) == (context, rows, context * rows * token)

"""The list of a server: loaded once when asked, made into GGUF where they are none, as many as memory holds."""

from __future__ import annotations

import asyncio
import os
import shutil

import numpy as np
import pytest
from gguf import GGUFValueType

from athanor.base.errors import InputError
from athanor.catalog.running import Catalog
from athanor.decoding.generate import generate
from athanor.export.gguf_writer import Value, write_raw
from athanor.serving.models import MemoryHeld, Models, NoModel, fit_cache
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer

TEXT = GGUFValueType.STRING


def export(root, seed=0):
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    write_export(
        root / "models/export", make_model(tokenizer, seed=seed), tokenizer, root / "models/tokenizer", "tiny", ("f16",)
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    export(root := tmp_path_factory.mktemp("served"))
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "root")


def run(root, work, *requested, memory_bytes=1 << 33):
    async def within():
        models = Models(Catalog(root, requested), root, memory_bytes, rows=2)
        try:
            return await work(models)
        finally:
            await models.close()

    return asyncio.run(within())


async def greedy(served, text="", limit=9):
    ids = [served.tokenizer.bos, *served.tokenizer.encode(text)]
    body = {"prompt": ids, "n_predict": limit, "temperature": 0, "return_tokens": True}
    return (await served.engine.ask("/completion", body))["tokens"]


def test_an_export_is_made_into_gguf_once_and_requests_share_its_load(made):
    async def work(models):
        async with models.using("tiny") as exact, models.using("tiny") as again, models.using("tiny-f16") as f16:
            assert exact is again and exact.context_tokens == 128 and exact.defaults["temperature"] == 0
            states = {row["id"]: row["state"] for row in models.states()}
            assert states == {"tiny": "ready", "tiny-f16": "ready"} and models.engines().keys() == states.keys()
            return exact.engine.job.path, await greedy(exact), await greedy(f16)

    path, *answers = run(made, work)
    before = os.stat(path).st_mtime_ns
    assert run(made, work) == (path, *answers) and os.stat(path).st_mtime_ns == before


def test_models_that_do_not_fit_make_idle_ones_leave_and_never_those_in_use(made):
    async def work(models):
        for name in ("tiny-f16", "tiny"):
            async with models.using(name):
                assert models.engines().keys() == {name}
        async with models.using("tiny") as served:  # before its first row is asked for
            with pytest.raises(MemoryHeld, match="tiny"):
                async with models.using("tiny-f16"):
                    pass
            assert await greedy(served)

    async def too_large(models):
        with pytest.raises(InputError, match="more than the 1 MiB of all models"):
            async with models.using("tiny"):
                pass
        return models.states()[0]["state"]

    run(made, work, memory_bytes=100 << 20)
    assert run(made, too_large, memory_bytes=1 << 20) == "failed"


def test_an_export_that_is_made_again_is_loaded_for_the_next_request(root):
    async def work(models):
        async with models.using("tiny") as old:
            before = await greedy(old)
            await asyncio.to_thread(export, root, 1)
            async with models.using("tiny") as new:
                assert new is not old and await greedy(new) != before == await greedy(old)
        assert new.engine.alive and not old.engine.alive
        (root / "models/export/model-f16.gguf").write_bytes(b"no model")
        with pytest.raises(InputError, match="not a whole GGUF file"):
            async with models.using(models.states()[1]["id"]):
                pass
        shutil.rmtree(root / "models/export")
        with pytest.raises(NoModel, match="no model 'tiny'"):
            async with models.using("tiny"):
                pass
        assert not new.engine.alive

    run(root, work)


def test_a_base_model_goes_on_with_a_text(root):
    tokenizer = write_tiny_tokenizer(root / "models/tokenizer")
    save(root / "models/base", model := make_model(tokenizer, seed=2), tokenizer)
    (expected,) = generate(model, [[tokenizer.bos, *tokenizer.encode("import ")]], max_new_tokens=9, stop_ids=())

    async def work(models):
        async with models.using("base") as served:
            assert served.continues and models.states()[-1]["template"] == "none"
            assert served.defaults["temperature"] > 0  # its likeliest text goes in circles
            return await greedy(served, "import ")

    assert run(root, work) == expected.ids


def test_a_lora_brings_its_own_template(root):
    folder = root / "models/lora-export"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf/chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    shutil.move(root / "models/export/model-f16.gguf", folder / "base.gguf")
    values = {key: Value(TEXT, text) for key, text in (("general.type", "adapter"), ("adapter.type", "lora"))}
    zeros = {
        f"blk.0.attn_q.weight.lora_{factor}": np.zeros(shape) for factor, shape in (("a", (1, 32)), ("b", (32, 1)))
    }
    write_raw(
        folder / "adapter.gguf",
        "llama",
        values | {"adapter.lora.alpha": Value(GGUFValueType.FLOAT32, 1.0)},
        zeros,
        "f32",
    )

    async def work(models):
        async with models.using("adapter") as served:
            return await served.engine.ask("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})

    assert run(root, work)["prompt"] == "<hi>"


def test_a_cache_fits_fewer_answers_before_a_shorter_context():
    header = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.embedding_length": 256}
    header |= {"llama.block_count": 8, "llama.context_length": 4096}
    token = 8 * 4 * 128 * 2
    for tokens, context, rows in ((8 * 4096, 4096, 8), (3 * 4096, 4096, 3), (1000, 1000, 1), (1, 512, 1)):
        assert fit_cache(header, 8, tokens * token) == (context, rows, context * rows * token)

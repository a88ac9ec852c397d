"""The list of a server: loaded once when asked, made into GGUF where they are none, as many as memory holds."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from athanor.base.errors import InputError
from athanor.serving.discover import AvailableModel
from athanor.serving.memory import fit_cache
from athanor.serving.models import MemoryHeld, Models, NoModel
from tests.evaluation.tiny import make_model, write_tiny_tokenizer
from tests.serving.models_tiny import write_export

pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    tokenizer = write_tiny_tokenizer(root / "tokenizer")
    write_export(root / "models/export", make_model(tokenizer), tokenizer, root / "tokenizer", types=("f16",))
    return root


def listed(root, *paths) -> list[AvailableModel]:
    kinds = ("torch", "llama.cpp")
    return [AvailableModel(p.stem, p.stem, str(p), kinds[p.suffix == ".gguf"], "export", 0.0, 0) for p in paths]


def run(root, work, paths=None, **options):
    export = root / "models/export"
    paths = paths or [export / "hf", *export.glob("*.gguf")]

    async def within():
        models = Models(listed(root, *paths), root=root, **{"memory_bytes": 1 << 33, "rows": 2, **options})
        try:
            return await work(models)
        finally:
            await models.close()

    return asyncio.run(within())


async def greedy(served):
    body = {"prompt": [served.tokenizer.bos], "n_predict": 9, "temperature": 0, "return_tokens": True}
    return (await served.engine.ask("/completion", body))["tokens"]


def test_an_export_is_made_into_gguf_once_and_requests_share_its_load(made):
    async def work(models):
        hf, again, f16 = await asyncio.gather(*(models.served(name) for name in ("hf", "hf", "model-f16")))
        assert hf is again and hf.engine.job.path.endswith("model.gguf") and hf.context_tokens == 128
        assert hf.defaults["temperature"] == 0 and not hf.continues
        states = {row["id"]: row["state"] for row in models.states()}
        assert states == {"hf": "ready", "model-f16": "ready"} and models.memory().keys() == states.keys()
        return hf.engine.job.path, await greedy(hf), await greedy(f16)

    path, exact, rounded = run(made, work)
    before = os.stat(path).st_mtime_ns
    assert run(made, work) == (path, exact, rounded) and os.stat(path).st_mtime_ns == before


def test_models_that_do_not_fit_make_idle_ones_leave_and_never_those_that_answer(made, tmp_path):
    copy = tmp_path / "copy.gguf"
    shutil.copy(next((made / "models/export").glob("*.gguf")), copy)
    shutil.copytree(made / "models/export/hf", tmp_path / "hf")
    paths = [next((made / "models/export").glob("*.gguf")), copy]

    async def work(models):
        first = await models.served("model-f16")
        await models.served("copy")
        assert models.memory().keys() == {"copy"}  # the other left
        assert first is not await models.served("model-f16")
        answer = asyncio.create_task(models.served("model-f16"))
        engine = (await answer).engine
        stream = engine.rows_of({"prompt": [2], "n_predict": 100, "ignore_eos": True})
        await anext(stream)
        with pytest.raises(MemoryHeld, match="model-f16"):
            await models.served("copy")
        await stream.aclose()
        await models.served("copy")

    run(made, work, paths, memory_bytes=100 << 20)
    with pytest.raises(InputError, match="more than the 1 MiB of all models"):
        run(made, lambda models: models.served("copy"), paths, memory_bytes=1 << 20)


def test_a_replaced_file_is_loaded_again_and_a_broken_one_says_why(made, tmp_path):
    path = tmp_path / "m.gguf"
    shutil.copy(next((made / "models/export").glob("*.gguf")), path)
    shutil.copy(made / "models/export/hf/tokenizer.model", tmp_path)

    async def work(models):
        first = await models.served("m")
        os.utime(path, ns=(1, 1))
        assert await models.served("m") is not first
        path.write_bytes(b"no model")
        with pytest.raises(InputError):
            await models.served("m")
        with pytest.raises(NoModel, match="no model 'n'"):
            await models.served("n")
        return models.states()[0]["reason"]

    assert run(made, work, [path])


def test_a_cache_fits_fewer_answers_before_a_shorter_context():
    header = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.embedding_length": 256}
    header |= {"llama.block_count": 8, "llama.context_length": 4096}
    token = 8 * 4 * 128 * 2
    assert fit_cache(header, 8, 8 * 4096 * token) == (4096, 8, 8 * 4096 * token)
    assert fit_cache(header, 8, 3 * 4096 * token)[:2] == (4096, 3)
    assert fit_cache(header, 8, 1000 * token)[:2] == (1000, 1) and fit_cache(header, 8, 1)[:2] == (512, 1)

"""Write a model that is no GGUF file as one, for the engine: an export's exact weights, a base model or a checkpoint.

    python -P -m athanor.catalog.convert PATH FOLDER

writes FOLDER/model.gguf in F32 with its tokenizer. A process of its own: it needs torch, which serving does not.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

from athanor.base.artifacts import new_dir, sha256_bytes
from athanor.base.errors import AthanorError, InputError
from athanor.catalog.discover import AvailableModel
from athanor.export.llamacpp.engine import child_environment
from athanor.tokenizer.tokenizer import MODEL_FILE

FOLDER, FILE = ".athanor/gguf", "model.gguf"
# Conversions; of a checkpoint each is asked for once or twice. One of the last hour may be loading.
KEPT, KEPT_BYTES, RECENT_SECONDS = 8, 8 << 30, 3600


async def gguf_of(root: Path, model: AvailableModel, used: Collection[Path] = ()) -> Path:
    """The GGUF file of a model, made once unless its files change. The oldest conversions leave, but for those `used`."""
    if (path := Path(model.base or model.path)).is_file():
        return path
    target = root / FOLDER / sha256_bytes(f"{path} {model.created}".encode())[:16]
    if not (target / FILE).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        total = 0
        for count, old in enumerate(sorted(target.parent.iterdir(), key=lambda folder: -folder.stat().st_mtime), 2):
            total += sum(file.stat().st_size for file in old.glob("*"))
            recent = time.time() - old.stat().st_mtime < RECENT_SECONDS
            if (count > KEPT or total > KEPT_BYTES) and not recent and old / FILE not in used:
                shutil.rmtree(old, ignore_errors=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "athanor.catalog.convert", str(path), str(target), cwd=root,
            stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
            env=child_environment(),
        )  # fmt: skip
        try:
            _, said = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            reason = said.decode(errors="replace").strip().rpartition("\n")[2] or f"status {process.returncode}"
            raise InputError(reason, where=model.id)
    os.utime(target)  # by its last use
    return target / FILE


def convert(path: Path, folder: Path) -> None:
    from athanor.catalog.loading import load_export
    from athanor.export.gguf_writer import write_gguf
    from athanor.export.source import make_source
    from athanor.export.vocabulary import Vocabulary

    model, tokenizer = load_export(path)
    with new_dir(folder) as made:
        (made / MODEL_FILE).write_bytes(tokenizer.model_bytes)
        source = make_source(path.name, model, tokenizer, Vocabulary.load(made / MODEL_FILE), {})
        write_gguf(made / FILE, source, "f32")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except AthanorError as error:
        sys.exit(str(error))

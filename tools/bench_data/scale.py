"""The data path from data/raw to data/shards on made text: time, memory, open files and mappings of each stage.

    python -m tools.bench_data.scale FOLDER --shards 4000 --shard-bytes 1000000 --workers 2 --max-files 256

FOLDER holds the text, which is made once, and results.json with a row for each stage. With --minhash datatrove's MinHash
alone, in one process, runs on the same text after them; its environment is made in --datatrove.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from athanor.base.artifacts import read_json, read_manifest, write_json
from athanor.runtime import presets
from athanor.text.documents import SHARD_BYTES
from tools import made_text
from tools.bench_data import corpus, sides

STAGES = ("train_classifiers", "clean", "train_tokenizer", "shard")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scale", description="what the data path needs at a size")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=532)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-files", type=int, default=256)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--minhash", action="store_true")
    parser.add_argument(
        "--datatrove", type=Path, default=Path(tempfile.gettempdir()) / "athanor-bench-data" / "datatrove"
    )
    args = parser.parse_args()
    folder = args.folder.absolute()
    manifest = make(folder, args.shards, args.shard_bytes, args.workers)
    documents, size = (sum(count[unit] for count in manifest["counts"].values()) for unit in ("documents", "bytes"))
    facts = {"shards": args.shards, "documents": documents, "bytes": size, "workers": args.workers}
    print(
        f"{args.shards:,} shards, {documents:,} documents, {size / 1e9:.2f} GB of text, {args.workers} workers",
        flush=True,
    )
    results = folder / "results.json"
    for name in args.stages:
        row: dict[str, Any] = sides.stage(folder, f"stages.{name}", args.workers, args.max_files)
        write_json(results, {**(read_json(results) if results.is_file() else {}), name: {**facts, **row}})
        print(described(name, size, row), flush=True)
    if args.minhash:
        python, _ = sides.trove_environment(args.datatrove.absolute())
        row = sides.trove(python, folder / "data" / "raw", folder / "datatrove", "--minhash")["used"]
        write_json(results, {**read_json(results), "datatrove": {**facts, **row}})
        print(described("datatrove's MinHash", size, row), flush=True)
    return 0


def make(folder: Path, shards: int, shard_bytes: int, workers: int) -> dict[str, Any]:
    """Put the text, this checkout's code and parameters into the folder; returns the manifest of data/raw."""
    raw = folder / "data" / "raw"
    sources = [("made-0", "web", shards - shards // 2), ("made-1", "prose", shards // 2)]
    if not (raw / "manifest.json").is_file():
        raw.parent.mkdir(parents=True, exist_ok=True)
        made_text.make(raw, sources, made_text.Made(shard_bytes), workers)
    sides.prepare(folder)
    values = presets.values(sides.ROOT / "presets" / "default.yaml")
    for rules in values["clean"]["rules"].values():
        rules["min_quality"] = None  # the weak labels call words drawn at random bad
    values["download"]["sources"] = [
        {"type": "files", "name": name, "globs": ["corpus/**"], "kind": kind} for name, kind, _ in sources
    ]
    values["mixture"]["sources"] = {name: {"share": 0.5, "max_epochs": 1.0} for name, _, _ in sources}
    values["shard"]["shard_tokens"] = 100_000_000
    with open(folder / "params.yaml", "w", encoding="utf-8") as file:
        YAML().dump(values, file)
    corpus.write_battery(folder, folder / "params.yaml")
    shutil.rmtree(folder / "data" / "clean", ignore_errors=True)
    return read_manifest(raw, "raw", 1)


def described(stage: str, size: int, row: dict[str, Any]) -> str:
    peaks = f"coordinator {row['peak_bytes'] / 1e6:.0f} MB, largest worker {row['worker_peak_bytes'] / 1e6:.0f} MB"
    rate = f"{size / 1e6 / row['cpu_seconds']:.2f} MB per CPU-second, {row['wall_seconds']:.0f} s"
    return f"{stage}: {rate}, {peaks}, {row['files']} files and {row['mappings']} mappings at most"


if __name__ == "__main__":
    sys.exit(main())

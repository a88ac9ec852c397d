"""The needs of the data path at the planned size, and the first limit of this machine that it will meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.data.shards import token_dtype
from athanor.sources import datapath
from athanor.sources.datapath import Host, Limit, Need

SHOWN_BYTES = 1e9  # of text; less is no matter of files, memory and hours


@dataclass(frozen=True)
class DataPath:
    """`needs` of the stages that will run; `limit` is met first, or is nearest where none is met."""

    text_bytes: float
    needs: list[Need]
    limit: Limit
    workers: int

    @property
    def is_shown(self) -> bool:
        return self.text_bytes >= SHOWN_BYTES or self.limit.share > 1

    def as_dict(self) -> dict[str, Any]:
        stages = [{**dataclasses.asdict(need), "seconds": need.seconds(self.workers)} for need in self.needs]
        limit = {**dataclasses.asdict(self.limit), "met": self.limit.share > 1}
        return {"text_bytes": self.text_bytes, "workers": self.workers, "stages": stages, "limit": limit}


def data_path(
    root: Path, built: Mapping[str, Any], stages: Collection[str], copies: int, host: Host
) -> DataPath | None:
    """The data path of these parameters, of which `stages` will run; None where none of it does.

    Sizes are those of the download where it is kept, and else of params.yaml.
    """
    text, downloaded = datapath.text_of(built["download"]), root / "metrics" / "download.json"
    if "download" not in stages and downloaded.is_file():
        counts = read_json(downloaded)["sources"]
        text = {name: counts[name]["bytes"] for name in text if name in counts} or text
    shard, tokenizer = built["shard"], built["tokenizer"]
    tokens = shard.train_tokens and shard.train_tokens + (shard.cooldown_tokens or 0)
    path = datapath.needs(
        text,
        download_disk=datapath.raw_disk(built["download"], text),
        samples={"train-classifiers": built["classifiers"].sample_bytes, "train-tokenizer": tokenizer.sample_bytes},
        tokens=tokens,
        shard_tokens=shard.shard_tokens,
        id_bytes=token_dtype(built["model"].vocab_size or tokenizer.vocab_size).itemsize,
        copies=copies,
    )
    path = [need for need in path if need.stage in stages]
    return DataPath(sum(text.values()), path, datapath.first_limit(path, host), host.workers) if path else None

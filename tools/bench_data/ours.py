"""The clean stage of this checkout, run as DVC would, on a folder of documents."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from athanor.runtime import presets
from tools.bench_data import usage

ROOT = Path(__file__).resolve().parents[2]
CODE = ("athanor", "stages", "dvc.yaml", "pyproject.toml")
TRAIN, CLEAN = "stages.train_classifiers", "stages.clean"


@dataclass(frozen=True)
class Cleaned:
    training: usage.Usage | None  # of the classifiers; not a part of cleaning, once for a corpus
    clean: usage.Usage
    documents: int


def prepare(folder: Path, preset: str = "default") -> None:
    """Put this checkout's code and a preset's params.yaml beside the folder's data."""
    for name in CODE:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "params.yaml").write_text(presets.complete(ROOT / "presets" / f"{preset}.yaml"))


def run(folder: Path, workers: int = 1, train: bool = True) -> Cleaned:
    """Train the classifiers (unless `train` is false and they are there) and clean; nothing is taken up from before."""
    training = None
    if (ROOT / "stages" / "train_classifiers.py").is_file() and (train or not (folder / "models").is_dir()):
        shutil.rmtree(folder / "models", ignore_errors=True)
        training = stage(folder, TRAIN, workers)
    shutil.rmtree(folder / "data" / "clean", ignore_errors=True)
    clean = stage(folder, CLEAN, workers)
    return Cleaned(training, clean, kept(folder / "data" / "clean"))


def stage(folder: Path, module: str, workers: int) -> usage.Usage:
    shutil.rmtree(folder / ".athanor", ignore_errors=True)  # slots, or the second run would find the work done
    environment = {
        **usage.ONE_THREAD,
        "ATHANOR_WORKERS": str(workers),
        "ATHANOR_TRACKING": "off",
        "PYTHONPATH": str(folder),
        "DVC_ROOT": str(folder),
        "PATH": os.environ.get("PATH", ""),
    }
    return usage.run([sys.executable, "-m", module], folder, environment)


def kept(clean: Path) -> int:
    """Documents left, of training and validation."""
    import pyarrow.parquet as pq

    files = [path for path in clean.rglob("*.parquet") if path.name != "dropped.parquet"]
    return sum(pq.ParquetFile(path).metadata.num_rows for path in files)

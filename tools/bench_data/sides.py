"""Both sides of the benchmark on a folder of documents: the clean stage of this checkout, run as DVC would, and datatrove."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq

from athanor.runtime import presets
from tools.bench_data import usage

ROOT = Path(__file__).resolve().parents[2]
CODE = ("athanor", "stages", "dvc.yaml", "pyproject.toml")
TRAIN, CLEAN = "stages.train_classifiers", "stages.clean"


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


def ours(folder: Path, workers: int = 1, train: bool = True) -> dict[str, Any]:
    """Train the classifiers (unless `train` is false and they are there) and clean; nothing is taken up from before.

    Usage of both (training is no part of cleaning, but once for a corpus), and how many documents are left.
    """
    training = None
    if train or not (folder / "models").is_dir():
        shutil.rmtree(folder / "models", ignore_errors=True)
        training = stage(folder, TRAIN, workers)
    clean = folder / "data" / "clean"
    shutil.rmtree(clean, ignore_errors=True)
    used = stage(folder, CLEAN, workers)
    files = [path for path in clean.rglob("*.parquet") if path.name != "dropped.parquet"]
    return {"training": training, "used": used, "documents": sum(pq.read_metadata(path).num_rows for path in files)}


def stage(folder: Path, module: str, workers: int, max_files: int | None = None) -> dict[str, Any]:
    """Run a stage with nothing to take up from before."""
    shutil.rmtree(folder / ".athanor", ignore_errors=True)  # slots, or the second run would find the work done
    environment = {
        **usage.ONE_THREAD,
        "ATHANOR_WORKERS": str(workers),
        "ATHANOR_TRACKING": "off",
        "PYTHONPATH": str(folder),
        "DVC_ROOT": str(folder),
        "PATH": os.environ.get("PATH", ""),
    }
    return asdict(usage.run([sys.executable, "-m", module], folder, environment, max_files))


# -- datatrove, in an environment of its own ------------------------------------------------------------------------

# The English word splitter of datatrove needs spaCy, without a model. Parquet is read with the version that we use.
REQUIREMENTS = ("datatrove[processing]==0.10.1", "spacy==3.8.18", "orjson==3.13.0", f"pyarrow=={pyarrow.__version__}")
SCRIPT = Path(__file__).with_name("trove_run.py")


def trove_environment(folder: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of the environment, made on the first call, and the versions in it."""
    python, versions = folder / "bin" / "python", folder / "versions.json"
    if not versions.is_file() or json.loads(versions.read_text())["requirements"] != list(REQUIREMENTS):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        listed = subprocess.check_output([str(python), "-m", "pip", "list", "--format", "json"], text=True)
        found = {row["name"].lower(): row["version"] for row in json.loads(listed)}
        versions.write_text(json.dumps({"requirements": list(REQUIREMENTS), "versions": found}))
    return python, json.loads(versions.read_text())["versions"]


def trove(python: Path, raw: Path, out: Path, mode: str = "") -> dict[str, Any]:
    """Filters, MinHash and PII on the documents of `raw`; --every: no document leaves before the last filter; or --minhash."""
    shutil.rmtree(out, ignore_errors=True)
    command = [str(python), str(SCRIPT), str(raw), str(out), *filter(None, [mode])]
    settings = {**usage.ONE_THREAD, "PYTHONPATH": "", "PATH": os.environ.get("PATH", ""), "HF_HUB_OFFLINE": "1"}
    used = usage.run(command, out.parent, settings)
    counts = json.loads((out / "counts.json").read_text())
    return {"used": asdict(used), "documents": counts["clean"]}

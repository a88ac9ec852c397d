"""datatrove in an environment of its own, run on a folder of documents."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow

from tools.bench_data import usage

# The English word splitter of datatrove needs spaCy, without a model. Parquet is read with the version that we use.
REQUIREMENTS = ("datatrove[processing]==0.10.1", "spacy==3.8.18", "orjson==3.13.0", f"pyarrow=={pyarrow.__version__}")
SCRIPT = Path(__file__).with_name("trove_run.py")


@dataclass(frozen=True)
class Filtered:
    used: usage.Usage
    after_filters: int  # documents
    documents: int


def environment(folder: Path) -> tuple[Path, dict[str, str]]:
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


def run(python: Path, raw: Path, out: Path, every: bool) -> Filtered:
    """Filters, MinHash and PII on the documents of `raw`; `every`: no document leaves before the last filter."""
    shutil.rmtree(out, ignore_errors=True)
    command = [str(python), str(SCRIPT), str(raw), str(out), *(["--every"] if every else [])]
    settings = {**usage.ONE_THREAD, "PYTHONPATH": "", "PATH": os.environ.get("PATH", ""), "HF_HUB_OFFLINE": "1"}
    used = usage.run(command, out.parent, settings)
    counts = json.loads((out / "counts.json").read_text())
    return Filtered(used, counts["filtered"], counts["clean"])

"""The benchmark measures CPU and memory of a tree of processes; its corpus repeats nothing (about 6 s)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from athanor.runtime import presets
from athanor.text.conversations import read_items
from athanor.text.documents import Document, read_sources, shard_files
from tools.bench_data import __main__ as bench
from tools.bench_data import corpus, sides, usage

SPIN = "import time\nheld = b'x' * {size}\nwhile time.process_time() < {seconds}: pass\n"
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"


def test_cpu_and_memory_of_a_command_and_its_children():
    child = SPIN.format(size=80_000_000, seconds=0.6)
    found = usage.run([sys.executable, "-c", PARENT, child], Path.cwd(), {})
    assert found.cpu_seconds >= 0.6 and found.wall_seconds >= 0.5
    assert found.processes >= 1 and found.worker_peak_bytes > 80_000_000 > found.peak_bytes > 1_000_000


def test_a_process_without_children():
    found = usage.run([sys.executable, "-c", SPIN.format(size=90_000_000, seconds=0.4)], Path.cwd(), {"A_B": "1"})
    assert found.processes == 0 and found.worker_peak_bytes == 0 and found.peak_bytes > 90_000_000


def test_memory_of_the_caller_is_not_that_of_the_command():
    """ru_maxrss of a child begins with its parent's: a sample seemed to need more memory than the whole corpus."""
    held = bytearray(b"x" * 300_000_000)
    found = usage.run([sys.executable, "-c", SPIN.format(size=10, seconds=0.3)], Path.cwd(), {})
    assert 1_000_000 < found.peak_bytes < len(held) / 3


def test_a_command_that_fails_is_not_measured():
    with pytest.raises(usage.CommandFailed, match="ended with 3:\nthis is why"):
        usage.run([sys.executable, "-c", "import sys; print('this is why'); sys.exit(3)"], Path.cwd(), {})


def fake_documents():
    for number in range(300):
        text = f"number {number % 200} " + "word " * 60
        yield Document(text, f"s{number % 3}", "prose", "unknown", "train")
    yield Document("too short", "s0", "prose", "unknown", "train")


def test_corpus_and_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_everything", fake_documents)
    params = tmp_path / "params.yaml"
    params.write_text(presets.complete(sides.ROOT / "presets" / "micro.yaml"))
    whole = corpus.make(tmp_path / "whole", 0.05, params)
    documents = list(read_sources(tmp_path / "whole" / "data" / "raw"))
    assert len({document.id for document in documents}) == len(documents) and corpus.total_bytes(whole) >= 50_000
    assert list(shard_files(tmp_path / "whole" / "data" / "raw")) == ["s0", "s1", "s2"]
    part = corpus.sample(tmp_path / "whole", tmp_path / "part", 0.01, params)
    chosen = [document.id for document in read_sources(tmp_path / "part" / "data" / "raw")]
    assert 10_000 <= corpus.total_bytes(part) < 11_000
    assert set(chosen) == set(sorted(document.id for document in documents)[: len(chosen)])
    assert len(list(read_items(tmp_path / "part" / "data" / "battery" / "items.jsonl"))) > 10
    made = os.stat(tmp_path / "whole" / "data" / "raw").st_mtime_ns
    assert corpus.make(tmp_path / "whole", 0.05, params) == whole
    assert os.stat(tmp_path / "whole" / "data" / "raw").st_mtime_ns == made


def test_real_text_begins_the_corpus():
    found: set[str] = set()
    for document in corpus._everything():
        found.add(document.source)
        if {"python-docs", "python-code"} <= found:
            return
    raise AssertionError(found)


def test_the_table():
    used = {"cpu_seconds": 10.0, "wall_seconds": 11.0, "processes": 0}
    used |= {"peak_bytes": 200_000_000, "worker_peak_bytes": 0}
    mine = {"training": None, "used": used, "documents": 7}
    theirs = [{"used": {**used, "cpu_seconds": seconds}, "documents": 2} for seconds in (50.0, 70.0)]
    quality = {"recall": {"0.8": 0.99}, "pairs_due": {"0.8": 100}, "precision": 1.0, "reported": 99}
    quality |= {"bias": 0.001, "bias_sigmas": 1.0}
    lines = bench.table(
        {
            "machine": {"cpu": "a", "python": "3"},
            "megabytes": 100.0,
            "sample_megabytes": 5.0,
            "whole": mine,
            "sample": {"ours": [mine, mine], "datatrove": theirs, "datatrove_every": []},
            "planted": quality,
        }
    )
    assert "| ours, whole corpus | 100.0 MB | 10.00 | 10.00 | 200 MB |" in lines
    assert "| ratio to ours: datatrove, dropped documents leave | | | 6.00 (5.00 to 7.00) | |" in lines
    assert "| 0.8 | 100 | 0.9900 |" in lines

"""The drill on a micro run: the stages pass it, and a defect in what it guards makes it fail."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.clone import environment
from tools import scratch
from tools.drill import compare
from tools.drill.faults import DAMAGE, KINDS, NOT_FOR_DOWNLOAD, Fault, damage, plan
from tools.drill.stage import identity

ROOT = Path(__file__).resolve().parents[2]
CODE = (*scratch.CODE, "presets")


def drill(*words: str, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.drill", *words]
    return subprocess.run(command, cwd=root, env=environment(**env), capture_output=True, text=True, timeout=1800)


def rows(output: str) -> dict[tuple[str, str], list[int]]:
    """The table: (stage, words of the kind) to its numbers."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return {(row[0], row[1]): [int(cell) for cell in row[2:]] for row in cells[2:]}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A drill of sft and download that builds its inputs, with all that it left."""
    base = tmp_path_factory.mktemp("drill") / "kept"
    done = drill("--stages", "sft,download", "--kills", "4", "--keep", str(base))
    assert done.returncode == 0, done.stdout + done.stderr
    return base, done.stdout


def test_sft_and_download_end_as_if_never_killed(kept):
    base, output = kept
    table = rows(output)
    assert "8 kills, 0 differences" in output
    for stage in ("sft", "download"):
        assert sum(row[0] for (name, words), row in table.items() if name == stage and "all:" not in words) == 4
        total = next(row for (name, words), row in table.items() if name == stage and "all:" in words)
        kills, resumed, _, differences = total
        assert kills == 4 and resumed > 0 and differences == 0
        assert table[stage, KINDS["disk"]][1] == 2  # full twice, and each time it went on from what was kept
        logs = [log.read_text() for log in (base / stage / "disk" / "attempts").glob("*.log")]
        assert sum("larger than a limit" in log for log in logs) == 2
    assert len(list(base.glob("sft/round-*/metrics/sft.json"))) >= 1


def test_pretrain_ends_as_if_never_killed_after_twenty_deaths(kept, tmp_path):
    """Batches are read and checkpoints written beside the steps here; sft above works without."""
    words = ("--stages", "pretrain", "--kills", "20", "--overlap", "--inputs", str(kept[0] / "inputs"))
    done = drill(*words, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 kills, 0 differences" in done.stdout
    kinds = {words for _, words in rows(done.stdout)}
    assert set(KINDS.values()) <= kinds  # each of them came to pass
    assert not list(tmp_path.glob("athanor-drill-*"))  # nothing is left of a drill without differences


@pytest.mark.parametrize(
    ("stage", "path", "old", "new", "told"),
    [
        pytest.param(
            "sft",
            "athanor/training/state.py",
            '    stepper.optimizer.load(prefixed("optimizer."))\n',
            "",
            r"models/sft/model.safetensors differs from byte \d+ on",
            id="optimiser not restored",
        ),
        pytest.param(
            "sft",
            "athanor/training/loop.py",
            "        self.hooks.on_resume(",
            "        self.progress.step += 1\n        self.hooks.on_resume(",
            r"the attempt reads at \d+ where \d+ is next",
            id="a batch left out after a resume",
        ),
        pytest.param(
            "download",
            "athanor/sources/hub_tasks.py",
            "    remove_damaged(tasks)\n",
            "",
            "other samples at position",
            id="damage goes unseen",
        ),
    ],
)
def test_a_defect_is_found(kept, tmp_path, stage, path, old, new, told):
    root = tmp_path / "checkout"
    root.mkdir()
    for name in CODE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    text = (root / path).read_text()
    assert text.count(old) == 1
    (root / path).write_text(text.replace(old, new))
    chosen = plan(stage, 4, random.Random(f"3 {stage}"))
    assert {fault.kind for fault in chosen} & {"renamed", "fsync", "write", "remove", *DAMAGE}
    words = ("--stages", stage, "--kills", "4", "--seed", "3", "--inputs", str(kept[0] / "inputs"))
    done = drill(*words, root=root, TMPDIR=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert " 0 differences" not in done.stdout and re.search(told, done.stdout), done.stdout
    where = Path(done.stdout.split("Kept for a look: ")[1].strip())
    assert list((where / stage).glob("*/attempts"))


def test_a_checkpoint_written_again_is_another_one_though_it_gets_the_inode_of_the_damaged(tmp_path):
    path, seen = tmp_path / "step_00000073", set()
    for _ in range(20):  # file systems give a free inode out again
        path.mkdir()
        (path / "tensors.safetensors").write_text("x")
        assert identity(path) not in seen
        seen.add(identity(path))
        (path / "tensors.safetensors").write_text("damaged")
        assert identity(path) in seen  # and damage makes it no other
        shutil.rmtree(path)


def test_every_kind_is_planned_and_a_seed_repeats_its_plan():
    for stage, none in (("pretrain", ()), ("sft", ()), ("download", NOT_FOR_DOWNLOAD)):
        faults = plan(stage, 34, random.Random(7))
        assert {fault.kind for fault in faults} == set(KINDS) - {"disk", *none}
        assert faults == plan(stage, 34, random.Random(7)) != plan(stage, 34, random.Random(8))


def test_the_journal_must_have_every_row_once(kept, tmp_path):
    quiet, copy = kept[0] / "sft" / "quiet", tmp_path / "copy"
    shutil.copytree(quiet / ".athanor" / "runs", copy / ".athanor" / "runs")
    assert compare.differing_journals(quiet, copy, "sft") == []
    path = compare.journals(copy)[0] / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    load = '"system/cpu_utilization_percentage": '
    assert any(load in line for line in lines)
    path.write_text("".join(line.replace(load, f"{load}1") for line in lines))
    assert compare.differing_journals(quiet, copy, "sft") == []  # what else the machine did is no part of a run
    scalar = next(number for number, line in enumerate(lines) if '"loss"' in line)
    for planted, told in (
        ([*lines[: scalar + 1], *lines[scalar:]], "rows instead of"),
        ([*lines[:scalar], *lines[scalar + 1 :]], "rows instead of"),
        ([*lines[:scalar], lines[scalar].replace('"loss": ', '"loss": 1'), *lines[scalar + 1 :]], "first other row 0"),
    ):
        path.write_text("".join(planted))
        assert any(told in problem for problem in compare.differing_journals(quiet, copy, "sft"))
    path.write_text("".join(lines))
    shutil.copytree(path.parent, path.parent.with_name("sft-another"))
    assert "2 runs" in compare.differing_journals(quiet, copy, "sft")[0]


def test_one_flipped_bit_of_a_result_is_named(kept, tmp_path):
    quiet = kept[0] / "sft" / "quiet"
    shutil.copytree(quiet / "models" / "sft", tmp_path / "models" / "sft")
    expected, found = compare.files(quiet, ["models/sft"]), compare.files(tmp_path, ["models/sft"])
    assert compare.differing_files(expected, found) == []
    weights = found["models/sft/model.safetensors"]
    content = bytearray(weights.read_bytes())
    content[4321] ^= 1
    weights.write_bytes(content)
    (tmp_path / "models" / "sft" / "config.json").unlink()
    told = compare.differing_files(expected, compare.files(tmp_path, ["models/sft"]))
    assert any("model.safetensors differs from byte 4321 on" in problem for problem in told)
    assert "models/sft/config.json is missing" in told


def test_samples_must_go_on_at_the_checkpoint_without_a_gap():
    reference = compare.Samples(8, {position: f"d{position}" for position in range(0, 40, 8)})

    def read(*positions: int) -> list[dict]:
        return [{"at": position, "digest": f"d{position}"} for position in positions]

    saved = {"point": "renamed", "path": ".athanor/slots/sft/f/step_00000002"}
    assert compare.differing_samples(reference, [*read(0, 8), saved, *read(16)], 0, False) == []
    assert compare.differing_samples(reference, read(16, 24, 32), 16, True) == []
    assert "16 is next" in compare.differing_samples(reference, read(24, 32), 16, True)[0]
    assert "24 is next" in compare.differing_samples(reference, read(16, 32), 16, False)[0]
    assert "ended at 32 of 40" in compare.differing_samples(reference, read(16, 24), 16, True)[0]
    assert "other samples" in compare.differing_samples(reference, [{"at": 16, "digest": "d8"}], 16, False)[0]
    for overlap in (False, True):
        assert "written after 8" in compare.differing_samples(reference, [*read(0), saved], 0, False, overlap)[0]
    late = [*read(0, 8, 16), saved, *read(24)]
    assert "written after 24" in compare.differing_samples(reference, late, 0, False)[0]
    assert compare.differing_samples(reference, late, 0, False, overlap=True) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--stages", "sft,eval"),
            "--stages: 'eval' is no resumable stage. Fix: use pretrain, sft, download",
        ),
        (("--kills", "0"), "--kills: 0 is out of range. Fix: use a value ≥ 1"),
        (("--inputs", "/nowhere"), "/nowhere/data/shards: not found. Fix: build it there (dvc repro pretrain)"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(words, told, tmp_path):
    done = drill(*words, TMPDIR=str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith(told) and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.glob("athanor-drill-*"))


def test_a_flip_of_the_state_changes_what_it_says(tmp_path):
    """A flipped last digit gave the same number, and the drill waited for a complaint about it."""
    path, text = tmp_path / "state.json", '{"loss": 0.10000000000000001}'
    at = (text.index("}") - 0.5) / len(text)
    part = next(p for p in (at + n / 10_000 for n in range(100)) if int(p * 1000) % 8 == 0)
    assert int(part * len(text)) == text.index("}") - 1
    path.write_text(text)
    assert json.loads(text.replace("1}", "0}")) == json.loads(text)
    damage(tmp_path, "pretrain", Fault("flipped state", part), [tmp_path])
    try:
        after = json.loads(path.read_text())
    except ValueError:
        after = None  # no JSON at all is a change, too
    assert after != json.loads(text)

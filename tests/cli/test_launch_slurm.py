"""`athanor launch slurm`: scripts as they are written, what bash makes of them, and a chain of jobs under a real Slurm."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.errors import ParamsError
from athanor.base.strict import read_yaml
from athanor.cli.launch import slurm
from tests.e2e.clone import Clone, commit, environment, make_clone

GOLDEN = Path(__file__).with_name("golden")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # a user's may lack these
LIMIT = 900.0  # s for what takes a third of it
TOKENS = 2_998_272  # a fast machine does 1,000,000 in a job before Slurm cuts it
CUT = "stopped at step"


def script(monkeypatch, folder, *words, python="/env/bin/python"):
    monkeypatch.setenv("DVC_ROOT", str(folder))
    monkeypatch.setattr(sys, "executable", python)
    parser = argparse.ArgumentParser()
    slurm.options(parser)
    args = parser.parse_args(words)
    return slurm.script(args, *slurm.margin(folder, slurm.seconds_of(args.time)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one-node", ["--time=90", "--partition=gpu", "--account=lab", "--exclude=n07", "--gpus=1", "--sbatch=--qos=long"]),
        ("two-nodes-array", ["--nodes=2", "--processes=0", "--gpus=4", "--cpus=32", "--array", "--jobs=6"]),
    ],
)  # fmt: skip
def test_the_script(monkeypatch, tmp_path, name, words):
    text = script(monkeypatch, tmp_path, *words).replace(str(tmp_path.resolve()), "/checkout")
    assert text == (GOLDEN / f"{name}.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_the_margin_comes_from_what_saves_took(tmp_path):
    assert slurm.margin(tmp_path, 14400)[0] == slurm.UNMEASURED_MARGIN
    run = tmp_path / ".athanor/runs/pretrain-1"
    run.mkdir(parents=True)
    lines = [{"m": {"time.step_s": 0.5}}, {"m": {"time.step_s": 2.0, "time.checkpoint_s": 30.0}}, {"event": "x"}]
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert slurm.margin(tmp_path, 14400) == (124, "the longest measured here: step 2.0 s, checkpoint 30.0 s")
    assert slurm.margin(tmp_path, 240)[0] == 60


def test_times_as_sbatch_takes_them():
    known = {"90": 5400, "90:30": 5430, "4:00:00": 14400, "2-0": 172800, "1-12:30": 131400, "1-00:00:01": 86401}
    assert {text: slurm.seconds_of(text) for text in known} == known
    for text in ("four", "1", "0:10", "1:2:3:4"):
        with pytest.raises(ParamsError, match="--time"):
            slurm.seconds_of(text)


def fake(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("work", "left", "restarts", "status", "asked"),
    [
        ("exit 0", 9999, 0, 0, ""),
        ("exit 1", 9999, 0, 1, ""),
        ("exit 75", 9999, 0, 75, ""),  # athanor stop, a full disk: the next job would end the same way
        ("exit 75", 30, 0, 0, "requeue 7"),
        ("exit 75", 30, 19, 75, ""),
        ("trap 'exit 75' INT; sleep 1; kill -USR1 $PPID; sleep 9 & wait", 9999, 0, 0, "requeue 7"),
    ],
)
def test_which_ends_are_continued(monkeypatch, tmp_path, work, left, restarts, status, asked):
    python = fake(tmp_path, "python", work)
    text = script(monkeypatch, tmp_path, python=python).replace("sleep 60", "exit 0")
    fake(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked')
    values = {"SLURM_JOB_END_TIME": str(int(time.time()) + left), "SLURM_JOB_ID": "7"}
    values |= {"SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=values, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    told = tmp_path / "asked"
    assert (told.read_text().strip() if told.is_file() else "") == asked


CONF = """
ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=17821
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17822 CPUs={cores}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17823 CPUs={cores}
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Slurm of two nodes on this machine; yields the environment of its users."""
    if os.geteuid() != 0 or not all(shutil.which(name, path=PATH) for name in PROGRAMS):
        pytest.skip("needs root and Slurm (apt install slurmctld slurmd slurm-client)")
    root = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n0", "spool-n1"):
        (root / name).mkdir()
    (root / "slurm.conf").write_text(CONF.format(root=root, cores=os.cpu_count()))
    env = environment(
        PATH=f"{Path(sys.executable).parent}:{PATH}",
        SLURM_CONF=str(root / "slurm.conf"),
        ATHANOR_TRACKING="off",
        ATHANOR_THREADS="1",
    )
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
    with open(root / "log.txt", "w") as log:
        daemons = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command in commands]
    try:
        deadline = time.monotonic() + 60
        while asked(env, "sinfo", "-h", "-o", "%t").split() != ["idle"]:  # both, and with an answer
            assert time.monotonic() < deadline, (root / "log.txt").read_text()
            time.sleep(0.5)
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


def asked(env, *command):
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def chain_of_jobs(clone, env, cuts):
    """What the jobs of a chain said. Slurm asks each to save soon after it began, until so many have cut the training."""
    words = ["job.sh", "--time=2", "--array", "--jobs=50", "--sbatch=--signal=B:USR1@75"]
    subprocess.run([sys.executable, "-m", "athanor", "launch", "slurm", *words], cwd=clone.path, env=env, check=True)
    done = subprocess.run(["sbatch", "--parsable", "job.sh"], cwd=clone.path, env=env, capture_output=True, text=True)
    job, longer, deadline = done.stdout.strip(), False, time.monotonic() + LIMIT
    while asked(env, "squeue", "-h"):
        assert time.monotonic() < deadline, "\n".join(said(clone))
        time.sleep(0.5)
        if not longer and sum(CUT in text for text in said(clone)) >= cuts:
            longer = True  # the rest in one, however slow the machine is
            asked(env, "scontrol", "update", f"JobId={job}", "TimeLimit=60")
    return said(clone)


def said(clone):
    return [path.read_text() for path in sorted((clone.path / ".athanor").glob("slurm-*.log"))]


def with_tokens(path, tokens):
    clone = make_clone(path)
    params, yaml = path / "params.yaml", YAML()
    values = yaml.load(params.read_text())
    values["pretrain"] |= {"tokens": tokens, "validation_every_tokens": tokens // 3, "sample_every_tokens": 0}
    yaml.dump(values, params)
    commit(clone, "tokens")
    return clone


def made_of(clone):
    """The hashes of all that the stages made, but for the files about times and hosts."""
    stages = read_yaml(clone.path / "dvc.lock")["stages"].values()
    made = {out["path"]: out["md5"] for stage in stages for out in stage["outs"]}
    return {path: value for path, value in made.items() if not path.startswith("metrics/runs/")}


def test_a_chain_of_jobs_trains_the_bytes_of_one_run(cluster, tmp_path):
    """The last job of the array ends the chain."""
    one = with_tokens(tmp_path / "one", TOKENS)
    repro = [sys.executable, "-m", "athanor", "repro"]
    subprocess.run([*repro, "shard", "sft-data"], cwd=one.path, env=cluster, check=True)
    shutil.copytree(one.path, tmp_path / "chain", symlinks=True)
    alone, chain = subprocess.Popen(repro, cwd=one.path, env=cluster), Clone(tmp_path / "chain")
    try:
        logs = chain_of_jobs(chain, cluster, 2)
        assert alone.wait(LIMIT) == 0
    finally:
        alone.kill()
    assert 3 <= len(logs) < 50 and sum(CUT in text for text in logs) >= 2, "\n".join(logs)
    assert made_of(one) == made_of(chain)

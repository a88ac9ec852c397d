"""Whatever happens to the tracking store or the shipper, MLflow ends up saying what the journals say."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.runtime import ship
from athanor.runtime.journal import Journal
from athanor.runtime.locks import try_lock
from tests.runtime.shippers import Checkout, Shippers, die, finish, points, running, until
from tests.runtime.view import assert_view, environment, meta, runs, view


@pytest.fixture(scope="module")
def shippers():
    made = Shippers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """An SQLite store with tables and nothing in them; making one takes seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("tables") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def checkout(tmp_path, tables):
    made = Checkout(tmp_path / "here")
    shutil.copyfile(tables, made.path / "mlflow.db")
    return made


@pytest.fixture
def shared(tmp_path, tables):
    (tmp_path / "shared").mkdir()
    shutil.copyfile(tables, tmp_path / "shared" / "mlflow.db")
    return f"sqlite:///{tmp_path}/shared/mlflow.db"


# -- an SQLite store --------------------------------------------------------


def test_four_shippers_create_one_database_with_one_parent(shippers, tmp_path):
    uri = f"sqlite:///{tmp_path}/shared/mlflow.db"
    four = [Checkout(tmp_path / name, uri) for name in "abcd"]
    for number, one in enumerate(four):
        one.closed(f"clean-{number}", "clean", steps=5)
    shippers.run(*four)
    assert [one.log for one in four if "Traceback" in one.log or "not reachable" in one.log] == []
    assert_view(four[0].client, *(one.path for one in four))


def test_shipper_killed_while_it_makes_the_database(shippers, tmp_path):
    """Tables that were made half cannot be opened by MLflow again, so they may not appear under the store's name."""
    kills = 0
    for number, seconds in enumerate((0.2, 1.0)):
        one = Checkout(tmp_path / f"c{number}")
        one.closed("clean-1", "clean")
        pid = shippers.start(one, IDLE_SECONDS=60.0)  # it may not leave before it is killed
        until(lambda one=one: next(one.path.glob("mlflow.db*"), None) is not None)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        shippers.join(pid)
        kills += not ship.shipped(one.folder("clean-1"))
        shippers.join(shippers.start(one, GIVE_UP_SECONDS=0.0))
        assert ship.shipped(one.folder("clean-1")), one.log
        assert [file.name for file in one.path.iterdir() if file.name.endswith(".new")] == []
    assert kills >= 1


def test_unreachable_store_is_given_up_with_few_words(shippers, tmp_path):
    one = Checkout(tmp_path / "one", "http://127.0.0.1:9")
    one.closed("clean-1", "clean")
    shippers.join(shippers.start(one, GIVE_UP_SECONDS=5.0, POLL_SECONDS=0.2))
    assert not ship.shipped(one.folder("clean-1"))
    assert 2 <= one.log.count("not reachable") <= 5
    one.uri = f"sqlite:///{tmp_path}/mlflow.db"
    shippers.run(one)
    assert_view(one.client, one.path)


def test_locked_database_delays_and_loses_nothing(shippers, checkout):
    checkout.closed("clean-1", "clean", started_ms=1)
    shippers.run(checkout)
    journal = checkout.open("pretrain-1", steps=20, started_ms=2)
    lock = sqlite3.connect(checkout.path / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    pid = shippers.start(checkout)
    time.sleep(1.0)  # the shipper meets the lock, or is slow and does not: both have to end well
    points(journal, 20, 30)
    finish(journal)
    lock.execute("ROLLBACK")
    lock.close()
    shippers.join(pid)
    assert_view(checkout.client, checkout.path)


def test_deleted_database_is_made_again_by_the_next_shipper(shippers, checkout, tmp_path):
    checkout.closed("clean-1", "clean", started_ms=1)
    checkout.closed("pretrain-1", steps=50, started_ms=2)
    shippers.run(checkout)
    before = view(checkout.client)
    (checkout.path / "mlflow.db").unlink()
    assert ship.unshipped(checkout.path) == ship.run_folders(checkout.path)
    shippers.run(checkout)
    # Under another name, because this process still has the deleted file open.
    shutil.copyfile(checkout.path / "mlflow.db", tmp_path / "copy.db")
    checkout.uri = f"sqlite:///{tmp_path}/copy.db"
    assert_view(checkout.client, checkout.path)
    assert view(checkout.client) == before


def test_database_replaced_under_a_live_shipper(shippers, checkout):
    checkout.closed("clean-1", "clean", started_ms=1)
    journal = checkout.open("pretrain-1", steps=30, started_ms=2)
    pid = shippers.start(checkout)
    until(lambda: read_json_or(checkout.folder("pretrain-1") / "ship.json").get("offset", 0) > 0)
    (checkout.path / "mlflow.db").unlink()
    points(journal, 30, 60)
    finish(journal)
    shippers.join(pid)
    assert_view(checkout.client, checkout.path)


def test_torn_last_line_waits_for_its_end(shippers, checkout):
    journal = checkout.open("pretrain-1", steps=10)
    with open(journal.path, "a") as other:
        other.write('{"t": 1700000000000, "s": 10, "m": {"lo')
        other.flush()
        pid = shippers.start(checkout)
        state = checkout.folder("pretrain-1") / "ship.json"
        until(lambda: read_json_or(state).get("offset", 0) > 0)
        assert read_json(state)["offset"] == journal.path.read_bytes().rfind(b"\n") + 1
        other.write('ss": 0.25}}\n')
    points(journal, 11, 15)
    finish(journal)
    shippers.join(pid)
    assert_view(checkout.client, checkout.path)


def test_journal_that_ends_torn_or_in_zeros_is_shipped_without_that_line(shippers, checkout):
    journal = checkout.open("pretrain-1", steps=10)
    die(journal)
    with open(journal.path, "ab") as file:
        file.write(b'{"t": 1, "s": 10')
    shippers.run(checkout)
    assert_view(checkout.client, checkout.path)
    with open(journal.path, "ab") as file:
        file.write(b"\0" * 40 + b"\n")
    finish(checkout.open("pretrain-1", steps=12))
    shippers.run(checkout)
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(line for line in lines if b"\0" not in line))
    assert_view(checkout.client, checkout.path)


def test_failed_then_resumed_run_says_only_how_it_ended(shippers, checkout):
    checkout.closed("pretrain-1", steps=10, status="FAILED")
    shippers.run(checkout)
    assert_view(checkout.client, checkout.path)
    (checkout.folder("pretrain-1") / "end.json").unlink()
    journal = Journal(checkout.folder("pretrain-1"))
    write_json(journal.folder / "meta.json", meta("pretrain-1", "pretrain", resumed=1))
    points(journal, 8, 25)
    die(journal)
    shippers.run(checkout)
    assert_view(checkout.client, checkout.path)
    journal = Journal(checkout.folder("pretrain-1"))
    write_json(journal.folder / "meta.json", meta("pretrain-1", "pretrain", resumed=2))
    points(journal, 20, 40)
    finish(journal)
    shippers.run(checkout)
    assert_view(checkout.client, checkout.path)


def test_shippers_killed_at_random_lose_and_double_nothing(shippers, tmp_path, shared):
    """Two checkouts ship to one database while stages come, die and end, and no shipper lives long."""
    dice = random.Random(7)
    pair = [Checkout(tmp_path / name, shared) for name in "ab"]
    started = time.monotonic()
    for one in pair:
        one.closed(f"warm-{one.path.name}", "clean", steps=400)
    shippers.run(*pair)
    whole = max(0.3, time.monotonic() - started - 0.5)  # what one undisturbed delivery takes here
    live: dict[Checkout, Journal] = {}
    kills = 0
    for turn in range(14):
        for one in pair:
            if one in live:
                points(live[one], 300, 350)
                if turn % 4:
                    finish(live[one], dice.choice(["FINISHED", "FINISHED", "FAILED"]))
                else:
                    die(live[one])
            facts = {"stage": f"stage-{turn % 3}", "started_ms": 10 * turn + 10, "key": f"k{turn % 2}"}
            live[one] = one.open(f"run-{turn}-{one.path.name}", steps=300, **facts)
            (live[one].folder / "files" / "card.md").write_text(f"{turn}")
        pids = [shippers.start(one) for one in pair]
        time.sleep(dice.uniform(0.0, whole))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # fails when it is gone: then it was no kill
            kills += 1
        for pid in pids:
            shippers.join(pid)
    for journal in live.values():
        finish(journal)
    shippers.run(*pair)
    assert kills == 28
    assert all(not (folder / "end.json").is_file() for one in pair for folder in ship.unshipped(one.path))
    assert_view(pair[0].client, *(one.path for one in pair))


def test_two_parents_of_one_key_become_one(shippers, checkout):
    """Shippers of different machines share no lock; the next one to close a run merges what they made."""
    checkout.closed("clean-1", "clean", started_ms=1, params={"clean.seed": 1})
    checkout.closed("shard-1", "shard", started_ms=2, params={"shard.seed": 2})
    shippers.run(checkout)
    client, key = checkout.client, meta("", "")["key"]
    found = {run.data.tags.get("athanor.run"): run for run in runs(client)}
    second = client.create_run(found[None].info.experiment_id, start_time=5, tags={"athanor.key": key})
    client.set_tag(found["shard-1"].info.run_id, "mlflow.parentRunId", second.info.run_id)
    checkout.closed("pretrain-1", started_ms=3)
    shippers.run(checkout)
    assert_view(client, checkout.path)


def test_inputs_that_mlflow_lost_are_there_at_the_end(shippers, checkout):
    """Two machines log the same new dataset at once: MLflow keeps one's id of it, and the other's inputs point nowhere."""
    journal = checkout.open("pretrain-1", steps=5, started_ms=1)
    pid = shippers.start(checkout)
    until(lambda: (checkout.folder("pretrain-1") / "ship.json").is_file())
    with contextlib.closing(sqlite3.connect(checkout.path / "mlflow.db", timeout=30)) as database, database:
        assert database.execute("UPDATE datasets SET dataset_uuid = 'of the other machine'").rowcount == 1
    finish(journal)
    shippers.join(pid)
    assert_view(checkout.client, checkout.path)


def test_a_run_that_cannot_be_shipped_does_not_hold_up_the_others(shippers, checkout):
    checkout.closed("clean-1", "clean", started_ms=1)
    (checkout.folder("clean-1") / "journal.jsonl").write_text('{"t": "yesterday", "s": 0, "m": {"x": 1}}\n')
    checkout.closed("pretrain-1", started_ms=2)
    journal = checkout.open("sft-1", "sft", steps=5, started_ms=3)
    pid = shippers.start(checkout)
    until(lambda: (checkout.folder("sft-1") / "ship.json").is_file())
    deleted = read_json(checkout.folder("sft-1") / "ship.json")["mlflow_run"]
    checkout.client.delete_run(deleted)  # by its user, in the UI, while it trains
    points(journal, 5, 9)
    finish(journal)
    shippers.join(pid)
    assert ship.shipped(checkout.folder("pretrain-1")) and ship.shipped(checkout.folder("sft-1"))
    assert ship.unshipped(checkout.path) == [checkout.folder("clean-1")]
    assert "clean-1 is not shipped" in checkout.log
    assert "sft-1" not in {run.data.tags.get("athanor.run") for run in runs(checkout.client)}


# -- rebuild ----------------------------------------------------------------


def test_rebuild_gives_the_same_view_and_leaves_other_checkouts_alone(shippers, tmp_path, shared):
    here, there = Checkout(tmp_path / "here", shared), Checkout(tmp_path / "there", shared)
    here.closed("clean-1", "clean", started_ms=1)
    die(here.open("pretrain-1", steps=40, started_ms=2))
    here.closed("pretrain-2", steps=60, started_ms=3)
    here.closed("sft-1", "sft", status="FAILED", started_ms=4, key="other")
    there.closed("clean-9", "clean", started_ms=5)
    shippers.run(here)
    shippers.run(there)
    client = here.client
    before, theirs = view(client), read_json(there.folder("clean-9") / "ship.json")
    assert_view(client, here.path, there.path)
    for turn in range(2):
        spoilt = read_json(here.folder("pretrain-2") / "ship.json")["mlflow_run"]
        client.log_metric(spoilt, "train/loss", 99.0, step=1000 + turn)
        client.set_tag(spoilt, "athanor.stage", "spoilt")
        shippers.run(here, words=("--rebuild",))
        assert_view(client, here.path, there.path)
        assert view(client) == before
    assert "4 of 4 runs are in sqlite:" in here.log
    assert client.get_run(theirs["mlflow_run"]).info.lifecycle_stage == "active"
    here.uri = f"sqlite:///{tmp_path}/new/mlflow.db"  # an empty store
    shippers.run(here, words=("--rebuild",))
    assert_view(here.client, here.path)


def test_rebuild_waits_for_the_shipper_at_work(shippers, checkout):
    checkout.closed("clean-1", "clean")
    with try_lock(checkout.path / ".athanor" / "ship.lock") as free:
        assert free
        shippers.join(shippers.start(checkout, "--rebuild", LOCK_SECONDS=0.3))
    assert "ship.lock: a stage or its shipper is at work (process " in checkout.log
    assert runs(checkout.client) == []


# -- a server ---------------------------------------------------------------


class Server:
    """`mlflow server` in a process group of its own."""

    def __init__(self, folder) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.uri = f"http://127.0.0.1:{free.getsockname()[1]}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        command += ["--port", self.uri.rpartition(":")[2], "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "files")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment(**quiet), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        until(self.answers)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def test_server_killed_before_during_and_after_a_stage(shippers, tmp_path):
    server = Server(tmp_path)
    secret = "planted-password"
    one = Checkout(tmp_path / "one", server.uri.replace("://", f"://me:{secret}@"))
    two = Checkout(tmp_path / "two", server.uri)
    one.closed("clean-1", "clean", started_ms=1)  # while there is no server
    journal = one.open("pretrain-1", steps=900, started_ms=2)
    pid = shippers.start(one)
    until(lambda: "not reachable" in one.log)
    server.start()
    try:
        state = one.folder("pretrain-1") / "ship.json"
        until(lambda: ship.shipped(one.folder("clean-1")) and read_json_or(state).get("offset", 0) > 0)
        points(journal, 900, 1800)
        server.kill()  # during the stage
        points(journal, 1800, 2000)
        finish(journal)
        one.closed("sft-1", "sft", started_ms=3)  # after it
        until(lambda: one.log.count("not reachable") >= 2)
        two.closed("clean-2", "clean", started_ms=4)
        two.closed("pretrain-2", steps=20, started_ms=5, key="main@bbbbbbb/12345678")
        second = shippers.start(two)
        server.start()
        shippers.join(pid)
        shippers.join(second)
        client = one.client
        assert_view(client, one.path, two.path)
        before = view(client)
        shippers.run(one, words=("--rebuild",))
        assert_view(client, one.path, two.path)
        assert view(client) == before
        assert read_json(state)["uri"] == server.uri.replace("://", "://***@")
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert [str(file) for file in files if secret.encode() in file.read_bytes()] == []
    finally:
        server.kill()


def read_json_or(path):
    return read_json(path) if path.is_file() else {}


def test_a_shipper_that_hangs_does_not_outlive_the_stages(shippers, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Checkout(tmp_path / "one", f"http://127.0.0.1:{silent.getsockname()[1]}")
        journal = one.open("pretrain-1", steps=3)
        pid = shippers.start(one, GIVE_UP_SECONDS=1e9, STUCK_SECONDS=0.4)
        silent.accept()  # it asks, and is told nothing
        assert running(pid)  # a stage lives
        finish(journal)
        shippers.join(pid)
    assert "no stage runs: this shipper ends" in one.log and not ship.shipped(one.folder("pretrain-1"))

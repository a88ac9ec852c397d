"""A tracking store that is dead, hangs or is of another MLflow: told at once, in one line, and waited for by nobody."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from athanor.base.errors import InputError
from athanor.cli import ui
from athanor.cli.doctor.checks import store
from athanor.cli.doctor.main import Checkout
from athanor.runtime import ship, store_check
from athanor.runtime.store_check import _migrations, trouble
from tests.runtime.shippers import Checkout as Journals


@pytest.fixture
def address(monkeypatch):
    monkeypatch.delenv("ATHANOR_TRACKING", raising=False)
    return lambda uri: monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


@contextlib.contextmanager
def server(status: int):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.mark.parametrize(
    "uri, what",
    [
        ("http://me:planted-1@127.0.0.1:9", "is not reachable (Connection refused)"),
        ("http://me:pla/nted-1@127.0.0.1:9", "has no usable address"),
        ("postgresql+psycopg2://me:planted-1@127.0.0.1:1/db", "is not reachable (Connection refused)"),
    ],
)
def test_a_dead_store_is_one_line_without_its_secrets_everywhere(address, tmp_path, uri, what):
    address(uri)
    found = str(trouble(tmp_path))
    assert f"the tracking store {what}. Fix: start it" in found and "planted" not in found and "pla/nted" not in found
    (finding,) = store(Checkout(tmp_path, (), ()))
    assert finding.kind == "store" and what in finding.what and not finding.note


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql:///db?host=/var/run/postgresql",
        "mysql+pymysql://u:p@/db?unix_socket=/run/mysqld/mysqld.sock",
        "postgresql+psycopg2://h1:5432,h2:5432/db",
        "postgresql://me:pla/nted-1@127.0.0.1/db",
    ],
)
def test_an_address_that_its_driver_reads_in_its_own_way_is_left_to_it(address, tmp_path, uri):
    address(uri)
    assert trouble(tmp_path) is None


def test_an_answer_of_any_kind_but_an_error_of_the_server_is_enough(address, tmp_path):
    for status, fine in ((200, True), (401, True), (404, True), (502, False)):
        with server(status) as uri:
            address(uri)
            assert (trouble(tmp_path) is None) == fine


def test_a_store_that_takes_connections_and_says_nothing_costs_seconds(address, tmp_path, monkeypatch):
    monkeypatch.setattr(store_check, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert trouble(tmp_path) is not None
    gone = threading.Event()
    monkeypatch.setattr(store_check, "_trouble", lambda uri: gone.wait())  # a name server that hangs
    assert "does not answer within" in str(trouble(tmp_path))
    gone.set()


def database(path, version: str, *tables: str) -> None:
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as db:
        for name in ("alembic_version", *tables):
            db.execute(f"CREATE TABLE {name} (version_num TEXT)")
        db.execute("INSERT INTO alembic_version VALUES (?)", (version,))
        db.commit()


def test_a_database_of_another_mlflow_is_told_and_one_that_it_upgrades_is_not(address, tmp_path):
    address("")
    path, steps = tmp_path / "mlflow.db", _migrations()
    (newest,) = steps.keys() - {before for before, _ in steps.values()}
    before, added = steps[newest]
    assert len(steps) > 50 and trouble(tmp_path) is None  # no store yet
    database(path, newest)
    assert trouble(tmp_path) is None
    database(path, "f" * 12)
    assert "newer than the one here" in str(trouble(tmp_path)) and "athanor ship --rebuild" in str(trouble(tmp_path))
    database(path, before)  # MLflow makes the tables that are missing, and all the rest with them
    assert (trouble(tmp_path) is None) == bool(added)
    database(path, before, *added)
    assert "of an older MLflow. Fix: mlflow db upgrade" in str(trouble(tmp_path))
    path.write_bytes(b"no database" * 100)
    assert "is damaged" in str(trouble(tmp_path))


def test_nobody_waits_for_a_store_in_which_something_is_wrong(address, tmp_path, monkeypatch, capsys):
    checkout = Journals(tmp_path / "one")
    checkout.closed("clean-1", "clean")
    address("http://127.0.0.1:9")
    monkeypatch.setattr(ship, "ASK_SECONDS", 0.0)
    started = []
    monkeypatch.setattr(ship, "start_detached", started.append)
    assert ship.wait(checkout.path, 1e9) == 1 and started
    assert "is not reachable" in capsys.readouterr().err
    monkeypatch.setenv("DVC_ROOT", str(checkout.path))
    with pytest.raises(InputError, match="is not reachable"):
        ui.run(None)


def test_what_mlflow_says_of_a_store_is_one_line(address, tmp_path):
    path = tmp_path / "mlflow.db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="MLflow cannot use it: .*Fix: athanor doctor") as refused:
        ui._experiment(f"sqlite:///{path}")
    assert "\n" not in str(refused.value)

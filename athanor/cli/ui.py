"""The MLflow UI on the page that shows runs.

python -m athanor ui [--port 5000]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from athanor.base.errors import InputError
from athanor.runtime import ship
from athanor.runtime.machine import anchor
from athanor.runtime.overview import VIEW
from athanor.runtime.redact import redact
from athanor.runtime.store import EXPERIMENT
from athanor.runtime.store_check import in_one_line, trouble

if TYPE_CHECKING:
    from mlflow.entities import Experiment


# The address holds for one page. MLflow has no setting for others; what is chosen there, the browser keeps.
PULLED = (
    "no stage ran in this checkout, and MLflow shows the runs that were made where it is. The results that are here came"
    " with Git and dvc pull: athanor summary, athanor compare A B, dvc exp show"
)
LAYOUT = (
    "Once in a browser: choose 'Model training' at the top left of a run's page, and close the assistant at the right"
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=5000)


def run(args: argparse.Namespace) -> int:
    root = anchor()
    if why := trouble(root):
        raise why
    ship.wait(root, 60.0)
    uri = ship.tracking_uri(root)
    if uri.startswith("sqlite:///") and not os.path.exists(uri.removeprefix("sqlite:///")):
        pulled = any((root / "metrics/runs").glob("*.json"))
        print(PULLED if pulled else "there are no runs yet: make repro first", file=sys.stderr)
        return 1
    experiment = _experiment(uri)
    # Without the query the UI opens in its GenAI mode, which hides these runs, and without columns that tell them apart.
    query = f"workflowType=machine_learning&viewStateShareKey={VIEW}"
    fragment = f"#/experiments/{experiment.experiment_id}/runs?{query}" if experiment else ""
    if uri.startswith("http"):
        print(f"open {redact(uri).rstrip('/')}/{fragment}\n{LAYOUT}")
        return 0
    mlflow_settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    # Not as an argument, which every user of the machine can read.
    environment = {**os.environ, **mlflow_settings, "MLFLOW_BACKEND_STORE_URI": uri}
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", args.host, "--port", str(args.port), "--workers", "1"]
    if _is_listening(args.port):
        problem = f"something listens on port {args.port} already"
        raise InputError(problem, where="athanor ui", fix=f"athanor ui --port {args.port + 1}, or stop it")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT, too: a shell's background job ignores it
        signal.signal(signum, signal.default_int_handler)
    # A session of its own: at Ctrl-C its processes would each print a traceback.
    server = subprocess.Popen(command, env=environment, cwd=root, start_new_session=True)
    try:
        if _wait_until_listening(server, args.port):
            print(f"open http://127.0.0.1:{args.port}/{fragment}\n{LAYOUT}\n(Ctrl-C stops the server)", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        return 0


def _experiment(uri: str) -> Experiment | None:
    from mlflow.tracking import MlflowClient

    for name, value in {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}.items():
        os.environ.setdefault(name, value)
    try:
        return MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    except Exception as error:  # of MLflow, of SQLAlchemy, of a driver
        raise InputError(
            f"MLflow cannot use it: {in_one_line(error)}", where=redact(uri), fix="athanor doctor"
        ) from None


def _wait_until_listening(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; False when it has ended instead."""
    while server.poll() is None:
        if _is_listening(port):
            return True
        time.sleep(0.1)
    return False


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False

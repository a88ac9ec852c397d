"""The MLflow UI on the page that shows runs.

    python -m athanor ui [--port 5000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from athanor.pipeline import ship
from athanor.pipeline.machine import anchor
from athanor.pipeline.redact import redact
from athanor.pipeline.tracking import EXPERIMENT


def main() -> int:
    parser = argparse.ArgumentParser(description="open the MLflow UI on this checkout's runs")
    parser.add_argument("--port", type=int, default=5000)
    args = parser.parse_args()
    root = anchor()
    ship.wait(root, 60.0)
    uri = ship.tracking_uri(root)
    if uri.startswith("sqlite:///") and not os.path.exists(uri.removeprefix("sqlite:///")):
        print("there are no runs yet: make repro first", file=sys.stderr)
        return 1
    from mlflow.tracking import MlflowClient

    found = MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    # Without the query the UI opens in its GenAI mode, which hides these runs.
    page = f"#/experiments/{found.experiment_id}/runs?workflowType=machine_learning" if found else ""
    if uri.startswith("http"):
        print(f"open {redact(uri).rstrip('/')}/{page}")
        return 0
    print(f"open http://127.0.0.1:{args.port}/{page}\n(Ctrl-C stops the server)", flush=True)
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    # Not as an argument, which every user of the machine can read.
    environment = {**os.environ, **quiet, "MLFLOW_BACKEND_STORE_URI": uri}
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", "127.0.0.1", "--port", str(args.port), "--workers", "1"]
    try:
        return subprocess.call(command, env=environment, cwd=root)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""`athanor ui` with its real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request

from tests.e2e.clone import ROOT, environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_link_is_printed_when_the_server_answers(micro):
    port = free_port()
    command = [sys.executable, "-m", "athanor", "ui", "--port", str(port)]
    with subprocess.Popen(
        command, cwd=micro.path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as ui:
        try:
            # MLflow talks, too.
            link = next(line.split()[1] for line in ui.stdout if line.startswith("open "))
            assert link.startswith(f"http://127.0.0.1:{port}/#/experiments/")
            with urllib.request.urlopen(link, timeout=30) as answer:  # at once: no retry
                assert answer.status == 200
            again = subprocess.run(command, cwd=micro.path, env=environment(), capture_output=True, text=True)
            assert again.returncode == 1 and f"--port {port + 1}" in again.stderr
            os.killpg(ui.pid, signal.SIGINT)  # as the terminal does
            assert ui.wait(timeout=60) == 0
        finally:
            ui.kill()  # nothing that goes wrong above may hold up the tests


def test_results_that_were_pulled_are_told_from_none(tmp_path):
    """Seen: after dvc pull it advised make repro, which kept all stages."""
    command = [sys.executable, "-m", "athanor", "ui"]
    (tmp_path / ".dvc").mkdir()
    for name, words in (("nothing", "make repro first"), ("metrics/runs/export.json", "dvc pull: athanor summary")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
        said = subprocess.run(
            command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True
        )
        assert said.returncode == 1 and words in said.stderr

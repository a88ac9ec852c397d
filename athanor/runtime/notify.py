"""Tells somebody elsewhere how a run fares: the machine setting `notify`, a command or an address.

A command finds what there is to tell in ATHANOR_EVENT and ATHANOR_TEXT, whatever shell quoting it uses. An address is
sent JSON with the text under the names that chat services read: `text` (Slack, Mattermost), `content` (Discord).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import urllib.request

from athanor.base.errors import AthanorError
from athanor.runtime.machine import machine
from athanor.runtime.redact import redact
from athanor.runtime.terminal import say

CRITICAL, STALL, FAILED, DONE = "critical", "stall", "failed", "done"
TIMEOUT_S = 10.0


def notify(event: str, text: str, *, wait: bool = True) -> None:
    """Tell it, if the setting says where; without `wait` in a thread. A notice that fails is a line on the terminal."""
    try:
        target = machine().notify
    except AthanorError:  # what is told may be this very mistake in machine.yaml
        return
    if target:
        thread = threading.Thread(target=_send, args=(target, event, redact(text)), name="notify", daemon=True)
        thread.start()
        if wait:
            thread.join(2 * TIMEOUT_S)


def _send(target: str, event: str, text: str) -> None:
    try:
        if target.startswith(("http://", "https://")):
            body = json.dumps({"event": event, "text": text, "content": text}).encode()
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        else:
            env = {**os.environ, "ATHANOR_EVENT": event, "ATHANOR_TEXT": text}
            subprocess.run(target, shell=True, env=env, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # Not the target: an address may hold a secret.
        words = (
            f"status {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else type(error).__name__
        )
        say(f"notify of machine.yaml did not work ({words}); the run is not touched by that")

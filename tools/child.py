"""A contender's process, which works for a turn when it is told to and waits otherwise."""

from __future__ import annotations

import contextlib
import json
import subprocess
from typing import Any


class Child:
    def __init__(self, name: Any, errors: Any, command: list[str], **options: Any) -> None:
        self.name, self.errors = name, errors
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self.child: Any = subprocess.Popen(command, text=True, **pipes, **options)

    def turn(self) -> Any:
        """A turn, and what it says of it."""
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write("\n")
            self.child.stdin.flush()
        return self.told()

    def told(self) -> Any:
        """What it says next; RuntimeError when it has ended."""
        line = self.child.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"{self.name}: {(self.errors.read().strip().splitlines() or ['ended'])[-1]}")
        return json.loads(line)

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()
        self.errors.close()

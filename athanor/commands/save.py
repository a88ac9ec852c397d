"""`athanor save`: a checkpoint now, without an end. See athanor/commands/stop.py."""

from __future__ import annotations

import sys

from athanor.commands import stop
from athanor.pipeline.guards import SAVE


def main() -> int:
    return stop.main(SAVE)


if __name__ == "__main__":
    sys.exit(main())

"""python -m athanor: see athanor/commands/cli.py."""

import sys

from athanor.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

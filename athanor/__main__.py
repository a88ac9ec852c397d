"""python -m athanor: see athanor/cli/cli.py."""

import sys

from athanor.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""python -m athanor: see athanor/pipeline/cli.py."""

import sys

from athanor.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())

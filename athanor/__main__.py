"""python -m athanor: see athanor/cli/cli.py."""

import os
import sys

if __name__ == "__main__":
    if not __package__:  # `python athanor`, as .venv/bin/athanor does: `python -m` loads modules of this folder first
        sys.path[0] = os.getcwd()
    from athanor.runtime.start import refuse_shadows, settle

    refuse_shadows(os.getcwd())
    settle()
    from athanor.cli.cli import main

    sys.exit(main())

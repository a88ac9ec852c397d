"""Records which fields of parameter dataclasses a process reads; hermetic.py puts it in the place of sitecustomize.

A read counts when code outside the parameter classes asks for the value, or
calls a method of theirs that does. Checks at building (`__post_init__`, the
strict builder), copies (`asdict`, `replace`) and what `dataclass` generates
(`__eq__`, `__repr__`) do not count: they happen to every field.

Standard library only: it runs before anything else is imported.
"""

import atexit
import dataclasses
import json
import os
import sys
from pathlib import Path

FOLDER = "PARAM_READS"  # environment variable: where each process leaves a file
CONFIG = "athanor.model.config"  # ModelParams is copied into a ModelConfig, which is then read
BUILDING = ("dataclasses", "copy", "athanor.base.strict")

reads: set[str] = set()
plain_dataclass = dataclasses.dataclass


def dataclass(cls=None, /, **options):
    if cls is None:
        return lambda decorated: dataclass(decorated, **options)
    made = plain_dataclass(cls, **options)
    if is_recorded(made.__module__):
        watch(made)
    return made


def is_recorded(module):
    """Whether a module holds classes of parameters: `params` or `…_params` in the folder that reads them."""
    return module == CONFIG or (module.startswith("athanor.") and module.endswith("params"))


def watch(cls):
    names = frozenset(field.name for field in dataclasses.fields(cls))
    plain = cls.__getattribute__

    def __getattribute__(self, name):
        if name in names and counts(sys._getframe(1)):
            reads.add(f"{cls.__qualname__}.{name}")
        return plain(self, name)

    cls.__getattribute__ = __getattribute__


def counts(frame):
    """True when the read comes, maybe through methods of parameter classes, from code that uses the value."""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module in BUILDING or code.co_name == "__post_init__" or code.co_filename == "<string>":
            return False
        if not is_recorded(module):
            return True
        frame = frame.f_back
    return False


def leave():
    if reads:
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(sorted(reads)))


if FOLDER in os.environ:
    dataclasses.dataclass = dataclass
    atexit.register(leave)

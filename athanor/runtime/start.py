"""The first thing a command or a stage does: see to how Python was started.

Modules of the standard library are imported here only where they are needed: a file of the checkout may have their name.
"""

from __future__ import annotations

import os
import sys

OURS = ("athanor", "stages", "tests", "tools")
HARMLESS = ("test", "this", "turtle")  # nothing imports these
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # where getpass.getuser looks before it asks the system


def settle() -> None:
    """Make output tolerant, name the user, and start this process again where its Python would change results.

    `python -O` drops the `assert` of the tests that judge a model's code, `-OO` the docstrings that exercises are made
    of. Without UTF-8 the names of files are other ones, and so are the hashes of folders.
    """
    _name_user()
    if (form := os.environ.get("PYTHONIOENCODING", "")) and ":" not in form:
        os.environ["PYTHONIOENCODING"] = f"{form}:backslashreplace"
    if sys.flags.optimize or sys.getfilesystemencoding() != "utf-8":
        if not form and sys.stdout is not None and sys.stdout.isatty():
            os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"
        os.environ["PYTHONUTF8"] = "1"
        os.environ.pop("PYTHONOPTIMIZE", None)
        program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        sys.stdout and sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *program[-2 if program[-2] == "-m" else -1 :], *sys.argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _name_user() -> None:
    """Give a user without an entry in passwd, as containers have, the name and home that DVC asks for."""
    import pwd

    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        if not any(map(os.environ.get, USER_VARIABLES)):
            os.environ["LOGNAME"] = f"uid{os.getuid()}"
        os.environ.setdefault("HOME", os.path.join(os.getcwd(), ".athanor", "home"))


def refuse_shadows(folder: str) -> None:
    """Exit where a file or folder has the name of a module: Python would import it in that module's place."""
    for name in sorted(os.listdir(folder)):
        stem, end = os.path.splitext(name)
        package = not end and os.path.isfile(os.path.join(folder, name, "__init__.py"))
        if (end == ".py" or package) and stem not in OURS and (whose := _module(stem)):
            what = f"{name}: has the name of a module of {whose}, and Python would import it in its place"
            sys.exit(f"{what}. Fix: mv {name} my_{name}")


def _module(stem: str) -> str:
    """Whose module has this name: Python's or an installed package; "" for none."""
    if stem in sys.stdlib_module_names and stem not in HARMLESS:
        return "Python"
    installed = [path for path in sys.path if path.endswith("-packages")]
    here = (f"{path}/{stem}{end}" for path in installed for end in ("", ".py"))
    return "an installed package" if any(map(os.path.exists, here)) else ""

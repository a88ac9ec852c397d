"""Functions, tasks and errors as JSON: what travels between the processes and machines of one run.

One form for every way of running, so that what works in one process works on
a cluster, and no pickle: an answer is read by a program that makes only its own
dataclasses and exceptions of it, and calls nothing else that it names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OWN = ("athanor",)  # the packages whose dataclasses an answer may be made of


def name_of(item: Any) -> str:
    """`module:name` of a function or class that other processes can import; TypeError for anything else."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", "<none>")
    if module == "__main__":  # a stage run as python -m stages.clean: others know it by that name
        module = getattr(sys.modules["__main__"].__spec__, "name", None)
    if not module or "<" in name:
        raise TypeError(f"{item!r} is no function or class at the top of a module, so no other process can import it")
    return f"{module}:{name}"


def item_of(name: str) -> Any:
    return pkgutil.resolve_name(name)


def pack(value: Any, where: str) -> Any:
    """A task as plain JSON that `unpack` turns back into an equal value; TypeError names the part that cannot travel.

    Understands None, bool, int, float, str, list, tuple, dict with text keys,
    Path, and dataclasses of a module made of these.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is list:
        return [pack(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [pack(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: pack(item, f"{where}.{key}") for key, item in value.items()}}
    if isinstance(value, Path):
        return {"path": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {"class": name_of(type(value)), "fields": {n: pack(getattr(value, n), f"{where}.{n}") for n in names}}
    raise TypeError(
        f"{where}: {value!r:.80} ({type(value).__name__}) cannot be sent to another process; a task is made of "
        "text, finite numbers, lists, tuples, dicts with text keys, paths and dataclasses"
    )


def unpack(value: Any, packages: tuple[str, ...] = OWN) -> Any:
    """What was packed; ValueError for a class that is no dataclass of these packages."""
    if isinstance(value, list):
        return [unpack(item, packages) for item in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        name = value["class"]
        kind = item_of(name) if name.partition(".")[0] in packages else None
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            raise ValueError(f"'{name}' is no dataclass of {', '.join(packages)}")
        return kind(**{name: unpack(item, packages) for name, item in value["fields"].items()})
    if "tuple" in value:
        return tuple(unpack(value["tuple"], packages))
    return Path(value["path"]) if "path" in value else {k: unpack(item, packages) for k, item in value["dict"].items()}


def pack_error(error: BaseException) -> dict[str, Any]:
    """An error as plain JSON; one with parts that cannot travel goes as a RuntimeError with its type and text."""
    trace = "".join(traceback.format_exception(error))
    args = (error.errno, error.strerror, error.filename) if isinstance(error, OSError) else error.args
    try:
        packed = {
            "class": name_of(type(error)),
            "args": pack(list(args), "args"),
            "state": pack({key: item for key, item in vars(error).items() if key != "__notes__"}, "state"),
        }
        if str(unpack_error({**packed, "trace": ""})) == str(error):
            return {**packed, "trace": trace}
    except Exception:  # whatever a foreign class does: the text still has to arrive
        pass
    args = [f"{type(error).__name__}: {error}"]
    return {"class": "builtins:RuntimeError", "args": args, "state": {"dict": {}}, "trace": trace}


def unpack_error(packed: dict[str, Any]) -> BaseException:
    """The error again: same type, message and fields. Where it happened stands in a note, below its traceback.

    One of a module that is not loaded here, or of no exception's type, is a RuntimeError.
    """
    name, args = packed["class"], unpack(packed["args"])
    loaded = name.partition(".")[0] in OWN or name.partition(":")[0] in sys.modules
    kind = item_of(name) if loaded else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        kind, args = RuntimeError, [f"{name}: {', '.join(map(str, args))}"]
    error = kind.__new__(kind, *args)  # not kind(...): our errors compose their message from keywords
    error.args = tuple(args[:2] if isinstance(error, OSError) else args)
    vars(error).update(unpack(packed["state"]))
    error.add_note(f"raised in a worker:\n{packed['trace']}")
    return error


def call_text(work: Callable[..., Any], name: str, task: Any, folder: Path) -> str:
    """One task as text that `run_call` of any process can do. Refuses what another process could not."""
    return json.dumps(
        {
            "cwd": str(Path.cwd()),
            "work": name_of(work),
            "name": name,
            "task": pack(task, f"task '{name}'"),
            "folder": str(folder.absolute()),
        },
        allow_nan=False,
    )

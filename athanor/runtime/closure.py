"""Which code a stage depends on: the static import closure of its module, cut at athanor/runtime.

`dvc.yaml` lists the library's folders that hold it, so that a change in evaluation never re-trains and a change in the
model does. A stage that needs a file or two of a folder may name these instead. This module computes the list, compares
it with dvc.yaml and, with --fix, rewrites it:

    python -m athanor deps [--fix]

Only the standard library's `ast` looks at the code; nothing is imported. The same command shows what dvc.yaml may not
say because it would make a cached result false or useless (`problems`).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from athanor.base.artifacts import sha256_bytes, write_text
from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml

PACKAGES = ("stages", "athanor")
CUT = "athanor.runtime"
PROBES = "probes"
SIDE = "side"
TEMPLATING = ("foreach", "matrix")


def graphs(root: Path) -> list[Path]:
    """dvc.yaml, and the files of side stages, which DVC sees only while a command runs one of them."""
    sides = [path for folder in (PROBES, SIDE) for path in sorted((root / folder).glob("*.yaml"))]
    return [root / "dvc.yaml", *(path for path in sides if path.name != "dvc.yaml")]


def module_path(root: Path, module: str) -> Path | None:
    """The file of a module of this repository, or None for anything else."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imports(root: Path, module: str, text: str) -> set[str]:
    """Modules of this repository that `module`, whose code is `text`, imports anywhere, also inside functions."""
    return {name for name in _imported(module, text) if module_path(root, name)}


@lru_cache(maxsize=1024)
def _imported(module: str, text: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AthanorError("relative import", where=f"{module}:{node.lineno}", fix="import by full name")
            base = node.module or ""
            names.add(base)
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            raise AthanorError(
                "dynamic import hides a dependency", where=f"{module}:{node.lineno}", fix="import by name"
            )
    return frozenset(name for name in names if name.split(".")[0] in PACKAGES)


def closure(root: Path, module: str) -> list[str]:
    """Paths, relative to root and sorted, of every file whose change may change what `module` does.

    Package `__init__` files count when they are not empty.
    """
    visited: set[str] = set()
    files: set[str] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        if name in visited or name == CUT or name.startswith(CUT + "."):
            continue
        visited.add(name)
        path = module_path(root, name)
        if path is None:
            raise AthanorError("no such module", where=name)
        text = path.read_text(encoding="utf-8")
        if path.name != "__init__.py" or text.strip():
            own = (path, path.with_suffix(".c"))  # what a module compiles has its name
            files.update(file.relative_to(root).as_posix() for file in own if file.exists())
        queue += imports(root, name, text)
        components = name.split(".")
        queue += [
            ".".join(components[:i]) for i in range(1, len(components)) if module_path(root, ".".join(components[:i]))
        ]
    return sorted(files)


def code_digest(root: Path, module: str) -> str:
    """Digest of the closure's syntax trees: comments, layout and docstrings do not count."""
    return digest_of(file_digests(root, module))


def file_digests(root: Path, module: str) -> dict[str, str]:
    """Each file of a module's closure with the digest of its syntax tree."""
    return {file: file_digest(root / file) for file in closure(root, module)}


def digest_of(files: Mapping[str, str]) -> str:
    """One digest of all of `file_digests`."""
    return sha256_bytes("\n".join(f"{file} {files[file]}" for file in sorted(files)).encode())


def file_digest(path: Path) -> str:
    """Digest of one file's syntax tree without docstrings, the same for every version of Python that can parse it.

    Of a file of C, its bytes.
    """
    if path.suffix == ".c":
        return sha256_bytes(path.read_bytes())
    return _text_digest(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=1024)  # stages share most files, and a plan asks for each of them
def _text_digest(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return sha256_bytes(repr(_plain(tree)).encode())


def _plain(node: Any) -> Any:
    """A syntax tree as nested tuples. Empty fields are left out: newer versions of Python add some, e.g. type_params."""
    if isinstance(node, ast.AST):
        fields = ((name, _plain(value)) for name, value in ast.iter_fields(node))
        return (type(node).__name__, *((name, value) for name, value in fields if value not in (None, ())))
    if isinstance(node, list):
        return tuple(_plain(item) for item in node)
    return node if node is None else (type(node).__name__, repr(node))


def stage_module(command: str) -> str:
    """The module of `python -m stages.<name>`, the only command a stage may have."""
    words = command.split()
    if words[:2] != ["python", "-m"] or len(words) != 3 or not words[2].startswith("stages."):
        raise AthanorError(f"command is '{command}'", where="dvc.yaml", fix="use python -m stages.<name>")
    return words[2]


def is_code(dep: str) -> bool:
    """Whether a stage's dependency is code: of this repository's packages, or any other file of Python."""
    return dep.endswith(".py") or PurePosixPath(dep).parts[:1] in [(package,) for package in PACKAGES]


def code_deps(files: Iterable[str], declared: Iterable[str]) -> list[str]:
    """The dependencies that hold the files of a closure: folders of the library, or files where `declared` has them so."""
    declared_paths = set(declared)
    folders = {file: "/".join(PurePosixPath(file).parts[:2]) for file in files}
    return sorted(
        {
            file if file in declared_paths and folder not in declared_paths else folder
            for file, folder in folders.items()
        }
    )


def compare(root: Path, fix: bool = False) -> list[str]:
    """Differences between dvc.yaml, side stages' files too, and the closures, in words; empty when they agree.

    With `fix`, a file that differs is rewritten with its comments kept. No fix helps a file in a folder of code
    dependencies that no stage uses which depends on the folder: an edit of it would make stages stale for nothing.
    """
    used: dict[str, set[str]] = {}
    differences = [problem for path in graphs(root) for problem in _compare(root, path, fix, used)]
    for folder, files in sorted(used.items()):
        unused = {
            file for path in (root / folder).rglob("*.py") if (file := path.relative_to(root).as_posix()) not in files
        }
        differences += [
            f"{folder}: no stage that depends on it uses {file}"
            for file in sorted(unused)
            if (root / file).stat().st_size
        ]
    return differences


def _compare(root: Path, path: Path, fix: bool, used: dict[str, set[str]]) -> list[str]:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    graph: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"))
    differences = []
    for name, stage in graph["stages"].items():
        files = closure(root, stage_module(stage["cmd"]))
        deps = list(stage.get("deps", []))
        declared = [dep for dep in deps if is_code(dep)]
        expected = code_deps(files, declared)
        differences += [f"{name}: missing code dependency {dep}" for dep in expected if dep not in declared]
        differences += [f"{name}: superfluous code dependency {dep}" for dep in declared if dep not in expected]
        for dep in expected:
            if (root / dep).is_dir():
                used.setdefault(dep, set()).update(file for file in files if file.startswith(f"{dep}/"))
        if fix:
            stage["deps"] = [dep for dep in deps if not is_code(dep)] + expected
    if fix and differences:
        import io

        out = io.StringIO()
        yaml.dump(graph, out)
        write_text(path, out.getvalue())
    return differences


def problems(root: Path) -> list[str]:
    """Broken rules of dvc.yaml, and of side stages' files, in words; empty when there are none."""
    main, *sides = graphs(root)
    messages = _problems(read_yaml(main))
    for path in sides:
        graph, name = read_yaml(path), path.relative_to(root).as_posix()
        messages += [f"{name}: {text}" for text in _problems(graph)]
        messages += [
            f"{name}: {stage}: works in {declared.get('wdir', path.parent.name)}. Fix: wdir: .."
            for stage, declared in graph["stages"].items()
            if declared.get("wdir") != ".."
        ]
    return messages


def _problems(graph: Mapping[str, Any]) -> list[str]:
    stages: dict[str, Any] = graph["stages"]
    messages = [f"{where}: ${{}} hides a parameter in the graph. Fix: write the value" for where in templated(graph)]
    if "vars" in graph:
        messages.append("vars: templating hides a parameter in the graph. Fix: write the values")
    needed = {dep for stage in stages.values() for dep in stage.get("deps", [])}
    for name, stage in stages.items():
        messages += [f"{name}: {key} hides stages. Fix: write each of them" for key in TEMPLATING if key in stage]
        if not any(key in stage for key in TEMPLATING):
            messages += [f"{name}: {text}" for text in (*command(stage), *code(stage), *outputs(stage, needed))]
    return messages


def templated(value: Any, where: str = "") -> Iterator[str]:
    """Keys of every text that holds `${`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from templated(str(key), where)
            yield from templated(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from templated(item, where)
    elif isinstance(value, str) and "${" in value:
        yield where


def command(stage: Mapping[str, Any]) -> Iterator[str]:
    try:
        stage_module(str(stage["cmd"]))
    except AthanorError as error:
        yield f"{error.what}. Fix: {error.fix}"


def code(stage: Mapping[str, Any]) -> Iterator[str]:
    """A stage's code dependencies are files, or folders of the library: more would make it stale by what it does not use."""
    for dep in stage.get("deps", []):
        parts = PurePosixPath(dep).parts  # nothing for the repository itself
        if not parts or (is_code(dep) and len(parts) < 2 and not dep.endswith(".py")):
            yield f"depends on all code, {dep}. Fix: name its folders (athanor deps --fix)"


def outputs(stage: Mapping[str, Any], needed: set[str]) -> Iterator[str]:
    """Every output is used by a stage or declared terminal, and kept in the cache.

    What lies in `metrics/` and `plots/` is for people and needs no consumer.
    DVC's metrics may stay out of the cache, because its run-cache keeps them, and no other output may.
    """
    outs = {path: options for kind in ("outs", "metrics", "plots") for path, options in entries(stage.get(kind, []))}
    options_of = dict(entries(stage.get("outs", [])))
    terminal = list((stage.get("meta") or {}).get("terminal", []))
    for path, options in outs.items():
        if options.get("persist"):
            yield f"{path} persists, so a new run would start from an old result. Fix: remove persist"
    for path, options in options_of.items():
        if options.get("cache") is False:
            yield f"{path} is an uncached output, which switches the run-cache off. Fix: make it a metric, or cache it"
        used = any(path == dep or PurePosixPath(path) in PurePosixPath(dep).parents for dep in needed)
        if used and path in terminal:
            yield f"{path} is declared terminal and has a consumer. Fix: remove it from meta.terminal"
        if not used and path not in terminal and not path.startswith(("metrics/", "plots/")):
            yield f"{path} has no consumer. Fix: remove the output, or name it in meta: {{terminal: [{path}]}}"
    for path in terminal:
        if path not in options_of:
            yield f"{path} is declared terminal and is no output. Fix: remove it from meta.terminal"


def entries(declared: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and options of outputs, which DVC lets one write as a path or as a path with options."""
    for entry in declared:
        if isinstance(entry, Mapping):
            yield from ((str(path), options or {}) for path, options in entry.items())
        else:
            yield str(entry), {}


def main() -> int:
    parser = argparse.ArgumentParser(description="check the code dependencies and other rules of dvc.yaml")
    parser.add_argument("--fix", action="store_true", help="rewrite the code dependencies")
    args = parser.parse_args()
    broken_rules = problems(Path.cwd())  # no rewriting mends these
    differences = compare(Path.cwd(), args.fix) if not broken_rules else []
    for line in broken_rules or differences:
        print(("fixed: " if args.fix and differences else "") + line)
    return 1 if broken_rules or (differences and not args.fix) else 0


if __name__ == "__main__":
    sys.exit(main())

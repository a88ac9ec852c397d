"""The running interpreter's standard library, read from its source files and never imported.

One scan, one `ast.parse` for each file, feeds three users: documentation as
prose and code (python_documents) and question-answer pairs
(instruct/docstrings). Importing is avoided because modules act on import
(`antigravity` opens a browser) and because what an import shows depends on
the machine.
"""

from __future__ import annotations

import ast
import functools
import io
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.text import globs

LICENSE = "PSF-2.0"

# Tests and demos, what pip put there, code vendored from others, and what only some builds ship. One Python version
# then gives nearly one corpus whoever built it (distributions still move tkinter and distutils into other packages).
SKIPPED_FOLDERS = frozenset(
    "__phello__ __pycache__ _vendor dist-packages ensurepip idlelib lib-dynload lib2to3 site-packages test tests"
    " turtledemo".split()
)
# Written at build time, or changed by distributions.
SKIPPED_FILES = ("_sysconfigdata", "_sysconfig_vars", "site.py", "sitecustomize.py", "usercustomize.py")
TOPICS = "pydoc_data/topics.py"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. `tree` is its syntax tree; `lines` keep their line ends."""

    name: str  # dotted import name
    path: str  # relative, with forward slashes
    text: str
    tree: ast.Module
    license: str = LICENSE
    package: str = ""  # the distribution it belongs to, "" for the standard library

    @property
    def meta(self) -> Facts:
        """The origin of a document that is made from the module, for its `meta`."""
        return {"module": self.name, **({"package": self.package} if self.package else {})}

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree; walking it costs more than parsing, so it is done once."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def string_lines(self) -> frozenset[int]:
        """1-based numbers of lines that begin inside a string literal, so that `#` there is no comment."""
        spans = [
            (node.lineno, node.end_lineno)
            for node in self.nodes
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno
        ]
        return frozenset(number for first, last in spans for number in range(first + 1, last + 1))


@dataclass(frozen=True)
class Entry:
    """A module, class, function or method with its documentation."""

    name: str  # dotted, as one would import it
    node: ast.Module | Definition
    doc: str  # cleaned docstring, may be empty
    parent: ast.Module | Definition | None

    @property
    def kind(self) -> str:
        if isinstance(self.node, ast.Module):
            return "module"
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "method" if isinstance(self.parent, ast.ClassDef) else "function"


def root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def provenance(paths: list[Path], base: Path) -> Facts:
    """The interpreter's version and one digest over the names and bytes of all files read."""
    return {
        "interpreter": f"{platform.python_implementation()} {platform.python_version()}",
        "files": len(paths),
        "files_sha256": globs.digest_of([(path.relative_to(base).as_posix(), path) for path in paths]),
        "license": LICENSE,
    }


def source_files(base: Path) -> list[Path]:
    """Every file the scan reads, in the order of its relative path."""
    files = []
    for path in base.rglob("*.py"):
        parts = path.relative_to(base).parts
        if SKIPPED_FOLDERS.isdisjoint(parts[:-1]) and not any(folder.startswith("config-") for folder in parts):
            if not path.name.startswith(SKIPPED_FILES) or len(parts) > 1:
                files.append((parts, path))
    if not files:
        raise InputError(
            "the interpreter has no standard library source files",
            where=base,
            fix="use a Python that ships its .py files, or replace the source of type python in params.yaml",
        )
    return [path for _, path in sorted(files)]


def scan(base: Path, tick: Tick = ignore) -> Iterator[Module]:
    """Parse every source file except the topics, in path order; `tick` is called with the bytes of each."""
    for path in source_files(base):
        relative = path.relative_to(base).as_posix()
        data = path.read_bytes()
        tick(len(data))
        if relative == TOPICS or is_codec_table(relative):
            continue
        yield Module(module_name(relative), relative, *parse(data, str(path)))


def parse(data: bytes, where: str) -> tuple[str, ast.Module]:
    """Text (with \\n line ends) and tree of one file; InputError when it is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in a docstring is the library's affair
            text = decode(data)
            return text, ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"cannot be parsed ({error})", where=where, fix="reinstall this Python") from None


def decode(data: bytes) -> str:
    """Source bytes as text: honours a BOM and a PEP 263 declaration, form feeds become plain line ends."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    # Other characters that str.splitlines() takes for line ends would shift line numbers against ast's.
    return text.translate(dict.fromkeys((0x0B, 0x0C, 0x1C, 0x1D, 0x1E)) | dict.fromkeys((0x85, 0x2028, 0x2029), " "))


def is_codec_table(relative: str) -> bool:
    """The generated character tables of `encodings`: 1.4 MB of hexadecimal numbers that teach nothing."""
    folder, _, name = relative.rpartition("/")
    return folder == "encodings" and name not in ("__init__.py", "aliases.py", "idna.py", "punycode.py", "utf_8_sig.py")


def module_name(relative: str) -> str:
    return relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def topics(base: Path) -> dict[str, str]:
    """The language reference pages behind `help('with')`, by topic."""
    path = base / TOPICS
    if not path.is_file():
        raise InputError("file not found", where=path, fix="use a Python that ships pydoc_data")
    _, tree = parse(path.read_bytes(), str(path))
    pages: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pages |= ast.literal_eval(node.value)
    return {name: pages[name] for name in sorted(pages)}


def entries(module: Module) -> Iterator[Entry]:
    """The module and its classes, functions and methods in source order; functions inside functions are left out."""
    yield Entry(module.name, module.tree, _doc(module.tree), None)
    yield from _definitions(module.name, module.tree)


def _definitions(prefix: str, parent: ast.AST) -> Iterator[Entry]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            yield Entry(name, node, _doc(node), parent)
            if isinstance(node, ast.ClassDef):
                yield from _definitions(name, node)
        elif isinstance(node, (ast.If, ast.Try)):  # conditional definitions
            for inner in _definitions(prefix, node):
                yield inner if inner.parent is not node else Entry(inner.name, inner.node, inner.doc, parent)


def _doc(node: ast.Module | Definition) -> str:
    return "\n".join(line.rstrip() for line in (ast.get_docstring(node) or "").split("\n")).strip()


def docstring_node(node: ast.AST) -> ast.Expr | None:
    """The statement that holds the docstring of a module, class or function."""
    body = getattr(node, "body", [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return body[0] if isinstance(body[0].value.value, str) else None
    return None


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, drop_self: bool = True) -> str:
    """The arguments of a function as source text, without annotations' line breaks: `src, dst, *, follow=True`."""
    text = ast.unparse(node.args)
    if drop_self and text.split(",")[0].strip(" /") in ("self", "cls"):
        text = text.partition(",")[2].strip().removeprefix("/").lstrip(", ")
    return text

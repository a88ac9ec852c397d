"""The library's folders import one way only, as docs/architecture.md draws them. Below 1 s."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# From what is used to what uses it. A folder may import those before it.
ORDER = (
    "base", "text", "words", "model", "data", "tokenizer", "quality", "sources", "classifiers", "cleaning",
    "tokenizer_training", "sharding", "chat_data", "training", "decoding", "evaluation", "rewards", "export", "tuning",
    "synthesis", "hardware", "monitor", "troubles", "runtime", "sizing", "origins", "catalog", "serving", "stages", "cli",
)  # fmt: skip
WATCHERS = (
    "hardware",
    "monitor",
    "troubles",
    "runtime",
    "sizing",
    "origins",
    "catalog",
    "serving",
    "cli",
)  # fmt: skip; no result depends on them
LETS_IN = {"stages": {"runtime"}}  # a stage's code ends where the runtime begins


def folder(module: str) -> str:
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "athanor" else top


def edges() -> set[tuple[str, str, str]]:
    """(importing folder, imported folder, file) of every import of our own code, those inside functions too."""
    found = set()
    for path in (*(ROOT / "athanor").rglob("*.py"), *(ROOT / "stages").glob("*.py")):
        name = path.relative_to(ROOT)
        here = name.parts[1] if name.parts[0] == "athanor" and len(name.parts) > 2 else name.parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = (
                    [node.module or ""]
                    if node.module != "athanor"
                    else [f"athanor.{alias.name}" for alias in node.names]
                )
            found |= {
                (here, folder(module), str(name)) for module in modules if module.split(".")[0] in ("athanor", "stages")
            }
    return {edge for edge in found if edge[0] != edge[1] and edge[0] != "athanor"}


def test_every_folder_has_its_place():
    folders = {path.name for path in (ROOT / "athanor").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders | {"stages"} == set(ORDER)


def test_arrows_point_one_way():
    back = [edge for edge in edges() if ORDER.index(edge[1]) >= ORDER.index(edge[0])]
    assert not back, "\n".join(f"{file} of {here} imports {there}" for here, there, file in sorted(back))


def test_nothing_that_makes_a_result_imports_what_watches_it():
    wrong = [
        edge
        for edge in edges()
        if edge[1] in WATCHERS and edge[0] not in WATCHERS and edge[1] not in LETS_IN.get(edge[0], ())
    ]
    assert not wrong, "\n".join(f"{file} of {here} imports {there}" for here, there, file in sorted(wrong))

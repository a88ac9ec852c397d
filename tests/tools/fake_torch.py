"""A torch without any kernels, as a wheel: what an installer can see of one."""

from __future__ import annotations

import zipfile
from pathlib import Path

CODE = """from types import SimpleNamespace
__version__ = "{version}"
version = SimpleNamespace(cuda={cuda!r}, hip={hip!r})
"""


def wheel(folder: Path, version: str, *, name: str = "torch", cuda: str | None = None, hip: str | None = None) -> Path:
    """A wheel in an index that pip reads from `folder`'s address: file:///..."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / name / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", CODE.format(version=version, cuda=cuda, hip=hip))
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{each.name.replace("+", "%2B")}">{each.name}</a>' for each in path.parent.glob("*.whl"))
    (path.parent / "index.html").write_text(links)
    return path

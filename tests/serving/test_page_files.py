"""The files of the chat page, without a browser."""

from __future__ import annotations

import hashlib
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import athanor.serving

PAGE = Path(athanor.serving.__file__).parent / "page"
OWN = sorted(path for path in PAGE.iterdir() if path.suffix in (".js", ".css", ".html", ".svg"))


def test_each_vendored_file_is_the_one_in_the_list_and_comes_with_its_licence():
    rows = re.findall(
        r"^\| `(\S+)` \| `\S+` \| [\d.]+ \| `\S+` \| .*\((\S+)\) \| `([0-9a-f]{64})` \|$",
        (PAGE / "vendor" / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    listed = {name for row in rows for name in row[:2]} | {"README.md"}
    assert listed == {path.name for path in (PAGE / "vendor").iterdir()}
    for name, licence, expected in rows:
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == expected, name
        assert (PAGE / "vendor" / licence).stat().st_size > 700


def test_nothing_in_the_page_would_need_a_laxer_policy_or_another_host():
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        named = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        code = re.sub(r"(^|\s)//[^\n]*|/\*[\s\S]*?\*/", "", named, flags=re.MULTILINE)
        for odd in "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( createPolicy".split():
            assert odd not in code, f"{path.name}: {odd}"
        assert not re.search(r'setAttribute\("style"|\sstyle=|<style|<script>|\son[a-z]+="', text), path.name
        assert not re.search(r"""(src|href|url|from|import)\W{1,3}(https?:)?//""", code), path.name


def test_every_file_that_the_page_names_is_there():
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'"/page/([\w./]+)"', text) + re.findall(r'from "\./([\w./]+)"', text):
            assert (PAGE / name).is_file(), f"{path.name} names {name}"


def test_the_page_is_part_of_the_package():
    text = (PAGE.parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    patterns = tomllib.loads(text)["tool"]["setuptools"]["package-data"]["athanor.serving"]
    for path in PAGE.rglob("*"):
        name = path.relative_to(PAGE.parent).as_posix()
        assert path.is_dir() or any(fnmatch(name, pattern) for pattern in patterns), name


def test_no_file_of_ours_is_long():
    assert {path.name for path in OWN if len(path.read_text(encoding="utf-8").splitlines()) > 350} == set()

"""The files of the chat page, without a browser. What its policy forbids is seen in the tests with one."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import athanor.serving

VENDOR = Path(athanor.serving.__file__).parent / "page/vendor"


def test_each_vendored_file_is_the_one_in_the_list_and_comes_with_its_licence():
    row = r"^\| `(\S+)` \| `\S+` \| [\d.]+ \| `\S+` \| .*\((\S+)\) \| `([0-9a-f]{64})` \|$"
    rows = re.findall(row, (VENDOR / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {"README.md"}
    for name, licence, digest in rows:
        assert (
            hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
            and (VENDOR / licence).stat().st_size > 700
        )
        names |= {name, licence}
    assert names == {path.name for path in VENDOR.iterdir()}

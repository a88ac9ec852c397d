"""The files of the chat page, without a browser. What its policy forbids is seen in the tests with one."""

from __future__ import annotations

import re

from athanor.base.artifacts import sha256_file
from tests.serving.live import ROOT

VENDOR = ROOT / "athanor/serving/page/vendor"


def test_each_vendored_file_is_the_one_in_the_list_and_comes_with_its_licence():
    row = r"^\| `(\S+)` \| `\S+` \| [\d.]+ \| `\S+` \| .*\((\S+)\) \| `([0-9a-f]{64})` \|$"
    rows = re.findall(row, (VENDOR / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"README.md", *(name for row in rows for name in row[:2])} == {path.name for path in VENDOR.iterdir()}
    for name, licence, digest in rows:
        assert sha256_file(VENDOR / name) == digest, name
        assert (VENDOR / licence).stat().st_size > 700

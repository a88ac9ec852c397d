"""A side stage by real DVC: what `--force` runs and what it leaves alone. About 10 s."""

from __future__ import annotations

import json
import re
import sys

from tests.cli import toy_pipeline as toy
from tests.e2e.clone import ROOT, Clone

CALL = "import sys; from pathlib import Path; from athanor.cli import side; "
CALL += "sys.exit(side.repro(Path.cwd(), Path('probes/x.yaml'), 'x', 'force' in sys.argv))"


def test_force_runs_nothing_upstream(tmp_path):
    """`dvc repro --force` forces all that a stage depends on: hours, and requests that are paid for again."""
    root = toy.make(tmp_path / "toy")
    (root / "probes").mkdir()
    side = {"wdir": "..", "cmd": "cp b/part.txt x", "deps": ["b"], "outs": ["x"]}
    (root / "probes/x.yaml").write_text(json.dumps({"stages": {"x": side}}))

    def ran(*words: str) -> list[str]:
        done = Clone(root).run(sys.executable, "-c", CALL, *words, PYTHONPATH=str(ROOT), ATHANOR_TRACKING="off")
        assert not (root / "probes/dvc.yaml").exists()
        return re.findall(r"Running stage '([^']+)'", done.stdout)

    mine = "probes/dvc.yaml:x"
    assert ran() == ["a", "b", mine] and ran() == []
    assert ran("force") == [mine]
    # What it depends on is brought up to date all the same.
    (root / "params.yaml").write_text(json.dumps(toy.PARAMS | {"a": {"value": 2, "fold": 10, "more": []}}))
    assert ran("force") == ["a", "b", mine]

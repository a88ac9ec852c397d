"""The health monitor of a run that trains: each finding goes to the terminal, the journal and a file.

The monitor reads what the journal reads, so a resumed run first goes through
its journal again and then knows what it would know without the interruption.
A finding that the journal holds is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from athanor.base.artifacts import write_json
from athanor.monitor.finding import Finding, status
from athanor.monitor.monitor import Reader
from athanor.monitor.thresholds import Thresholds
from athanor.runtime import notify
from athanor.runtime.journal import Journal, rows
from athanor.runtime.redact import redact

FILE = "health.json"


class Health:
    """Feeds one journal's rows to the monitor as they are written. `say` shows a line to the user."""

    def __init__(
        self, journal: Journal, say: Callable[[str], None], thresholds: Thresholds, plan: Mapping[str, Any]
    ) -> None:
        self.journal, self.say, self.broken, self.phase = journal, say, False, plan["phase"]
        self.reader = Reader(plan["phase"], thresholds)
        for row in rows(journal.path.read_bytes()):
            self.reader.line(row)
        recorded = {(finding.rule, finding.step, finding.level) for finding in self.reader.recorded}
        if self.reader.monitor is None:
            journal.event("training", **plan)
            self.reader.line({"event": "training", **plan})
        self._report(
            [finding for finding in self.reader.findings if (finding.rule, finding.step, finding.level) not in recorded]
        )

    def see(self, step: int, values: Mapping[str, float]) -> None:
        """Look at numbers that the journal has just taken. Trouble of the monitor's own never stops a training."""
        if self.broken:
            return
        try:
            findings = self.reader.line({"s": step, "m": values})
        except Exception as error:
            self.broken = True
            self.say(f"the health monitor stopped at step {step} ({error!r}); the training goes on")
            return
        if findings:
            self._report(findings)

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.say(str(finding))
            if finding.level == notify.CRITICAL:
                notify.notify(finding.level, f"{self.phase}: {finding}", wait=False)
            self.journal.event("finding", **finding.to_dict())
        summary = {
            "status": status(self.reader.findings),
            "findings": [each.to_dict() for each in self.reader.findings],
        }
        write_json(self.journal.folder / "files" / FILE, redact(summary))

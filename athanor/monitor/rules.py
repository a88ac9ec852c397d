"""Every rule by its name, in the order in which they look at a step."""

from __future__ import annotations

from athanor.monitor import gradient_rules, jump_rules, loss_rules, machine_rules
from athanor.monitor.rule import Rule

RULES: dict[str, type[Rule]] = {
    **loss_rules.RULES,
    **jump_rules.RULES,
    **gradient_rules.RULES,
    **machine_rules.RULES,
}

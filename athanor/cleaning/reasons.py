"""Reasons for which a document leaves the corpus, numbered as the decisions on disk number them."""

from __future__ import annotations

from athanor.cleaning import rules

KEPT = -1
EXACT, NEAR = "exact_duplicate", "near_duplicate"
EXACT_VAL, NEAR_VAL = "exact_duplicate_of_val", "near_duplicate_of_val"
ITEM = "evaluation_item"
REASONS = (*rules.RULES, EXACT, NEAR, EXACT_VAL, NEAR_VAL, ITEM)

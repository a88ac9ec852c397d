"""Assertions in the helpers of these tests tell what differs, as those in the tests do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.pipeline.view", "tests.pipeline.shippers")

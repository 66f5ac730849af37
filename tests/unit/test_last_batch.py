"""The names of what may become of a last batch."""

from __future__ import annotations

import enum

import pytest

from stateful_pipes import LastBatchPolicy


def test_policies_are_found_by_name():
    dali = enum.Enum("LastBatchPolicy", {"FILL": 0, "DROP": 1, "PARTIAL": 2})
    assert [LastBatchPolicy(one) for one in ("FILL", dali.DROP, LastBatchPolicy.PARTIAL)] == list(LastBatchPolicy)
    for wrong in ("fill", 1, None, enum.Enum("Policy", {"FILL": 0}).FILL):
        with pytest.raises(ValueError, match="is not a valid LastBatchPolicy"):
            LastBatchPolicy(wrong)

"""One named value in a state, and the rule for what a saved one may be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stateful_pipes.fields import Field, adopted_seed, allowable, counter, fixed, identity, ruled, tally, text


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        (fixed(3), [3], [True, 3.0, "3", 4, None, np.int64(3)]),
        (fixed(True), [True], [1, 1.0, False, None]),
        (fixed(0.5), [0.5], ["0.5", 1, None, math.nan]),
        (fixed("x"), ["x"], ["y", b"x", None]),
        (allowable(3), [1, 3, 2**62], [0, -1, True, 3.0, None, "3", 2**63]),
        (adopted_seed(3), [0, 2**64 - 1], [-1, 2**64, True, 3.0, None, "3"]),
        (counter(3), [0, 2**63 - 2], [-1, 2**63 - 1, True, 3.0, None, math.nan]),
        (counter(3, 5), [0, 4], [5, -1]),
        (text("x"), ["", "y"], [b"", None, 3]),
        (identity("x"), ["x"], ["y", "", None, b"x"]),
        (identity(""), ["x", ""], [None, 3]),
    ],
    ids=lambda value: f"{value.kind} {value.value}" if isinstance(value, Field) else "",
)
def test_what_a_field_accepts(field, good, bad):
    assert [value for value in good if not field.accepts(value)] == []
    assert [value for value in bad if field.accepts(value)] == []


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (fixed("x"), "'x'"),
        (fixed(3), "3"),
        (allowable(3), "at least 1"),
        (adopted_seed(3), "0 to 2**64 - 1"),
        (counter(3), f"0 to {2**63 - 2}"),
        (counter(3, 5), "0 to 4"),
        (text("x"), "string"),
    ],
    ids=lambda value: value.kind if isinstance(value, Field) else "",
)
def test_it_says_what_is_right(field, words):
    assert words in field.expects


def test_values_are_fixed_unless_a_rule_is_named():
    assert ruled({"a": 1, "seed": 2}, {"seed": adopted_seed, "unused": counter}) == {"a": fixed(1), "seed": adopted_seed(2)}


def test_what_may_be_missing_here_is_a_field_all_the_same():
    rules = {"skipped": tally, "fingerprint": identity, "seed": adopted_seed}
    assert ruled({}, rules) == {"skipped": tally(0), "fingerprint": identity("")}
    assert [field.may_be_missing for field in (tally(0), identity("x"), fixed(3), text(""))] == [True, True, False, False]

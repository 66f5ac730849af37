"""Weights over positions: which source each position is drawn from."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateful_pipes.nodes.schedule import Schedule
from stateful_pipes.rng import derive_each


def choices(weights, count, key=5, names=("a", "b", "c"), left="000"):
    return Schedule(names, weights).choices(key, 0, count, left)


def expected(shares, key, positions):
    """The same by exact fractions: the source in whose part of [0, 1) the position's 64 bits lie."""
    found = []
    for drawn in derive_each(key, positions):
        ends = [sum(shares[: number + 1]) for number in range(len(shares))]
        found.append(next(number for number, end in enumerate(ends) if Fraction(drawn, 2**64) < end))
    return found


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), key=st.integers(0, 2**64 - 1))
def test_a_source_is_chosen_where_the_hash_lies_in_its_part(weights, key):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    names, left = range(len(weights)), "0" * len(weights)
    assert Schedule(names, weights).choices(key, 0, 40, left) == expected(shares, key, range(40))


@pytest.mark.parametrize(
    "weights",
    [
        (1, 2, 1),
        np.array([0.25, 0.5, 0.25]),
        {"c": 10, "a": 10, "b": 20},
        {0: [1, 2, 1]},
        {0: {"b": 2, "c": 1, "a": 1}},
        {0: np.array([1, 2, 1]), 10**18: [3, 1, 1]},
        [Fraction(1, 4), 0.5, np.float32(0.25)],
    ],
    ids=str,
)
def test_ways_to_say_the_same(weights):
    assert choices(weights, 300) == choices([1, 2, 1], 300)


def test_the_text_is_the_shares():
    assert str(Schedule("ab", [0.7, 0.3])) == "0:7/10,3/10" == str(Schedule("ab", {"b": 3, "a": 7}))
    assert str(Schedule("ab", {0: [1, 0], 8: [1, 2]})) == "0:1,0;8:1/3,2/3"


def test_a_schedule_changes_at_its_positions():
    schedule = {0: [1, 0, 0], 10: [0, 1, 0], 600: [0, 0, 1], 601: [0, 1, 0]}
    assert choices(schedule, 700) == [0] * 10 + [1] * 590 + [2] + [1] * 99


def test_what_is_left_out_is_not_chosen_and_the_others_keep_their_ratio():
    found = choices([5, 1, 3], 20_000, left="100")
    assert set(found) == {1, 2}
    assert found == [1 + number for number in expected([Fraction(1, 4), Fraction(3, 4)], 5, range(20_000))]


@given(data=st.data())
def test_choices_do_not_depend_on_what_was_asked_before(data):
    schedule = Schedule("ab", {0: [1, 2], 300: [5, 1]})
    for _ in range(data.draw(st.integers(1, 6))):
        key, left = data.draw(st.sampled_from([(1, "00"), (1, "01"), (2, "00")]))
        first, count = data.draw(st.integers(0, 600)), data.draw(st.integers(1, 300))
        fresh = Schedule("ab", {0: [1, 2], 300: [5, 1]})
        assert schedule.choices(key, first, count, left) == fresh.choices(key, 0, 1000, left)[first : first + count]


def test_weights_far_apart():
    assert choices([10**30, 1, 0], 1000) == [0] * 1000
    assert choices([1e-300, 0, 1], 1000) == [2] * 1000


def test_zeros():
    schedule = Schedule("ab", {0: [0, 1], 5: [1, 1]})
    assert schedule.has_zeros()
    assert not schedule.has_zeros(at_last=True)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ([1, 2], ValueError, r"one for each of 3 sources, got \[1, 2\]"),
        ([1, -0.5, 1], ValueError, r"not be negative, and not all 0, got \[1, -0.5, 1\]"),
        ([0, 0, 0.0], ValueError, "not all 0"),
        ([1, float("nan"), 1], ValueError, "finite, got"),
        ([1, float("inf"), 1], ValueError, "finite, got"),
        ([1, True, 1], TypeError, "a weight must be a number, got True"),
        ([1, "2", 1], TypeError, "a weight must be a number, got '2'"),
        ([1, None, 1], TypeError, "a weight must be a number, got None"),
        ([1, Decimal(1), 1], TypeError, "a weight must be a number, got Decimal"),
        ("123", TypeError, "a weight must be a number, got '1'"),
        (0.5, TypeError, "a sequence or a mapping, got 0.5"),
        ([], ValueError, "one for each of 3 sources"),
        ({}, ValueError, "must name the sources"),
        ({"a": 1, "b": 2}, ValueError, r"must name the sources \('a', 'b', 'c'\), got \['a', 'b'\]"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, ValueError, "must name the sources"),
        ({1: [1, 1, 1]}, ValueError, r"ascend from 0, got \[1\]"),
        ({0: [1, 1, 1], 9: [1, 2, 1], 5: [1, 1, 1]}, ValueError, r"ascend from 0, got \[0, 9, 5\]"),
        ({0: [1, 1, 1], -1: [1, 2, 1]}, ValueError, "from 0 to"),
        ({0: [1, 1, 1], 2**63: [1, 2, 1]}, ValueError, "from 0 to"),
        ({"0": [1, 1, 1]}, ValueError, "must name the sources"),
        ({0: [1, 1, 1], 5: [0, 0, 0]}, ValueError, "not all 0"),
    ],
    ids=str,
)
def test_wrong_weights(weights, error, words):
    with pytest.raises(error, match=words):
        Schedule(("a", "b", "c"), weights)

"""Counts, values and lists in messages."""

from __future__ import annotations

import pytest

from stateful_pipes.wording import listed, short_repr, shortened


class Broken:
    def __repr__(self):
        raise ValueError("no words")


class Lines:
    def __repr__(self):
        return "Lines(\n    a  b,\n)"


@pytest.mark.parametrize("length", [0, 1, 9, 10])
def test_a_text_that_is_short_enough_is_left(length):
    assert shortened("x" * length, 10) == "x" * length


@pytest.mark.parametrize("length", [11, 12, 1000])
def test_a_longer_text_is_cut_to_the_length(length):
    assert shortened("x" * length, 10) == "xxxxxxx..."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a  b\n", "'a  b\\n'"),
        (b"\n", "b'\\n'"),
        (Lines(), "Lines( a  b, )"),
        ("x" * 100, f"'{'x' * 76}..."),
        ({}, "{}"),
    ],
)
def test_a_value_is_shown_in_a_line(value, shown):
    assert short_repr(value) == shown


def test_of_a_value_that_cannot_be_shown_its_type_is():
    assert short_repr(Broken()) == "a value of type Broken"
    assert short_repr(10**5000) == "a value of type int"


def test_a_value_is_shown_as_long_as_it_may_be():
    assert short_repr("abcdefgh", 6) == "'ab..."


@pytest.mark.parametrize(
    ("most", "shown"), [(0, ", ..."), (1, "'a', ..."), (2, "'a', 'b', ..."), (3, "'a', 'b', 'c'"), (9, "'a', 'b', 'c'")]
)
def test_a_list_says_where_it_is_cut(most, shown):
    assert listed("abc", most) == shown


def test_only_what_is_listed_is_put_into_words():
    asked = []

    def show(value):
        asked.append(value)
        return str(value)

    assert listed(range(10**9), 2, show) == "0, 1, ..."
    assert asked == [0, 1]


def test_nothing_is_an_empty_list():
    assert listed([], 3) == ""

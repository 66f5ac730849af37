"""Permutations at any position. That they are bijections at every length, and uniform: tests/property/test_uniformity.py."""

from __future__ import annotations

import numpy as np
import pytest

from stateful_pipes.permutation import MAX_LENGTH, permute
from stateful_pipes.rng import derive

KEYS = (0, 1, 2**64 - 1, 0x0123456789ABCDEF)


def whole(key, length):
    return permute(key, length, np.arange(length))


def is_bijection(indices, length):
    seen = np.zeros(length, dtype=np.int64)
    np.add.at(seen, indices, 1)  # raises for an index past the end
    return len(indices) == length and (indices >= 0).all() and (seen == 1).all()


@pytest.mark.parametrize("key", KEYS)
def test_every_short_length_is_a_bijection(key):
    assert [length for length in range(1, 301) if not is_bijection(whole(key, length), length)] == []


@pytest.mark.parametrize("length", [1, 5, 1023, 1024, 20_000])
def test_any_position_at_once_is_the_same(length):
    """Whatever is asked beside a position, its index is the same: blocks, order, repetition."""
    expected = whole(7, length)
    rng = np.random.default_rng(0)
    for positions in (np.arange(length)[::-1], rng.integers(length, size=3 * length), np.array([length - 1, 0]), np.arange(0)):
        assert permute(7, length, positions).tolist() == expected[positions].tolist()
    assert [int(permute(7, length, np.array([p]))[0]) for p in range(0, length, 997)] == expected[::997].tolist()


@pytest.mark.parametrize("length", [10**12, 2**40 + 1, 2**62 - 1, MAX_LENGTH])
def test_huge_lengths(length):
    positions = np.concatenate([np.arange(50), length - 1 - np.arange(50), 50 + np.arange(5000) * (length // 5001)])
    indices = permute(1, length, positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < length
    assert len(set(indices.tolist())) == len(set(positions.tolist()))
    # Spread over the whole range: a tenth of it without any of 5,000 has a chance of 10**-200.
    assert len(set((indices // (length // 10 + 1)).tolist())) == 10


@pytest.mark.parametrize("length", [300, 1024, 65537])
def test_keys_give_unrelated_permutations(length):
    one, other = whole(derive(0, 1), length), whole(derive(0, 2), length)
    assert np.count_nonzero(one == other) < 12  # one is expected; 12 has a chance of 10**-10
    assert np.count_nonzero(one == np.arange(length)) < 12


def test_what_is_returned_may_be_changed():
    """Short permutations are kept: the caller must not hold the kept array."""
    first = whole(5, 10)
    expected = first.tolist()
    first[:] = -1
    assert whole(5, 10).tolist() == expected


def test_positions_are_not_changed():
    positions = np.arange(2000)
    permute(5, 2000, positions)
    assert (positions == np.arange(2000)).all()

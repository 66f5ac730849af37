"""The shuffles: bijections at every length, and not to be told from uniform by a chi-square test, which biased ones fail.

Seeds are fixed, so each test passes always or never. The statistic of a uniform shuffle has the degrees of freedom as its
mean and twice that as its variance; the bound is five deviations above the mean, and some more where there are few degrees.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from stateful_pipes import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    InfiniteRandomSampler,
    RandomSampler,
    WeightedRandomSampler,
    permutation,
)
from stateful_pipes.permutation import permute
from stateful_pipes.rng import derive

DRAWS = {3: 3000, 4: 3000, 5: 6000, 6: 7200, 7: 25_200}  # so many that the biased ones fail
LENGTH = 10_000  # the cipher's radices are both 100 here
NEAR_POWERS = sorted({2**k + d for k in range(1, 21) for d in (-1, 0, 1)} | {65_537})
LARGE = sorted({2**k + d for k in range(21, 40) for d in (-1, 0, 1)} | {10**k + d for k in range(7, 13) for d in (-1, 0)})
lengths = pytest.mark.parametrize("length", DRAWS)


# Not to be told from uniform.


def excess(counts, expected, degrees):
    """By how much the chi-square statistic is above its bound; a number below 0 for a uniform shuffle."""
    assert expected >= 5
    return ((np.asarray(counts) - expected) ** 2 / expected).sum() - (degrees + 5 * math.sqrt(2 * degrees) + 10)


def permutation_excess(shuffle, length, draws):
    """Of how often each permutation comes."""
    powers = length ** np.arange(length)
    drawn = np.array([int(np.dot(shuffle(seed, length), powers)) for seed in range(draws)])
    _, counts = np.unique(drawn, return_counts=True)
    outcomes = math.factorial(length)
    assert len(counts) <= outcomes
    return excess(np.pad(counts, (0, outcomes - len(counts))), draws / outcomes, outcomes - 1)


def by_seed(seed, length):
    return RandomSampler(length, seed=seed).indices(0, range(length))


def by_epoch(epoch, length):
    return RandomSampler(length, seed=1).indices(epoch, range(length))


def by_cycle(cycle, length):
    return InfiniteRandomSampler(length, seed=2).indices(0, range(cycle * length, (cycle + 1) * length))


def equal_weights(seed, length):
    return WeightedRandomSampler(np.ones(length), replacement=False, seed=seed).indices(0, range(length))


def walk_of_a_class(seed, length):
    labels = np.zeros(length, dtype=np.int64)
    return ClassBalancedBatchSampler(labels, length, labels=labels, seed=seed).indices(0, range(length))


def turn_of_groups(seed, length):
    labels = np.arange(length)
    return BalancedBatchSampler(labels, length, labels=labels, seed=seed).indices(0, range(length))


def swap_each_with_any(seed, length):
    """The classic fault: length**length equally likely ways for length! outcomes."""
    items = list(range(length))
    for one in range(length):
        other = derive(seed, one) % length
        items[one], items[other] = items[other], items[one]
    return items


def rotated(seed, length):
    """Each item is equally often in each place, and yet few permutations come."""
    return (np.arange(length) + derive(seed) % length) % length


@lengths
def test_permutations_over_seeds_are_uniform(length):
    assert permutation_excess(by_seed, length, DRAWS[length]) < 0


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("shuffle", [by_epoch, by_cycle, equal_weights, walk_of_a_class, turn_of_groups])
def test_permutations_over_whatever_names_them_are_uniform(shuffle, length):
    assert permutation_excess(shuffle, length, 1500) < 0


@lengths
def test_biased_permutations_are_found(length):
    assert permutation_excess(swap_each_with_any, length, DRAWS[length]) > 0
    assert permutation_excess(rotated, length, DRAWS[length]) > 0


@pytest.mark.parametrize("length", [5, 6])
def test_the_cipher_is_not_for_so_few_items(length, monkeypatch):
    monkeypatch.setattr(permutation, "_SMALL", 1)
    assert permutation_excess(by_seed, length, DRAWS[length]) > 0


def test_the_first_two_at_the_shortest_length_that_the_cipher_is_for():
    length = permutation._SMALL
    drawn = np.array([permute(derive(3, seed), length, np.arange(2)) for seed in range(8 * length)])
    for place in (0, 1):
        assert excess(np.bincount(drawn[:, place], minlength=length), 8, length - 1) < 0
    assert (
        excess(np.bincount((drawn[:, 1] - drawn[:, 0]) % length, minlength=length)[1:], 8 * length / (length - 1), length - 2) < 0
    )


# Pairs: items that stand `lag` places apart.


def pairs_excess(shuffles, lag):
    """Of how often a pair comes: by both items' hundreds, by both their last two digits, and by their distance.

    The first two are tables whose margins are given, since each item comes once: hence their degrees of freedom.
    """
    tables = np.zeros((2, LENGTH))
    distances = np.zeros(LENGTH)
    for shuffled in shuffles:
        one, other = shuffled, np.roll(shuffled, -lag)
        tables[0] += np.bincount(one // 100 * 100 + other // 100, minlength=LENGTH)
        tables[1] += np.bincount(one % 100 * 100 + other % 100, minlength=LENGTH)
        distances += np.bincount((other - one) % LENGTH, minlength=LENGTH)
    each = distances.sum() / LENGTH
    assert distances[0] == 0
    return max(*(excess(table, each, 99**2) for table in tables), excess(distances[1:], each * LENGTH / (LENGTH - 1), LENGTH - 2))


def large_shuffles(count=100):
    return [permute(derive(5, seed), LENGTH, np.arange(LENGTH)) for seed in range(count)]


@pytest.fixture(scope="module")
def shuffled():
    return large_shuffles()


@pytest.mark.parametrize("lag", [1, 2, 3, 99, 100, 101, 5000])
def test_pairs_are_uniform(shuffled, lag):
    assert pairs_excess(shuffled, lag) < 0


def test_adjacent_items_are_as_often_adjacent_as_by_chance(shuffled):
    """One pair each way and permutation: a Poisson number of 2 for each, within five deviations."""
    adjacent = [int(np.count_nonzero(np.abs(np.diff(one)) == 1)) for one in shuffled]
    assert abs(sum(adjacent) - 2 * len(shuffled)) < 5 * math.sqrt(2 * len(shuffled))


def test_biased_pairs_are_found(shuffled, monkeypatch):
    rng = np.random.default_rng(0)

    def by_a_buffer():
        """As loaders do it that hold a part of the items and draw from that."""
        return np.argsort(np.arange(LENGTH) + rng.random(LENGTH) * LENGTH / 2)

    def linear():
        """One multiplication modulo the length."""
        return (np.arange(LENGTH) * (10 * rng.integers(LENGTH) + 3) + rng.integers(LENGTH)) % LENGTH

    def now_and_then_in_runs():
        """One item in a hundred is followed by its neighbour."""
        items = rng.permutation(LENGTH // 2) * 2
        return np.concatenate(
            [np.stack([items[:50], items[:50] + 1], 1).ravel(), rng.permutation(np.r_[items[50:], items[50:] + 1])]
        )

    for biased in (by_a_buffer, linear, now_and_then_in_runs):
        shuffles = [biased() for _ in range(len(shuffled))]
        assert all(len(set(one.tolist())) == LENGTH for one in shuffles[:3])
        assert pairs_excess(shuffles, 1) > 0, biased
    fair = [rng.permutation(LENGTH) for _ in range(len(shuffled))]
    assert pairs_excess(fair, 1) < 0
    monkeypatch.setattr(permutation, "_ROUNDS", 3)
    assert max(pairs_excess(large_shuffles(), lag) for lag in (1, 100)) > 0


# Bijections.


def strays(length, key):
    """Whether any index is missing, twice there or outside."""
    found = permute(key, length, np.arange(length))
    return len(found) != length or found.min() < 0 or found.max() >= length or (np.bincount(found, minlength=length) != 1).any()


def test_every_length_to_5000_is_a_bijection():
    assert [length for length in range(1, 5001) if strays(length, derive(0, length))] == []


@pytest.mark.parametrize("key", [0, 2**64 - 1, 0x0123456789ABCDEF])
def test_lengths_around_powers_of_two_are_bijections(key):
    assert [length for length in NEAR_POWERS if strays(length, key)] == []


def test_a_mapping_that_is_no_bijection_is_found(monkeypatch):
    monkeypatch.setattr("tests.property.test_uniformity.permute", lambda key, length, positions: positions * 3 % length)
    assert [length for length in range(1, 10) if strays(length, 0)] == [3, 6, 9]


def repeats(length):
    """Whether many positions, at both ends, in the middle and spread, have an image that is twice there, or outside."""
    middle, step = length // 2, length // 10_000
    positions = np.unique(np.r_[:10_000, middle : middle + 10_000, length - 10_000 : length, :length:step])
    found = permute(derive(1, length), length, positions)
    assert len(positions) > 30_000
    assert excess(np.bincount(found // (length // 100 + 1), minlength=100), len(found) / 100, 99) < 0  # all over the length
    return found.min() < 0 or found.max() >= length or len(np.unique(found)) < len(found)


def test_large_lengths_repeat_no_index():
    assert [length for length in LARGE if repeats(length)] == []

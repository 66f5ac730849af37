"""Labels as groups, and the shares of a cycle."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.samplers.groups import as_labels, cycle_shares, group, labels_of, ratios_of

DTYPES = ["int8", "uint8", "int16", "int32", "int64", "uint64", "bool"]


def members(groups):
    return {
        key: groups.members[start:stop].tolist()
        for key, start, stop in zip(groups.keys, groups.starts[:-1], groups.starts[1:], strict=True)
    }


def grouped_by_hand(*labels):
    found = {}
    for index, key in enumerate(zip(*labels, strict=True)):
        found.setdefault(key, []).append(index)
    return dict(sorted(found.items()))


@given(st.lists(st.sampled_from([-100, -3, 0, 1, 2, 100]), min_size=1, max_size=40))
def test_groups_are_those_of_a_dictionary(labels):
    found = members(group(np.array(labels)))
    assert list(found.items()) == list(grouped_by_hand(labels).items())


@pytest.mark.parametrize("labels", [[0, 2**40, 5, 2**40], [-(2**63), 2**63 - 1, 0, 0], [7] * 3])
def test_labels_may_lie_far_apart(labels):
    assert members(group(np.array(labels))) == grouped_by_hand(labels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_of_integers_does_not_matter(dtype):
    labels = [1, 0, 0, 1, 1]
    found, plain = group(np.array(labels, dtype=dtype)), group(np.array(labels))
    assert members(found) == members(plain)
    assert found.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("labels", "dtype"), [([127, -128, 0, -128], "int8"), ([0, 255, 7], "uint8"), ([2**64 - 1, 2**64 - 3], "uint64")]
)
def test_the_ends_of_a_type(labels, dtype):
    assert members(group(np.array(labels, dtype=dtype))) == grouped_by_hand(labels)


def test_strings_and_domains():
    labels, domains = np.array(["b", "ä", "b", "ä", "b"]), np.array([1, 0, 1, 1, 0])
    assert members(group(labels)) == grouped_by_hand(labels.tolist())
    assert members(group(labels, domains)) == grouped_by_hand(labels.tolist(), domains.tolist())


@pytest.mark.parametrize("other", [[0, 1, 1], [0, 1, 0, 0], [1, 0, 0]])
def test_the_fingerprint_tells_labels_apart(other):
    assert group(np.array(other)).fingerprint != group(np.array([0, 1, 0])).fingerprint


def test_the_fingerprint_tells_domains_apart_and_strings_that_are_joined():
    plain = np.array([0, 0])
    assert group(plain, np.array([0, 1])).fingerprint != group(plain, np.array([1, 0])).fingerprint
    assert group(np.array([0, 1, 0, 1])).fingerprint != group(np.array([0, 1]), np.array([0, 1])).fingerprint
    assert group(np.array([2**64 - 1], dtype=np.uint64)).fingerprint != group(np.array([-1])).fingerprint
    assert group(np.array(["ab", "c"])).fingerprint != group(np.array(["a", "bc"])).fingerprint


class Dataset:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 3


@pytest.mark.parametrize("labels", [[0, 1, 1], torch.tensor([0, 1, 1]), np.array([0, 1, 1]), (0, 1, 1)])
def test_where_labels_come_from(labels):
    assert labels_of(Dataset(), labels).tolist() == [0, 1, 1]
    assert labels_of(Dataset(targets=labels), None).tolist() == [0, 1, 1]
    assert labels_of(Dataset(labels=labels), None).tolist() == [0, 1, 1]
    assert labels_of(Dataset(targets=[9, 9, 9]), labels).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("labels", "error", "told"),
    [
        (None, TypeError, "neither targets nor labels"),
        ([0, 1], ValueError, r"3 samples, got an array of shape \(2,\)"),
        ([[0], [1], [1]], ValueError, r"shape \(3, 1\)"),
        ([0.5, 1.0, 2.0], TypeError, "float64"),
        ([0, None, 1], TypeError, "object"),
    ],
)
def test_wrong_labels_are_refused(labels, error, told):
    with pytest.raises(error, match=told):
        labels_of(Dataset(), labels)


def test_strings_in_an_array_of_objects():
    assert as_labels("labels", np.array(["a", "bb"], dtype=object), 2).dtype.kind == "U"


GROUPS = group(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 0, 1, 1]))


def test_equal_parts_by_default():
    # Classes have a third each; 0 and 1 have two domains, 2 has one.
    assert ratios_of(GROUPS, None, None) == [Fraction(1, 6)] * 4 + [Fraction(1, 3)]


def test_a_number_counts_as_it_is_written():
    parts = ratios_of(GROUPS, {0: 0.1, 1: 0.2, 2: 0.7}, {0: 1, 1: 3})
    assert parts == [Fraction(1, 40), Fraction(3, 40), Fraction(1, 20), Fraction(3, 20), Fraction(7, 10)]


@pytest.mark.parametrize(
    ("class_ratio", "told"),
    [
        ({0: 1, 1: 1}, "2 is missing"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "3 has no sample"),
        ({0: 1, 1: 0, 2: 1}, "above 0, got 0 for 1"),
        ({0: 1, 1: -1, 2: 1}, "above 0, got -1 for 1"),
        ({0: 1, 1: float("nan"), 2: 1}, "nan"),
    ],
)
def test_wrong_ratios_are_refused(class_ratio, told):
    with pytest.raises(ValueError, match=told):
        ratios_of(GROUPS, class_ratio, None)


@pytest.mark.parametrize("wrong", ["1/3", None, True, Decimal(1)])
def test_ratios_are_numbers(wrong):
    with pytest.raises(TypeError, match=r"class_ratio\[1\] must be a number, got"):
        ratios_of(GROUPS, {0: 1, 1: wrong, 2: 1}, None)


def test_domain_ratios_need_domains():
    with pytest.raises(ValueError, match="without domains"):
        ratios_of(group(np.array([0, 1])), None, {0: 1})


sizes_and_parts = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=6)


@given(sizes_and_parts, st.integers(1, 9))
def test_the_shortest_cycle_that_holds_every_group(pairs, multiple):
    sizes = [size for size, _ in pairs]
    total = sum(part for _, part in pairs)
    ratios = [Fraction(part, total) for _, part in pairs]
    length, shares = cycle_shares(sizes, ratios, multiple)
    assert sum(shares) == length
    assert length % multiple == 0
    assert all(abs(share - ratio * length) < 1 for share, ratio in zip(shares, ratios, strict=True))
    assert all(share >= size for share, size in zip(shares, sizes, strict=True))
    shorter = length - multiple
    assert any(ratio * shorter < size for size, ratio in zip(sizes, ratios, strict=True))


def test_rounding_by_the_largest_remainder():
    # 7 * (1/2, 1/3, 1/6) is 3.5, 2.33, 1.17; 10 * 1/4 is 2.5 for each, where the first ones get more.
    assert cycle_shares([1, 1, 1], [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)], 7) == (7, [4, 2, 1])
    assert cycle_shares([1] * 4, [Fraction(1, 4)] * 4, 10) == (10, [3, 3, 2, 2])


def test_a_cycle_beyond_all_memory_is_refused():
    with pytest.raises(ResumableBatchConfigurationError, match="less uneven"):
        cycle_shares([1, 1], [Fraction(1, 10**15), 1 - Fraction(1, 10**15)])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 5))
def test_equal_parts_by_the_short_way_are_the_same(sizes, multiple):
    part = Fraction(1, len(sizes))
    one_by_one = [Fraction(1, len(sizes)) for _ in sizes]
    assert cycle_shares(sizes, [part] * len(sizes), multiple) == cycle_shares(sizes, one_by_one, multiple)


def test_counts():
    assert Counter(group(np.array([1, 0, 1])).sizes.tolist()) == Counter([1, 2])

"""Draws in proportion to weights: against exact chances, against what is frozen, and as any other sampler."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stateful_pipes import StatefulDataLoader, WeightedRandomSampler
from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.samplers import as_resumable
from stateful_pipes.samplers.weighted import _alias_table, _in_integers, _minus_log, _WithoutReplacement

WEIGHTS = [3.0, 0.0, 1.0, 0.5, 2.25, 1e-9, 7.0]
MANY = (np.arange(3000) ** 2 % 1009).astype(np.float64)  # three are 0
both = pytest.mark.parametrize("replacement", [True, False])


def sampler_of(replacement, weights=WEIGHTS, num_samples=5, seed=5, **more):
    return WeightedRandomSampler(weights, num_samples, replacement, seed=seed, **more)


def chi_square(counts, chances):
    """Over all outcomes that can be; none of the others is there."""
    counts, expected = np.asarray(counts), np.asarray(chances) * np.sum(counts)
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() > 5
    return ((counts - expected) ** 2 / expected).sum()


def chances_of_table(weights):
    """What the alias table draws, exactly."""
    thresholds, aliases = _alias_table(_in_integers(np.array(weights, dtype=np.float64)))
    chances = [Fraction(0)] * len(weights)
    for item, (threshold, alias) in enumerate(zip(thresholds.tolist(), aliases.tolist(), strict=True)):
        chances[item] += Fraction(threshold, 2**64 * len(weights))
        chances[alias] += Fraction(2**64 - threshold, 2**64 * len(weights))
    return chances


def chance_without_replacement(weights, drawn):
    """Of drawing these items, in this order, each in proportion to the weights that are left."""
    chance, left = 1.0, sum(weights)
    for item in drawn:
        chance *= weights[item] / left
        left -= weights[item]
    return chance


# Chances.


def many_weights():
    rng = np.random.default_rng(0)
    yield from ([1.0], [1.0] * 7, [5e-324] * 3, [5e-324, 1.7e308], [1.7e308] * 5, [1, 1 - 2**-53], [3, 1], [2, 1, 1])
    for items in (2, 3, 8, 100, 513):
        yield rng.random(items)
        yield rng.pareto(0.3, items)
        yield rng.integers(1, 5, items)
        yield 2.0 ** rng.integers(-1000, 1000, items)


@pytest.mark.parametrize("weights", list(many_weights()), ids=lambda weights: f"{len(weights)} items")
def test_the_alias_table_has_the_chances_of_the_weights(weights):
    exact = [Fraction(float(weight)) for weight in weights]
    total = sum(exact)
    found = chances_of_table(weights)
    assert sum(found) == 1
    assert all(abs(chance - weight / total) < len(exact) * 2.0**-59 for chance, weight in zip(found, exact, strict=True))


def test_the_check_of_the_table_can_fail():
    uniform = chances_of_table([1, 1, 1])
    assert abs(uniform[0] - Fraction(1, 3)) < 3 * 2.0**-59
    assert not abs(uniform[0] - Fraction(1, 3) - Fraction(1, 2**56)) < 3 * 2.0**-59


@pytest.mark.parametrize("items", [2, 5, 8, 1000])
def test_draws_with_replacement_follow_the_weights(items):
    weights = np.arange(items) % 7 * 1.5 + (np.arange(items) > 0)
    drawn = sampler_of(True, weights, 10**9).indices(2, range(10**8, 10**8 + 200_000))
    counts = np.bincount(drawn, minlength=items)
    # The mean is the degrees of freedom, the deviation the root of twice that: five deviations. The seed is fixed.
    degrees = np.count_nonzero(weights) - 1
    assert chi_square(counts, weights / weights.sum()) < degrees + 5 * math.sqrt(2 * degrees) + 20
    assert chi_square(counts, (weights > 0) / np.count_nonzero(weights)) > 10_000 or items == 2  # as if all weighed the same


def test_neighbours_with_replacement_are_independent():
    weights = np.array([1, 2, 3, 4, 5]) / 15
    drawn = sampler_of(True, weights, 10**9).indices(0, range(100_000))
    for step in (1, 2, 64):
        pairs = np.bincount(drawn[:-step] * 5 + drawn[step:], minlength=25)
        assert chi_square(pairs, np.outer(weights, weights).ravel()) < 65  # 24 degrees of freedom


def test_draws_without_replacement_are_successive():
    """First draws, pairs and whole orders of four items that can be drawn, over epochs, against exact chances."""
    weights = [1.0, 0.0, 2.0, 4.0, 0.5]
    sampler = sampler_of(False, weights, 4)
    drawn = [tuple(sampler.indices(epoch, range(4)).tolist()) for epoch in range(6_000)]
    for length, bound in ((1, 25), (2, 45), (4, 70)):  # 3, 11 and 23 degrees of freedom, one more than five deviations
        outcomes = list(itertools.permutations([0, 2, 3, 4], length))
        heads = [one[:length] for one in drawn]
        counts = [heads.count(one) for one in outcomes]
        assert sum(counts) == len(drawn)
        assert chi_square(counts, [chance_without_replacement(weights, one) for one in outcomes]) < bound


def test_without_replacement_over_seeds():
    """As over epochs; and it is not the order of keys that are weighted in another way."""
    weights = [1.0, 2.0, 4.0]
    outcomes = list(itertools.permutations(range(3)))
    drawn = [tuple(sampler_of(False, weights, 3, seed).indices(0, range(3)).tolist()) for seed in range(2500)]
    counts = [drawn.count(one) for one in outcomes]
    assert chi_square(counts, [chance_without_replacement(weights, one) for one in outcomes]) < 35
    assert chi_square(counts, [chance_without_replacement([1.0, 2.0, 3.0], one) for one in outcomes]) > 50


def test_without_replacement_no_index_comes_twice():
    sampler = sampler_of(False, MANY, np.count_nonzero(MANY))
    epochs = [sampler.indices(epoch, range(len(sampler))).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == np.flatnonzero(MANY).tolist() for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


@both
def test_a_weight_of_zero_is_never_drawn(replacement):
    weights = np.zeros(1000)
    weights[::3] = 1e-300
    weights[-1] = -0.0
    drawn = sampler_of(replacement, weights, 333).indices(0, range(333))
    assert set(drawn.tolist()) <= set(range(0, 999, 3))
    assert len(set(drawn.tolist())) == 333 or replacement


@pytest.mark.parametrize("least", [5e-324, 1e-300, 1.0])
def test_weights_may_be_far_apart(least):
    """The heavy one is first; the light ones come in any order, however light."""
    sampler = sampler_of(False, [least, least, 1.7e308, least], 4)
    drawn = [sampler.indices(epoch, range(4)).tolist() for epoch in range(200)]
    assert {one[0] for one in drawn} == {2}
    assert len(set(map(tuple, drawn))) == 6


# What is frozen.


def test_golden_draws():
    """A failure here is no reason to change a value: streams that people have saved would change."""
    expected = {True: ([0, 6, 0, 4, 6], [6, 6, 6, 0, 6]), False: ([6, 0, 4, 3, 2], [6, 0, 4, 2, 3])}
    for replacement, epochs in expected.items():
        sampler = sampler_of(replacement, seed=2**64 - 1)
        assert [sampler.indices(epoch, range(5)).tolist() for epoch in (0, 3)] == list(epochs)
        assert sampler.state_dict()["weights"] == "f6691ef7ac9a3789"


@both
def test_golden_draws_by_a_hash(replacement):
    drawn = sampler_of(replacement, MANY, 2900, seed=1).indices(7, range(2900))
    assert (
        hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()
        == {
            True: "5f27728b859ae4f7b26a5a7cf83a1b61fb71fde9b084de7f155dc386f665b751",
            False: "6ce550a3d9d460c1d54e3889d7d82cd5191786e7d512eb8c611f5b5ebc41b711",
        }[replacement]
    )


def test_golden_logarithms():
    arguments = np.array([2.0**-53, 0.1, 0.5, 0.7, 0.75, 1 - 2.0**-53])
    assert [value.hex() for value in _minus_log(arguments).tolist()] == [
        "0x1.25e4f7b2737fap+5",
        "0x1.26bb1bbb55515p+1",
        "0x1.62e42fefa39efp-1",
        "0x1.6d3c324e13f4fp-2",
        "0x1.269621134db92p-2",
        "0x1.0000000000000p-53",
    ]


def test_logarithms_are_right():
    edges = [2.0**-53, 1 - 2.0**-53, math.sqrt(0.5), np.nextafter(math.sqrt(0.5), 0), 0.5, 0.25]
    arguments = np.concatenate([edges, np.random.default_rng(0).random(20_000), 1 - 2.0 ** -np.arange(1.0, 54)])
    exact = np.array([-math.log(x) for x in arguments.tolist()])
    assert np.abs(_minus_log(arguments) / exact - 1).max() < 1e-15


def test_keys_are_sorted_stably(monkeypatch):
    """Ties are for the earlier item."""
    monkeypatch.setattr("stateful_pipes.samplers.weighted._minus_log", np.ones_like)
    assert list(sampler_of(False, [1] * 100, 100)) == list(range(100))
    assert list(sampler_of(False, [1, 2, 1, 2], 4)) == [1, 3, 0, 2]


# As a sampler.


@both
def test_indices_are_pure_in_epoch_and_position(replacement):
    """Asked in one piece, in pieces, backwards, with a stride, after other epochs: always the same."""
    sampler = sampler_of(replacement, MANY, 2900)
    whole = sampler.indices(3, range(2900))
    assert whole.dtype == np.int64
    for size in (1, 7, 1024):
        pieces = [sampler.indices(3, range(start, min(start + size, 2900))) for start in range(0, 2900, size)]
        assert np.concatenate(pieces).tolist() == whole.tolist()
    assert sampler.indices(4, range(2900)).tolist() != whole.tolist()
    assert sampler.indices(3, range(100, 2900, 7)).tolist() == whole[100:2900:7].tolist()
    assert sampler.indices(3, range(2899, -1, -3)).tolist() == whole[::-1][::3].tolist()
    assert sampler.indices(3, range(0)).shape == (0,)
    assert sampler_of(replacement, MANY, 2900).indices(3, range(50, 60)).tolist() == whole[50:60].tolist()
    sampler.indices(3, range(2900))[:] = -1
    assert sampler.indices(3, range(2900)).tolist() == whole.tolist()


@both
def test_num_samples_changes_no_draw(replacement):
    assert list(sampler_of(replacement, num_samples=6))[:4] == list(sampler_of(replacement, num_samples=4))


@both
def test_a_state_resumes_at_every_position(replacement):
    whole = list(sampler_of(replacement)) + sampler_of(replacement).indices(1, range(5)).tolist()
    for count in range(6):
        sampler = sampler_of(replacement)
        sampler.advance(count)
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = sampler_of(replacement, seed=99)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[count : 5 if count < 5 else 10]
        assert resumed.state_dict() == state
        assert (resumed.epoch, resumed.consumed) == divmod(count, 5)
    with pytest.raises(ValueError, match="5 items that the epoch has left, got 6"):
        sampler.advance(6)


@both
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": [*WEIGHTS[:-1], 7.000000000000001]}, "weights"),
        ({"weights": WEIGHTS[::-1]}, "weights"),
        ({"weights": [*WEIGHTS, 0.0]}, "items, weights"),
        ({"num_samples": 4}, "length"),
    ],
    ids=str,
)
def test_a_state_of_others_is_refused(replacement, change, field):
    sampler = sampler_of(replacement, **change)
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError) as caught:
        sampler.load_state_dict(sampler_of(replacement, seed=1).state_dict())
    assert ", ".join(one.field for one in caught.value.differences) == field
    assert sampler.state_dict() == before


def test_a_state_with_and_one_without_replacement_are_not_the_same():
    with pytest.raises(StateMismatchError, match="replacement"):
        sampler_of(True).load_state_dict(sampler_of(False).state_dict())


@pytest.mark.parametrize(
    "weights",
    [
        np.array([2, 1, 0], dtype=np.int32),
        np.array([2, 1, 0], dtype=">f4"),
        (2.0, 1.0, -0.0),
        torch.tensor([2, 1, 0]),
        torch.tensor([2.0, 1.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([2.0, 9.0, 1.0, 9.0, 0.0])[::2],
    ],
    ids=lambda weights: f"{type(weights).__name__} {getattr(weights, 'dtype', '')}",
)
def test_weights_are_the_same_in_whatever_form(weights):
    plain = sampler_of(True, [2.0, 1.0, 0.0], 50)
    found = sampler_of(True, weights, 50)
    assert found.state_dict() == plain.state_dict()
    assert list(found) == list(plain)


@both
def test_a_later_change_of_the_weights_does_not_matter(replacement):
    weights = np.ones(8)
    sampler = sampler_of(replacement, weights)
    expected, state = list(sampler_of(replacement, weights)), sampler.state_dict()
    weights[:] = [0, 0, 0, 0, 0, 0, 0, 1]
    assert list(sampler) == expected
    assert sampler.state_dict() == state


@pytest.mark.parametrize("scale", [2.0**-1000, 2.0, 2.0**900])
@both
def test_only_proportions_count(replacement, scale):
    assert list(sampler_of(replacement, np.array(WEIGHTS[:5]) * scale, 4)) == list(sampler_of(replacement, WEIGHTS[:5], 4))


@both
def test_sizes_at_the_edge(replacement):
    assert list(sampler_of(replacement, [0.1], 1)) == [0]
    assert list(sampler_of(replacement, [0, 0, 7], 1)) == [2]
    assert len(WeightedRandomSampler([1, 2, 3], replacement=replacement)) == 3
    assert sorted(sampler_of(False, [5, 5], 2)) == [0, 1]


def test_an_epoch_may_have_2_62_draws():
    sampler = sampler_of(True, [1, 1], 2**62)
    sampler.advance(2**62 - 30)
    drawn = [*itertools.islice(sampler, 31)]
    assert len(drawn) == 30
    assert set(drawn) == {0, 1}
    assert sampler.indices(0, range(2**62 - 1, 2**62)).tolist() == drawn[-1:]


def test_more_items_than_torch_can_take():
    """torch.multinomial ends at 2**24."""
    weights = np.zeros(2**24 + 1)
    weights[[5, -1]] = 1, 3
    assert set(sampler_of(True, weights, 50)) == {5, 2**24}
    assert set(sampler_of(False, weights, 2)) == {5, 2**24}
    with pytest.raises(RuntimeError):
        torch.multinomial(torch.ones(1).expand(len(weights)), 2)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1, math.nan], ValueError, "weights must be finite and not negative, got nan at index 1"),
        ([1, 2, math.inf], ValueError, "got inf at index 2"),
        ([-0.5, 2], ValueError, "got -0.5 at index 0"),
        (torch.tensor([1.0, -math.inf]), ValueError, "got -inf at index 1"),
        ([[1.0, 2.0]], ValueError, r"weights must be of shape \(items,\), got \(1, 2\)"),
        (3.0, ValueError, r"got \(\)"),
        ([0, 0.0, -0.0], ResumableBatchConfigurationError, "at least one weight above 0.*none of 3"),
        ([], ResumableBatchConfigurationError, "none of 0"),
        (torch.zeros(0), ResumableBatchConfigurationError, "none of 0"),
        (["1", "2"], TypeError, "weights must be numbers, got <U1"),
        ([1, None], TypeError, "got object"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "got complex64"),
    ],
    ids=str,
)
@both
def test_wrong_weights(replacement, weights, error, message):
    with pytest.raises(error, match=message):
        WeightedRandomSampler(weights, 1, replacement)


def test_wrong_arguments():
    for wrong in (0, -1, 2**62 + 1):
        with pytest.raises(ValueError, match=f"num_samples must be from 1 to .*got {wrong}"):
            WeightedRandomSampler([1.0], wrong)
    for wrong in (1.0, True, "3"):
        with pytest.raises(TypeError, match="num_samples must be an integer"):
            WeightedRandomSampler([1.0], wrong)
    with pytest.raises(TypeError, match="replacement must be a bool, got 0"):
        WeightedRandomSampler([1.0], 1, 0)
    with pytest.raises(ValueError, match="at most the 2 weights above 0 without replacement, got 3"):
        WeightedRandomSampler([1, 0, 2], replacement=False)
    with pytest.raises(ValueError, match="seed and generator exclude each other"):
        WeightedRandomSampler([1.0], seed=1, generator=torch.Generator())


@both
def test_seeds(replacement):
    torch.manual_seed(9)
    drawn = WeightedRandomSampler(MANY, 20, replacement)
    torch.manual_seed(9)
    assert int(torch.empty((), dtype=torch.int64).random_()) == drawn.seed
    one, other = (WeightedRandomSampler(MANY, 20, replacement, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    assert list(one) == list(WeightedRandomSampler(MANY, 20, replacement, generator=torch.Generator().manual_seed(3)))
    assert list(one) != list(other)


# One list an epoch.


def lists_made(monkeypatch):
    made = []
    make = _WithoutReplacement._list

    def counted(self, key):
        assert self._made is None  # never two at once
        made.append(key)
        return make(self, key)

    monkeypatch.setattr(_WithoutReplacement, "_list", counted)
    return made


def test_a_list_is_made_once_an_epoch_and_kept_for_one(monkeypatch):
    made = lists_made(monkeypatch)
    sampler = sampler_of(False, MANY, 2000)
    assert made == []
    list(sampler)
    list(sampler)
    assert len(made) == 1
    sampler.set_epoch(1)
    list(sampler)
    assert len(set(made)) == len(made) == 2
    sampler.set_epoch(0)
    list(sampler)
    assert made[2:] == made[:1]


def test_neither_a_copy_nor_a_pickle_makes_a_list_or_takes_it_along(monkeypatch):
    sampler = sampler_of(False, MANY, 2000)
    small = len(pickle.dumps(sampler))
    sampler.advance(3)
    expected = list(sampler)
    made = lists_made(monkeypatch)
    assert len(pickle.dumps(sampler)) <= small + 10
    for again in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert list(again) == expected
    assert len(made) == 2
    assert list(sampler) == expected
    assert len(made) == 2


# In loaders.


@both
def test_in_a_plain_data_loader(replacement):
    sampler = sampler_of(replacement, MANY, 20)
    whole = list(sampler)
    batches = []
    for batch, _ in zip(DataLoader(range(3000), batch_size=4, sampler=sampler), range(3), strict=False):
        sampler.advance(len(batch))
        batches.append(batch.tolist())
    resumed = sampler_of(replacement, MANY, 20, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    batches += [batch.tolist() for batch in DataLoader(range(3000), batch_size=4, sampler=resumed)]
    assert batches == [whole[start : start + 4] for start in range(0, 20, 4)]


@both
def test_in_a_stateful_data_loader(replacement):
    def loader(seed):
        sampler = sampler_of(replacement, MANY, 22, seed=seed)
        assert as_resumable(sampler) is sampler
        return StatefulDataLoader(range(3000), 4, sampler=sampler, seed=1)

    with loader(5) as whole:
        expected = [batch.tolist() for _ in range(2) for batch in whole]
    assert sum(map(len, expected)) == 44
    for cut in range(1, len(expected)):
        with loader(5) as first, loader(6) as second:
            stream = itertools.chain.from_iterable(first for _ in range(2))
            batches = [batch.tolist() for batch in itertools.islice(stream, cut)]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            while len(batches) < len(expected):
                batches += [batch.tolist() for batch in second]
        assert batches == expected


@both
def test_without_resume_each_pass_is_drawn_anew(replacement):
    sampler = WeightedRandomSampler(MANY, 20, replacement, seed=1, resumable=False)
    one, other = iter(sampler), iter(sampler)
    mixed = list(zip(one, other, strict=True))  # two passes at once
    assert [a for a, _ in mixed] != [b for _, b in mixed]
    again = WeightedRandomSampler(MANY, 20, replacement, seed=1, resumable=False)
    assert [list(again), list(again)] == [list(found) for found in zip(*mixed, strict=True)]
    with pytest.raises(ResumableModeRequiredError):
        sampler.state_dict()

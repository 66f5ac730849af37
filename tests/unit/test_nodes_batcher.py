"""Batches and the seed under which each is collated."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import default_collate

from stateful_pipes import (
    InfiniteRandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    positions_of,
)
from stateful_pipes.errors import ResumableBatchConfigurationError, StateMismatchError
from stateful_pipes.pipeline_state import load
from stateful_pipes.rng import COLLATE, derive
from tests.streams import disturb, drawing_collate, generator_states, same


def sampled(length, **kwargs):
    return SamplerNode(SequentialSampler(length), **kwargs)


def batched(length=10, batch_size=4, seed=5, **kwargs):
    kwargs.setdefault("collate_fn", list)
    return SeededBatcher(sampled(length), batch_size, seed=seed, **kwargs)


@pytest.mark.parametrize("length", [1, 4, 8, 10])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 100])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_an_epoch(length, batch_size, drop_last):
    whole = [list(range(length))[start : start + batch_size] for start in range(0, length, batch_size)]
    expected = [batch for batch in whole if len(batch) == batch_size or not drop_last]
    if not expected:
        with pytest.raises(ResumableBatchConfigurationError, match="dropped") as caught:
            batched(length, batch_size, drop_last=True)
        assert caught.value.code == 338
        assert caught.value.found == length
        assert str(batch_size) in caught.value.expected
        return
    node = batched(length, batch_size, drop_last=drop_last)
    assert node.length() == len(expected)
    for epoch in range(3):
        node.reset(None)
        assert list(node) == expected
        assert node.consumed() == (epoch + 1, 0)  # with drop_last too


def test_many_batches_at_once():
    """What a batcher above pulls: a short block ends the epoch, and the end is told after it."""
    node = batched()
    ticket = node.pull(2)
    assert node.run(ticket) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(positions_of(ticket)) == [0, 4]
    ticket = node.pull(2)
    assert node.run(ticket) == [[8, 9]]
    assert list(positions_of(ticket)) == [8]
    with pytest.raises(StopIteration):
        node.pull(2)
    assert node.run(node.pull(9)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("move", [lambda node: node.seek((0, 0)), lambda node: node.next_epoch((0, 8))])
def test_an_end_that_was_not_told_is_forgotten_by_a_move(move):
    node = batched()
    node.pull(9)
    move(node)
    assert node.run(node.pull(1)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("cut", range(4))
def test_batches_of_batches(cut):
    def make():
        return SeededBatcher(batched(21, 2), 3, collate_fn=list, seed=6)

    def epochs(node, count):
        found = []
        for _ in range(count):
            node.reset(None)
            found += list(node)
        return found

    expected = epochs(make(), 2)
    assert expected[:4] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
        [[12, 13], [14, 15], [16, 17]],
        [[18, 19], [20]],
    ]
    node = make()
    node.reset(None)
    for _ in range(cut):
        next(node)
    resumed = make()
    resumed.load_state_dict(node.state_dict())
    assert epochs(resumed, 2)[: 8 - cut] == expected[cut:]


def test_torch_s_collate_is_the_default_and_gets_no_seed():
    for kwargs in ({}, {"collate_fn": None}, {"collate_fn": default_collate}):
        node = SeededBatcher(sampled(10), 4, seed=1, **kwargs)
        assert node.collate_fn is default_collate
        assert node.global_generators() == frozenset()
        assert same(next(node), torch.tensor([0, 1, 2, 3]))


def test_a_collate_draws_under_the_batch_s_own_seed():
    node = batched(collate_fn=lambda samples: (random.getstate(), np.random.randint(2**31), torch.rand(2)))
    ticket = node.pull(3)
    first = node.run(ticket)
    disturb()
    assert same(node.run(ticket), first)
    for position, (state, *_) in zip((0, 4, 8), first, strict=True):
        assert random.Random(derive(5, COLLATE, 0, position)).getstate() == state
    assert len({draw for _, draw, _ in first}) == 3


def test_collate_seeds_differ_over_epochs_and_seeds():
    found = []
    for seed in (1, 2):
        node = batched(seed=seed, collate_fn=lambda samples: random.random())
        for _ in range(2):
            node.reset(None)
            found += list(node)
    assert len(set(found)) == len(found) == 12


def test_the_seed_is_by_the_first_position_so_batch_size_counts_but_not_how_it_is_pulled():
    draw = lambda samples: (samples[0], random.random())  # noqa: E731
    fours, twos = (dict(list(batched(12, size, collate_fn=draw))) for size in (4, 2))
    assert {first: fours[first] for first in (0, 4, 8)} == {first: twos[first] for first in (0, 4, 8)}
    blocks = batched(12, 4, collate_fn=draw)
    assert dict(blocks.run(blocks.pull(3))) == fours


def test_two_batchers_of_one_seed_draw_differently():
    inner = batched(8, 1, collate_fn=lambda samples: random.random())
    outer = SeededBatcher(inner, 1, collate_fn=lambda samples: (samples[0], random.random()), seed=5)
    assert all(one != other for one, other in outer)


def test_a_mapper_and_a_batcher_of_one_seed_draw_differently():
    inner = SeededMapper(sampled(8), lambda index: random.random(), seed=5)
    outer = SeededBatcher(inner, 1, collate_fn=lambda samples: (samples[0], random.random()), seed=5)
    assert all(one != other for one, other in outer)


def test_samples_keep_their_draws_whatever_the_batch_size():
    def samples(batch_size, drop_last=False):
        inner = SeededMapper(sampled(12), lambda index: (index, random.random(), float(torch.rand(()))), seed=5)
        return [one for batch in SeededBatcher(inner, batch_size, collate_fn=list, seed=6, drop_last=drop_last) for one in batch]

    assert samples(4) == samples(5) == samples(1) == samples(100)
    assert samples(5, drop_last=True) == samples(1)[:10]


def test_a_random_collate_leaves_the_caller_s_generators():
    np.random.standard_normal()
    before = generator_states()
    list(batched(collate_fn=drawing_collate))
    assert generator_states() == before


def test_an_error_is_the_original_with_its_place():
    error = ValueError("ragged")

    def collate(samples):
        if 5 in samples:
            raise error
        return samples

    node = batched(collate_fn=collate, name="stack")
    next(node)
    with pytest.raises(ValueError, match="ragged") as caught:
        next(node)
    assert caught.value is error
    assert caught.value.__notes__ == ["in node 'stack' at epoch 0, collating positions 4 to 7"]


def test_stop_iteration_in_a_collate_is_an_error():
    def collate(samples):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(batched(collate_fn=collate))


def test_the_state():
    assert batched(drop_last=True).state_dict()["nodes"]["batcher"] == {
        "type": "SeededBatcher",
        "batch_size": 4,
        "drop_last": True,
        "seed": 5,
    }


def test_the_seed_of_the_state_is_taken():
    expected = list(batched(collate_fn=drawing_collate))
    node = batched(seed=9, collate_fn=drawing_collate)
    next(node)
    node.load_state_dict(batched().state_dict())
    node.reset(None)
    assert same(list(node), expected)


def test_another_batch_size_has_to_be_named():
    state = batched(batch_size=5).state_dict()
    with pytest.raises(StateMismatchError, match=r"batcher\.batch_size: saved 5, here 4 .*allow=\('batch_size',\)"):
        batched().load_state_dict(state)
    node = batched()
    load(node, state, ("batch_size",))
    assert next(node) == [0, 1, 2, 3]  # the pipeline's own


def test_another_batch_size_goes_on_at_the_same_sample():
    one = batched(12, 3)
    next(one)
    loader = StatefulDataLoader(batched(12, 4))
    loader.load_state_dict(one.state_dict(), allow="batch_size")
    assert list(loader) == [[3, 4, 5, 6], [7, 8, 9, 10], [11]]


def test_another_drop_last_is_refused():
    with pytest.raises(StateMismatchError, match=r"batcher\.drop_last: saved True, here False"):
        load(batched(), batched(drop_last=True).state_dict(), ("batch_size", "world_size"))


def test_over_an_endless_order():
    node = SeededBatcher(SamplerNode(InfiniteRandomSampler(50, seed=1)), 2, drop_last=True, collate_fn=list)
    assert node.length() is None
    assert [len(next(node)) for _ in range(100)] == [2] * 100


@pytest.mark.parametrize("drop_last", [False, True])
def test_over_a_foreign_source(drop_last):
    node = SeededBatcher(tn.IterableWrapper(range(10)), 4, collate_fn=list, drop_last=drop_last)
    assert node.length() is None
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], *([] if drop_last else [[8, 9]])]
    for _ in range(2):
        node.reset(None)
        assert list(node) == expected


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": -3}, ValueError, "got -3"),
        ({"batch_size": 2.0}, TypeError, r"batch_size must be an integer, got 2\.0"),
        ({"batch_size": None}, ResumableBatchConfigurationError, r"makes no batches.*\[node sampler\].*[Uu]se a batch sampler"),
        ({"batch_size": None, "drop_last": True}, ValueError, "say it to the batch sampler"),
        ({"batch_size": True}, TypeError, "got True"),
        ({"batch_size": "4"}, TypeError, "got '4'"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be callable, got 3"),
        ({"seed": 2**64}, ValueError, "seed must be"),
        ({"seed": 1.0}, TypeError, "seed must be"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        batched(**kwargs)


def test_a_batch_size_may_be_numpy_s():
    assert type(batched(batch_size=np.int64(4)).batch_size) is int


def test_a_source_is_a_node():
    with pytest.raises(TypeError, match="source must be a torchdata node, got list"):
        SeededBatcher([1, 2], 2)


def test_what_it_draws_at_construction():
    source = sampled(3)
    before = generator_states()
    SeededBatcher(source, 2, seed=1)
    assert generator_states() == before
    source = sampled(3)
    torch.manual_seed(4)
    node = SeededBatcher(source, 2)
    after = generator_states()
    torch.manual_seed(4)
    assert node.seed == int(torch.empty((), dtype=torch.int64).random_())
    assert generator_states() == after

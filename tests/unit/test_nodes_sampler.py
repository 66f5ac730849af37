"""The cursor over an order: which positions each rank takes, and under which index."""

from __future__ import annotations

import math
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch.distributed as dist

from stateful_pipes import (
    InfiniteRandomSampler,
    Mixer,
    OrderSampler,
    RandomSampler,
    SamplerNode,
    SequentialSampler,
    StatefulDataLoader,
    positions_of,
)
from stateful_pipes.errors import ResumableBatchConfigurationError, StateMismatchError
from stateful_pipes.pipeline_state import load


def node_of(length, rank=0, world_size=1, uneven="pad", seed=3):
    return SamplerNode(RandomSampler(length, seed=seed), rank=rank, world_size=world_size, uneven=uneven)


def pulled(node, count, epoch=0):
    """All (position, index) of what is left of an epoch, in tickets of `count`."""
    found = []
    while True:
        try:
            ticket = node.pull(count)
        except StopIteration:
            return found
        assert ticket[0] == epoch
        found += zip(positions_of(ticket), node.run(ticket), strict=True)


def order(length, epoch=0, seed=3):
    return RandomSampler(length, seed=seed).indices(epoch, range(length)).tolist()


@pytest.mark.parametrize("count", [1, 2, 7, 100, 6000])
@pytest.mark.parametrize("length", [1, 7, 4096, 5000])
def test_one_rank_takes_every_position(length, count):
    node = node_of(length)
    for epoch in range(2):
        assert pulled(node, count, epoch) == list(enumerate(order(length, epoch)))
        assert node.mark() == (epoch + 1, 0)


def test_items_are_plain_integers():
    node = node_of(3)
    assert [type(index) for index in node.run(node.pull(3))] == [int] * 3


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("length", [1, 7, 24, 5001])
def test_padded_ranks_take_the_order_in_turns_and_wrap(length, world_size):
    share = -(-length // world_size)
    whole = order(length)
    for rank in range(world_size):
        node = node_of(length, rank, world_size)
        positions = [rank + world_size * step for step in range(share)]
        assert pulled(node, 4) == [(p, whole[p % length]) for p in positions]  # a padding sample has its own position
        assert node.mark() == (1, 0)
        assert node.length() == share


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("length", [7, 24, 5001])
def test_dropping_ranks_take_equally_many_without_wrapping(length, world_size):
    whole = order(length)
    for rank in range(world_size):
        node = node_of(length, rank, world_size, "drop")
        positions = [rank + world_size * step for step in range(length // world_size)]
        assert pulled(node, 4) == [(p, whole[p]) for p in positions]
        assert node.mark() == (1, 0)


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_all_ranks_have_the_same_state(uneven):
    nodes = [node_of(11, rank, 3, uneven) for rank in range(3)]
    for _ in range(12):
        marks = set()
        for node in nodes:
            with suppress(StopIteration):
                node.pull(2)
            marks.add(node.mark())
        assert len(marks) == 1
        assert 0 <= marks.pop()[1] <= 11  # clamped to the epoch


@pytest.mark.parametrize("at", [0, 4, 8, 12, 22])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4), (2, 5)])
def test_another_number_of_ranks_goes_on_where_the_state_stands(before, after, at):
    length = 23
    sources = [node_of(length, rank, before) for rank in range(before)]
    for source in sources:
        if at:
            source.pull(at // before)
        source.stream.arrive(source.mark())
    state = sources[0].get_state()
    consumed = state["nodes"]["sampler"]["consumed"]
    assert consumed == at // before * before
    found = {}
    for rank in range(after):
        node = node_of(length, rank, after, seed=9)
        load(node, state, ("world_size",))
        found |= dict(pulled(node, 3))
    whole = order(length)
    assert {p: found[p] for p in range(consumed, length)} == {p: whole[p] for p in range(consumed, length)}
    assert min(found, default=length) == consumed


def test_another_number_of_ranks_has_to_be_named():
    state = node_of(10, 0, 2).state_dict()
    with pytest.raises(StateMismatchError, match=r"sampler\.world_size: saved 2, here 1 .*allow=\('world_size',\)"):
        node_of(10).load_state_dict(state)
    node_of(10, 1, 2).load_state_dict(state)  # another rank: its state is the same


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_seek_anywhere(count):
    node = node_of(9000)
    for epoch, consumed in [(2, 8990), (0, 0), (7, 4095), (7, 4096), (0, 8999)]:
        node.seek((epoch, consumed))
        assert node.mark() == (epoch, consumed)
        node.pull(count)
        node.seek((epoch, consumed))
        assert pulled(node, count, epoch) == list(enumerate(order(9000, epoch)))[consumed:]


def test_positions_of_a_huge_order():
    node = node_of(10**15)
    node.seek((5, 10**14))
    assert node.run(node.pull(3)) == RandomSampler(10**15, seed=3).indices(5, range(10**14, 10**14 + 3)).tolist()


def test_an_endless_order_never_ends():
    node = SamplerNode(InfiniteRandomSampler(50, seed=1), rank=1, world_size=2)
    assert node.length() is None
    found = [node.run(node.pull(3)) for _ in range(1500)]
    expected = InfiniteRandomSampler(50, seed=1).indices(0, range(1, 9_000, 2)).tolist()
    assert [index for block in found for index in block] == expected
    assert node.mark() == (0, 9_000)


def test_a_ticket_is_small_and_plain():
    ticket = node_of(10**12).pull(256)
    assert [type(part) for part in ticket] == [int, tuple, bytes]
    assert len(pickle.dumps(ticket)) < 256 * 8 + 100


def test_run_is_pure():
    node = node_of(100)
    ticket = node.pull(5)
    first = node.run(ticket)
    node.seek((3, 50))
    node.pull(10)
    assert node.run(ticket) == first
    assert node.mark() == (3, 60)


def test_the_state():
    node = SamplerNode(RandomSampler(100, seed=3), rank=1, world_size=4, uneven="drop")
    node.pull(5)
    node.stream.arrive(node.mark())
    assert node.get_state()["nodes"] == {
        "sampler": {
            "type": "SamplerNode",
            "order": "RandomSampler",
            "length": 100,
            "seed": 3,
            "epoch": 0,
            "consumed": 20,
            "world_size": 4,
            "uneven": "drop",
        }
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"length": 101}, "length"),
        ({"order": "SequentialSampler"}, "order"),
        ({"uneven": "drop"}, "uneven"),
        ({"consumed": 101}, "consumed"),
        ({"consumed": -1}, "consumed"),
        ({"epoch": True}, "epoch"),
        ({"seed": 2**64}, "seed"),
        ({"world_size": 0}, "world_size"),
    ],
    ids=str,
)
def test_a_wrong_state(changes, field):
    state = node_of(100).state_dict()
    state["nodes"]["sampler"] |= changes
    node = node_of(100)
    with pytest.raises(StateMismatchError, match=rf"sampler\.{field}: "):
        load(node, state, ("world_size",))
    assert node.consumed() == (0, 0)


def test_the_seed_of_the_state_is_taken():
    node = node_of(5000, seed=9)
    node.pull(10)
    node.load_state_dict(node_of(5000, seed=3).state_dict())
    assert node.sampler.seed == 3
    assert pulled(node, 100) == list(enumerate(order(5000)))


def test_an_order_is_taken_as_it_is():
    class Odd:
        def indices(self, seed, epoch, positions):
            return np.arange(positions.start, positions.stop, positions.step) * 2 + 1

    node = SamplerNode(Odd())
    assert type(node.sampler) is OrderSampler
    assert node.run(node.pull(3)) == [1, 3, 5]
    assert node.state_dict()["nodes"]["sampler"]["length"] == -1


def test_an_order_that_raises_stop_iteration_is_an_error():
    class Broken:
        def indices(self, seed, epoch, positions):
            raise StopIteration

    with pytest.raises(RuntimeError, match=r"Broken\.indices raised StopIteration"):
        SamplerNode(Broken()).pull(1)


def test_it_starts_at_the_sampler_s_cursor():
    sampler = SequentialSampler(5)
    sampler.set_epoch(2)
    sampler.advance(3)
    assert pulled(SamplerNode(sampler), 10, 2) == [(3, 3), (4, 4)]


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"rank": 0}, ValueError, "rank and world_size together, got rank=0, world_size=None"),
        ({"world_size": 2}, ValueError, "rank and world_size together, got rank=None, world_size=2"),
        ({"rank": 2, "world_size": 2}, ValueError, "got 2"),
        ({"rank": -1, "world_size": 2}, ValueError, "got -1"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"rank": 0.0, "world_size": 1}, TypeError, "integer"),
        ({"uneven": "wrap"}, ValueError, 'uneven must be "pad" or "drop", got \'wrap\''),
        ({"uneven": None}, ValueError, "got None"),
        ({"name": ""}, TypeError, "name must be"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs, error, words):
    sampler = SequentialSampler(11)
    with pytest.raises(error, match=words):
        SamplerNode(sampler, **kwargs)
    SamplerNode(sampler)  # a refused node leaves its sampler free


def test_dropping_all_is_refused_where_it_comes_to_that():
    node = node_of(11, 0, 12, "drop")  # which is right below another node that deals
    with pytest.raises(ResumableBatchConfigurationError, match="11 samples over 12 ranks"):
        node.pull(1)


def test_dropping_needs_one_sample_for_each_rank():
    node = node_of(12, 11, 12, "drop")
    assert len(pulled(node, 5)) == node.length() == 1


def test_ranks_are_torch_distributed_s_by_default(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    node = SamplerNode(SequentialSampler(9))
    assert (node.rank, node.world_size) == (2, 3)
    assert [index for _, index in pulled(node, 2)] == [2, 5, 8]


def test_all_ranks_together_take_each_sample():
    length, world_size = 1000, 7
    found = [index for rank in range(world_size) for _, index in pulled(node_of(length, rank, world_size), 13)]
    assert len(found) == math.ceil(length / world_size) * world_size
    assert set(found) == set(range(length))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplerNode(SequentialSampler(4)),
        lambda: Mixer({"a": SamplerNode(SequentialSampler(4))}, {"a": 1.0}, seed=1),
    ],
)
def test_one_made_before_the_process_group_would_give_each_rank_everything(monkeypatch, make):
    loader = StatefulDataLoader(make())
    given = StatefulDataLoader(SamplerNode(SequentialSampler(4), rank=0, world_size=1))
    assert next(iter(loader)) == 0
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ResumableBatchConfigurationError, match=r"before torch\.distributed was initialised"):
        iter(loader)
    assert list(given) == [0, 1, 2, 3]
    assert list(StatefulDataLoader(make())) == [1, 3]


def test_a_seed_loaded_into_the_sampler_while_its_pipeline_is_closed():
    sampler = RandomSampler(9, seed=1)
    loader = StatefulDataLoader(SamplerNode(sampler))
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.close()
    sampler.load_state_dict({**sampler.state_dict(), "seed": 2})
    assert list(loader) == list(RandomSampler(9, seed=2))[2:]

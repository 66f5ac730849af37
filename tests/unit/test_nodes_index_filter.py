"""A filter by index: the order without what is left out, with the positions and draws that the rest has anyway."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stateful_pipes import (
    IndexFilter,
    InfiniteRandomSampler,
    Mixer,
    NaiveBatchSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    positions_of,
)
from stateful_pipes.errors import NodeAttachedError, ResumableBatchConfigurationError, StateMismatchError
from tests.streams import place_of, same


class Strided:
    """A user's order in which indices come again."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def indices(self, seed, epoch, positions):
        return [(7 * position + epoch) % 10 for position in positions]


ORDERS = {
    "random": lambda length: RandomSampler(length, seed=3),
    "sequential": SequentialSampler,
    "infinite": lambda length: InfiniteRandomSampler(length, seed=3),
    "user's": Strided,
}
KEEPS = {
    "third": lambda index: index % 3 == 1,
    "most": lambda index: index % 50 != 7,
    "rare": lambda index: index % 500 == 1,
    "one": lambda index: index == 1,
    "all": lambda index: True,
}


def never(index):
    return False


def is_third(index):
    return index % 3 == 1


def draw(index):
    return index, random.random(), float(torch.rand(()))


def filtered(keep=is_third, length=20, rank=0, world_size=1, uneven="pad", sampler=None):
    sampler = RandomSampler(length, seed=3) if sampler is None else sampler
    return IndexFilter(SamplerNode(sampler, rank=rank, world_size=world_size, uneven=uneven), keep)


def pulled(node, sizes, epoch=None):
    """(position, item) of what is left of an epoch, in tickets of these sizes, the last one again and again."""
    found, sizes = [], list(sizes)
    while len(found) < 3000:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        try:
            ticket = node.pull(size)
        except StopIteration:
            break
        assert epoch is None or ticket[0] == epoch
        assert 1 <= len(positions_of(ticket)) <= size
        found += zip(positions_of(ticket), node.run(ticket), strict=True)
    return found


def kept_of(sampler, keep, epoch, length):
    """What is to come out, by plain means."""
    return [(p, i) for p, i in enumerate(sampler.indices(epoch, range(length)).tolist()) if keep(i)]


# The stream.


@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [5000]], ids=str)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("order", ["random", "sequential", "user's"])
def test_it_is_the_filtered_order_with_its_positions(order, keep, sizes):
    node = filtered(KEEPS[keep], sampler=ORDERS[order](600))
    plain = SamplerNode(ORDERS[order](600)).sampler
    for epoch in range(3):
        assert pulled(node, sizes, epoch) == kept_of(plain, KEEPS[keep], epoch, 600)
        assert node.mark() == (epoch + 1, 0)


@pytest.mark.parametrize("keep", KEEPS)
def test_an_endless_order_goes_on(keep):
    node = filtered(KEEPS[keep], sampler=InfiniteRandomSampler(501, seed=3))
    expected = kept_of(InfiniteRandomSampler(501, seed=3), KEEPS[keep], 0, 501 * 12)
    found = [item for _ in range(10) for item in zip([0], node.run(node.pull(1)), strict=True)]
    assert [item for _, item in found] == [index for _, index in expected[:10]]
    assert node.mark() == (0, expected[9][0] + 1)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda flags: flags.__getitem__])
def test_keep_in_every_form(kind):
    flags = [index % 3 == 1 for index in range(20)]
    assert pulled(filtered(kind(flags)), [2]) == pulled(filtered(), [3])


def test_the_array_is_held_as_a_copy():
    flags = np.arange(20) % 3 == 1
    node = filtered(flags)
    flags[:] = False
    assert pulled(node, [2]) == pulled(filtered(), [2])


@pytest.mark.parametrize("size", [1, 4])
def test_what_is_kept_draws_as_it_does_without_the_filter(size):
    whole = list(SeededMapper(SamplerNode(RandomSampler(40, seed=3)), draw, seed=5))
    node = SeededMapper(filtered(length=40), draw, seed=5)
    found = [item for _, item in pulled(node, [size])]
    assert same(found, [sample for sample in whole if is_third(sample[0])])


def test_items_are_plain_integers():
    assert {type(index) for index in filtered()} == {int}


def test_a_big_order_of_which_little_is_kept_is_looked_through_in_bounded_blocks():
    asked = []

    def keep(index):
        asked.append(index)
        return index % 100_000 == 0

    node = filtered(keep, sampler=SequentialSampler(10**9))
    assert pulled_some(node, 3) == [0, 100_000, 200_000]
    assert len(asked) < 5 * 100_000 + 3 * 2**16


def pulled_some(node, count):
    return [item for _ in range(count) for item in node.run(node.pull(1))]


def test_workers_get_neither_the_function_nor_the_order():
    node = pickle.loads(pickle.dumps(filtered(lambda index: index > 3)))
    assert not {"keep", "_sampler"} & set(vars(node))
    ticket = filtered().pull(3)
    assert node.run(ticket) == filtered().run(ticket)


# What keeps nothing, and what goes wrong.


@pytest.mark.parametrize("size", [1, 100])
def test_nothing_kept(size):
    node = filtered(never)
    for _ in range(2):
        with pytest.raises(ResumableBatchConfigurationError, match="0 kept samples over 1 ranks"):
            node.pull(size)
        node.seek((0, 0))
    with pytest.raises(ResumableBatchConfigurationError, match="nothing is kept"):
        filtered([False] * 20)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_kept_in_a_loader(workers):
    loader = StatefulDataLoader(ProcessPrefetcher(SeededBatcher(filtered(never), 2), workers, multiprocessing_context="fork"))
    before = loader.state_dict()
    for _ in range(2):
        with pytest.raises(ResumableBatchConfigurationError, match="0 kept samples"):
            next(iter(loader))
        loader.close()
        assert loader.state_dict() == before


def test_a_state_after_which_nothing_is_kept_is_the_next_epoch():
    node = filtered(lambda index: index < 3, sampler=SequentialSampler(20))
    loader = StatefulDataLoader(SeededBatcher(node, 3, collate_fn=list))
    iterator = iter(loader)
    assert next(iterator) == [0, 1, 2]
    assert place_of(loader) == (1, 0)
    assert list(iterator) == []
    assert list(loader) == [[0, 1, 2]]


@pytest.mark.parametrize(("length", "at"), [(20, 11), (5000, 4500)])
def test_a_function_that_raises_is_told_where(length, at):
    def keep(index):
        if index == at:
            raise KeyError("no such label")
        return index % 3 == 1

    loader = StatefulDataLoader(SeededBatcher(filtered(keep, sampler=SequentialSampler(length)), 2, collate_fn=list))
    read = []
    with pytest.raises(KeyError, match="no such label") as caught:
        read.extend(index for batch in loader for index in batch)
    assert read == [index for index in range(at) if index % 3 == 1][: len(read)]
    assert at - 10 <= read[-1]
    assert any(
        f"in node 'index_filter' at epoch 0, positions {at} (indices {at}), asked what to keep" in note
        for note in caught.value.__notes__
    )
    position = loader.position
    loader.close()
    with pytest.raises(KeyError):
        list(loader)
    assert loader.position >= position


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_raised_once_loses_nothing(workers):
    broken = [13]

    def keep(index):
        if index in broken:
            broken.clear()
            raise OSError("once")
        return index % 3 == 1

    node = SeededBatcher(filtered(keep, sampler=SequentialSampler(30)), 2, collate_fn=list)
    loader = StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork"))
    read = []
    with pytest.raises(OSError, match="once"):
        read.extend(index for batch in loader for index in batch)
    loader.close()
    read += [index for batch in loader for index in batch]
    assert read == list(range(1, 30, 3))
    loader.close()


def test_a_function_that_raises_stop_iteration_ends_nothing():
    def keep(index):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(filtered(keep))


def test_an_answer_that_is_no_boolean_is_told_with_its_place():
    with pytest.raises(ValueError, match="ambiguous") as caught:
        filtered(lambda index: np.array([True, False]), sampler=SequentialSampler(5)).pull(1)
    assert "positions 0 (indices 0)" in caught.value.__notes__[0]


def test_an_index_that_the_array_lacks_is_told():
    node = filtered([True] * 8, sampler=Strided(20))
    with pytest.raises(IndexError, match="out of bounds") as caught:
        pulled(node, [4])
    assert "in node 'index_filter' at epoch 0, positions" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("keep", "error", "words"),
    [
        ([1, 0] * 10, TypeError, r"a function or a flat array of booleans, got int64 of shape \(20,\)"),
        ([[True] * 20], TypeError, r"got bool of shape \(1, 20\)"),
        (None, TypeError, "got object"),
        (True, TypeError, r"got bool of shape \(\)"),
        ([True] * 19, ValueError, "a boolean for each of 20 indices, got 19"),
    ],
    ids=str,
)
def test_wrong_arguments(keep, error, words):
    source = SamplerNode(RandomSampler(20, seed=3), rank=1, world_size=2)
    with pytest.raises(error, match=words):
        IndexFilter(source, keep)
    assert (source.rank, source.world_size) == (1, 2)
    IndexFilter(source, is_third)  # a refused filter leaves the node free


@pytest.mark.parametrize("source", [[1, 2], RandomSampler(5)], ids=["list", "sampler"])
def test_the_source_has_to_be_a_sampler_node(source):
    with pytest.raises(TypeError, match=f"source must be a SamplerNode, got {type(source).__name__}"):
        IndexFilter(source, is_third)


def test_what_a_batch_sampler_has_put_together_is_not_filtered():
    with pytest.raises(ResumableBatchConfigurationError, match=r"the batches of a NaiveBatchSampler .*Subset"):
        filtered(sampler=NaiveBatchSampler(20, 4))
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(filtered(), None)


def test_a_node_that_has_another_above_it_keeps_its_share():
    source = SamplerNode(RandomSampler(20, seed=3), rank=1, world_size=2)
    batcher = SeededBatcher(source, 2)
    with pytest.raises(NodeAttachedError):
        IndexFilter(source, is_third)
    assert source.world_size == 2
    assert batcher.length() == 5


# Ranks.


def in_turn(shares):
    """What all ranks got, in global order; each got as much."""
    return [item for row in zip(*shares, strict=True) for item in row]


def shares_of(length, world_size, uneven, size, keep=is_third):
    return [pulled(filtered(keep, length, rank, world_size, uneven), [size], 0) for rank in range(world_size)]


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [20, 31, 47, 300])
@pytest.mark.parametrize("size", [1, 3])
def test_the_ranks_together_take_the_one_stream(length, world_size, uneven, size):
    whole = pulled(filtered(length=length), [4])
    shares = shares_of(length, world_size, uneven, size)
    together = in_turn(shares)
    if uneven == "drop":
        assert together == whole[: len(whole) // world_size * world_size]
        return
    assert together[: len(whole)] == whole
    padding = together[len(whole) :]
    assert len(padding) < world_size
    assert [index for _, index in padding] == [whole[i % len(whole)][1] for i in range(len(padding))]
    assert all(position >= length for position, _ in padding)
    assert len({position for position, _ in together}) == len(together)


def test_padding_goes_round_as_often_as_it_takes():
    shares = shares_of(20, 5, "pad", 2, keep=lambda index: index == 4)
    ((position, _),) = shares[0]
    assert [share[0] for share in shares] == [(position + 20 * more, 4) for more in range(5)]
    shares = shares_of(20, 5, "pad", 2, keep=lambda index: index in (4, 9))
    positions = [position for ((position, _),) in shares]
    assert len(set(positions)) == 5


def test_dropping_needs_one_for_each_rank():
    with pytest.raises(ResumableBatchConfigurationError, match="2 kept samples over 3 ranks with uneven='drop'"):
        filtered(lambda index: index < 2, 20, 0, 3, "drop").pull(1)
    assert len(pulled(filtered(lambda index: index < 3, 20, 0, 3, "drop"), [1])) == 1


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_all_ranks_have_the_same_mark_at_each_step(uneven):
    nodes = [filtered(length=50, rank=rank, world_size=3, uneven=uneven) for rank in range(3)]
    for _ in range(14):
        states = set()
        for node in nodes:
            with suppress(StopIteration):
                node.pull(2)
            states.add(node.mark())
        assert len(states) == 1
        assert 0 <= states.pop()[1] <= 50


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_filters_below_a_mixer_are_dealt_out_by_it(uneven):
    def mixture(rank, world_size):
        sources = [filtered(length=length, rank=rank, world_size=world_size, uneven=uneven) for length in (20, 30)]
        return Mixer(dict(zip("ab", sources, strict=True)), {"a": 1, "b": 2}, seed=3)

    whole = pulled(mixture(0, 1), [3])
    together = in_turn([pulled(mixture(rank, 2), [3]) for rank in range(2)])
    assert together[: len(whole)] == whole[: len(together)]
    assert len(together) == len(whole) + (len(whole) % 2 if uneven == "pad" else -(len(whole) % 2))


# Length.


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_length_is_what_comes_out(order, world_size, uneven):
    flags = np.arange(60) % 7 < 2
    for rank in range(world_size):
        node = filtered(flags, rank=rank, world_size=world_size, uneven=uneven, sampler=ORDERS[order](47))
        assert node.length() == len(pulled(node, [3]))


@pytest.mark.parametrize("node", [lambda: filtered(), lambda: filtered([True] * 20, sampler=Strided(20)),
                                  lambda: filtered([True] * 20, sampler=InfiniteRandomSampler(20))])  # fmt: skip
def test_length_that_is_not_known(node):
    assert node().length() is None


# The state.


def test_the_state():
    node = filtered(np.arange(20) % 3 == 1, rank=1, world_size=2, sampler=SequentialSampler(20))
    node.pull(2)
    node.stream.arrive(node.mark())
    entries = node.get_state()["nodes"]
    assert entries["index_filter"] == {
        "type": "IndexFilter",
        "keep": entries["index_filter"]["keep"],
        "world_size": 2,
        "uneven": "pad",
    }
    assert len(entries["index_filter"]["keep"]) == 16
    assert entries["sampler"]["world_size"] == 1
    assert entries["sampler"]["consumed"] == 11  # right behind 1, 4, 7, 10
    assert filtered().get_state()["nodes"]["index_filter"]["keep"] == "function"


def test_another_array_is_refused():
    flags = np.arange(20) % 3 == 1
    state = filtered(flags).state_dict()
    flags[5] = True
    with pytest.raises(StateMismatchError, match=r"index_filter\.keep: "):
        filtered(flags).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"index_filter\.keep: "):
        filtered().load_state_dict(state)


def loader_of(keep, workers, batch_size=2, **share):
    mapper = SeededMapper(filtered(keep, 23, **share), draw, seed=5)
    batcher = SeededBatcher(mapper, batch_size, collate_fn=list, seed=6)
    return StatefulDataLoader(ProcessPrefetcher(batcher, workers, multiprocessing_context="fork"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keep", ["third", "one", "all"])
def test_resume_at_each_position(keep, workers):
    keep = KEEPS[keep]
    loader = loader_of(keep, 0)
    whole = [list(loader) for _ in range(3)]
    loader = loader_of(keep, 0)
    states = [loader.state_dict()]
    for _ in range(2):
        for _ in loader:
            states.append(json.loads(json.dumps(loader.state_dict())))
        states.append(loader.state_dict())
    flat = [batch for epoch in whole for batch in epoch]
    steps = [0]
    for epoch in whole[:2]:
        steps += [steps[-1] + more for more in range(1, len(epoch) + 1)] + [steps[-1] + len(epoch)]
    resumed = loader_of(keep, workers)
    for step, state in zip(steps, states, strict=True):
        resumed.load_state_dict(state)
        found = []
        while len(found) < len(flat) - step:
            found += list(resumed)
        assert same(found, flat[step:]), f"resumed after {step} batches"
        assert same(resumed.state_dict()["epoch"], 3)
    resumed.close()


def test_marks_stand_right_behind_the_last_kept():
    node = filtered(lambda index: index % 10 == 3, sampler=SequentialSampler(40))
    assert pulled_some(node, 2) == [3, 13]
    assert node.mark() == (0, 14)
    node.pull(2)
    assert node.mark() == (0, 34)
    with pytest.raises(StopIteration):
        node.pull(1)
    assert node.mark() == (1, 0)


@settings(max_examples=settings().max_examples // 2)
@given(
    length=st.integers(1, 60),
    kept=st.sets(st.integers(0, 59), min_size=1),
    seed=st.integers(0, 2**64 - 1),
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    uneven=st.sampled_from(["pad", "drop"]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    rounds=st.integers(0, 12),
)
def test_any_keep_partition_and_ranks_and_others_from_there_on(length, kept, seed, ranks, uneven, sizes, rounds):
    truth = kept_of(RandomSampler(length, seed=seed), kept.__contains__, 0, length)
    if len(truth) < (max(ranks) if uneven == "drop" else 1):
        return

    def nodes_of(world_size):
        samplers = [RandomSampler(length, seed=seed) for _ in range(world_size)]
        return [filtered(kept.__contains__, length, rank, world_size, uneven, one) for rank, one in enumerate(samplers)]

    shares, marks = [], set()
    for node in nodes_of(ranks[0]):
        shares.append(pulled(node, [1], 0)[:rounds])
        node.seek((0, 0))
        for _ in shares[-1]:
            node.pull(1)
        marks.add(node.mark())
    (mark,) = marks
    done = in_turn(shares)
    assert done[: len(truth)] == truth[: len(done)]
    if mark[0] == 1:  # the last round was padded or short, and so told the end already
        assert len(done) >= len(truth)
        return
    shares = []
    for node in nodes_of(ranks[1]):
        node.seek(mark)
        shares.append(pulled(node, sizes, 0))
    rest, left = in_turn(shares), truth[len(done) :]
    assert rest[: len(left)] == left[: len(rest)]
    assert (len(left) - len(rest) if uneven == "drop" else len(rest) - len(left)) in range(ranks[1])


def test_a_stream_without_end_in_a_loader():
    node = SeededBatcher(filtered(sampler=InfiniteRandomSampler(10, seed=1)), 4, collate_fn=list)
    loader = StatefulDataLoader(node)
    with pytest.raises(TypeError, match="endless"):
        len(loader)
    expected = [index for _, index in kept_of(InfiniteRandomSampler(10, seed=1), is_third, 0, 400)]
    assert [index for batch in islice(loader, 20) for index in batch] == expected[:80]

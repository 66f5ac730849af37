"""A batch sampler at the source: whole batches for each rank, and the batcher that keeps them."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from stateful_pipes import (
    NaiveBatchSampler,
    OrderSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    StatefulDataLoader,
    build_batch_sampler,
    positions_of,
)
from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.pipeline_state import load


class Labelled:
    targets = [0] * 8 + [1] * 3

    def __len__(self):
        return len(self.targets)


def sampler_of(length=10, batch_size=4, repeat=False, drop_last=False, seed=3):
    return NaiveBatchSampler(length, batch_size, repeat=repeat, drop_last=drop_last, seed=seed)


def node_of(rank=0, world_size=1, uneven="pad", **kwargs):
    return SamplerNode(sampler_of(**kwargs), rank=rank, world_size=world_size, uneven=uneven)


def batched(*args, **kwargs):
    return SeededBatcher(node_of(*args, **kwargs), None, collate_fn=list, seed=1)


def pulled(node, epoch=0):
    """(positions, indices) of each batch of what is left of an epoch."""
    found = []
    while True:
        try:
            ticket = node.pull(None)
        except StopIteration:
            return found
        assert ticket[0] == epoch
        found.append((list(positions_of(ticket)), node.run(ticket)))


@pytest.mark.parametrize(("length", "batch_size"), [(10, 4), (8, 4), (1, 4), (5000, 7), (9000, 4097)])
def test_one_rank_takes_the_batches_as_they_are(length, batch_size):
    node = node_of(length=length, batch_size=batch_size)
    for epoch in range(2):
        sampler = sampler_of(length, batch_size)
        sampler.set_epoch(epoch)
        found = pulled(node, epoch)
        assert [indices for _, indices in found] == list(sampler)
        assert [position for positions, _ in found for position in positions] == list(range(length))
        assert node.mark() == (epoch + 1, 0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_padded_ranks_take_batches_in_turns_and_wrap(world_size):
    whole = list(sampler_of())  # three batches, the last of two samples
    starts = [0, 4, 8, 10, 14, 18, 20]
    for rank in range(world_size):
        found = pulled(node_of(rank, world_size))
        mine = [rank + world_size * turn for turn in range(-(-3 // world_size))]
        assert [indices for _, indices in found] == [whole[number % 3] for number in mine]
        assert [positions[0] for positions, _ in found] == [starts[number] for number in mine]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dropping_ranks_take_whole_rounds(world_size):
    whole = list(sampler_of())
    for rank in range(world_size):
        found = [indices for _, indices in pulled(node_of(rank, world_size, "drop"))]
        assert found == whole[rank : 3 // world_size * world_size : world_size]


def test_dropping_all_is_refused():
    with pytest.raises(ResumableBatchConfigurationError, match="3 batches over 4 ranks"):
        node_of(0, 4, "drop").pull(None)


def test_a_rank_in_the_middle_of_a_cycle_that_repeats():
    whole = list(islice(sampler_of(repeat=True), 12))
    for rank in range(3):
        node = node_of(rank, 3, repeat=True)
        assert [node.run(node.pull(None)) for _ in range(4)] == whole[rank::3]
        assert node.mark() == (0, 40)


def test_samples_one_by_one_are_those_of_the_batches():
    assert list(node_of()) == [index for batch in sampler_of() for index in batch]
    with pytest.raises(ResumableBatchConfigurationError, match=r"dealt out to 2 ranks.*batch_size=None"):
        list(node_of(0, 2))


@pytest.mark.parametrize("make", [lambda: RandomSampler(9), lambda: OrderSampler(RandomSampler(9).order)])
def test_a_sampler_makes_no_batches(make):
    node = SamplerNode(make())
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        node.pull(None)
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(node, None)


def test_what_regroups_makes_no_batches_of_the_source_s():
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(SeededBatcher(node_of(), 2), None)
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(ProcessPrefetcher(node_of(), 1), None)
    assert list(SeededBatcher(ProcessPrefetcher(node_of(), 0), None, collate_fn=list)) == list(sampler_of())


def test_a_batch_sampler_may_be_regrouped():
    flat = [index for batch in sampler_of() for index in batch]
    assert list(SeededBatcher(node_of(), 3, collate_fn=list)) == [flat[start : start + 3] for start in range(0, 10, 3)]


def test_regrouped_it_stops_inside_a_batch_and_the_rest_of_that_is_a_batch():
    one = StatefulDataLoader(SeededBatcher(node_of(), 3, collate_fn=list, seed=1))
    flat = [index for batch in sampler_of() for index in batch]
    assert next(iter(one)) == flat[:3]
    two = StatefulDataLoader(SeededBatcher(node_of(), 3, collate_fn=list, seed=1))
    two.load_state_dict(one.state_dict())
    assert list(two) == [flat[3:6], flat[6:9], flat[9:]]
    node = node_of()
    node.pull(3)
    assert [indices for _, indices in pulled(node)] == [flat[3:4], flat[4:8], flat[8:]]


@pytest.mark.parametrize(("world_size", "uneven", "batches"), [(1, "pad", 3), (2, "pad", 2), (2, "drop", 1), (4, "pad", 1)])
def test_lengths(world_size, uneven, batches):
    loader = StatefulDataLoader(batched(0, world_size, uneven))
    assert len(loader) == batches == len(list(loader))
    assert node_of(0, world_size, uneven).length() == (10 if world_size == 1 else None)


def test_an_endless_one_has_no_length():
    with pytest.raises(TypeError, match="endless"):
        len(StatefulDataLoader(batched(repeat=True)))


def test_its_entry_in_the_state():
    node = node_of(repeat=True)
    for _ in range(5):
        node.pull(None)
    entry = node.entry(node.mark())
    assert (entry["epoch"], entry["consumed"], entry["cycle"], entry["offset"]) == (0, 18, 1, 8)
    assert (entry["order"], entry["batch_size"], entry["samples"]) == ("NaiveBatchSampler", 4, 10)


@pytest.mark.parametrize(
    ("field", "value"), [("cycle", 2), ("offset", 4), ("consumed", 17), ("consumed", 14), ("offset", -1), ("cycle", "1")]
)
def test_a_cursor_that_contradicts_itself_changes_nothing(field, value):
    loader = StatefulDataLoader(batched(repeat=True))
    list(islice(loader, 5))
    before = loader.state_dict()
    state = json.loads(json.dumps(before))
    state["nodes"]["sampler"][field] = value
    with pytest.raises(StateMismatchError, match="sampler"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_another_batch_size_is_refused_even_if_named():
    state = StatefulDataLoader(batched()).state_dict()
    with pytest.raises(StateMismatchError, match=r"sampler\.batch_size: saved 4, here 5"):
        StatefulDataLoader(batched(batch_size=5)).load_state_dict(state, allow=("batch_size",))


def test_another_number_of_ranks_has_to_be_named():
    loaders = [StatefulDataLoader(batched(rank, 2)) for rank in range(2)]
    assert [next(iter(loader)) for loader in loaders] == list(sampler_of())[:2]
    state = loaders[1].state_dict()
    with pytest.raises(StateMismatchError, match="world_size"):
        load(batched(), state)
    one = StatefulDataLoader(batched())
    one.load_state_dict(state, allow=("world_size",))
    assert list(one) == list(sampler_of())[2:]


def test_the_sampler_follows_the_loader_and_belongs_to_it():
    sampler = sampler_of()
    loader = StatefulDataLoader(range(10), batch_sampler=sampler)
    next(iter(loader))
    assert (sampler.epoch, sampler.consumed, sampler.cycle) == (0, 4, 0)
    assert loader.batch_sampler is sampler
    assert (loader.sampler, loader.batch_size, loader.drop_last) == (None, None, False)
    loader.close()
    assert sampler.consumed == 4


def test_a_subclass_or_one_without_resume_is_refused():
    class Mine(NaiveBatchSampler):
        pass

    with pytest.raises(ResumableModeRequiredError, match="Mine is a subclass of NaiveBatchSampler"):
        SamplerNode(Mine(10, 2))
    with pytest.raises(ResumableModeRequiredError, match="NaiveBatchSampler that was made with resumable=False"):
        SamplerNode(NaiveBatchSampler(10, 2, resumable=False))


def test_each_list_is_made_once_for_prefetch_and_consumption():
    sampler = build_batch_sampler("class_balance", Labelled(), 4, seed=1)
    made = []
    held = sampler.order.cycle
    make_list = held._list
    held._list = lambda key: made.append(key) or make_list(key)
    node = SeededBatcher(SeededMapper(SamplerNode(sampler), lambda index: index, rng=()), None, collate_fn=list)
    with StatefulDataLoader(ProcessPrefetcher(node, 2)) as loader:
        read = list(islice(loader, 2 * len(sampler) - 1))
    assert len(made) in (2, 3), "those of the cycles begun, and perhaps of one that is pulled ahead"
    assert len(set(made)) == len(made)
    assert read == list(islice(build_batch_sampler("class_balance", Labelled(), 4, seed=1), len(read)))

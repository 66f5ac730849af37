"""Orders as samplers: a cursor that only consumption moves, alone, in plain loaders, in torchdata's and in a node."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import pickle
import re
import typing

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from stateful_pipes import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    InfiniteRandomSampler,
    NaiveBatchSampler,
    Order,
    OrderSampler,
    RandomSampler,
    SamplerNode,
    SamplerState,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import (
    NodeAttachedError,
    ResumableBatchConfigurationError,
    ResumableModeRequiredError,
    ResumableSamplerGeneratorError,
    StateMismatchError,
)
from stateful_pipes.samplers import as_resumable
from tests.streams import generator_states, place_of


class Strided:
    """A user's order with an argument and a use of everything that it is given."""

    def __init__(self, length, step=1):
        self.length = length
        self.step = step

    def __len__(self):
        return self.length

    def arguments(self):
        return {"step": self.step}

    def indices(self, seed, epoch, positions):
        return [(p * self.step + epoch + seed) % self.length for p in positions]


class Endless:
    def indices(self, seed, epoch, positions):
        return (np.asarray(positions) % 7 + epoch).astype(np.int32)


FINITE = {
    "sequential": lambda n=11, seed=5: SequentialSampler(n),
    "random": lambda n=11, seed=5: RandomSampler(n, seed=seed),
    "user": lambda n=11, seed=5: OrderSampler(Strided(n, 3), seed=seed),
}
ENDLESS = {
    "infinite": lambda n=11, seed=5: InfiniteRandomSampler(n, seed=seed),
    "replacement": lambda n=11, seed=5: InfiniteRandomSampler(n, replacement=True, seed=seed),
    "user endless": lambda n=11, seed=5: OrderSampler(Endless(), seed=seed),
}
finite = pytest.mark.parametrize("make", FINITE.values(), ids=FINITE)
every = pytest.mark.parametrize("make", [*FINITE.values(), *ENDLESS.values()], ids=[*FINITE, *ENDLESS])


def some(sampler, count=25):
    return list(itertools.islice(sampler, count))


def flat(lists):
    return list(itertools.chain(*lists))


@every
def test_is_a_torch_sampler(make):
    assert isinstance(make(), Sampler)


@every
def test_two_passes_are_alike_and_do_not_move_the_cursor(make):
    sampler = make()
    before = sampler.state_dict()
    first = some(sampler)
    assert some(sampler) == first
    assert all(type(index) is int for index in first)
    assert sampler.state_dict() == before
    assert (sampler.epoch, sampler.consumed) == (0, 0)


@every
@pytest.mark.parametrize("count", [0, 1, 5, 10])
def test_advance_moves_the_start_of_a_pass(make, count):
    sampler, fresh = make(), make()
    sampler.advance(count)
    assert (sampler.epoch, sampler.consumed) == (0, count)
    assert some(sampler, 30 - count) == some(fresh, 30)[count:]


def test_advance_is_one_item_by_default():
    sampler = SequentialSampler(3)
    sampler.advance()
    assert list(sampler) == [1, 2]


@finite
def test_advance_past_the_end_of_an_epoch(make):
    sampler, fresh = make(), make()
    sampler.advance(4)
    sampler.advance(7)
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    fresh.set_epoch(1)
    assert list(sampler) == list(fresh)
    with pytest.raises(ValueError, match="11 items that the epoch has left, got 12"):
        sampler.advance(12)
    with pytest.raises(ValueError, match="got -1"):
        sampler.advance(-1)
    assert (sampler.epoch, sampler.consumed) == (1, 0)


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_epoch_never_ends(make):
    sampler = make()
    sampler.advance(10**12)
    assert (sampler.epoch, sampler.consumed) == (0, 10**12)
    assert len(some(sampler, 3000)) == 3000
    with pytest.raises(TypeError, match="endless"):
        len(sampler)


@pytest.mark.parametrize("count", [1.0, "1", None])
def test_advance_by_a_whole_number(count):
    with pytest.raises(TypeError):
        SequentialSampler(3).advance(count)


@every
def test_set_epoch(make):
    sampler = make()
    first = some(sampler, 11)
    sampler.advance(3)
    sampler.set_epoch(0)  # the current one: nothing happens, at whatever position
    assert (sampler.epoch, sampler.consumed) == (0, 3)
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.consumed) == (2, 0)
    third = some(sampler, 11)
    sampler.set_epoch(0)
    assert some(sampler, 11) == first
    assert (third == first) is (type(sampler) is SequentialSampler)


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, ValueError), (2**63 - 1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)]
)
def test_an_epoch_is_a_whole_number(epoch, error):
    sampler = RandomSampler(3, seed=0)
    with pytest.raises(error, match="epoch must be"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


@pytest.mark.parametrize("length", [1, 2, 10, 1023, 1024, 3000])
def test_every_epoch_is_another_permutation(length):
    sampler = RandomSampler(length, seed=1)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert sorted(epochs[-1]) == list(range(length))
    assert len({tuple(epoch) for epoch in epochs}) == min(3, math.factorial(min(length, 4)))
    assert list(RandomSampler(length, seed=2)) != epochs[0] or length < 10


def test_permutation_after_permutation():
    sampler = InfiniteRandomSampler(10, seed=1)
    drawn = some(sampler, 40)
    cycles = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(cycle) == list(range(10)) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) == 4


def test_replacement_draws_each_index_by_itself():
    drawn = some(InfiniteRandomSampler(10, replacement=True, seed=1), 2000)
    assert set(drawn) == set(range(10))
    assert len(set(drawn[:10])) < 10
    counts = np.bincount(drawn)
    assert ((counts - 200) ** 2 / 200).sum() < 35  # 9 degrees of freedom: a chance of 6 in 100,000


@every
def test_indices_are_pure_in_epoch_and_position(make):
    """Asked in one piece, in pieces, backwards, with a stride, after other epochs: always the same."""
    sampler = make(3000) if make not in ENDLESS.values() else make(700)
    whole = sampler.indices(3, range(2900)).tolist()
    sampler.indices(1, range(5))
    assert sampler.indices(3, range(100, 2900, 7)).tolist() == whole[100:2900:7]
    assert [int(sampler.indices(3, range(p, p + 1))[0]) for p in range(2899, 0, -300)] == whole[2899:0:-300]
    assert sampler.indices(3, range(0)).shape == (0,)
    assert sampler.indices(3, range(9)).dtype == np.int64
    assert make(len(sampler)).indices(3, range(2900)).tolist() == whole if sampler.length else True


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler, InfiniteRandomSampler])
def test_a_source_is_a_length_or_something_sized(kind):
    assert some(kind(np.int64(5)), 5)
    assert kind([0] * 5).state_dict().keys() == kind(5).state_dict().keys()
    for wrong in (True, 2.0, None, iter([1]), (x for x in [1])):
        with pytest.raises(TypeError, match="expected a sized dataset or a length"):
            kind(wrong)
    for wrong in (-1, 2**62 + 1, 10**30):
        with pytest.raises(ValueError, match=str(wrong)):
            kind(wrong)
    for empty in (0, [], {}):
        with pytest.raises(ResumableBatchConfigurationError, match="nothing to sample from"):
            kind(empty)


@pytest.mark.parametrize("kind", [RandomSampler, InfiniteRandomSampler, lambda n, **k: OrderSampler(Strided(n), **k)])
def test_seeds(kind):
    torch.manual_seed(9)
    drawn = kind(5)
    after = torch.get_rng_state()
    torch.manual_seed(9)
    assert int(torch.empty((), dtype=torch.int64).random_()) == drawn.seed
    assert torch.equal(torch.get_rng_state(), after)
    before = generator_states()
    assert kind(5, seed=2**64 - 1).seed == 2**64 - 1
    one, other = (kind(5, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.seed == other.seed
    assert some(one) == some(other)
    assert generator_states() == before
    with pytest.raises(ValueError, match="seed and generator exclude each other"):
        kind(5, seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got 3"):
        kind(5, generator=3)
    with pytest.raises(ValueError, match="got -1"):
        kind(5, seed=-1)
    with pytest.raises(TypeError, match=r"got 0\.5"):
        kind(5, seed=0.5)


def test_replacement_is_a_bool():
    with pytest.raises(TypeError, match="replacement must be a bool, got 1"):
        InfiniteRandomSampler(5, replacement=1)


def test_huge_orders_start_anywhere_at_once():
    for sampler in (RandomSampler(10**12, seed=0), InfiniteRandomSampler(10**12, seed=0), SequentialSampler(10**12)):
        sampler.advance(10**12 - 5)
        found = some(sampler, 5)
        assert len(set(found)) == 5
        assert all(0 <= index < 10**12 for index in found)
        assert len(json.dumps(sampler.state_dict())) < 200


# State.


@every
def test_a_state_resumes_at_every_position(make):
    whole = some(make())
    for count in range(12):
        sampler = make()
        sampler.advance(min(count, 10))
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = make(seed=99)
        resumed.load_state_dict(state)
        assert some(resumed, 25 - min(count, 10)) == whole[min(count, 10) :]
        assert resumed.state_dict() == state


@every
def test_a_state_is_plain_constant_and_shares_nothing(make):
    sampler = make()
    keys = list(sampler.state_dict())
    sampler.state_dict()["consumed"] = 7
    sampler.advance(2)
    state = sampler.state_dict()
    assert list(state) == keys
    assert state["consumed"] == 2
    assert all(type(value) in (int, float, str, bool) for value in state.values())
    sampler.load_state_dict(state)
    state["consumed"] = 9
    assert sampler.consumed == 2


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(3),
        RandomSampler(3),
        InfiniteRandomSampler(3),
        NaiveBatchSampler(3, 2),
        ClassBalancedBatchSampler(range(3), 2, labels=[0, 0, 1]),
        BalancedBatchSampler(range(3), 2, labels=[0, 0, 1]),
    ],
    ids=lambda s: s.name,
)
def test_the_type_of_a_state_declares_its_keys(sampler):
    declared = typing.get_type_hints(SamplerState)
    assert set(sampler.state_dict()) <= set(declared)
    assert all(type(value) is declared[key] for key, value in sampler.state_dict().items())


def test_the_end_of_an_epoch_loads_as_the_start_of_the_next():
    state = {**RandomSampler(5, seed=1).state_dict(), "consumed": 5}
    sampler = RandomSampler(5, seed=2)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.consumed, sampler.seed) == (1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"length": 12}, {"length"}),
        ({"type": "SequentialSampler"}, {"type"}),
        ({"seed": -1, "epoch": -1}, {"seed", "epoch"}),
        ({"epoch": True}, {"epoch"}),
        ({"epoch": math.nan}, {"epoch"}),
        ({"consumed": 12}, {"consumed"}),
        ({"consumed": 1.0}, {"consumed"}),
        ({"extra": 0}, {"extra"}),
        ({"length": "11", "seed": 2**64, "epoch": -1, "consumed": -1, "x": 1}, {"length", "seed", "epoch", "consumed", "x"}),
    ],
)
def test_a_wrong_state_names_every_field_and_changes_nothing(changes, fields):
    sampler = RandomSampler(11, seed=5)
    sampler.advance(3)
    for target in (sampler, iter(sampler)):
        before = target.state_dict()
        state = RandomSampler(11, seed=6).state_dict() | changes
        with pytest.raises(StateMismatchError) as caught:
            target.load_state_dict(state)
        assert {one.field for one in caught.value.differences} == fields
        assert {one.node for one in caught.value.differences} == {"RandomSampler"}
        assert target.state_dict() == before
    with pytest.raises(StateMismatchError, match=re.escape(str(caught.value))):
        sampler.validate_state_dict(state)
    assert sampler.seed == 5


def test_validation_changes_nothing():
    sampler, other = RandomSampler(11, seed=5), RandomSampler(11, seed=6)
    other.advance(4)
    sampler.validate_state_dict(other.state_dict())
    assert sampler.state_dict() == RandomSampler(11, seed=5).state_dict()
    with pytest.raises(ResumableSamplerGeneratorError):
        sampler.validate_state_dict(other.state_dict() | {"seed": -1})
    node = SamplerNode(sampler)
    with pytest.raises(NodeAttachedError, match="validate_state_dict"):
        sampler.validate_state_dict(other.state_dict())
    assert list(node) == list(RandomSampler(11, seed=5))


@pytest.mark.parametrize("seed", [-1, 2**64, None, "5", 1.0, True])
def test_a_damaged_seed_is_told_apart(seed):
    sampler = RandomSampler(11, seed=5)
    sampler.advance(3)
    for target in (sampler, iter(sampler)):
        before = target.state_dict()
        with pytest.raises(ResumableSamplerGeneratorError, match=r"RandomSampler\.seed") as caught:
            target.load_state_dict({**before, "seed": seed})
        assert caught.value.code == 351
        assert target.state_dict() == before


@pytest.mark.parametrize("state", [None, [], 3, "x", {}])
def test_no_state_at_all(state):
    with pytest.raises(StateMismatchError, match="RandomSampler"):
        RandomSampler(11, seed=5).load_state_dict(state)


def test_a_missing_field_is_named():
    for field in RandomSampler(11, seed=5).state_dict():
        state = RandomSampler(11, seed=5).state_dict()
        del state[field]
        with pytest.raises(StateMismatchError, match=rf"RandomSampler\.{field}: saved missing"):
            RandomSampler(11, seed=5).load_state_dict(state)


def test_arguments_of_an_order_are_compared():
    state = OrderSampler(Strided(11, 3), seed=1).state_dict()
    assert state["type"] == "Strided"
    assert state["step"] == 3
    OrderSampler(Strided(11, 3), seed=2).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"Strided\.step: saved 3, here 4"):
        OrderSampler(Strided(11, 4), seed=2).load_state_dict(state)
    replaced = InfiniteRandomSampler(5, replacement=True, seed=1).state_dict()
    with pytest.raises(StateMismatchError, match=r"InfiniteRandomSampler\.replacement"):
        InfiniteRandomSampler(5, seed=1).load_state_dict(replaced)
    with pytest.raises(StateMismatchError, match=r"InfiniteRandomSampler\.items"):
        InfiniteRandomSampler(6, seed=1, replacement=True).load_state_dict(replaced)


# The iterator's own state, as torchdata's loader asks for it.


@every
def test_an_iterator_resumes_at_every_position(make):
    whole = some(make())
    iterator = iter(make())
    for count in range(len(whole) + 1):
        state = iterator.state_dict()
        assert (state["epoch"], state["consumed"]) == (0, count)
        resumed = iter(make(seed=99))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert some(resumed, 25 - count) == whole[count:]
        next(iterator, None)


@finite
def test_an_iterator_s_end_stays_the_end(make):
    sampler = make()
    iterator = iter(sampler)
    list(iterator)
    state = iterator.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 11)
    resumed = iter(make())
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert resumed.state_dict() == state
    assert (sampler.epoch, sampler.consumed) == (0, 0)


def test_an_iterator_keeps_its_place_when_the_sampler_moves():
    sampler = RandomSampler(5, seed=0)
    whole = list(sampler)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(3)
    assert list(iterator) == whole[1:]


def test_an_iterator_across_its_blocks():
    whole = list(RandomSampler(5000, seed=0))
    assert whole == RandomSampler(5000, seed=0).indices(0, range(5000)).tolist()
    assert sorted(whole) == list(range(5000))


# In other people's loaders.


@every
def test_in_a_plain_loader(make):
    sampler = make()
    sampler.advance(2)
    loader = DataLoader(range(20), batch_size=3, sampler=sampler)
    first = [batch.tolist() for batch in itertools.islice(loader, 3)]
    assert flat(first) == some(sampler, 9)
    assert [batch.tolist() for batch in itertools.islice(loader, 3)] == first
    sampler.advance(3)
    assert [batch.tolist() for batch in itertools.islice(loader, 2)] == first[1:]


@finite
def test_in_a_batch_sampler(make):
    sampler = make()
    assert flat(BatchSampler(sampler, 4, drop_last=False)) == list(sampler)
    assert len(BatchSampler(sampler, 4, drop_last=False)) == 3
    assert len(DataLoader(range(11), sampler=sampler, batch_size=4)) == 3


def torchdata_loader(sampler, num_workers, batch_size=3):
    return TorchdataLoader(range(11), batch_size, sampler=sampler, num_workers=num_workers)


def batches(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", FINITE.values(), ids=FINITE)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_torchdata_s_loader_it_resumes(make, num_workers):
    """At every step of the second epoch, into a sampler of another seed, and on into the third."""
    sampler = make()
    loader = torchdata_loader(sampler, num_workers)
    assert flat(batches(loader)) == list(make())
    sampler.set_epoch(1)
    states, epoch = [], []
    for batch in loader:
        epoch.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    sampler.set_epoch(2)
    following = batches(loader)
    assert flat(epoch) == make().indices(1, range(11)).tolist()
    for consumed, state in enumerate(states, 1):
        if num_workers and consumed not in (1, 3, 4):
            continue  # each cell starts two processes
        fresh = make(seed=99)
        resumed = torchdata_loader(fresh, num_workers)
        resumed.load_state_dict(copy.deepcopy(state))
        if consumed < len(epoch):
            assert batches(resumed) == epoch[consumed:]
        else:
            iter(resumed)
        fresh.set_epoch(2)
        assert batches(resumed) == following


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [ENDLESS["infinite"], ENDLESS["replacement"]], ids=["infinite", "replacement"])
def test_an_endless_one_in_torchdata_s_loader(make):
    iterator = iter(loader := torchdata_loader(make(), 0))
    [next(iterator) for _ in range(7)]
    state = copy.deepcopy(loader.state_dict())
    expected = [next(iterator).tolist() for _ in range(10)]
    resumed = torchdata_loader(make(seed=99), 0)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in itertools.islice(resumed, 10)] == expected


# Ownership.


def test_one_sampler_belongs_to_one_pipeline():
    sampler = RandomSampler(6, seed=0)
    node = SamplerNode(sampler)
    for other in (lambda: SamplerNode(sampler), lambda: StatefulDataLoader(range(6), sampler=sampler)):
        with pytest.raises(NodeAttachedError, match="already belongs") as caught:
            other()
        assert "Close" in caught.value.remedy
    node.close()
    SamplerNode(sampler)


def test_a_dropped_pipeline_gives_its_sampler_free():
    sampler = RandomSampler(6, seed=0)
    gc.disable()  # dropping alone must do
    try:
        loader = StatefulDataLoader(range(6), sampler=sampler)
        del loader
        SamplerNode(sampler)
    finally:
        gc.enable()


def test_an_attached_sampler_is_moved_by_its_loader_only():
    sampler = RandomSampler(6, seed=0)
    loader = StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
    next(iter(loader))
    state = sampler.state_dict()
    assert (sampler.epoch, sampler.consumed) == (state["epoch"], state["consumed"]) == (0, 2)
    for move in (sampler.advance, lambda: sampler.load_state_dict(state)):
        with pytest.raises(NodeAttachedError, match="loader"):
            move()
    assert list(loader.sampler) == list(sampler)  # from the consumed position on
    assert len(list(sampler)) == 4
    assert place_of(loader) == (0, 2)


def test_an_iterator_of_an_attached_sampler_cannot_change_its_seed():
    """The loader's stream would go on in another order, in the middle of an epoch."""
    sampler = RandomSampler(5000, seed=0)
    loader = StatefulDataLoader(range(5000), batch_size=1000, sampler=sampler, rng=())
    next(iter(loader))
    other = RandomSampler(5000, seed=1).state_dict()
    with pytest.raises(NodeAttachedError):
        iter(sampler).load_state_dict(other)
    assert sampler.seed == 0


def test_set_epoch_of_an_attached_sampler_is_the_loader_s():
    sampler = RandomSampler(6, seed=0)
    loader = StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
    next(iter(loader))
    sampler.set_epoch(0)
    assert place_of(loader) == (0, 2)
    sampler.set_epoch(4)
    assert place_of(loader) == (4, 0)
    assert torch.cat(list(loader)).tolist() == RandomSampler(6, seed=0).indices(4, range(6)).tolist()
    assert (sampler.epoch, sampler.consumed) == (5, 0)


def test_a_loader_starts_at_the_sampler_s_cursor_and_leaves_it_at_its_own():
    sampler = RandomSampler(6, seed=0)
    sampler.set_epoch(2)
    sampler.advance(2)
    expected = list(sampler)
    loader = StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
    assert place_of(loader) == (2, 2)
    assert next(iter(loader)).tolist() == expected[:2]
    loader.close()
    assert (sampler.epoch, sampler.consumed) == (2, 4)
    sampler.advance(2)
    assert (sampler.epoch, sampler.consumed) == (3, 0)


def test_a_closed_loader_takes_its_sampler_back_if_it_is_free():
    sampler = RandomSampler(6, seed=0)
    loader = StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
    loader.close()
    assert len(list(loader)) == 3
    loader.close()
    other = SamplerNode(sampler)
    with pytest.raises(NodeAttachedError):
        iter(loader)
    other.close()
    iter(loader)


def test_a_refused_construction_gives_the_sampler_free():
    """Also while the error is still held: a handler builds the loader again."""
    sampler = RandomSampler(6, seed=0)
    with pytest.raises(ValueError, match="batch_size") as held:
        StatefulDataLoader(range(6), batch_size=-1, sampler=sampler)
    StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
    del held


@every
def test_a_copy_belongs_to_nobody(make):
    sampler = make()
    node = SamplerNode(sampler)
    node.pull(4)
    node.stream.arrive(node.mark())
    for copied in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert copied.state_dict() == sampler.state_dict()
        assert copied.consumed == 4
        copied.advance(1)
        assert sampler.consumed == 4


# What cannot be resumed.


@pytest.mark.parametrize("base", [SequentialSampler, RandomSampler, InfiniteRandomSampler, OrderSampler])
def test_a_subclass_is_refused(base):
    class Mine(base):
        def __iter__(self):
            return iter([3, 1, 2])

    sampler = Mine(Strided(5)) if base is OrderSampler else Mine(5)
    for use in (as_resumable, SamplerNode, lambda sampler: StatefulDataLoader(range(5), sampler=sampler)):
        with pytest.raises(ResumableModeRequiredError, match=f"Mine is a subclass of {base.__name__}") as caught:
            use(sampler)
        assert "OrderSampler(order)" in caught.value.remedy


@pytest.mark.parametrize(
    "foreign",
    [
        TorchSequentialSampler(range(5)),
        TorchRandomSampler(range(5)),
        torch.utils.data.SubsetRandomSampler([3, 1]),
        torch.utils.data.WeightedRandomSampler([1.0, 2.0], 2),
        torch.utils.data.DistributedSampler(range(5), num_replicas=1, rank=0),
        BatchSampler(TorchSequentialSampler(range(5)), 2, drop_last=False),
        [3, 1, 2],
        range(5),
        iter([1]),
        torch.Generator(),
        Strided,  # the class and not an object
        "random",
        3,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_foreign_sampler_is_refused(foreign):
    for use in (as_resumable, SamplerNode, lambda sampler: StatefulDataLoader(range(5), sampler=sampler)):
        with pytest.raises(ResumableModeRequiredError, match=type(foreign).__name__) as caught:
            use(foreign)
        assert "OrderSampler(order)" in caught.value.remedy


@pytest.mark.parametrize(
    "order", [3, [1, 2], Strided, torch.utils.data.SubsetRandomSampler([3, 1])], ids=lambda v: type(v).__name__
)
def test_an_order_has_a_method_indices(order):
    with pytest.raises(TypeError, match=r"indices\(seed, epoch, positions\)"):
        OrderSampler(order)


class Answers(Strided):
    def __init__(self, answer):
        super().__init__(5)
        self.answer = answer

    def indices(self, seed, epoch, positions):
        return self.answer(positions)


@pytest.mark.parametrize(
    "answer",
    [
        lambda positions: [0] * (len(positions) + 1),
        lambda positions: [],
        lambda positions: 3,
        lambda positions: None,
        lambda positions: [0.0] * len(positions),
        lambda positions: [[0]] * len(positions),
        lambda positions: ["0"] * len(positions),
        lambda positions: [True] * len(positions),
    ],
)
def test_a_wrong_answer_of_an_order_is_refused(answer):
    with pytest.raises(ValueError, match=r"Answers.indices must give 5 integers"):
        next(iter(OrderSampler(Answers(answer), seed=0)))


def test_an_order_gets_its_seed():
    assert list(OrderSampler(Strided(5), seed=2)) == [2, 3, 4, 0, 1]
    assert isinstance(Strided(5), Order)
    sampler = as_resumable(Strided(5))
    assert type(sampler) is OrderSampler
    assert sampler.name == "Strided"


@pytest.mark.parametrize("name", ["type", "order", "length", "seed", "epoch", "consumed", "world_size", "uneven"])
def test_an_argument_under_a_name_of_the_state_s_own_is_refused_or_compared(name):
    """It must not happen that two orders with different arguments take each other's states."""

    class Named(Strided):
        def arguments(self):
            return {name: self.step}

    try:
        one, other = (StatefulDataLoader(range(5), sampler=Named(5, step), seed=0) for step in (1, 2))
    except (ValueError, TypeError):
        return
    with pytest.raises(StateMismatchError):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, np.int64(3), b"x", object()], ids=lambda v: type(v).__name__)
def test_an_argument_that_is_not_plain_is_refused(value):
    """It would stand in the state, which is plain JSON."""

    class Named(Strided):
        def arguments(self):
            return {"weights": value}

    with pytest.raises((TypeError, ValueError), match="weights"):
        SamplerNode(Named(5)).state_dict()

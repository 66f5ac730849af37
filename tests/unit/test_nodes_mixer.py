"""The mixture: its choices, when it ends, its ranks, and that every position of it resumes."""

from __future__ import annotations

import gc
import json
import pickle
import random
import weakref
from functools import partial
from itertools import chain, cycle, islice, pairwise

import numpy as np
import pytest
import torchdata.nodes as tn
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes.samplers.multi_node_weighted_sampler import MultiNodeWeightedSampler
from torchdata.nodes.samplers.stop_criteria import StopCriteria

from stateful_pipes import (
    IndexFilter,
    InfiniteRandomSampler,
    Mixer,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    positions_of,
)
from stateful_pipes.errors import (
    NodeAttachedError,
    ResumableBatchConfigurationError,
    ResumableModeRequiredError,
    StateMismatchError,
)
from stateful_pipes.nodes.schedule import Schedule
from stateful_pipes.rng import MIX, derive
from tests.streams import place_of

UNTIL_ALL = StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED
ALL = StopCriteria.ALL_DATASETS_EXHAUSTED
FIRST = StopCriteria.FIRST_DATASET_EXHAUSTED
FOREVER = StopCriteria.CYCLE_FOREVER
RULES = (UNTIL_ALL, ALL, FIRST, FOREVER)
LENGTHS, WEIGHTS = (5, 2, 7), {0: (1, 2, 1), 6: (3, 1, 1)}


def show(number, index):
    return number, index, random.random()


def pair(number, index):
    return [(number, index, part, random.random()) for part in (0, 1)]


def broken(index):
    if index % 3 == 1:
        raise OSError(f"sample {index} is gone")
    return index


def source(number, length, seed=10, **share):
    node = SamplerNode(RandomSampler(length, seed=seed + number), **share)
    return SeededMapper(node, partial(show, number), seed=seed + number)


def mixed(lengths=LENGTHS, weights=WEIGHTS, stop=UNTIL_ALL, seed=3, source_seed=10, **share):
    sources = [source(number, length, source_seed, **share) for number, length in enumerate(lengths)]
    return Mixer(sources, weights, seed=seed, stop_criteria=stop)


def other_seeds(**arguments):
    return mixed(seed=77, source_seed=700, **arguments)


def pulled(node, counts=(1,), items=None):
    """(position, item) of what is left of the epoch, or of about so many items, in tickets of these sizes in turn."""
    found = []
    for count in cycle(counts):
        if items is not None and len(found) >= items:
            return found
        try:
            ticket = node.pull(count)
        except StopIteration:
            return found
        assert len(positions_of(ticket)) <= count
        found += zip(positions_of(ticket), node.run_here(ticket)[0], strict=True)


def items(node, count=None):
    return [item for _, item in pulled(node, items=count)]


def steps(loader, count):
    """So many items, over the ends of epochs, which show as None."""
    found = []
    while True:
        for item in loader:
            found.append(item)
            if len(found) == count:
                return found
        found.append(None)
        if len(found) == count:
            return found


# Choices.


def test_the_choice_is_a_function_of_seed_epoch_and_position():
    node = mixed(stop=FOREVER)
    for epoch in (0, 1, 5):
        node.seek(node.start(epoch))
        found = pulled(node, items=600)
        expected = Schedule(range(3), WEIGHTS).choices(derive(3, MIX, epoch, 0), 0, 600, "000")
        assert [position for position, _ in found] == list(range(600))
        assert [number for _, (number, *_) in found] == expected


@pytest.mark.parametrize("stop", RULES)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=30)
def test_the_size_of_blocks_does_not_matter(stop, counts):
    one, other = mixed(stop=stop), mixed(stop=stop)
    for epoch in range(3):
        if stop == FOREVER:
            one.seek(one.start(epoch))
            other.seek(other.start(epoch))
        expected = pulled(one, items=60)
        found = pulled(other, counts, items=60)
        assert found[: len(expected)] == expected
        if stop != FOREVER:
            assert len(found) == len(expected)
            assert one.mark() == other.mark()


def test_the_cursor_after_a_block_is_that_after_its_items():
    one, other = mixed(), mixed()
    for count in (3, 1, 2, 4):
        other.pull(count)
        for _ in range(count):
            one.pull(1)
        assert one.mark() == other.mark()


class Counted(SeededMapper):
    """Notes how it was pulled."""

    def pull(self, count):
        self.pulls.append(count)
        return super().pull(count)


def test_a_block_is_one_pull_of_each_source():
    nodes = [Counted(SamplerNode(SequentialSampler(1000)), int, seed=0, name=name) for name in "ab"]
    for node in nodes:
        node.pulls = []
    Mixer(nodes, [1, 1], seed=1).pull(64)
    assert [len(node.pulls) for node in nodes] == [1, 1]
    assert sum(node.pulls[0] for node in nodes) == 64


def test_a_source_of_weight_0_is_left_out():
    node = mixed(weights={0: (1, 0, 1), 50: (1, 1, 1)}, stop=FOREVER)
    numbers = [number for number, *_ in items(node, 200)]
    assert 1 not in numbers[:50]
    assert 1 in numbers[50:]


def test_a_mixture_of_one_is_that_one():
    assert items(mixed((6,), [2])) == items(source(0, 6))


def test_the_weights_are_kept_within_four_sigma():
    """Also over a schedule's change, and a resume; weights that are a little off would be found out."""
    draws, change, cut = 100_000, 40_000, 55_555

    def endless():
        sources = [SeededMapper(SamplerNode(SequentialSampler(997 + k)), partial(pick, k), rng=()) for k in range(3)]
        return StatefulDataLoader(Mixer(sources, {0: [0.5, 0.3, 0.2], change: [0.1, 0.2, 0.7]}, seed=12, stop_criteria=FOREVER))

    first = endless()
    numbers = list(islice(first, cut))
    second = endless()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    numbers += islice(second, draws - cut)
    parts = ((numbers[:change], [0.5, 0.3, 0.2]), (numbers[change:], [0.1, 0.2, 0.7]), (numbers[cut:], [0.1, 0.2, 0.7]))
    for part, weights in parts:
        assert all(deviation(part, number, weight) < 4 for number, weight in enumerate(weights))
        assert all(deviation(part, number, weight + 0.015) > 4 for number, weight in enumerate(weights))
    together = [(change * a + (draws - change) * b) / draws for a, b in zip(parts[0][1], parts[1][1], strict=True)]
    assert all(deviation(numbers, number, weight) < 4 for number, weight in enumerate(together))
    changes = sum(one != other for one, other in pairwise(numbers[:change]))
    assert deviation([1] * changes + [0] * (change - 1 - changes), 1, 1 - 0.25 - 0.09 - 0.04) < 4  # draws are independent


def pick(number, index):
    return number


def deviation(numbers, number, weight):
    return abs(numbers.count(number) - len(numbers) * weight) / (len(numbers) * weight * (1 - weight)) ** 0.5


# The end of an epoch.


class Walk(tn.BaseNode):
    """A torchdata source that is in an epoch of its own, told from outside, and goes to the next where it is reset."""

    def __init__(self, number, length):
        super().__init__()
        self.node = source(number, length)
        self.following = 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.node.seek((self.following, 0))
        self.following += 1

    def next(self):
        ticket = self.node.pull(1)
        return self.node.run_here(ticket)[0][0]

    def get_state(self):
        return {}


class Reference(MultiNodeWeightedSampler):
    """torchdata's, with the choices that a Mixer of this seed makes."""

    def __init__(self, lengths, weights, stop, seed):
        sources = {str(number): Walk(number, length) for number, length in enumerate(lengths)}
        super().__init__(sources, dict.fromkeys(sources, 1.0), stop_criteria=stop, rank=0, world_size=1)
        self.schedule, self.mixer_seed = Schedule(range(len(lengths)), weights), seed

    def _get_new_weighted_sampler(self, initial_state=None):
        for walk in self.source_nodes.values():
            walk.following = self._epoch << 32 if self.stop_criteria in (UNTIL_ALL, FOREVER) else self._epoch
        return self.choices()

    def choices(self):
        while True:
            ended = [gone and self.stop_criteria == ALL for gone in self._datasets_exhausted.values()]
            key = derive(self.mixer_seed, MIX, self._epoch, sum(ended))
            left = "".join("01"[gone] for gone in ended)
            yield str(self.schedule.choices(key, self._num_yielded, 1, left)[0])


mixtures = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


@pytest.mark.parametrize("stop", RULES)
@given(
    mixture=mixtures, change=st.integers(1, 12), seed=st.integers(0, 2**64 - 1), counts=st.lists(st.integers(1, 5), min_size=1)
)
@settings(max_examples=40)
def test_an_epoch_ends_as_torchdata_s(stop, mixture, change, seed, counts):
    lengths, before, after = zip(*mixture, strict=True)
    weights = {0: before, change: after}
    reference = Reference(lengths, weights, stop, seed)
    node = mixed(lengths, weights, stop, seed)
    for epoch in range(3):
        reference.reset()
        expected = list(islice(reference, 40))
        assert len(expected) < 40 or stop in (FOREVER, UNTIL_ALL)
        assert node.mark() == node.start(epoch)
        assert items(node, 40)[:40] == expected
        blocks = mixed(lengths, weights, stop, seed)
        blocks.seek(blocks.start(epoch))
        assert [item for _, item in pulled(blocks, counts, 40)][:40] == expected
        if len(expected) == 40:
            node.next_epoch(node.mark())


def test_torchdata_s_own_draws_end_alike():
    """The same without a replaced sampler, where the draws cannot matter: what an epoch holds."""
    lengths = (4, 3)
    sources = {str(n): tn.IterableWrapper([(n, i) for i in range(length)]) for n, length in enumerate(lengths)}
    theirs = MultiNodeWeightedSampler(sources, {"0": 1.0, "1": 2.0}, stop_criteria=ALL, rank=0, world_size=1)
    ours = Mixer(
        [tn.IterableWrapper([(n, i) for i in range(length)]) for n, length in enumerate(lengths)], [1, 2], stop_criteria=ALL
    )
    assert sorted(theirs) == sorted(items(ours)) == sorted((n, i) for n, length in enumerate(lengths) for i in range(length))


def test_an_empty_source():
    def node(stop):
        return Mixer([tn.IterableWrapper([]), tn.IterableWrapper([1, 2])], [1, 1], seed=0, stop_criteria=stop)

    assert sorted(items(node(ALL))) == [1, 2]
    assert set(items(node(FIRST))) <= {1, 2}
    with pytest.raises(ResumableBatchConfigurationError, match=r"a source has no item \[node iterable_wrapper\]"):
        items(node(UNTIL_ALL))


# Epochs.


@pytest.mark.parametrize("stop", [UNTIL_ALL, ALL, FIRST])
def test_jumping_to_an_epoch_is_walking_there(stop):
    walking = StatefulDataLoader(mixed(stop=stop))
    epochs = [list(walking) for _ in range(4)]
    assert all(one != other for number, one in enumerate(epochs) for other in epochs[:number])
    jumping = StatefulDataLoader(mixed(stop=stop))
    for epoch in (3, 1, 0, 2):
        iterator = iter(jumping)
        next(iterator)
        jumping.set_epoch(epoch)
        assert place_of(jumping) == (epoch, 0)
        assert list(jumping) == epochs[epoch]
        assert place_of(jumping) == (epoch + 1, 0)


def test_a_mixture_s_last_epochs():
    node = mixed()
    starts = [node.start(epoch)[3][0][0] for epoch in (0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**63 - 2)]
    assert len(set(starts)) == 6
    assert all(0 <= start < 2**63 - 2**40 for start in starts)
    loader = StatefulDataLoader(mixed())
    loader.set_epoch(2**40)
    first = list(loader)
    loader.set_epoch(2**40)
    assert list(loader) == first
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))


def test_restart_and_close_and_going_on():
    loader = StatefulDataLoader(mixed())
    whole = list(StatefulDataLoader(mixed()))
    iterator = iter(loader)
    assert [next(iterator) for _ in range(5)] == whole[:5]
    loader.close()
    assert place_of(loader) == (0, 5)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(2)] == whole[5:7]
    loader.restart()
    assert list(loader) == whole


@pytest.mark.parametrize("stop", [UNTIL_ALL, ALL, FIRST])
def test_leaving_an_epoch_goes_to_the_next(stop):
    expected = mixed(stop=stop)
    expected.seek(expected.start(1))
    node = mixed(stop=stop)
    node.reset(None)
    next(node)
    node.reset(None)
    assert list(islice(node, 100)) == items(expected)


@pytest.mark.parametrize("seed", range(6))
def test_leaving_an_epoch_loses_nothing_of_what_was_pulled_ahead(seed):
    doubled = SeededFlatMapper(tn.IterableWrapper([1, 2]), lambda item: [item, item], 2, rng=())
    node = Mixer([doubled, tn.IterableWrapper([3, 4])], [1, 1], seed=seed, stop_criteria=ALL)
    node.reset(None)
    next(node)  # and the second one is pulled ahead, from a source that nothing was consumed of perhaps
    node.reset(None)
    assert sorted(node) == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("stop", [UNTIL_ALL, ALL, FIRST])
def test_torchdata_s_loader_above(stop):
    own = StatefulDataLoader(mixed(stop=stop))
    epochs = [list(own) for _ in range(3)]
    for cut in range(len(epochs[0])):
        loader = tn.Loader(mixed(stop=stop))
        iterator = iter(loader)
        assert [next(iterator) for _ in range(cut)] == epochs[0][:cut]
        state = json.loads(json.dumps(loader.state_dict()))
        other = tn.Loader(other_seeds(stop=stop))
        other.load_state_dict(state)
        assert [list(other) for _ in range(3)] == [epochs[0][cut:], *epochs[1:]]


# Resume.


PIPELINES = {
    **{stop: partial(mixed, stop=stop) for stop in RULES},
    "one": lambda seed=3, source_seed=10: mixed((3,), [1], seed=seed, source_seed=source_seed),
}


def pipeline(make):
    """As a name for a function of (seed, source_seed)."""
    PIPELINES[make.__name__] = make
    return make


@pipeline
def batched(seed=3, source_seed=10):
    sources = [
        SeededBatcher(source(number, 9, source_seed), size, drop_last=drops, collate_fn=list, seed=source_seed)
        for number, size, drops in ((0, 2, False), (1, 4, True), (2, 1, False))
    ]
    return Mixer(sources, [1, 1, 2], seed=seed)


@pipeline
def batcher_above(seed=3, source_seed=10):
    return SeededBatcher(mixed(seed=seed, source_seed=source_seed), 4, drop_last=True, collate_fn=list, seed=seed)


@pipeline
def nested(seed=3, source_seed=10):
    inner = [mixed((2, 3), [1, 1], stop, seed, source_seed + 10 * i) for i, stop in enumerate((UNTIL_ALL, FIRST))]
    deeper = Mixer([*inner, source(8, 3, source_seed)], [3, 3, 1], seed=seed, stop_criteria=FIRST)
    return Mixer([deeper, mixed((1, 2), [1, 1], ALL, seed, source_seed + 50)], [1, 1], seed=seed)


@pipeline
def filtered_and_doubled(seed=3, source_seed=10):
    kept = IndexFilter(SamplerNode(RandomSampler(9, seed=source_seed)), np.arange(9) % 3 > 0)
    one = SeededMapper(kept, partial(show, 0), seed=source_seed)
    two = SeededFlatMapper(SamplerNode(RandomSampler(4, seed=source_seed)), partial(pair, 1), 2, seed=source_seed)
    return SeededBatcher(Mixer([one, two], [1, 1], seed=seed), 3, collate_fn=list, seed=seed)


@pipeline
def mapper_above(seed=3, source_seed=10):
    return SeededMapper(mixed(seed=seed, source_seed=source_seed), partial(show, 9), seed=seed)


@pipeline
def foreign_beside(seed=3, source_seed=10):
    foreign = tn.ParallelMapper(tn.IterableWrapper(range(5)), partial(pick, 7), num_workers=1, method="thread")
    return Mixer([source(0, 4, source_seed), foreign, tn.IterableWrapper([10, 11])], [2, 2, 1], seed=seed)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_position_resumes(name):
    make = PIPELINES[name]
    whole = steps(StatefulDataLoader(make()), 60)
    assert whole.count(None) >= 1 or name == FOREVER
    loader = StatefulDataLoader(make())
    reading = chain.from_iterable(chain(loader, [None]) for _ in range(60))
    shapes = set()
    for cut in range(30 if name != "foreign_beside" else 12):
        state = json.loads(json.dumps(loader.state_dict()))
        assert state == loader.state_dict(), "plain JSON"
        shapes.add(str({node: {key: type(value) for key, value in entry.items()} for node, entry in state["nodes"].items()}))
        other = StatefulDataLoader(make(seed=8, source_seed=800))
        list(islice(other, 3))
        other.load_state_dict(state)
        following = whole[cut + (whole[cut] is None) :]  # the end of an epoch is told with its last item
        assert steps(other, 25) == following[:25], f"after {cut} steps"
        other.close()
        assert next(reading) == whole[cut]
    assert len(shapes) == 1
    loader.close()


@pytest.mark.parametrize(
    ("name", "method"), [("batched", "inline"), ("batched", "fork"), ("batcher_above", "fork"), ("batched", "spawn")]
)
def test_the_mixture_runs_in_workers(name, method):
    def loader(seed=3, source_seed=10):
        node = PIPELINES[name](seed, source_seed)
        workers = {} if method == "inline" else {"multiprocessing_context": method}
        return StatefulDataLoader(ProcessPrefetcher(node, 0 if method == "inline" else 1 + (method == "fork"), **workers))

    whole = steps(StatefulDataLoader(PIPELINES[name]()), 40)
    with loader() as first:
        assert steps(first, 3) == whole[:3]
        state = first.state_dict()
    with loader(9, 900) as second:
        second.load_state_dict(state)
        assert steps(second, 30) == whole[3:33]


def test_workers_below_the_mixture_are_refused():
    """It leads its sources back, which would lose what their workers have in hand."""
    with pytest.raises(ValueError, match="a ProcessPrefetcher with workers stands below the mixture"):
        Mixer([ProcessPrefetcher(source(0, 4), 2), source(1, 4)], [1, 1])
    inline = Mixer([ProcessPrefetcher(source(0, 5), 0), source(1, 2), source(2, 7)], WEIGHTS, seed=3)
    assert items(inline) == items(mixed())


def test_the_state():
    node = mixed((5, 2), {0: (0.5, 1.5), 9: (1, 1)}, stop=ALL, rank=1, world_size=2, uneven="drop")
    next(iter(StatefulDataLoader(node)))
    nodes = node.state_dict()["nodes"]
    assert list(nodes) == ["sampler", "mapper", "sampler_2", "mapper_2", "mixer"]
    assert nodes["mixer"] == {
        "type": "Mixer",
        "sources": "[0, 1]",
        "weights": "0:1/4,3/4;9:1/2,1/2",
        "stop_criteria": "ALL_DATASETS_EXHAUSTED",
        "seed": 3,
        "world_size": 2,
        "uneven": "drop",
        "epoch": 0,
        "consumed": 2,
        "exhausted": "00",
    }
    assert nodes["sampler"]["world_size"] == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"exhausted": "00"}, "exhausted"),
        ({"exhausted": "0000"}, "exhausted"),
        ({"exhausted": "002"}, "exhausted"),
        ({"exhausted": "00\u0660"}, "exhausted"),
        ({"exhausted": 0}, "exhausted"),
        ({"weights": "0:1/3,1/3,1/3"}, "weights"),
        ({"stop_criteria": FIRST}, "stop_criteria"),
        ({"sources": "2,1,0"}, "sources"),
        ({"uneven": "drop"}, "uneven"),
        ({"world_size": 2}, "world_size"),
        ({"seed": -1}, "seed"),
        ({"consumed": -1}, "consumed"),
        ({"epoch": "0"}, "epoch"),
    ],
    ids=str,
)
def test_a_wrong_state(changes, field):
    state = StatefulDataLoader(mixed()).state_dict()
    state["nodes"]["mixer"] |= changes
    loader = StatefulDataLoader(mixed(seed=4))
    before = steps(loader, 5)
    kept = loader.state_dict()
    with pytest.raises(StateMismatchError, match=rf"mixer\.{field}: "):
        loader.load_state_dict(state)
    assert loader.state_dict() == kept
    assert before + steps(loader, 30) == steps(StatefulDataLoader(mixed(seed=4)), 35)


def test_a_state_of_other_sources():
    state = StatefulDataLoader(mixed()).state_dict()
    loader = StatefulDataLoader(mixed((5, 2), [1, 1]))
    with pytest.raises(StateMismatchError, match=r"mapper_3: saved 'SeededMapper', here missing"):
        loader.load_state_dict(state)
    del state["nodes"]["sampler_2"]
    with pytest.raises(StateMismatchError, match=r"sampler_2: saved missing, here SamplerNode"):
        StatefulDataLoader(mixed()).load_state_dict(state)


# Ranks.


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("stop", RULES)
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=3), world_size=st.integers(1, 4))
@settings(max_examples=15)
def test_the_ranks_share_one_mixture(stop, uneven, counts, world_size):
    lengths = (5, 4, 7)
    whole = items(mixed(lengths, stop=stop), 120)
    nodes = [mixed(lengths, stop=stop, rank=rank, world_size=world_size, uneven=uneven) for rank in range(world_size)]
    shares = [pulled(node, counts, None if stop != FOREVER else 20) for node in nodes]
    assert len({len(share) for share in shares}) == 1
    assert all(node.mark() == nodes[0].mark() for node in nodes)
    found = dict(pair for share in shares for pair in share)
    assert sorted(found) == list(range(world_size * len(shares[0])))
    for rank, share in enumerate(shares):
        assert all(position % world_size == rank for position, _ in share)
    if stop != FOREVER:
        left = len(whole) % world_size
        rounded = len(whole) - left if uneven == "drop" else len(whole) + (world_size - left) % world_size
        assert len(found) == rounded
    assert [found[position] for position in sorted(found)] == list(islice(cycle(whole), len(found)))


@pytest.mark.parametrize("world_size", [3, 7, 20])
def test_more_ranks_than_items(world_size):
    def nodes(uneven):
        sources = [
            [IndexFilter(SamplerNode(SequentialSampler(40), rank=rank, world_size=world_size, uneven=uneven), few)]
            for rank in range(world_size)
        ]
        return [Mixer(one, [1], seed=1) for one in sources]

    assert [items(node) for node in nodes("pad")] == [[(3, 30)[rank % 2]] for rank in range(world_size)]
    with pytest.raises(
        ResumableBatchConfigurationError, match=rf"2 items over {world_size} ranks .*leave none for each \[node mixer\]"
    ):
        items(nodes("drop")[0])


def few(index):
    return index in (3, 30)


@pytest.mark.parametrize("shares", [((0, 2), (1, 2)), ((0, 2), (0, 3)), ((0, 1), (0, 2))])
def test_sources_of_different_ranks_are_refused(shares):
    nodes = [source(n, 6, rank=rank, world_size=world_size) for n, (rank, world_size) in enumerate(shares)]
    with pytest.raises(ResumableBatchConfigurationError, match="dealt out to ranks in different ways"):
        Mixer(nodes, [1, 1])
    refused_leaves_as_it_was(nodes, shares)


def refused_leaves_as_it_was(nodes, shares):
    gc.collect()
    assert [(node.sources[0].rank, node.sources[0].world_size) for node in nodes] == list(shares)
    assert [node.name for node in nodes] == ["mapper"] * len(nodes)
    for node in nodes:
        list(node)  # it can still be used by itself


def test_sources_that_disagree_about_the_rest_are_refused():
    nodes = [source(0, 6, rank=0, world_size=2, uneven="drop"), source(1, 6, rank=0, world_size=2)]
    with pytest.raises(ResumableBatchConfigurationError, match=r"uneven \['drop', 'pad'\]"):
        Mixer(nodes, [1, 1])


@pytest.mark.parametrize("order", [1, -1])
def test_a_foreign_source_beside_a_dealt_one(order):
    def sources(world_size):
        return [source(0, 6, rank=0, world_size=world_size, uneven="drop"), tn.IterableWrapper([1, 2])][::order]

    with pytest.raises(ResumableBatchConfigurationError, match="a source that is not this library's cannot be dealt out"):
        Mixer(sources(2), [1, 1])
    assert len(items(Mixer(sources(1), [1, 1], stop_criteria=ALL))) == 8


def test_foreign_sources_deal_for_themselves(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    node = Mixer([tn.IterableWrapper([1, 3]), tn.IterableWrapper([5, 7, 9])], [1, 1], seed=0, stop_criteria=ALL)
    assert sorted(items(node)) == [1, 3, 5, 7, 9]


def test_ranks_under_a_filter_and_a_mixture():
    def node(rank, world_size):
        share = {"rank": rank, "world_size": world_size}
        kept = IndexFilter(SamplerNode(RandomSampler(30, seed=1), **share), np.arange(30) % 2 > 0)
        inner = mixed((4, 3), [1, 2], FIRST, **share)
        return Mixer([kept, inner], [1, 1], seed=3)

    whole = items(node(0, 1))
    shares = [items(node(rank, 2)) for rank in (0, 1)]
    found = [item for row in zip(*shares, strict=True) for item in row]
    assert found == [*whole, *whole][: len(found)]
    assert 0 <= len(found) - len(whole) < 2


@pytest.mark.parametrize("kwargs", [{}, {"name": "sampler"}], ids=["attached", "name"])
def test_a_refused_mixture_leaves_its_sources_as_they_were(kwargs):
    nodes = [source(n, 6, rank=1, world_size=2) for n in (0, 1)]
    above = None if kwargs else SeededBatcher(nodes[1], 2)
    with pytest.raises(ValueError if kwargs else NodeAttachedError):
        Mixer(nodes, [1, 1], **kwargs)
    gc.collect()
    assert [(node.sources[0].rank, node.sources[0].world_size) for node in nodes] == [(1, 2)] * 2
    assert above is None or list(above.state_dict()["nodes"]) == ["sampler", "mapper", "batcher"]


def test_a_source_that_was_read_from_before():
    """What its ranks made ahead is not what all of them read together."""
    sampler = SamplerNode(SequentialSampler(50), rank=1, world_size=2)
    assert list(islice(sampler, 3)) == [1, 3, 5]
    node = Mixer([sampler], [1], seed=0)
    assert list(islice(node, 4)) == [7, 9, 11, 13]


# What else it tells and takes.


def test_len_and_what_the_loader_tells():
    loader = StatefulDataLoader(SeededBatcher(mixed(), 4, collate_fn=list))
    with pytest.raises(TypeError):
        len(loader)
    next(iter(loader))
    assert place_of(loader) == (0, 4)
    assert loader.batch_size == 4
    assert loader.sampler is None
    assert loader.batch_sampler is None
    assert loader.dataset is None
    lines = loader.describe().splitlines()
    assert lines[1].startswith("└─ mixer: Mixer(sources='[0, 1, 2]', weights='0:1/4,1/2,1/4;6:3/5,1/5,1/5'")
    assert "├─ 1 1/2, from 6 on 1/5 ── " in "\n".join(lines)


def test_it_makes_no_batches_of_its_own():
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(mixed(), None)
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        mixed().pull(None)


def test_a_foreign_source_has_no_epoch_to_jump_to():
    loader = StatefulDataLoader(Mixer([source(0, 3), tn.IterableWrapper([1, 2])], [1, 1], seed=0))
    with pytest.raises(ResumableModeRequiredError, match="only IterableWrapper itself knows"):
        loader.set_epoch(3)
    first = list(loader)
    assert first == list(StatefulDataLoader(Mixer([source(0, 3), tn.IterableWrapper([1, 2])], [1, 1], seed=0)))
    assert place_of(loader) == (1, 0)


def test_an_error_says_where():
    sources = {
        "good": SamplerNode(SequentialSampler(9)),
        "bad": SeededMapper(SamplerNode(SequentialSampler(9)), broken, name="b"),
    }
    node = Mixer(sources, {"good": 1, "bad": 3}, seed=0)
    with pytest.raises(OSError, match="sample 1 is gone") as caught:
        list(node)
    assert "in node 'b' at epoch 0, position 1, index 1" in "".join(caught.value.__notes__)


def test_the_samples_of_a_ticket():
    sources = {"low": SamplerNode(SequentialSampler(90)), "high": source(1, 90, rank=0, world_size=1)}
    node = Mixer(sources, {"low": 1, "high": 1}, seed=0)
    for count in (1, 5, 8):
        first = node.mark()[1]
        ticket = node.pull(count)
        made = [item[:2] if isinstance(item, tuple) else (0, item) for item in node.run_here(ticket)[0]]
        assert node.samples(ticket) == (0, list(range(first, first + count)), [(("low", "high")[n], index) for n, index in made])
    batches = Mixer(
        [SeededBatcher(SamplerNode(SequentialSampler(6)), 3, collate_fn=list), tn.IterableWrapper([0])], [1, 1], seed=4
    )
    names = {str(batches.samples(batches.pull(1))) for _ in range(3)}
    assert "epoch 0, positions 0 (indices (0, 0), (0, 1), (0, 2))" in names


def test_samples_left_out_are_counted_for_their_mapper():
    def loader():
        sources = [SeededMapper(SamplerNode(SequentialSampler(9)), broken, max_skipped=m, seed=m) for m in (50, 60)]
        return StatefulDataLoader(SeededBatcher(Mixer(sources, [1, 1], seed=0, stop_criteria=ALL), 4, collate_fn=list, seed=0))

    first = loader()
    found = list(first)
    assert sorted(chain.from_iterable(found)) == sorted([0, 2, 3, 5, 6, 8] * 2)
    nodes = first.state_dict()["nodes"]
    assert (nodes["mapper"]["skipped"], nodes["mapper_2"]["skipped"]) == (3, 3)
    second = loader()
    iterator = iter(second)
    assert [next(iterator) for _ in range(2)] == found[:2]
    third = loader()
    third.load_state_dict(second.state_dict())
    assert list(third) == found[2:]
    assert third.state_dict() == first.state_dict()
    assert third.stats()["skipped"] == 6


def test_samples_left_out_before_the_mixture_are_counted_on():
    nodes = [SeededMapper(SamplerNode(SequentialSampler(9)), broken, max_skipped=50, seed=1) for _ in "ab"]
    list(islice(nodes[1], 2))
    entries = Mixer(nodes, [1, 1]).state_dict()["nodes"]
    assert (entries["mapper"]["skipped"], entries["mapper_2"]["skipped"]) == (0, 1)


def test_names_that_recur_are_numbered():
    below = [
        SeededMapper(source(0, 4), int),
        SeededMapper(source(1, 4), int, name="own"),
        SeededMapper(source(2, 4), int, name="other_2"),
    ]
    names = list(Mixer(below, [1, 1, 1]).state_dict()["nodes"])
    assert names == ["sampler", "mapper", "mapper_2", "sampler_2", "mapper_3", "own", "sampler_3", "mapper_4", "other_2", "mixer"]
    nodes = Mixer([source(0, 4), mixed((3, 3), [1, 1])], [1, 1]).state_dict()["nodes"]
    assert list(nodes) == ["sampler", "mapper", "sampler_2", "mapper_2", "sampler_3", "mapper_3", "mixer", "mixer_2"]


def test_names_that_were_given_are_not_numbered():
    below = [SeededMapper(source(number, 4), int, name="own_3") for number in range(2)]
    with pytest.raises(ValueError, match="'own_3'"):
        Mixer(below, [1, 1])
    assert list(below[1].state_dict()["nodes"]) == ["sampler", "mapper", "own_3"]


def test_two_mixtures_of_one_seed_choose_differently():
    inner = mixed((50, 50), [1, 1], seed=3)
    outer = Mixer([inner, source(9, 50)], [1, 1], seed=3, stop_criteria=FOREVER)
    lone = mixed((50, 50), [1, 1], seed=3, stop=FOREVER)
    outer_choices = [int(number == 9) for number, *_ in items(outer, 64)]
    assert outer_choices != [number for number, *_ in items(lone, 64)]


def test_seeds_are_drawn_once_and_the_state_s_are_taken():
    one = mixed(seed=None)
    assert one.seed != mixed(seed=None).seed
    two = mixed(seed=None)
    two.load_state_dict(one.state_dict())
    assert two.seed == one.seed
    assert items(two) == items(one)


def test_dropping_it_frees_it():
    loader = StatefulDataLoader(mixed())
    next(iter(loader))
    gone = weakref.ref(loader.pipeline)
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_a_ticket_is_plain_and_what_workers_get_is_small():
    node = mixed((10**9, 10**9, 10**9))
    assert len(pickle.dumps(node.pull(256))) < 256 * 9 + 1000
    ticket = node.pull(8)
    other = pickle.loads(pickle.dumps(node))
    assert other.run_here(ticket) == node.run_here(ticket) == node.run_here(ticket)


def test_endless_sources():
    nodes = [SamplerNode(InfiniteRandomSampler(5, seed=n)) for n in (0, 1)]
    node = Mixer(nodes, [1, 1], seed=0)
    assert len(pulled(node, (7,), items=700)) == 700
    assert node.mark()[2] == "00"


@pytest.mark.parametrize(
    ("sources", "weights", "kwargs", "error", "words"),
    [
        (0, [], {}, ValueError, "sources must be one or more, none of them twice, got 0"),
        (2, [1], {}, ValueError, "one for each of 2 sources"),
        (2, [1, 1], {"stop_criteria": "LAST"}, ValueError, "stop_criteria must be one of 'CYCLE_UNTIL.*, got 'LAST'"),
        (2, [1, 1], {"stop_criteria": None}, ValueError, "got None"),
        (2, [1, 1], {"seed": 2**64}, ValueError, "seed"),
        (2, [1, 1], {"seed": 1.5}, TypeError, "seed"),
        (2, [1, 0], {}, ValueError, "a source of weight 0 never comes to its end, which CYCLE_UNTIL_ALL"),
        (2, {0: [1, 1], 5: [0, 1]}, {}, ValueError, "a source of weight 0"),
        (2, {0: [0, 1], 5: [1, 1]}, {"stop_criteria": ALL}, ValueError, "a source of weight 0 .* ALL_DATASETS_EXHAUSTED"),
        (2, [1, 1], {"name": ""}, TypeError, "name must be"),
    ],
    ids=str,
)
def test_wrong_arguments(sources, weights, kwargs, error, words):
    nodes = [source(number, 4) for number in range(sources)]
    with pytest.raises(error, match=words):
        Mixer(nodes, weights, **kwargs)


def test_weights_of_0_where_they_make_sense():
    assert {number for number, *_ in items(mixed((4, 4), [0, 1], FIRST))} == {1}
    assert {number for number, *_ in items(mixed((4, 4), [0, 1], FOREVER), 50)} == {1}
    assert {number for number, *_ in items(mixed((4, 4), {0: [0, 1], 9: [1, 1]}))} == {0, 1}


def test_wrong_sources():
    node = source(0, 4)
    with pytest.raises(ValueError, match="none of them twice"):
        Mixer([node, node], [1, 1])
    with pytest.raises(TypeError, match="source must be a torchdata node, got list"):
        Mixer([node, [1, 2]], [1, 1])
    foreign = tn.IterableWrapper([1])
    with pytest.raises(ValueError, match="none of them twice"):
        Mixer({"a": foreign, "b": foreign}, {"a": 1, "b": 1})
    Mixer([node], [1])

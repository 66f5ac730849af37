"""How far a state is, without its pipeline: the same as the loader says that it was taken of."""

from __future__ import annotations

import copy
import json

import pytest
import torchdata.nodes as tn

from stateful_pipes import (
    ClassBalancedBatchSampler,
    ExternalSource,
    FileReader,
    InfiniteRandomSampler,
    Mixer,
    Node,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import StateMismatchError
from stateful_pipes.nodes.foreign import as_node
from stateful_pipes.progress import Progress, is_state, progress_of


def batched(node):
    return StatefulDataLoader(SeededBatcher(node, 2, collate_fn=list))


def sampler(length=7, **kwargs):
    return SamplerNode(RandomSampler(length, seed=1), **kwargs)


def samplers(tmp_path):
    return StatefulDataLoader(list(range(7)), batch_size=2, shuffle=True)


def ranks(tmp_path):
    return batched(sampler(rank=1, world_size=2))


def endless(tmp_path):
    return batched(SamplerNode(InfiniteRandomSampler(5, seed=1)))


def batch_sampler(tmp_path):
    order = ClassBalancedBatchSampler(range(8), labels=[0, 1, 0, 1, 1, 0, 0, 1], batch_size=2, seed=1)
    return StatefulDataLoader(list(range(8)), batch_sampler=order)


def mixture(tmp_path):
    return batched(Mixer({"en": sampler(3), "de": sampler(4)}, {"en": 1, "de": 1}, seed=1))


def mixture_of_mixtures(tmp_path):
    lower = Mixer([sampler(3), sampler(4)], [1, 1], seed=1, name="zz")
    return batched(SeededMapper(Mixer([lower, sampler(5)], [1, 1], seed=2, name="aa"), abs, seed=1))


def function(tmp_path):
    return batched(ExternalSource(lambda place: place.idx_in_epoch if place.idx_in_epoch < 5 else next(iter(())), batch=False))


def files(tmp_path):
    names = [tmp_path / str(number) for number in range(3)]
    for name in names:
        name.write_bytes(b"a")
    return batched(FileReader(files=list(map(str, names))))


def foreign(tmp_path):
    return batched(tn.Prefetcher(tn.IterableWrapper(range(7)), 2))


MAKERS = [samplers, ranks, endless, batch_sampler, mixture, mixture_of_mixtures, function, files, foreign]


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_as_the_loader_s_position(make, tmp_path):
    loader = make(tmp_path)
    seen = set()
    for _ in range(3):
        for _ in zip(range(6), loader, strict=False):
            state = loader.state_dict()
            # As checkpoints are: with keys sorted, so that the order of the nodes is lost.
            for one in (state, json.loads(json.dumps(state, sort_keys=True))):
                found = progress_of(one)
                (count,) = found.samples
                assert (found.epoch, found.batches, count.number) == loader.position[:3]
            seen.add(found[:2])
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("make", "batches", "told"),
    [
        (samplers, 2, "epoch 0, 2 batches, 4 of 7 samples (sampler)"),
        (samplers, 4, "epoch 1, 0 batches, 0 of 7 samples (sampler)"),
        (ranks, 1, "epoch 0, 1 batch, 4 of 7 samples over all ranks (sampler)"),
        (endless, 2, "epoch 0, 2 batches, 4 samples (sampler)"),
        (mixture, 2, "epoch 0, 2 batches, 4 items (mixer)"),
        (mixture_of_mixtures, 2, "epoch 0, 2 batches, 4 items (aa)"),
        (files, 1, "epoch 0, 1 batch, 2 places (file_reader)"),
        (foreign, 2, "epoch 0, 2 batches, 4 items (prefetcher)"),
    ],
)
def test_it_says_whose_count_it_is(make, batches, told, tmp_path):
    loader = make(tmp_path)
    for _ in zip(range(batches), loader, strict=False):
        pass
    assert str(progress_of(loader.state_dict())) == told


class Pairs(Node):
    """An item of each of two sources."""

    kind = "pairs"

    def __init__(self, one, other):
        super().__init__(one, other)

    def pull(self, count):
        one, other = [source.pull(count) for source in self.sources]
        return (one[0], one[1], one, other)

    def run(self, ticket):
        return list(zip(*(source.run(part) for source, part in zip(self.sources, ticket[2:], strict=True)), strict=True))

    def mark(self):
        return (self.sources[0].mark()[0], 0, *(source.mark() for source in self.sources))

    def parts(self, mark):
        return tuple(mark[2:])


def test_several_sources_without_a_mixture_have_a_count_each():
    loader = StatefulDataLoader(Pairs(sampler(5), as_node(tn.IterableWrapper(range(5)))))
    next(iter(loader))
    found = progress_of(loader.state_dict())
    assert str(found) == "epoch 0, 1 batch, 1 of 5 samples (sampler), 1 item (iterable_wrapper)"
    assert [(count.node, count.number, count.noun, count.length) for count in found.samples] == [
        ("sampler", 1, "sample", 5),
        ("iterable_wrapper", 1, "item", None),
    ]


def test_a_node_s_state_before_the_end_of_its_epoch_is_told():
    node = SamplerNode(SequentialSampler(2))
    assert [next(node), next(node)] == [0, 1]
    state = node.get_state()
    assert state["epoch"] == 0
    assert str(progress_of(state)) == "epoch 1, 0 batches, 0 of 2 samples (sampler)"


def state_of(**changes):
    return {**StatefulDataLoader(list(range(7)), batch_size=2).state_dict(), **changes}


def test_a_state_that_counts_no_batches():
    state = state_of()
    del state["batch"]
    assert progress_of(state).batches is None
    assert str(progress_of(state)) == "epoch 0, batches not counted, 0 of 7 samples (sampler)"


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"format": "stateful_pipes"}, state_of(nodes=[]), state_of(epoch="1"), state_of(epoch=-1)]
)
def test_what_is_no_state_is_refused(wrong):
    assert not is_state(wrong)
    with pytest.raises(StateMismatchError, match="no state of a loader"):
        progress_of(wrong)


@pytest.mark.parametrize("wrong", [None, "1", 1.0, True, -1, 2**63, pytest.param(10**5000, id="huge"), [1]])
@pytest.mark.parametrize("field", ["consumed", "epoch", "length", "world_size"])
def test_damaged_fields_are_no_counts(field, wrong):
    state = state_of(batch=wrong)
    state["nodes"] = {"sampler": {**state["nodes"]["sampler"], field: wrong}, 5: "no node"}
    found = progress_of(state)
    assert found.batches is None
    assert [one.length for one in found.samples] == {"length": [None], "world_size": [7]}.get(field, [])
    assert str(found)


def test_the_state_stays_as_it_is():
    state = state_of()
    before = copy.deepcopy(state)
    assert progress_of(state) == progress_of(state) == Progress(0, 0, progress_of(state).samples)
    assert state == before

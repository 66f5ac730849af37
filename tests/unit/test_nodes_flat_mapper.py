"""One sample to a fixed number of items: positions and draws as if each item stood on its own."""

from __future__ import annotations

import json
import logging
import random

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from hypothesis import given, settings
from hypothesis import strategies as st

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
from stateful_pipes.errors import LoaderFailedError, ResumableBatchConfigurationError, StateMismatchError
from stateful_pipes.pipeline_state import load
from stateful_pipes.rng import PRIVATE, SAMPLE, derive
from tests.streams import place_of, same


def views(index):
    """Three items that show the order in which they were drawn."""
    return [(index, view, random.random(), float(np.random.random()), float(torch.rand(()))) for view in range(3)]


def views_from(index, rng):
    return [(index, view, rng.random()) for view in range(3)]


def plain_views(index):
    return [(index, view) for view in range(3)]


def one_by_one(index):
    for view in range(3):
        yield index, view, random.random(), float(np.random.random()), float(torch.rand(()))


def tagged(item):
    return item, random.random()


def samples(length=7, rank=0, world_size=1, uneven="pad"):
    return SamplerNode(RandomSampler(length, seed=1), rank=rank, world_size=world_size, uneven=uneven)


def flat(map_fn=views, length=7, fan_out=3, seed=5, source=None, **options):
    return SeededFlatMapper(samples(length) if source is None else source, map_fn, fan_out, seed=seed, **options)


def pulled(node, sizes, epoch=None):
    """(position, item) of what is left of an epoch, in tickets of these sizes, the last one again and again."""
    found, sizes = [], list(sizes)
    while True:
        try:
            ticket = node.pull(sizes.pop(0) if len(sizes) > 1 else sizes[0])
        except StopIteration:
            return found
        assert epoch is None or ticket[0] == epoch
        found += zip(positions_of(ticket), node.run(ticket), strict=True)


def expected(length=7, epoch=0):
    """What is to come out, by a SeededMapper that keeps the items of a sample together."""
    node = SeededMapper(samples(length), views, seed=5)
    node.seek((epoch, 0))
    return [(3 * p + view, item) for p, items in pulled(node, [length]) for view, item in enumerate(items)]


# The stream.


@pytest.mark.parametrize("sizes", [[1], [2], [3], [4], [21], [100], [1, 5, 2, 4], [2, 1, 3, 7]], ids=str)
def test_positions_and_draws_whatever_is_pulled_at_once(sizes):
    node = flat()
    for epoch in range(3):
        assert same(pulled(node, sizes, epoch), expected(epoch=epoch))
        assert node.mark() == (epoch + 1, 0, (epoch + 1, 0))


def test_it_draws_as_a_mapper_at_the_sample_s_position():
    node = flat(lambda index: [random.getstate()] * 3)
    for position, state in pulled(node, [4]):
        assert state == random.Random(derive(5, SAMPLE, 0, position // 3)).getstate()


@pytest.mark.parametrize("sizes", [[1], [2], [4], [50]], ids=str)
def test_what_a_generator_function_yields_is_drawn_under_the_sample_s_seed(sizes):
    assert same(pulled(flat(one_by_one), sizes), expected())


@pytest.mark.parametrize(("map_fn", "rng"), [(views_from, "generator"), (plain_views, ()), (views, ("python", "numpy", "torch"))])
@pytest.mark.parametrize("sizes", [[1], [2], [4], [5, 1]], ids=str)
def test_every_rng(map_fn, rng, sizes):
    whole = pulled(flat(map_fn, rng=rng), [100])
    assert [position for position, _ in whole] == list(range(21))
    assert [item[:2] for _, item in whole] == [(index, view) for index in samples() for view in range(3)]
    assert same(pulled(flat(map_fn, rng=rng), sizes), whole)
    assert ("seed" in flat(map_fn, rng=rng).settings()) is (rng != ())


@pytest.mark.parametrize("returned", [tuple, np.array, torch.tensor, iter])
def test_whatever_can_be_walked_may_be_returned(returned):
    assert [int(item) for item in flat(lambda index: returned([index, index + 10]), fan_out=2, rng=())] == [
        item for index in samples() for item in (index, index + 10)
    ]


@pytest.mark.parametrize("returned", [dict.fromkeys([0, 1]), "ab", b"ab"])
def test_what_would_be_taken_apart_is_refused(returned):
    with pytest.raises(TypeError, match=f"2 items, got a {type(returned).__name__}"):
        list(SeededFlatMapper(SamplerNode(SequentialSampler(1)), lambda index: returned, 2))


def test_workers_below_are_refused():
    below = ProcessPrefetcher(SamplerNode(SequentialSampler(3)), 1)
    with pytest.raises(ValueError, match="stands below the flat mapper"):
        SeededFlatMapper(below, lambda index: [index, index], 2)


def test_a_fan_out_of_one_is_a_mapper():
    node = flat(lambda index: [tagged(index)], fan_out=1)
    mapper = SeededMapper(samples(), tagged, seed=5)
    assert same(pulled(node, [2]), pulled(mapper, [2]))


def test_an_endless_source():
    node = flat(plain_views, source=SamplerNode(InfiniteRandomSampler(4, seed=1)), rng=())
    assert node.length() is None
    found = [item for _ in range(50) for item in node.run(node.pull(4))]
    indices = InfiniteRandomSampler(4, seed=1).indices(0, range(67)).tolist()
    assert found == [(index, view) for index in indices for view in range(3)][:200]


def test_length():
    assert flat().length() == len(pulled(flat(), [2])) == 21
    assert len(StatefulDataLoader(SeededBatcher(flat(), 4))) == 6
    assert len(StatefulDataLoader(SeededBatcher(flat(), 4, drop_last=True))) == 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 6, 21, 22])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_and_epochs(batch_size, drop_last, workers):
    if (workers and batch_size not in (4, 5)) or (drop_last and batch_size > 21):
        return
    node = SeededBatcher(flat(), batch_size, drop_last=drop_last, collate_fn=list, seed=6)
    with StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork")) as loader:
        for epoch in range(3):
            whole = [item for _, item in expected(epoch=epoch)]
            batches = [whole[start : start + batch_size] for start in range(0, 21, batch_size)]
            if drop_last and len(batches[-1]) < batch_size:
                del batches[-1]
            assert same(list(loader), batches)
            assert place_of(loader) == (epoch + 1, 0)


def test_nothing_is_shared_between_tickets():
    node = flat()
    first = node.pull(4)
    once = node.run(first)
    node.pull(4)
    assert same(node.run(first), once)
    node.seek((2, 5, (2, 1)))
    assert same(node.run(first), once)


# Above and below.


def test_two_of_them():
    def make():
        return flat(lambda item: [(item, k, random.random()) for k in range(2)], fan_out=2, source=flat(), seed=8)

    whole = pulled(make(), [100])
    assert [position for position, _ in whole] == list(range(42))
    below = [item for _, item in expected()]
    assert [(item, k) for _, (item, k, _) in whole] == [(item, k) for item in below for k in range(2)]
    for position, (_, k, drawn) in whole:
        generator = random.Random(derive(8, SAMPLE + (1 << 8), 0, position // 2))
        assert drawn == [generator.random() for _ in range(k + 1)][-1]
    for sizes in ([1], [2], [3], [5], [7, 1, 4]):
        assert same(pulled(make(), sizes), whole)
    for start in range(42):
        node, walked = make(), make()
        if start:
            walked.pull(start)
        node.seek(walked.mark())
        assert node.mark() == walked.mark()
        assert same(pulled(node, [4]), whole[start:])


def test_a_mapper_above_has_a_seed_for_each_item():
    def make():
        return SeededMapper(flat(plain_views, rng=()), tagged, seed=9)

    whole = pulled(make(), [100])
    for position, (_, drawn) in whole:
        assert drawn == random.Random(derive(9, SAMPLE + (1 << 8), 0, position)).random()
    assert len({drawn for _, (_, drawn) in whole}) == 21
    for size in (1, 2, 4, 5):
        assert same(pulled(make(), [size]), whole)


def test_above_a_filter_the_positions_are_those_of_the_order():
    def make():
        return flat(source=IndexFilter(samples(20), lambda index: index % 3 == 1))

    whole = [(position, item) for position, item in expected(20) if item[0] % 3 == 1]
    for size in (1, 4, 7):
        assert same(pulled(make(), [size]), whole)
    node = make()
    for start in range(len(whole)):
        node.seek((0, 0, (0, 0)))
        if start:
            node.pull(start)
        mark = node.mark()
        fresh = make()
        fresh.seek(mark)
        assert same(pulled(fresh, [4]), whole[start:])


def test_above_a_foreign_source():
    def make():
        return StatefulDataLoader(SeededBatcher(flat(plain_views, source=tn.IterableWrapper(range(5))), 4, collate_fn=list))

    whole = list(make())
    assert [item for batch in whole for item in batch] == [(index, view) for index in range(5) for view in range(3)]
    loader = make()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    for step, state in enumerate(states[:-1]):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert list(resumed) == whole[step:]


@pytest.mark.parametrize("world_size", [1, 2])
def test_below_a_mixer(world_size):
    def make(rank, world):
        sources = [flat(length=length, source=samples(length, rank, world), name=name) for name, length in (("a", 5), ("b", 4))]
        return Mixer(sources, [1, 1], seed=3)

    whole = pulled(make(0, 1), [100])
    shares = [pulled(make(rank, world_size), [2]) for rank in range(world_size)]
    assert same([item for row in zip(*shares, strict=True) for item in row][: len(whole)], whole)


# The state.


def loader_of(workers=0, batch_size=4, **options):
    node = SeededBatcher(flat(**options), batch_size, collate_fn=list, seed=6)
    return StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork"))


def test_the_state_at_each_offset():
    loader = loader_of(batch_size=1)
    found = [loader.state_dict()["nodes"]]
    found += [loader.state_dict()["nodes"] for _ in loader]
    shown = [(nodes["sampler"]["epoch"], nodes["sampler"]["consumed"], nodes["flat_mapper"]["offset"]) for nodes in found]
    assert shown == [(0, step // 3, step % 3) for step in range(21)] + [(1, 0, 0)]
    assert found[1]["flat_mapper"] == {
        "type": "SeededFlatMapper",
        "seed": 5,
        "rng": "python,numpy,torch",
        "fan_out": 3,
        "offset": 1,
    }


def test_the_position_counts_items():
    loader = loader_of(batch_size=2)
    assert [place_of(loader) for _ in loader] == [(0, consumed) for consumed in range(2, 21, 2)] + [(1, 0)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_resume_at_each_position(batch_size, workers):
    if workers and batch_size == 1:
        return
    loader = loader_of(0, batch_size)
    states, flat_items = [loader.state_dict()], [item for epoch in range(3) for _, item in expected(epoch=epoch)]
    done = [0]
    for _ in range(2):
        for batch in loader:
            states.append(json.loads(json.dumps(loader.state_dict())))
            done.append(done[-1] + len(batch))
    with loader_of(workers, batch_size, seed=99) as resumed:
        for count, state in zip(done, states, strict=True):
            resumed.load_state_dict(state)
            found = []
            while len(found) < len(flat_items) - count:
                found += [item for batch in resumed for item in batch]
            assert same(found, flat_items[count:]), f"resumed after {count} items"


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_another_batch_size_from_the_middle_of_a_sample(after):
    loader = loader_of(batch_size=4)
    first = next(iter(loader))
    resumed = loader_of(batch_size=after)
    resumed.load_state_dict(loader.state_dict(), allow="batch_size")
    found = [*first, *(item for batch in resumed for item in batch)]
    assert same(found, [item for _, item in expected()])


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"offset": 3}, "offset"), ({"offset": -1}, "offset"), ({"fan_out": 2}, "fan_out"), ({"rng": ""}, "rng")],
    ids=str,
)
def test_a_wrong_state(changes, field):
    state = flat().state_dict()
    state["nodes"]["flat_mapper"] |= changes
    node = flat()
    with pytest.raises(StateMismatchError, match=rf"flat_mapper\.{field}: "):
        node.load_state_dict(state)
    assert same(pulled(node, [2]), expected())


def test_a_state_in_the_middle_of_a_sample_that_is_not_there():
    def make():
        return flat(source=IndexFilter(SamplerNode(SequentialSampler(9)), lambda index: index < 4))

    state = make().state_dict()
    state["nodes"]["sampler"]["consumed"] = 5
    state["nodes"]["flat_mapper"]["offset"] = 1
    node = make()
    with pytest.raises(StateMismatchError, match=r"flat_mapper\.offset: .*no sample there"):
        node.load_state_dict(state)
    assert [item[0] for _, item in pulled(node, [2])] == [index for index in range(4) for _ in range(3)]


def test_torchdata_s_door():
    node = flat()
    node.reset(None)
    found = [next(node) for _ in range(4)]
    state = node.state_dict()
    resumed = flat(seed=1)
    resumed.load_state_dict(state)
    assert same([*found, *resumed], [item for _, item in expected()])


@settings(max_examples=settings().max_examples // 4)
@given(
    length=st.integers(1, 9),
    fan_out=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    cut=st.integers(0, 45),
    more=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_any_partition_with_a_cut_anywhere(length, fan_out, sizes, cut, more):
    def make():
        return flat(lambda index: [(index, random.random()) for _ in range(fan_out)], length, fan_out)

    whole = pulled(make(), [1000])
    assert len(whole) == length * fan_out
    assert same(pulled(make(), sizes), whole)
    cut %= length * fan_out
    node, resumed = make(), make()
    if cut:
        node.pull(cut)
    resumed.seek(node.mark())
    assert same(pulled(resumed, more), whole[cut:])
    assert same(pulled(node, more), whole[cut:])


# What goes wrong.


@pytest.mark.parametrize("count", [0, 2, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_another_number_of_items(count, workers):
    loader = loader_of(workers, map_fn=lambda index: [index] * (count if index == 4 else 3))
    with pytest.raises(ValueError, match=f"map_fn returned {count} items, where fan_out is 3") as caught:
        list(loader)
    position = list(samples()).index(4)
    assert any(f"in node 'flat_mapper' at epoch 0, position {position}, index 4" in note for note in caught.value.__notes__)
    loader.close()


@pytest.mark.parametrize("returned", [None, 3])
def test_what_cannot_be_walked(returned):
    with pytest.raises(TypeError, match="not iterable") as caught:
        list(flat(lambda index: returned))
    assert "in node 'flat_mapper' at epoch 0, position 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["at the call", "while it yields"])
def test_an_error_is_told_with_position_and_index(workers, late):
    def failing(index):
        if index == 4 and not late:
            raise KeyError("bad")
        yield index
        if index == 4:
            raise KeyError("bad")
        yield index
        yield index

    loader = loader_of(workers, map_fn=failing)
    with pytest.raises(KeyError, match="bad") as caught:
        list(loader)
    position = list(samples()).index(4)
    assert any(f"in node 'flat_mapper' at epoch 0, position {position}, index 4" in note for note in caught.value.__notes__)
    with pytest.raises(LoaderFailedError):
        next(iter(loader))
    loader.close()


def test_a_stop_iteration_ends_nothing():
    def stopping(index):
        return [next(iter([])) for _ in range(3)]

    def lost(index):
        raise StopIteration

    for map_fn in (stopping, lost):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(flat(map_fn))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((views, 0), ValueError, "fan_out must be at least 1, got 0"),
        ((views, 1.0), TypeError, "fan_out must be an integer"),
        ((views, True), TypeError, "fan_out must be an integer"),
        ((3, 3), TypeError, "map_fn must be callable, got 3"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    source = samples()
    with pytest.raises(error, match=words):
        SeededFlatMapper(source, *arguments)
    SeededFlatMapper(source, views, 3)


def test_it_makes_no_batches():
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        SeededBatcher(flat(), None)


# Generators that a transform owns.


class Cropper:
    def __init__(self):
        self.rng = np.random.default_rng()

    def crops(self, index):
        for view in range(3):
            yield index, view, self.rng.random()


def reseed(cropper, seed):
    cropper.rng = np.random.default_rng(seed)


@pytest.mark.parametrize("sizes", [[1], [2], [4], [50], [2, 1, 3, 7]], ids=str)
@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), ()], ids=str)
def test_own_generators_draw_the_same_wherever_a_ticket_ends(rng, sizes):
    order = list(samples())
    expected = []
    for position, index in enumerate(order):
        draw = np.random.default_rng(derive(5, SAMPLE, 0, position, PRIVATE))
        expected += [(index, view, draw.random()) for view in range(3)]
    assert [item for _, item in pulled(flat(Cropper().crops, rng=rng, reseed=reseed), sizes)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_own_generators_after_a_resume_between_the_items_of_a_sample(workers):
    def make():
        node = SeededBatcher(flat(Cropper().crops, reseed=reseed), 2, collate_fn=list)
        return StatefulDataLoader(ProcessPrefetcher(node, workers))

    with make() as loader:
        states, whole = [loader.state_dict()], []
        for batch in loader:
            whole.append(batch)
            states.append(loader.state_dict())
    for cut in (1, 4, 9):
        with make() as resumed:
            resumed.load_state_dict(states[cut])
            assert list(resumed) == whole[cut:]


# Samples that are left out.


def bad(index):
    if index in (2, 4):
        raise OSError(f"no sample {index}")
    return views(index)


def none_of_four(index):
    return [index] * (0 if index == 4 else 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 21])
def test_a_sample_that_is_left_out_counts_once_wherever_batches_end(batch_size, workers, caplog):
    if workers and batch_size != 4:
        return
    with loader_of(workers, batch_size, map_fn=bad, max_skipped=4) as loader, caplog.at_level(logging.WARNING, "stateful_pipes"):
        found = [item for batch in loader for item in batch]
        assert same(found, [item for _, item in expected() if item[0] not in (2, 4)])
        assert loader.stats()["skipped"] == loader.state_dict()["nodes"]["flat_mapper"]["skipped"] == 2
        assert len(caplog.records) == 2
        list(loader)
        assert loader.stats()["skipped"] == 4
        with pytest.raises(OSError, match="no sample") as caught:
            list(loader)
        assert "max_skipped=4" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_count_goes_on_after_a_resume(batch_size):
    def make():
        return loader_of(0, batch_size, map_fn=bad, max_skipped=2)

    loader = make()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    for state in states:
        resumed = make()
        resumed.load_state_dict(state)
        if state["epoch"] == 0:
            list(resumed)
        assert resumed.stats()["skipped"] == 2


def test_one_that_is_left_out_below_counts_once():
    def make(batch_size):
        source = SeededMapper(samples(), lambda index: 1 // (index != 4) and index, seed=1, max_skipped=1)
        node = flat(lambda index: [(index, view) for view in range(3)], source=source, rng=())
        return StatefulDataLoader(SeededBatcher(node, batch_size, collate_fn=list))

    for batch_size in (1, 2, 4, 5):
        loader = make(batch_size)
        found = [item for batch in loader for item in batch]
        assert found == [(index, view) for index in samples() if index != 4 for view in range(3)]
        assert loader.stats()["skipped"] == 1


def test_a_wrong_number_of_items_may_be_left_out():
    loader = loader_of(map_fn=none_of_four, max_skipped=1)
    assert [item for batch in loader for item in batch] == [index for index in samples() if index != 4 for _ in range(3)]


# Ranks.


def ranks_of(world_size, length=11, uneven="pad"):
    return [flat(source=samples(length, rank, world_size, uneven)) for rank in range(world_size)]


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("size", [3, 6, 9])
def test_the_ranks_together_read_the_stream_of_one(world_size, uneven, size):
    whole = expected(11)
    shares = [pulled(node, [size]) for node in ranks_of(world_size, uneven=uneven)]
    assert len({len(share) for share in shares}) == 1
    assert all(node.length() == len(shares[0]) for node in ranks_of(world_size, uneven=uneven))
    samples_ = [[share[start : start + 3] for start in range(0, len(share), 3)] for share in shares]
    together = [item for row in zip(*samples_, strict=True) for items in row for item in items]
    assert same(together[:33], whole[: len(together)])
    assert [position for position, _ in together] == list(range(len(together)))


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_several_ranks_cut_between_samples_only(size):
    (node, _) = ranks_of(2)
    with pytest.raises(ResumableBatchConfigurationError, match=r"a multiple of fan_out=3.*Choose such a batch size"):
        node.pull(size)
    loader = StatefulDataLoader(SeededBatcher(node, size))
    with pytest.raises(ResumableBatchConfigurationError, match="fan_out=3"):
        next(iter(loader))


def test_a_state_in_the_middle_of_a_sample_is_refused_with_several_ranks():
    node = flat(length=11)
    node.pull(4)
    node.stream.arrive(node.mark())
    state = node.get_state()
    for other in ranks_of(2):
        with pytest.raises(StateMismatchError, match=r"flat_mapper\.offset: saved 1, .*save where a sample ends"):
            load(other, state, ("world_size",))
        assert other.consumed() == (0, 0, (0, 0))
    node.pull(2)
    node.stream.arrive(node.mark())
    shares = []
    for other in ranks_of(2):
        load(other, node.get_state(), ("world_size",))
        shares.append(pulled(other, [3]))
    assert shares[0][0] == expected(11)[6]
    assert shares[1][0] == expected(11)[9]


def test_other_data_are_named_at_a_load():
    saved = StatefulDataLoader(flat(fingerprint="v1")).state_dict()
    StatefulDataLoader(flat(fingerprint=lambda: "v1")).load_state_dict(saved)
    StatefulDataLoader(flat()).load_state_dict(saved)
    with pytest.raises(StateMismatchError, match="the data are others") as caught:
        StatefulDataLoader(flat(fingerprint="v2")).load_state_dict(saved)
    assert [(one.node, one.field, one.saved, one.current) for one in caught.value.differences] == [
        ("flat_mapper", "fingerprint", "'v1'", "'v2'")
    ]

"""The contract of a node: the two halves, its place in a pipeline, and its face towards torchdata."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from functools import partial

import pytest
import torchdata.nodes as tn

from stateful_pipes import (
    Node,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    as_node,
)
from stateful_pipes.contract import walk
from stateful_pipes.errors import NodeAttachedError, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.fields import counter
from tests.streams import place_of


class Doubler(Node):
    """The smallest node: a function of the items."""

    def __init__(self, source, **kwargs):
        super().__init__(as_node(source), **kwargs)

    def run(self, ticket):
        return [2 * item for item in self.sources[0].run(ticket)]


class Scaler(Node):
    """With an argument that shapes its stream."""

    def __init__(self, source, factor):
        self.factor = factor
        super().__init__(source)

    def run(self, ticket):
        return [self.factor * item for item in self.sources[0].run(ticket)]

    def settings(self):
        return {"factor": self.factor}


class Drawing(SamplerNode):
    """Its pull draws as the training loop's own code may."""

    def pull(self, count):
        random.random()
        return super().pull(count)


class Countdown(Node):
    """A source: length, length - 1, ... 1 in each epoch."""

    def __init__(self, length, **kwargs):
        self.count = length
        self.at = (0, 0)
        super().__init__(**kwargs)

    def pull(self, count):
        epoch, position = self.at
        if position == self.count:
            self.at = (epoch + 1, 0)
            raise StopIteration
        stop = min(position + count, self.count)
        self.at = (epoch, stop)
        return (epoch, (position, stop, 1))

    def run(self, ticket):
        return [self.count - position for position in range(*ticket[1])]

    def mark(self):
        return self.at

    def seek(self, mark):
        self.at = mark

    def settings(self):
        return {"length": self.count}

    def values(self, mark):
        return {"epoch": mark[0], "position": mark[1]}

    def rules(self):
        return {"epoch": counter, "position": partial(counter, below=self.count)}

    def locate(self, entry, parts):
        return (entry["epoch"], entry["position"])

    def parts(self, mark):
        return ()

    def start(self, epoch):
        return (epoch, 0)

    def at_start(self, mark):
        return mark[1] == 0

    def next_epoch(self, mark):
        self.seek((mark[0] + 1, 0))

    def length(self):
        return self.count


class Pairs(Node):
    """Two sources in lockstep; the shorter one ends the epoch."""

    def __init__(self, one, other, **kwargs):
        super().__init__(one, other, **kwargs)

    def pull(self, count):
        try:
            tickets = [source.pull(count) for source in self.sources]
        except StopIteration:
            epoch = max(source.mark()[0] for source in self.sources)
            self.seek(tuple_mark([source.start(epoch) for source in self.sources]))
            raise
        return (tickets[0][0], tickets[0][1], tuple(tickets))

    def run(self, ticket):
        return list(zip(*(source.run(part) for source, part in zip(self.sources, ticket[2], strict=True)), strict=False))

    def mark(self):
        return tuple_mark([source.mark() for source in self.sources])

    def parts(self, mark):
        return mark[1:]

    def seek(self, mark):
        for source, part in zip(self.sources, mark[1:], strict=True):
            source.seek(part)

    def locate(self, entry, parts):
        return tuple_mark(parts)

    def start(self, epoch):
        return tuple_mark([source.start(epoch) for source in self.sources])

    def next_epoch(self, mark):
        self.seek(self.start(mark[0] + 1))

    def length(self):
        return min(source.length() for source in self.sources)


def tuple_mark(parts):
    return (parts[0][0], *parts)


def sampled(length=4):
    return SamplerNode(SequentialSampler(length))


def pipeline(length=6, batch_size=2):
    return SeededBatcher(SeededMapper(sampled(length), lambda index: index, seed=1), batch_size, collate_fn=list, seed=2)


MAKERS = {
    "sampler": sampled,
    "mapper": lambda: SeededMapper(SamplerNode(RandomSampler(5, seed=1)), lambda index: index, seed=1),
    "batcher": pipeline,
    "prefetcher": lambda: ProcessPrefetcher(pipeline(7, 2), 0),
    "doubler": lambda: Doubler(sampled()),
    "countdown": lambda: Countdown(4),
    "pairs": lambda: Pairs(sampled(4), Scaler(SamplerNode(RandomSampler(4, seed=3), name="other"), 10)),
    "foreign": lambda: as_node(tn.IterableWrapper(range(4))),
    "mapper over foreign": lambda: SeededMapper(tn.IterableWrapper(range(4)), lambda index: index, seed=1),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def epochs(node, count):
    """As torchdata wants it: reset before each epoch."""
    found = []
    for _ in range(count):
        node.reset(None)
        found.append(list(node))
    return found


# Towards torchdata.


@every
def test_a_node_is_a_torchdata_node(make):
    node = make()
    assert isinstance(node, tn.BaseNode)
    assert iter(node) is node
    first, second = epochs(node, 2)
    assert len(first) == len(second) > 2


@every
def test_reset_at_the_start_of_an_epoch_does_nothing(make):
    expected = epochs(make(), 1)
    node = make()
    node.reset(None)
    node.reset()
    assert epochs(node, 1) == expected


@every
def test_reset_in_an_epoch_goes_to_the_next_one(make):
    expected = epochs(make(), 3)
    node = make()
    node.reset(None)
    next(node)
    node.reset(None)
    assert list(node) == expected[1]
    node.reset(None)
    assert list(node) == expected[2]


@every
def test_without_reset_an_epoch_stays_at_its_end(make):
    node = make()
    list(node)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(node)


@every
@pytest.mark.parametrize("door", ["reset", "load_state_dict"])
def test_a_state_resumes_at_every_step(make, door):
    expected = epochs(make(), 3)
    node = make()
    node.reset(None)
    for consumed in range(len(expected[0]) + 1):
        if consumed:
            next(node)
        state = json.loads(json.dumps(node.state_dict()))
        resumed = make()
        if door == "reset":
            resumed.reset(state)
        else:
            resumed.load_state_dict(state)
            resumed.reset(None)  # stays where the state is
        if consumed < len(expected[0]) or door == "reset":
            # After the last item a reset still tells the end, which a node above may be waiting for.
            assert list(resumed) == expected[0][consumed:]
            resumed.reset(None)
        assert list(resumed) == expected[1]  # loaded, an exhausted epoch's state is the next one's start
        resumed.reset(None)
        assert list(resumed) == expected[2]


@every
def test_a_load_of_a_used_node_stays_at_the_next_reset(make):
    expected = epochs(make(), 1)[0]
    node = make()
    node.reset(None)
    next(node)
    state = node.state_dict()
    list(node)
    node.load_state_dict(state)
    node.reset(None)
    assert list(node) == expected[1:]


@every
def test_only_the_first_reset_after_a_load_stays(make):
    expected = epochs(make(), 2)
    node = make()
    node.reset(None)
    next(node)
    node.load_state_dict(node.state_dict())
    node.reset(None)
    node.reset(None)
    assert list(node) == expected[1]


@every
def test_a_reset_to_a_state_does_not_hold_the_next_one(make):
    expected = epochs(make(), 2)
    node = make()
    node.reset(None)
    next(node)
    node.reset(node.state_dict())
    node.reset(None)
    assert list(node) == expected[1]


@every
def test_a_state_is_the_same_shape_all_along_and_shares_nothing(make):
    node = make()
    node.reset(None)
    shape = lambda state: {name: list(entry) for name, entry in state["nodes"].items()}  # noqa: E731
    first = node.state_dict()
    assert first == node.state_dict()
    for item in iter(lambda: next(node, None), None):
        assert item is not None
        state = node.state_dict()
        assert shape(state) == shape(first)
        copied = copy.deepcopy(state)
        for entry in state["nodes"].values():
            entry.clear()
        assert node.state_dict() == copied
    assert shape(node.state_dict()) == shape(first)


@every
def test_a_loaded_state_is_not_kept(make):
    node = make()
    node.reset(None)
    next(node)
    state = node.state_dict()
    expected = copy.deepcopy(state)
    node.load_state_dict(state)
    for entry in state["nodes"].values():
        entry.clear()
    assert node.state_dict() == expected


@every
def test_a_refused_state_changes_nothing(make):
    expected = epochs(make(), 1)[0]
    node = make()
    node.reset(None)
    first = next(node)
    state = node.state_dict()
    for name in state["nodes"]:
        wrong = copy.deepcopy(state)
        del wrong["nodes"][name]
        for door in (node.reset, node.load_state_dict):
            with pytest.raises(StateMismatchError, match=f"{name}: saved missing"):
                door(wrong)
        assert node.state_dict() == state
    assert [first, *node] == expected


# The contract.


def test_a_node_without_run_is_refused():
    class Nothing(Node):
        pass

    with pytest.raises(ResumableModeRequiredError, match=r"Nothing does not implement run\(ticket\)"):
        Nothing(sampled())
    with pytest.raises(ResumableModeRequiredError, match=r"Node does not implement run\(ticket\)"):
        Node()


@pytest.mark.parametrize("name", ["next", "__next__", "reset", "get_state", "state_dict", "load_state_dict"])
def test_a_node_that_overrides_the_whole_node_s_methods_is_refused(name):
    kind = type("Third", (Doubler,), {name: lambda self, *args: None})
    with pytest.raises(ResumableModeRequiredError, match=f"Third overrides {name}"):
        kind(sampled())
    kind = type("Third", (SeededMapper,), {name: lambda self, *args: None})
    with pytest.raises(ResumableModeRequiredError, match=f"Third overrides {name}"):
        kind(sampled(), abs)


def test_run_of_the_base_is_a_hook():
    class Late(Doubler):
        def run(self, ticket):
            return Node.run(self, ticket)

    with pytest.raises(NotImplementedError, match="Late does not implement run"):
        next(Late(sampled()))


def test_a_node_with_two_sources_implements_the_contract():
    class Two(Node):
        def run(self, ticket):
            return []

    node = Two(sampled(), SamplerNode(SequentialSampler(2), name="other"))
    with pytest.raises(NotImplementedError, match="Two has 2 sources"):
        node.pull(1)


def test_a_node_of_your_own_below_and_above_ours():
    source = Countdown(5, name="count")
    node = SeededBatcher(Doubler(SeededMapper(source, lambda item: item, seed=1)), 2, collate_fn=list, seed=1)
    loader = StatefulDataLoader(Scaler(node, 2))
    assert len(loader) == 3
    assert list(loader) == [[10, 8, 10, 8], [6, 4, 6, 4], [2, 2]]
    assert list(loader.state_dict()["nodes"]) == ["count", "mapper", "batcher", "scaler"]  # the stateless one has none


def test_an_argument_of_your_own_node_is_compared():
    state = StatefulDataLoader(Scaler(sampled(), 2)).state_dict()
    StatefulDataLoader(Scaler(sampled(), 2)).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"scaler\.factor: saved 2, here 3"):
        StatefulDataLoader(Scaler(sampled(), 3)).load_state_dict(state)


def test_another_class_under_the_same_name_is_refused():
    state = StatefulDataLoader(Countdown(4, name="source")).state_dict()
    with pytest.raises(StateMismatchError, match=r"source\.type: saved 'Countdown', here 'SamplerNode'"):
        StatefulDataLoader(SamplerNode(SequentialSampler(4), name="source")).load_state_dict(state)


# Names.


def test_names_are_kinds_numbered_from_the_source_up():
    node = sampled()
    for _ in range(2):
        node = SeededMapper(node, abs, seed=1)
    node = SeededMapper(node, abs, seed=1, name="decode")
    node = SeededBatcher(Doubler(node), 2, seed=1)
    assert [one.name for one in walk(node)] == ["sampler", "mapper", "mapper_2", "decode", "doubler", "batcher"]
    assert list(node.state_dict()["nodes"]) == ["sampler", "mapper", "mapper_2", "decode", "batcher"]


def test_one_name_twice_is_refused():
    with pytest.raises(ValueError, match="'x'"):
        Doubler(Doubler(sampled(), name="x"), name="x")
    with pytest.raises(ValueError, match="'x'"):
        Pairs(Doubler(sampled(), name="x"), Doubler(sampled(), name="x"))


def test_nodes_that_are_named_by_their_kind_are_told_apart():
    node = Pairs(sampled(), sampled())
    assert [one.name for one in node.sources] == ["sampler", "sampler_2"]


def test_a_subtree_keeps_its_names():
    inner = SeededMapper(sampled(), abs, seed=1)
    before = list(inner.state_dict()["nodes"])
    outer = SeededMapper(inner, abs, seed=1)
    assert list(outer.state_dict()["nodes"])[:2] == before


# Places.


def test_a_node_has_one_place():
    source = sampled()
    above = Doubler(source)
    for use in (lambda: Doubler(source), lambda: StatefulDataLoader(source)):
        with pytest.raises(NodeAttachedError, match="'doubler' already pulls from it") as caught:
            use()
        assert caught.value.node == "sampler"
    for use in (lambda: source.reset(None), lambda: source.load_state_dict(above.state_dict()), lambda: next(source)):
        with pytest.raises(NodeAttachedError, match="'doubler'"):
            use()
    assert list(above) == [0, 2, 4, 6]


def test_a_dropped_parent_gives_its_source_free():
    source = sampled()
    gc.disable()  # dropping alone must do
    try:
        above = Doubler(source)
        del above
        assert list(Doubler(source)) == [0, 2, 4, 6]
    finally:
        gc.enable()


def test_dropping_a_pipeline_frees_it_without_the_garbage_collector():
    gc.disable()
    try:
        loader = StatefulDataLoader(ProcessPrefetcher(pipeline(), 0))
        next(iter(loader))
        gone = [weakref.ref(node) for node in walk(loader.pipeline)]
        del loader
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_every_node_knows_the_consumed_position():
    loader = StatefulDataLoader(ProcessPrefetcher(pipeline(), 0))
    iterator = iter(loader)
    next(iterator)
    assert [node.consumed() for node in walk(loader.pipeline)] == [(0, 2)] * 4
    assert all(node.top() is loader.pipeline for node in walk(loader.pipeline))
    next(iterator)
    next(iterator)
    assert [node.consumed() for node in walk(loader.pipeline)] == [(1, 0)] * 4


def test_set_epoch_of_any_node_moves_the_whole_pipeline():
    loader = StatefulDataLoader(ProcessPrefetcher(pipeline(), 0))
    next(iter(loader))
    for epoch, node in enumerate(walk(loader.pipeline), 3):
        node.set_epoch(epoch)
        assert place_of(loader) == (epoch, 0)
    with pytest.raises(ValueError, match="got -1"):
        loader.pipeline.set_epoch(-1)


@every
def test_a_look_at_a_node_s_state_moves_nothing(make):
    """Also below a loader, where torchdata's `state_dict` has not been told that the node is under way."""
    expected = list(StatefulDataLoader(make()))
    loader = StatefulDataLoader(make())
    iterator = iter(loader)
    first = next(iterator)
    state = loader.state_dict()
    assert loader.pipeline.state_dict() == state
    for node in walk(loader.pipeline):
        node.state_dict()
    assert loader.state_dict() == state
    assert [first, *iterator] == expected


def test_a_node_starts_at_its_sampler_s_cursor_under_every_door():
    """Its first reset is the start of iteration, not the end of an epoch."""

    def make():
        sampler = SequentialSampler(4)
        sampler.set_epoch(1)
        sampler.advance(2)
        return SamplerNode(sampler)

    node = make()
    node.reset(None)
    assert list(StatefulDataLoader(make())) == list(tn.Loader(make())) == list(make()) == list(node) == [2, 3]


def test_a_node_that_was_read_from_loses_nothing_to_a_node_above():
    source = sampled()
    assert next(source) == 0  # one more is pulled ahead, which does not count
    assert list(StatefulDataLoader(Doubler(source))) == [2, 4, 6]


def test_a_node_has_one_loader():
    node = pipeline()
    loader = StatefulDataLoader(node)
    with pytest.raises(NodeAttachedError, match="another loader reads from it"):
        StatefulDataLoader(node)
    loader.close()
    other = StatefulDataLoader(node)
    with pytest.raises(NodeAttachedError):
        iter(loader)
    del other
    assert len(list(loader)) == 3


def test_a_node_that_a_loader_reads_from_takes_no_node_above():
    source = sampled()
    loader = StatefulDataLoader(source)
    iterator = iter(loader)
    first = next(iterator)
    with pytest.raises(NodeAttachedError, match="loader"):
        Doubler(source)
    assert [first, *iterator] == [0, 1, 2, 3]
    loader.close()
    assert list(StatefulDataLoader(Doubler(source))) == [0, 2, 4, 6]


@every
@pytest.mark.parametrize("used", [0, 1, 4])
def test_a_node_s_state_fits_whoever_moved_it_last(make, used):
    """Read from by itself first, then by a loader over several epochs."""
    node = make()
    for _ in zip(range(used), node, strict=False):
        pass
    loader = StatefulDataLoader(node)
    for _ in range(2):
        list(loader)
    next(iter(loader))
    state = node.state_dict()
    expected = list(loader)
    resumed = StatefulDataLoader(make())
    resumed.load_state_dict(state)
    assert list(resumed) == expected


def test_a_refused_construction_gives_the_node_free():
    """Also while the error is still held: a handler goes back to an older checkpoint."""
    node = pipeline()
    good = StatefulDataLoader(node).checkpoint()
    with pytest.raises(Exception, match="checkpoint") as held:
        StatefulDataLoader(node, checkpoint=good[:-1])
    assert len(list(StatefulDataLoader(node, checkpoint=good))) == 3
    del held


def test_sources_of_a_refused_node_are_free():
    source = sampled(3)
    with pytest.raises(Exception, match="No valid batch") as held:
        SeededBatcher(source, 5, drop_last=True)
    assert len(list(SeededBatcher(source, 2, collate_fn=list))) == 2
    del held


def test_two_sources_with_the_same_marks():
    loader = StatefulDataLoader(MAKERS["pairs"]())
    expected = [list(loader) for _ in range(2)]
    assert [first for first, _ in expected[0]] == [0, 1, 2, 3]
    assert list(loader.state_dict()["nodes"]) == ["sampler", "other", "scaler"]
    resumed = StatefulDataLoader(MAKERS["pairs"]())
    resumed.set_epoch(1)
    next(iter(resumed))
    assert list(resumed) == expected[1][1:]


# What goes to the workers.


def test_a_pickled_node_runs_but_holds_nothing_of_the_main_process():
    node = SeededMapper(Countdown(5), abs, seed=3)
    above = Doubler(node)
    next(above)
    copied = pickle.loads(pickle.dumps(above))
    ticket = (0, (1, 3, 1), (0, (1, 3, 1)), 5)
    assert copied.run(ticket) == above.run(ticket) == [8, 6]
    for one in walk(copied):
        assert not set(Node.MAIN_ONLY) & set(vars(one))


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy])
def test_a_node_cannot_be_copied(copying):
    with pytest.raises(TypeError, match="cannot be copied"):
        copying(SeededMapper(Countdown(5), abs, seed=3))


def test_open_and_close_reach_every_sampler():
    sampler = RandomSampler(4, seed=0)
    node = Doubler(SeededMapper(SamplerNode(sampler), abs, seed=1))
    node.close()
    node.close()
    sampler.advance(1)
    node.open()
    with pytest.raises(NodeAttachedError):
        sampler.advance(1)


class Squares(Node):
    """A source that implements just what the contract lists."""

    def __init__(self):
        self.at = (0, 0)
        super().__init__()

    def pull(self, count):
        epoch, position = self.at
        if position == 4:
            self.at = (epoch + 1, 0)
            raise StopIteration
        stop = min(4, position + count)
        self.at = (epoch, stop)
        return (epoch, (position, stop, 1))

    def run(self, ticket):
        return [position**2 for position in range(*ticket[1])]

    def mark(self):
        return self.at

    def seek(self, mark):
        self.at = mark

    def values(self, mark):
        return {"epoch": mark[0], "consumed": mark[1]}

    def rules(self):
        return {"epoch": counter, "consumed": partial(counter, below=4)}

    def locate(self, entry, parts):
        return (entry["epoch"], entry["consumed"])

    def start(self, epoch):
        return (epoch, 0)

    def next_epoch(self, mark):
        self.at = (mark[0] + 1, 0)


def test_a_source_of_ones_own():
    loader = StatefulDataLoader(Squares())
    assert next(iter(loader)) == 0
    state = loader.state_dict()
    loader.restart()
    assert list(loader) == [0, 1, 4, 9]
    assert place_of(loader) == (1, 0)
    loader.load_state_dict(state)
    assert list(loader) == [1, 4, 9]
    with pytest.raises(TypeError, match="does not know its length"):
        len(loader)
    node = Squares()
    assert [list(node), node.reset(), list(node)] == [[0, 1, 4, 9], None, [0, 1, 4, 9]]


def test_a_node_in_the_middle_cannot_be_closed():
    """Its workers would be gone, and the nodes above would wait for them."""
    prefetcher = ProcessPrefetcher(SamplerNode(SequentialSampler(4)), 0)
    loader = StatefulDataLoader(Doubler(prefetcher))
    with pytest.raises(NodeAttachedError, match="close"):
        prefetcher.close()
    assert list(loader) == [0, 2, 4, 6]


def test_a_closed_node_takes_its_sampler_back():
    sampler = SequentialSampler(5)
    node = SamplerNode(sampler)
    next(node)
    node.close()
    next(node)
    assert sampler.consumed == 2
    with pytest.raises(NodeAttachedError):
        SamplerNode(sampler)


def test_a_node_whose_parent_was_dropped_goes_on_from_where_it_stood():
    source = SamplerNode(SequentialSampler(8))
    assert next(source) == 0
    parent = SeededBatcher(source, 2, collate_fn=list)
    assert next(parent) == [1, 2]
    del parent
    assert source.state_dict()["nodes"]["sampler"]["consumed"] == 1
    assert list(SeededBatcher(source, 3, collate_fn=list)) == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_loader_s_node_is_not_loaded_beside_it():
    node = SamplerNode(SequentialSampler(4))
    state = node.state_dict()
    loader = StatefulDataLoader(node)
    for move in (lambda: node.load_state_dict(state), node.reset):
        with pytest.raises(NodeAttachedError):
            move()
    assert list(loader) == [0, 1, 2, 3]


def test_an_allowed_difference_below_a_foreign_node_is_taken_over():
    def make(batch_size):
        batches = SeededBatcher(SamplerNode(SequentialSampler(12)), batch_size, collate_fn=list, seed=0)
        return StatefulDataLoader(tn.Batcher(batches, 2, drop_last=False))

    saving = make(2)
    assert next(iter(saving)) == [[0, 1], [2, 3]]
    loader = make(3)
    loader.load_state_dict(saving.state_dict(), allow=("batch_size",))
    state = loader.state_dict()
    loader.close()
    assert next(iter(loader)) == [[4, 5, 6], [7, 8, 9]]
    same_size = make(3)
    same_size.load_state_dict(state)
    assert list(same_size) == [[[4, 5, 6], [7, 8, 9]], [[10, 11]]]


def test_a_subclass_s_own_argument_is_in_the_state_and_compared():
    class Sized(SeededMapper):
        def __init__(self, source, size, **kwargs):
            super().__init__(source, str, **kwargs)
            self.size = size

        def settings(self):
            return {**super().settings(), "size": self.size}

    state = Sized(SamplerNode(SequentialSampler(9)), 3, seed=1).get_state()
    assert state["nodes"]["mapper"]["size"] == 3
    Sized(SamplerNode(SequentialSampler(9)), 3).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="size"):
        Sized(SamplerNode(SequentialSampler(9)), 4).load_state_dict(state)


def test_a_seed_that_the_sampler_got_while_the_node_was_closed_is_in_the_state():
    sampler = RandomSampler(9, seed=1)
    node = SamplerNode(sampler)
    assert node.get_state()["nodes"]["sampler"]["seed"] == 1
    node.close()
    sampler.load_state_dict({**sampler.state_dict(), "seed": 2})
    assert len(list(node)) == 9
    assert node.get_state()["nodes"]["sampler"]["seed"] == 2


def test_the_generators_are_as_before_after_run_and_only_that():
    node = SeededMapper(Drawing(SequentialSampler(3)), lambda index: random.random(), seed=1)
    random.seed(5)
    items = list(StatefulDataLoader(node))
    found = random.random()
    assert len(set(items)) == 3
    random.seed(5)
    pulls = [random.random() for _ in range(4)]  # and the epoch's end
    assert found == random.random()
    assert set(pulls).isdisjoint(items)

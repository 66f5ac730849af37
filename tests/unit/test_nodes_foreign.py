"""Other people's nodes as a source: their state as text, their epochs, and the loader's calls that reach only so far."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
import torchdata.nodes as tn

from stateful_pipes import (
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    as_node,
)
from stateful_pipes.encoding import decode, encode
from stateful_pipes.errors import (
    NodeAttachedError,
    ResumableModeRequiredError,
    StateEncodingError,
    StatefulPipesError,
    StateMismatchError,
)
from stateful_pipes.nodes.foreign import ForeignNode
from tests.streams import place_of, same


class Source(tn.BaseNode):
    """Counts; its state holds what it is told to."""

    def __init__(self, length=4, extra=None):
        super().__init__()
        self.length = length
        self.extra = extra
        self.resets = []
        self.fail = None

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.resets.append(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]

    def next(self):
        if self.fail == self.at:
            raise OSError("shard is gone")
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self):
        return {"at": self.at, "extra": self.extra}


class Filtering(tn.BaseNode):
    """Drops what a predicate refuses: many of the source's items for one of its own."""

    def __init__(self, source, keep):
        super().__init__()
        self.source = source
        self.keep = keep

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self):
        while True:
            item = next(self.source)
            if self.keep(item):
                return item

    def get_state(self):
        return {"source": self.source.state_dict()}


def even(item):
    return item % 2 == 0


MAKERS = {
    "wrapper": lambda: tn.IterableWrapper(range(5)),
    "mapper": lambda: tn.Mapper(tn.IterableWrapper(range(5)), abs),
    "batcher": lambda: tn.Batcher(tn.IterableWrapper(range(5)), 2, drop_last=False),
    "own": Source,
    "filtering": lambda: Filtering(Source(9), even),
    "filtering ours": lambda: Filtering(SamplerNode(RandomSampler(9, seed=1)), even),
    "batcher over ours": lambda: tn.Batcher(SamplerNode(RandomSampler(9, seed=1)), 2, drop_last=False),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_resumes_at_every_step_of_two_epochs(make):
    expected = [list(loader := StatefulDataLoader(make()))]
    expected.append(list(loader))
    loader = StatefulDataLoader(make())
    for epoch in range(2):
        iterator = iter(loader)
        for consumed in range(len(expected[epoch])):
            next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
            resumed = StatefulDataLoader(make())
            resumed.load_state_dict(state)
            found = list(resumed)
            if consumed + 1 < len(expected[epoch]):
                assert found == expected[epoch][consumed + 1 :]
            elif epoch == 0:
                assert found == expected[1]
        assert place_of(loader) == (epoch + 1, 0)


def test_its_items_are_the_payload_and_run_in_the_main_process():
    node = as_node(Source())
    ticket = node.pull(3)
    assert ticket == (0, (0, 3, 1), [0, 1, 2])
    assert node.run(ticket) == [0, 1, 2]
    node.run(ticket).append("changed")
    assert node.run(ticket) == [0, 1, 2]


def test_an_end_that_was_not_told_is_forgotten_by_a_move():
    node = as_node(Source(2))
    mark = node.mark()
    assert node.run(node.pull(3)) == [0, 1]  # short, so it has seen the end
    node.seek(mark)
    assert node.run(node.pull(1)) == [0]


def test_its_name_and_type_are_the_node_s_own():
    node = as_node(Source())
    assert type(node) is ForeignNode
    assert node.name == "source"
    assert node.type_name == "Source"
    assert list(StatefulDataLoader(node).state_dict()["nodes"]) == ["source"]
    assert as_node(tn.IterableWrapper([1])).name == "iterable_wrapper"
    assert as_node(node) is node


def test_its_state_is_one_text_and_its_epochs_are_counted():
    loader = StatefulDataLoader(Source(2))
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["nodes"]["source"] == {
        "type": "Source",
        "epoch": 0,
        "position": 1,
        "state": '{"at":1,"extra":null}',
    }
    next(iterator)  # the epoch's last: the node was reset, and this is its real state after that
    assert loader.state_dict()["nodes"]["source"] == {
        "type": "Source",
        "epoch": 1,
        "position": 0,
        "state": '{"at":0,"extra":null}',
    }


def test_tensors_and_bytes_in_its_state():
    extra = {"t": torch.ones(2, dtype=torch.bfloat16), "b": b"\xff", "a": np.arange(3), 1: (2, float("inf"))}
    loader = StatefulDataLoader(Source(4, extra))
    next(iter(loader))
    text = json.loads(loader.checkpoint())["state"]["nodes"]["source"]["state"]
    assert same(decode(text), {"at": 1, "extra": extra})
    resumed_source = Source(4)
    resumed = StatefulDataLoader(resumed_source, checkpoint=loader.checkpoint())
    assert next(iter(resumed)) == 1
    assert same(resumed_source.resets[-1], {"at": 1, "extra": extra})


def test_a_state_that_json_cannot_hold_is_refused_by_node():
    loader = StatefulDataLoader(Source(4, {"x": object()}))
    with pytest.raises(StateEncodingError, match=r"state\['extra'\]\['x'\] is a builtins\.object") as caught:
        next(iter(loader))
    assert caught.value.node == "source"


@pytest.mark.parametrize("lacking", ["next", "reset", "get_state"])
def test_a_node_without_a_part_of_the_contract_is_refused_by_name(lacking):
    methods = {name: getattr(Source, name) for name in ("next", "reset", "get_state") if name != lacking}
    kind = type("ThirdParty", (tn.BaseNode,), methods)
    for use in (as_node, StatefulDataLoader, lambda node: SeededMapper(node, abs), lambda node: ProcessPrefetcher(node, 0)):
        with pytest.raises(ResumableModeRequiredError, match=f"ThirdParty does not implement {lacking}") as caught:
            use(kind())
        assert caught.value.remedy


def test_such_a_node_is_refused_inside_another_too():
    class Stateless(tn.BaseNode):
        def reset(self, initial_state=None):
            super().reset(initial_state)

        def next(self):
            return 1

    with pytest.raises(ResumableModeRequiredError, match="Stateless does not implement get_state"):
        StatefulDataLoader(Filtering(Stateless(), even))


class Empty(Source):
    """Has {} for a state, and takes none."""

    def get_state(self):
        return {}


Empty.get_state.__module__ = "nvidia.dali.experimental.dynamic.pytorch.nodes"


def test_a_node_of_dali_s_dynamic_mode_is_refused_before_a_load_fails():
    for use in (as_node, StatefulDataLoader, lambda node: SeededMapper(tn.Mapper(node, abs), abs)):
        with pytest.raises(ResumableModeRequiredError, match="Empty of DALI's dynamic mode has no state") as caught:
            use(Empty())
        assert "DALIPipelineNode" in caught.value.remedy

    class Subclass(Empty):
        def get_state(self):
            return {"at": self.at}

    assert list(StatefulDataLoader(Subclass())) == [0, 1, 2, 3]


def test_what_has_a_state_in_another_version_of_dali_is_let_through():
    class Later(Source):
        def get_state(self):
            return super().get_state()  # an AttributeError before the first reset

    Later.get_state.__module__ = Empty.get_state.__module__
    assert list(StatefulDataLoader(Later())) == [0, 1, 2, 3]


class Forgetful(Filtering):
    """As Filtering, whose state holds nothing."""

    def reset(self, initial_state=None):
        super().reset(None)

    def get_state(self):
        return {}


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (lambda: SamplerNode(RandomSampler(9, seed=1)), "SamplerNode"),
        (lambda: tn.IterableWrapper(range(5)), "IterableWrapper"),
        (lambda: tn.Batcher(Source(), 2), "Batcher"),
    ],
)
def test_a_node_that_leaves_out_the_state_of_what_it_holds_is_refused(make, lost):
    """Its resume would start anew without a word."""
    loader = StatefulDataLoader(Forgetful(make(), even))
    for ask in (loader.state_dict, lambda: next(iter(loader))):
        with pytest.raises(ResumableModeRequiredError, match=f"Forgetful has an empty state.* {lost} in it") as caught:
            ask()
        assert caught.value.node == "forgetful"


def test_a_node_that_needs_no_state_is_let_through():
    class Ones(tn.BaseNode):
        def reset(self, initial_state=None):
            super().reset(initial_state)

        def next(self):
            return 1

        def get_state(self):
            return {}

    for make in (Ones, lambda: Forgetful(Ones(), bool)):
        loader = StatefulDataLoader(make())
        assert next(iter(loader)) == 1
        resumed = StatefulDataLoader(make())
        resumed.load_state_dict(loader.state_dict())
        assert next(iter(resumed)) == 1


@pytest.mark.parametrize("thing", [[1], range(3), iter([1]), None, 3, "x", SequentialSampler(3), torch.nn.Identity()])
def test_something_else_is_no_node(thing):
    with pytest.raises(TypeError, match=f"source must be a torchdata node, got {type(thing).__name__}"):
        as_node(thing)


def test_only_the_node_itself_knows_its_epochs():
    loader = StatefulDataLoader(Source())
    next(iter(loader))
    for move in (lambda: loader.set_epoch(3), loader.restart):
        with pytest.raises(ResumableModeRequiredError, match="Source itself knows") as caught:
            move()
        assert caught.value.node == "source"
    loader.set_epoch(0)  # the current one
    assert place_of(loader) == (0, 1)
    assert list(loader) == [1, 2, 3]
    loader.restart()  # at the start of an epoch there is nothing to leave
    assert list(loader) == [0, 1, 2, 3]


def test_set_epoch_of_a_sampler_inside_is_refused_and_changes_nothing():
    sampler = RandomSampler(9, seed=1)
    loader = StatefulDataLoader(Filtering(SamplerNode(sampler), even))
    first = next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ResumableModeRequiredError):
        sampler.set_epoch(5)
    assert loader.state_dict() == state
    assert [first, *loader] == list(StatefulDataLoader(Filtering(SamplerNode(RandomSampler(9, seed=1)), even)))


def test_length():
    with pytest.raises(TypeError, match="does not know its length"):
        len(StatefulDataLoader(Source()))

    class Sized(Source):
        def __len__(self):
            return self.length

    assert len(StatefulDataLoader(Sized(7))) == 7


def test_position_counts_its_own_items():
    loader = StatefulDataLoader(Filtering(Source(9), even))
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert place_of(loader) == (0, 2)


DAMAGED = [
    "",
    "x",
    "{",
    "null",
    "[]",
    "3",
    "{}",
    '{"at":',
    '{"__stateful_pipes__":"tensor"}',
    '{"__stateful_pipes__":"x","value":1}',
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_text_is_refused_and_changes_nothing(damaged):
    source = Source()
    loader = StatefulDataLoader(source)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    wrong = copy.deepcopy(state)
    wrong["nodes"]["source"]["state"] = damaged
    with pytest.raises(StatefulPipesError, match="source"):
        loader.load_state_dict(wrong)
    assert loader.state_dict() == state
    assert list(iterator) == [1, 2, 3]


def test_a_wrong_state_of_ours_inside_is_refused_and_changes_nothing():
    def make(length):
        return StatefulDataLoader(Filtering(SamplerNode(RandomSampler(length, seed=1)), even))

    expected = list(make(9))
    loader = make(9)
    iterator = iter(loader)
    first = next(iterator)
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match=r"sampler\.length: saved 11, here 9"):
        loader.load_state_dict(make(11).state_dict())
    assert loader.state_dict() == state
    assert [first, *iterator] == expected


def test_what_may_differ_reaches_ours_inside():
    def make(size):
        inner = SeededBatcher(SamplerNode(SequentialSampler(12)), size, collate_fn=list, seed=1)
        return StatefulDataLoader(Filtering(inner, bool))

    loader = make(3)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match=r"batcher\.batch_size"):
        make(4).load_state_dict(state)
    resumed = make(4)
    resumed.load_state_dict(state, allow=("batch_size",))
    assert list(resumed) == [[3, 4, 5, 6], [7, 8, 9, 10], [11]]


def test_a_failing_source_is_read_on_from_the_last_consumed_item():
    source = Source()
    loader = StatefulDataLoader(source)
    iterator = iter(loader)
    source.fail = 2
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(OSError, match="shard is gone"):
        next(iterator)
    source.fail = None
    loader.close()
    assert list(loader) == [2, 3]


def test_many_items_at_once_lose_none_to_an_error():
    source = Source(10)
    loader = StatefulDataLoader(SeededMapper(tn.Batcher(source, 3, drop_last=False), list, seed=1))
    iterator = iter(loader)
    assert next(iterator) == [0, 1, 2]
    source.fail = 5
    found = []
    while len(found) < 3:
        try:
            found.append(next(iterator))
        except OSError:
            source.fail = None
            loader.close()
            iterator = iter(loader)
    assert found == [[3, 4, 5], [6, 7, 8], [9]]


def test_nodes_of_ours_are_found_in_its_attributes():
    ours = [SamplerNode(SequentialSampler(3), name=name) for name in "abc"]

    class Holder(Source):
        def __init__(self):
            super().__init__()
            self.one = ours[0]
            self.more = {"b": [ours[1]]}
            self.below = Filtering(ours[2], even)
            self.itself = self

    assert list(as_node(Holder()).inner()) == ours


def test_closing_frees_samplers_inside():
    sampler = SequentialSampler(9)
    loader = StatefulDataLoader(Filtering(SamplerNode(sampler), even))
    assert next(iter(loader)) == 0
    with pytest.raises(NodeAttachedError):
        sampler.advance(1)
    loader.close()
    other = SamplerNode(sampler)
    with pytest.raises(NodeAttachedError):
        iter(loader)
    other.close()
    assert list(loader) == [2, 4, 6, 8]


def test_it_stays_in_the_main_process():
    node = as_node(Source())
    copied = pickle.loads(pickle.dumps(node))
    assert copied.run((0, (0, 2, 1), [5, 6])) == [5, 6]
    assert not hasattr(copied, "node")


def test_a_source_that_gives_none_and_empty_items():
    items = [None, 0, "", [], None]
    assert list(StatefulDataLoader(tn.IterableWrapper(items))) == items


def test_an_empty_source():
    loader = StatefulDataLoader(tn.IterableWrapper([]))
    for epoch in range(3):
        assert loader.position.epoch == epoch
        assert list(loader) == []


def test_encoding_is_asked_for_by_name():
    with pytest.raises(StateEncodingError) as caught:
        encode({1, 2}, "wrapper")
    assert caught.value.node == "wrapper"

"""A function as a source: what it is called with, where an epoch ends, and that it is resumed there."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial

import pytest
import torch

from stateful_pipes import (
    BatchInfo,
    ExternalSource,
    Mixer,
    ProcessPrefetcher,
    SampleInfo,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import LoaderFailedError, ResumableModeRequiredError, StateMismatchError
from tests.streams import place_of

LENGTHS = (5, 0, 3, 4)


def until(argument):
    """Epochs of lengths of their own; what it is called with."""
    index, epoch = (argument.iteration, argument.epoch_idx) if isinstance(argument, BatchInfo) else (argument[0], argument[3])
    if index >= LENGTHS[epoch % len(LENGTHS)]:
        raise StopIteration
    return tuple(argument)


def three(index):
    if index == 3:
        raise StopIteration
    return index


def batches_of(size, length, info):
    if info.idx_in_epoch == length:
        raise StopIteration
    return tuple(info)


def epochs(node, count, workers=0):
    with StatefulDataLoader(ProcessPrefetcher(node, workers)) as loader:
        return [list(loader) for _ in range(count)]


def test_it_is_called_with_the_index_of_the_batch():
    assert epochs(ExternalSource(three), 2) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_it_is_called_with_a_batch_info(workers):
    expected = [[(index, epoch) for index in range(length)] for epoch, length in enumerate(LENGTHS)]
    assert epochs(ExternalSource(until, batch_info=True), 4, workers) == expected
    assert BatchInfo(2, 1) == (2, 1) == BatchInfo(iteration=2, epoch_idx=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [6, 7, 8])
def test_it_is_called_with_a_sample_info_and_an_end_within_a_batch_drops_that(workers, length):
    node = SeededBatcher(ExternalSource(partial(batches_of, 3, length), batch=False), 3, collate_fn=list)
    expected = [
        [[(3 * number + place, place, number, epoch) for place in range(3)] for number in range(length // 3)]
        for epoch in range(2)
    ]
    assert epochs(node, 2, workers) == expected
    assert SampleInfo(idx_in_epoch=4, idx_in_batch=1, iteration=1, epoch_idx=0) == (4, 1, 1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_at_every_cut(workers):
    def make(workers=workers):
        source = ExternalSource(until, batch=False)
        node = SeededMapper(source, draw, seed=5)
        return StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, 2, collate_fn=list, seed=6), workers))

    with make(0) as loader:
        whole = [list(loader) for _ in range(5)]
    flat = [batch for epoch in whole for batch in epoch]
    assert [len(epoch) for epoch in whole] == [2, 0, 1, 2, 2]
    with make() as loader:
        read = 0
        while read < 6:
            for batch in loader:
                assert batch == flat[read]
                read += 1
                with make() as resumed:
                    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
                    assert place_of(resumed) == place_of(loader)
                    rest = [one for _ in range(5) for one in resumed]
                    assert rest[: len(flat) - read] == flat[read:]


def draw(sample):
    return sample, torch.rand(1).item()


@pytest.mark.parametrize("workers", [0, 1])
def test_with_the_last_batch_the_state_is_the_next_epoch_s_start(workers):
    with StatefulDataLoader(ProcessPrefetcher(ExternalSource(three), workers)) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(2)] == [0, 1]
        assert place_of(loader) == (0, 2)
        assert next(batches) == 2
        assert place_of(loader) == (1, 0)
        assert list(batches) == []
        assert list(loader) == [0, 1, 2]


def test_it_is_asked_once_for_each_place_and_one_ahead():
    asked = []

    def told(index):
        asked.append(index)
        return three(index)

    loader = StatefulDataLoader(ExternalSource(told))
    batches = iter(loader)
    for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        next(batches)
        assert asked == expected
    assert list(loader) == [0, 1, 2]
    assert asked == [0, 1, 2, 3] * 2


def test_moves():
    loader = StatefulDataLoader(ExternalSource(until, batch_info=True))
    next(iter(loader))
    loader.set_epoch(3)
    assert next(iter(loader)) == (0, 3)
    loader.restart()
    assert list(loader) == [(index, 3) for index in range(4)]
    with pytest.raises(TypeError, match="does not know its length"):
        len(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_told_in_its_turn_with_its_place(workers):
    faults = {"index": 2}

    def failing(index):
        if index == faults["index"]:
            raise ValueError("broken")
        return index if index < 4 else three(3)

    with StatefulDataLoader(ProcessPrefetcher(ExternalSource(failing), workers)) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(ValueError, match="broken") as caught:
            next(batches)
        assert "in node 'external_source' at position 2, called with 2" in "".join(caught.value.__notes__)
        assert place_of(loader) == (0, 2)
        with pytest.raises(LoaderFailedError):
            next(batches)
        loader.close()
        faults["index"] = -1
        assert list(loader) == [2, 3]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("asks", "arguments", "hint"),
    [
        (lambda info: info.iteration, {}, ["batch_info=True calls it with a BatchInfo"]),
        (lambda info: info.epoch_idx, {}, ["batch_info=True calls it with a BatchInfo"]),
        (lambda info: info.idx_in_epoch, {}, ["batch=False calls it with a SampleInfo"]),
        (lambda info: info.idx_in_batch, {"batch_info": True}, ["batch=False calls it with a SampleInfo"]),
        (lambda info: info.index, {}, []),
        (lambda info: Reader().iteration, {}, []),
    ],
)
def test_an_argument_of_another_kind_is_hinted_at(asks, arguments, hint, workers):
    with pytest.raises(AttributeError, match="has no attribute") as caught:
        epochs(ExternalSource(asks, **arguments), 1, workers)
    assert [note for note in caught.value.__notes__ if "calls it with" in note] == hint


def test_a_sample_that_is_left_out_counts_when_its_batch_is_handed_out():
    def odd(sample):
        if sample[0] == 3:
            raise ValueError("bad")
        return sample[0]

    source = ExternalSource(partial(batches_of, 2, 6), batch=False)
    node = SeededBatcher(SeededMapper(source, odd, seed=1, max_skipped=1), 2, collate_fn=list)
    loader = StatefulDataLoader(node)
    batches = iter(loader)
    assert next(batches) == [0, 1]
    assert loader.state_dict()["nodes"]["mapper"]["skipped"] == 0
    assert next(batches) == [2]
    assert loader.state_dict()["nodes"]["mapper"]["skipped"] == 1
    assert next(batches) == [4, 5]


def test_below_a_node_that_makes_more_of_each():
    node = SeededFlatMapper(ExternalSource(three), lambda index: [index, -index], 2, seed=1)
    with StatefulDataLoader(SeededBatcher(node, 2, collate_fn=list)) as loader:
        assert [list(loader) for _ in range(2)] == [[[0, 0], [1, -1], [2, -2]]] * 2


def test_under_torchdata():
    node = ExternalSource(three)
    assert list(node) == [0, 1, 2]
    node.reset()
    assert list(node) == [0, 1, 2]
    node.reset()
    assert [next(node), next(node)] == [0, 1]
    other = ExternalSource(three)
    other.reset(node.state_dict())
    assert list(other) == [2]


def test_a_damaged_state_is_refused():
    loader = StatefulDataLoader(ExternalSource(three))
    next(iter(loader))
    state = loader.state_dict()
    for change in ({"iteration": 2}, {"consumed": -1}, {"batch": False}, {"epoch": 1}):
        damaged = json.loads(json.dumps(state))
        damaged["nodes"]["external_source"].update(change)
        with pytest.raises(StateMismatchError, match=next(iter(change))):
            loader.load_state_dict(damaged)
    assert loader.state_dict() == state


class Seven:
    def __init__(self):
        self.left = 7

    def __call__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def generated():
    yield from (1, 2, 3)


async def asynchronous(index):
    return index


def generated_from(index):
    yield index


class Dataset:
    def __getitem__(self, index):
        return index


class Generating:
    def __call__(self):
        yield from (1, 2, 3)


class GeneratingFrom:
    def __call__(self, index):
        yield index


class Asynchronous:
    async def __call__(self, index):
        return index


ONWARDS = {
    "iterable": (lambda: [1, 2, 3], [[1, 2, 3], [1, 2, 3], [1, 2, 3]]),
    "iterator": (lambda: iter([1, 2, 3]), [[1, 2, 3], [], []]),
    "generator": (generated, [[1, 2, 3], [], []]),
    "generator function": (lambda: generated, [[1, 2, 3], [1, 2, 3], [1, 2, 3]]),
    "object that is called as one": (Generating, [[1, 2, 3], [1, 2, 3], [1, 2, 3]]),
    "part of one": (lambda: partial(generated_from, 3), [[3], [3], [3]]),
    "no argument": (Seven, [[6, 5, 4, 3, 2, 1, 0], [], []]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ONWARDS)
def test_what_can_be_read_only_onwards_works_and_is_not_resumed(kind, workers):
    make, expected = ONWARDS[kind]
    match = (
        r"external_source: the position of .* every load of one will be refused; to resume, write a function of the batch's index"
    )
    with pytest.warns(UserWarning, match=match) as told:
        node = ExternalSource(make())
    assert len(told) == 1
    with StatefulDataLoader(ProcessPrefetcher(node, workers)) as loader:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert list(loader) == expected[0]
            assert told == []  # an epoch that is not asked for is not missed
            assert [list(loader) for _ in range(2)] == expected[1:]
        words = [] if expected[1] else ["external_source: epoch 1 is empty", "cannot be begun anew; give a generator function"]
        assert len(told) == bool(words)
        assert all(word in str(told[0].message) for word in words)
        state = loader.state_dict()
        for load in (loader.load_state_dict, loader.validate_state_dict):
            with pytest.raises(ResumableModeRequiredError, match="write a function of the batch's index"):
                load(state)


class GoesOn:
    """After its end it goes on with the next epoch; of no argument or iterated."""

    def __init__(self, length):
        self.length, self.epoch, self.at = length, 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            self.epoch, self.at = self.epoch + 1, 0
            raise StopIteration
        self.at += 1
        return self.epoch, self.at - 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [GoesOn, lambda length: GoesOn(length).__next__], ids=["iterator", "function"])
def test_what_goes_on_after_its_end_ends_its_epoch(make, count, workers):
    with pytest.warns(UserWarning, match="not captured"):
        node = ExternalSource(make(3))
    with StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, count, collate_fn=list, seed=1), workers)) as loader:
        for epoch in range(3):
            items = [(epoch, index) for index in range(3)]
            batches = [items[start : start + count] for start in range(0, 3, count)]
            assert [batch for batch, _ in zip(loader, range(9), strict=False)] == batches


class Both:
    """Iterated, as DALI does, though it may be called too."""

    def __call__(self):
        return 0

    def __iter__(self):
        return iter([1, 2])


def test_what_is_iterable_is_iterated():
    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(Both()))
    assert [[item for item, _ in zip(loader, range(9), strict=False)] for _ in range(2)] == [[1, 2]] * 2


class StopsAtIter:
    def __iter__(self):
        raise StopIteration


def test_a_stop_iteration_that_leaks_is_no_end():
    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(StopsAtIter()))
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        list(loader)
    assert "in node 'external_source' at epoch 0, position 0" in caught.value.__notes__


@pytest.mark.parametrize("kind", ONWARDS)
def test_what_can_be_read_only_onwards_begins_anew_or_says_that_it_cannot(kind):
    make, expected = ONWARDS[kind]
    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(make()))
    first = next(iter(loader))
    for move in (loader.restart, lambda: loader.set_epoch(3)):
        if expected[1]:
            move()
            assert next(iter(loader)) == first
        else:
            with pytest.raises(ResumableModeRequiredError, match="only onwards"):
                move()
    if not expected[1]:
        assert [first, *loader] == expected[0]


def test_an_error_of_a_generator_is_no_end():
    def broken():
        yield 1
        raise ValueError("broken")

    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(broken))
    for _ in range(2):
        batches = iter(loader)
        if place_of(loader) == (0, 0):
            assert next(batches) == 1
        with pytest.raises(ValueError, match="broken") as caught:
            next(batches)
        assert "in node 'external_source' at epoch 0, position 1" in caught.value.__notes__
        loader.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_a_generator_s_first_item_is_no_end_either(error):
    def broken():
        raise error("broken")
        yield

    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(broken()))
    with pytest.raises(error, match="broken"):
        list(loader)
    for _ in range(2):
        loader.close()
        with pytest.raises((ValueError, RuntimeError), match=r"broken|was interrupted"):
            list(loader)


def test_an_interrupt_in_a_function_of_no_argument_is_no_end():
    given = iter([1, 2, KeyboardInterrupt(), 3, 4])

    def read():
        item = next(given)
        if isinstance(item, KeyboardInterrupt):
            raise item
        return item

    with pytest.warns(UserWarning, match="not captured"):
        loader = StatefulDataLoader(ExternalSource(read))
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(iter(loader))
    assert list(loader) == [3, 4]


def test_samples_that_can_be_read_only_onwards():
    """An end within a batch drops that, as for a function."""
    with pytest.warns(UserWarning, match="not captured"):
        node = ExternalSource(range(7), batch=False)
    with StatefulDataLoader(SeededBatcher(node, 3, collate_fn=list)) as loader:
        assert [list(loader) for _ in range(2)] == [[[0, 1, 2], [3, 4, 5]]] * 2


@pytest.mark.parametrize(
    ("source", "arguments", "error", "match"),
    [
        (3, {}, TypeError, "source must be callable or iterable, got 3"),
        (lambda one, other: 0, {}, TypeError, "one argument or none"),
        (lambda *, key: 0, {}, TypeError, "one argument or none"),
        (asynchronous, {}, TypeError, "source must not be async"),
        (generated_from, {}, TypeError, "a generator function takes no argument"),
        (GeneratingFrom(), {}, TypeError, "a generator function takes no argument"),
        (partial(GeneratingFrom()), {}, TypeError, "a generator function takes no argument"),
        (Asynchronous(), {}, TypeError, "source must not be async"),
        (Dataset(), {}, TypeError, "give its __getitem__"),
        (three, {"batch": 1}, TypeError, "batch must be a bool, got 1"),
        (three, {"batch": False, "batch_info": True}, ValueError, "batch_info=True is for batch=True"),
    ],
)
def test_wrong_arguments(source, arguments, error, match):
    with pytest.raises(error, match=re.escape(match)):
        ExternalSource(source, **arguments)


class Reader:
    def __call__(self, index=0):
        return three(index)

    def method(self, index):
        return three(index)

    @staticmethod
    def static(index, *, key=1):
        return three(index)


@pytest.mark.parametrize(
    "source",
    [
        lambda index=0: three(index),
        lambda *places: three(*places),
        {0: 0, 1: 1, 2: 2}.__getitem__,
        Reader(),
        Reader().method,
        Reader.static,
        partial(Reader().method),
        partial(lambda factor, index: factor * three(index), 1),
        int,
    ],
)
def test_what_takes_an_argument(source):
    loader = StatefulDataLoader(ExternalSource(source))
    assert next(iter(loader)) == 0
    loader.load_state_dict(loader.state_dict())


def test_a_mixture_has_to_know_where_its_sources_end():
    with pytest.raises(ValueError, match="ExternalSource tells only when it is run"):
        Mixer([SamplerNode(SequentialSampler(3)), SeededMapper(ExternalSource(three), abs)], [1, 1])


def test_batches_are_its_own():
    with pytest.raises(Exception, match="makes no batches"):
        SeededBatcher(ExternalSource(three), None)

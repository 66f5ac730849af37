"""The source without resume: any iterable of indices, walked once an epoch and never ahead of it."""

from __future__ import annotations

from itertools import count as count_up

import pytest
import torch

from stateful_pipes import InfiniteRandomSampler, SeededBatcher, StatefulDataLoader, positions_of
from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode


class Watched:
    """A sampler that says when it is asked."""

    def __init__(self, items):
        self.items, self.begun, self.given = items, 0, []

    def __iter__(self):
        self.begun += 1
        for item in self.items:
            self.given.append(item)
            yield item


class GoesOn:
    """An iterator that is its own pass: after its end it goes on with the next epoch."""

    def __init__(self, length):
        self.length, self.at = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at - 1


def pulled(node, count, epoch):
    """(position, item) of what is left of an epoch."""
    found = []
    while True:
        try:
            ticket = node.pull(count)
        except StopIteration:
            return found
        assert ticket[0] == epoch
        found += zip(positions_of(ticket), node.run(ticket), strict=True)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("items", [[4, 2, 0, 5, 1, 3], (0,), [], "abc", range(7), [(0, "a"), None, [1, 2]]], ids=str)
def test_it_yields_what_the_sampler_does_each_epoch(items, count):
    node = PlainSamplerNode(items, False)
    for epoch in range(3):
        assert pulled(node, count, epoch) == list(enumerate(items))
        assert node.mark() == (epoch + 1, 0)


BATCHES = [[1, 2], [3], [4, 5, 6], (7,)]


def test_batches_of_any_size_stay_as_they_are():
    node = PlainSamplerNode(BATCHES, True)
    for epoch in range(2):
        tickets = [node.pull(None) for _ in BATCHES]
        assert [node.run(ticket) for ticket in tickets] == [list(batch) for batch in BATCHES]
        assert [list(positions_of(ticket)) for ticket in tickets] == [[0, 1], [2], [3, 4, 5], [6]]
        assert {ticket[0] for ticket in tickets} == {epoch}
        with pytest.raises(StopIteration):
            node.pull(None)


@pytest.mark.parametrize("batch", [(1, 2), torch.tensor([1, 2]), {1: 0, 2: 0}, range(1, 3)], ids=str)
def test_a_batch_is_whatever_can_be_walked(batch):
    node = PlainSamplerNode([batch], True)
    assert [int(index) for index in node.run(node.pull(None))] == [1, 2]


def test_a_generator_is_walked_once():
    node = PlainSamplerNode((index for index in range(3)), False)
    assert pulled(node, 2, 0) == [(0, 0), (1, 1), (2, 2)]
    assert pulled(node, 2, 1) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
def test_an_iterator_that_goes_on_after_its_end(count):
    node = PlainSamplerNode(GoesOn(6), False)
    for epoch in range(3):
        assert pulled(node, count, epoch) == [(position, position) for position in range(6)]


@pytest.mark.parametrize("length", [4, 5])
def test_a_pass_begins_with_its_first_item_and_not_before(length):
    sampler = Watched(range(length))
    node = PlainSamplerNode(sampler, False)
    assert sampler.begun == 0
    for epoch in range(1, 4):
        node.pull(2)
        assert sampler.begun == epoch
        pulled(node, 2, epoch - 1)
        assert sampler.begun == epoch
        assert len(sampler.given) == length * epoch


def test_no_more_is_taken_than_was_pulled():
    sampler = Watched(count_up())
    node = PlainSamplerNode(sampler, False)
    node.pull(3)
    node.pull(2)
    assert sampler.given == [0, 1, 2, 3, 4]


def test_it_does_not_run_on_into_the_next_epoch():
    node = PlainSamplerNode([1], False)
    assert node.runs_on is SeededBatcher(node, 1).runs_on is False


def test_the_start_of_any_epoch_is_a_pass_anew():
    sampler = Watched([1, 2, 3])
    node = PlainSamplerNode(sampler, False)
    node.pull(2)
    node.seek((5, 0))
    assert sampler.begun == 1
    assert pulled(node, 2, 5) == [(0, 1), (1, 2), (2, 3)]
    assert sampler.begun == 2


def test_there_is_no_way_back():
    node = PlainSamplerNode([1, 2, 3], False)
    node.pull(2)
    mark = node.mark()
    node.seek(mark)
    assert node.run(node.pull(2)) == [3]
    with pytest.raises(ResumableModeRequiredError, match=r"a list cannot be led back.*resumable=True"):
        node.seek(mark)
    assert node.mark() == (0, 3)


def test_leaving_an_epoch_counts_it_once_however_far_it_was_pulled():
    for pulls in range(3):
        node = PlainSamplerNode([1, 2], False)
        for _ in range(pulls):
            node.pull(1)
        if pulls == 2:
            with pytest.raises(StopIteration):
                node.pull(1)
        node.next_epoch((0, 1))
        assert node.mark() == (1, 0)
        assert pulled(node, 1, 1) == [(0, 1), (1, 2)]


class Sized:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


@pytest.mark.parametrize(
    ("sampler", "length"),
    [
        ([1, 2], 2),
        (iter([1]), None),
        (Sized(3), 3),
        (Sized(TypeError()), None),
        (Sized(NotImplementedError()), None),
        (InfiniteRandomSampler(4, resumable=False), None),
    ],
)
def test_length(sampler, length):
    node = PlainSamplerNode(sampler, False)
    assert node.length() == length
    with pytest.raises(ResumableBatchConfigurationError, match="makes no batches"):
        node.batches()
    node = PlainSamplerNode(sampler, True)
    assert node.batches() == length
    assert node.length() is None


def test_an_error_of_the_sampler_s_is_told_with_its_place():
    def failing():
        yield 1
        raise KeyError("no more")

    node = PlainSamplerNode(failing(), False)
    node.pull(1)
    with pytest.raises(KeyError, match="no more") as caught:
        node.pull(1)
    assert caught.value.__notes__ == ["in node 'sampler' at epoch 0, position 1"]


class StopsAtIter:
    def __iter__(self):
        raise StopIteration


@pytest.mark.parametrize(("sampler", "batches"), [(StopsAtIter(), False), ([StopsAtIter()], True)], ids=["sampler", "batch"])
def test_a_stop_iteration_that_leaks_is_no_end(sampler, batches):
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        PlainSamplerNode(sampler, batches).pull(None if batches else 1)


def test_what_is_no_batch():
    with pytest.raises(TypeError, match="not iterable") as caught:
        PlainSamplerNode([3], True).pull(None)
    assert "in node 'sampler' at epoch 0" in caught.value.__notes__[0]


def test_an_empty_batch_has_no_position():
    node = PlainSamplerNode([[1], []], True)
    node.pull(None)
    with pytest.raises(ResumableBatchConfigurationError, match="the list gave an empty batch"):
        node.pull(None)


def test_a_batch_of_none_is_no_end():
    node = PlainSamplerNode([None, 1], False)
    assert pulled(node, 1, 0) == [(0, None), (1, 1)]


def test_a_saved_position_is_refused():
    node = PlainSamplerNode([1, 2, 3], False)
    next(iter(node))
    state = node.get_state()
    with pytest.raises(ResumableModeRequiredError, match="resumable=True"):
        PlainSamplerNode([1, 2, 3], False).load_state_dict(state)


def test_samples_for_errors():
    node = PlainSamplerNode([7, 8, 9], False)
    node.pull(1)
    assert str(node.samples(node.pull(2))) == "epoch 0, positions 1, 2 (indices 8, 9)"


def test_the_sampler_is_not_sent_to_workers():
    assert not {"sampler", "_pass"} & set(PlainSamplerNode([1], False).__getstate__())


def test_a_composed_loader_shows_it():
    sampler = [1, 2]
    loader = StatefulDataLoader(range(3), sampler=sampler, resumable=False)
    assert loader.sampler is sampler
    assert "sampler: PlainSamplerNode(epoch=0, position=0)" in loader.describe()

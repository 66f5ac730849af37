"""What is pulled ahead of the workers: some at once where that is only counting, else no more than they take."""

from __future__ import annotations

import pytest
import torchdata.nodes as tn

from stateful_pipes import (
    ClassBalancedBatchSampler,
    FileReader,
    IndexFilter,
    Mixer,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    as_node,
)
from stateful_pipes.prefetch.ahead import Ahead
from tests.streams import place_of

BOUND = 2


class Counted(SamplerNode):
    """Notes where it stands at each pull."""

    free = True

    def __init__(self, length, **kwargs):
        super().__init__(SequentialSampler(length), **kwargs)
        self.pulls = []

    @property
    def pulls_freely(self):
        return self.free

    def pull(self, count):
        self.pulls.append(self.mark())
        return super().pull(count)


class Costly(Counted):
    free = False


class Pool:
    """Takes tickets, and runs none."""

    outstanding = 0

    def submit(self, ticket, message):
        assert message.size > 0
        self.outstanding += 1
        return self.outstanding


def handed_out(node, count, pool):
    """Marks after each of the next items; each makes room for another."""
    ahead = Ahead(node, BOUND)
    marks = []
    for _ in range(count):
        ahead.fill(pool, at_least=1)
        pulled = ahead.pop()
        marks.append(pulled.mark)
        pool.outstanding -= pulled.ticket is not None
    return marks


def test_free_ones_are_pulled_some_at_once():
    node = Counted(100)
    ahead, pool, sizes = Ahead(node, BOUND), Pool(), []
    for position in range(40):
        before = len(node.pulls)
        ahead.fill(pool, at_least=1)
        sizes.append(len(node.pulls) - before)
        assert ahead.pop().mark == ahead.mark == (0, position + 1)
        pool.outstanding -= 1
        assert len(ahead.under_way) < BOUND
    assert [size for size in sizes if size][:5] == [1 + 2, 4, 8, 8, 8]


def test_others_are_pulled_as_they_are_wanted():
    node = Costly(100)
    handed_out(node, 10, Pool())
    assert len(node.pulls) == 10 + BOUND - 1


@pytest.mark.parametrize("kind", [Counted, Costly])
@pytest.mark.parametrize("length", range(1, 20))
def test_the_marks_are_those_of_single_pulls(kind, length):
    node, expected = kind(length), []
    for epoch in range(3):
        expected += [*((epoch, position) for position in range(1, length + 1)), (epoch + 1, 0)]
    assert handed_out(node, len(expected), Pool()) == expected


def test_nothing_behind_an_end_is_pulled_before_it_is_wanted():
    class Once(Counted):
        @property
        def runs_on(self):
            return False

    node = Once(20)
    ahead, pool = Ahead(node, BOUND), Pool()
    for _ in range(20):
        ahead.fill(pool, at_least=1)
        ahead.pop()
        pool.outstanding -= 1
    assert node.mark() == (1, 0)
    ahead.fill(pool)
    assert ahead.pop().is_end
    ahead.fill(pool)
    assert node.mark() == (1, 0)
    ahead.fill(pool, at_least=1)
    assert node.mark() > (1, 0)


def test_cleared_it_begins_small_where_it_was_led():
    node = Counted(100)
    ahead, pool = Ahead(node, BOUND), Pool()
    for _ in range(20):
        ahead.fill(pool)
        ahead.pop()
        pool.outstanding -= 1
    ahead.clear()
    pool.outstanding = 0
    node.seek((4, 7))
    node.pulls.clear()
    ahead.fill(pool, at_least=1)
    assert ahead.pop().mark == (4, 8)
    assert node.pulls == [(4, 7), (4, 8), (4, 9)]


class Asking(SeededMapper):
    """Asks somebody at each pull."""

    def pull(self, count):
        return super().pull(count)


def test_what_counts_only(tmp_path):
    (tmp_path / "one").write_bytes(b"1")

    def order():
        return SamplerNode(RandomSampler(9, seed=0))

    assert order().pulls_freely
    assert SeededBatcher(SeededMapper(order(), str), 2).pulls_freely
    not_free = [
        SamplerNode(ClassBalancedBatchSampler([0] * 8, 2, labels=[0, 1] * 4, seed=1)),
        FileReader(files=[tmp_path / "one"]),
        as_node(tn.IterableWrapper(range(3))),
        IndexFilter(order(), lambda index: index > 3),  # each pull may look at any number
        Asking(order(), str),
        Mixer([order(), tn.IterableWrapper(range(3))], [1, 1], seed=0),
    ]
    for node in not_free:
        assert not node.pulls_freely
        assert not SeededBatcher(node, 2).pulls_freely


def test_a_state_taken_or_loaded_amid_tickets_that_are_ready():
    def make():
        node = SeededBatcher(
            SeededMapper(SamplerNode(RandomSampler(60, seed=3)), lambda index: index, seed=1), 2, collate_fn=list
        )
        return StatefulDataLoader(ProcessPrefetcher(node, 1, prefetch_factor=1))

    with make() as loader, make() as resumed:
        iterator = iter(loader)
        states, batches = [], []
        for batch in iterator:
            batches.append(batch)
            states.append(loader.state_dict())
        for at in (0, 3, 11, 12, 28):
            resumed.load_state_dict(states[at])
            assert list(resumed) == batches[at + 1 :]
        loader.load_state_dict(states[11])
        loader.set_epoch(5)
        assert place_of(loader) == (5, 0)

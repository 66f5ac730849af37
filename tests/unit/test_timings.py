"""Own times: each node has what it takes itself, exactly, whichever process it runs in and whatever becomes of that."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import weakref

import pytest

from stateful_pipes.prefetch import timings
from stateful_pipes.prefetch.timings import KEPT_TASKS, Stopwatch, TimedNode, Timings, Usage


class Ticks:
    """A clock that shows one more whenever it is looked at, and goes on by what it is told to."""

    def __init__(self):
        self.now = 1000

    def __call__(self):
        self.now += 1
        return self.now

    def pass_by(self, ticks):
        self.now += ticks


@pytest.fixture
def ticks(monkeypatch):
    made = Ticks()
    monkeypatch.setattr(timings, "monotonic_ns", made)
    return made


class Layer:
    """Asks those below, takes `ticks` before and after, and fails if it is to; is pulled in `ticks`."""

    def __init__(self, clock, ticks, *below, fails=False):
        self.clock, self.ticks, self.below, self.fails = clock, ticks, below, fails

    def run(self, ticket):
        self.clock.pass_by(self.ticks)
        made = [layer.run(ticket=ticket) for layer in self.below]
        if self.fails:
            raise ValueError(ticket)
        self.clock.pass_by(self.ticks)
        return [ticket, *made]

    def pull(self, count):
        self.clock.pass_by(self.ticks)
        return count


def timed_own(layers):
    watch = Stopwatch()
    timed = [TimedNode(layer, watch) for layer in layers]
    for one in timed:
        one.stand_in("run")
    return timed


def test_what_a_node_calls_is_taken_off(ticks):
    low, other = Layer(ticks, 10), Layer(ticks, 100)
    middle = Layer(ticks, 1000, low, other, low)
    top = Layer(ticks, 0, middle)
    timed = timed_own([low, other, middle, top])
    assert top.run(7) == [7, [7, [7], [7], [7]]]
    # A tick between two looks, of which there are two for each call.
    assert [one.ran for one in timed] == [2 * 21, 201, 2004, 2]
    top.run(7)
    assert [one.ran for one in timed] == [4 * 21, 402, 4008, 4]


def test_a_node_that_fails_has_its_time_and_no_other_s(ticks):
    low = Layer(ticks, 10, fails=True)
    top = Layer(ticks, 100, low)
    timed = timed_own([low, top])
    for times in (1, 2):
        with pytest.raises(ValueError, match="7"):
            top.run(7)
        assert [one.ran for one in timed] == [11 * times, 102 * times]
    low.fails = False
    top.run(7)
    assert [one.ran for one in timed] == [22 + 21, 204 + 202]


def test_stopwatches_know_nothing_of_one_another(ticks):
    low = Layer(ticks, 10)
    top = Layer(ticks, 100, low)
    timed = [timed_own([layer])[0] for layer in (low, top)]
    top.run(7)
    assert [one.ran for one in timed] == [21, 200 + 20 + 3]


def test_pulling_is_told_apart(ticks):
    low = Layer(ticks, 10)
    (timed,) = timed_own([low])
    assert low.pull(7) == 7
    assert (timed.ran, timed.pulled) == (0, 0)
    timed.stand_in("run", "pull")
    assert (low.run(7), low.pull(count=7)) == ([7], 7)
    assert (timed.ran, timed.pulled) == (21, 11)


def test_a_method_of_the_user_s_own_stays(ticks):
    layer = Layer(ticks, 10)
    layer.run = own = lambda ticket: "own"
    (timed,) = timed_own([layer])
    assert layer.run is own
    assert (layer.run(7), timed.ran) == ("own", 0)


def test_a_timed_node_is_freed_when_it_is_dropped(ticks):
    layer = Layer(ticks, 10)
    (timed,) = timed_own([layer])
    layer.run(7)
    gone = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()
    assert timed.ran == 21


def test_a_timed_node_can_be_pickled_and_the_copy_times_its_own(ticks):
    low = Layer(ticks, 10)
    top = Layer(ticks, 100, low)
    timed = timed_own([low, top])
    copied = pickle.loads(pickle.dumps(top))
    assert copied.run(7) == top.run(7)
    assert [one.ran for one in timed] == [21, 202]
    copies = [TimedNode.of(copied), TimedNode.of(copied.below[0])]
    assert [one.ran for one in copies] == [2, 1]  # what they pass by, they pass by on a copy of the clock
    assert copies[0].watch is copies[1].watch is not timed[1].watch


def nodes(*ran):
    made = [TimedNode(Layer(None, 0), Stopwatch()) for _ in ran]
    for node, ticks in zip(made, ran, strict=True):
        node.ran = ticks
    return made


def test_each_worker_adds_to_cells_of_its_own(ticks):
    cells = Timings(3, 2)
    cells.add(0, 10, 15, 100, first := nodes(1, 2))
    cells.add(2, 20, 50, 1000, nodes(10, 20))
    cells.add(0, 30, 37, 200, nodes(4, 8))
    assert [node.ran for node in first] == [0, 0]
    ticks.now = cells._begun + 100 - 1
    assert cells.usage() == Usage(42, 3 * 100, 1300, (15, 30))
    assert cells.spans() == [[(10, 15), (30, 37)], [], [(20, 50)]]


def test_time_stops_when_it_is_closed(ticks):
    cells = Timings(2, 0)
    ticks.pass_by(98)
    cells.close()
    ticks.pass_by(1000)
    assert cells.usage().present == 2 * 99
    cells.close()
    assert cells.usage() == Usage(0, 2 * 99, 0, ())


@pytest.mark.parametrize("count", [1, KEPT_TASKS, KEPT_TASKS + 1, 3 * KEPT_TASKS - 1])
def test_the_last_tasks_are_kept_in_their_order(count):
    cells = Timings(2, 1)
    for task in range(count):
        cells.add(0, 10 * task, 10 * task + 5, 0, nodes(3))
    assert cells.spans() == [[(10 * task, 10 * task + 5) for task in range(count)][-KEPT_TASKS:], []]
    assert cells.usage().nodes == (3 * count,)


def test_what_is_being_written_is_left_out():
    cells = Timings(1, 0)
    cells.add(0, 10, 20, 0, ())
    cells.add(0, 30, 25, 0, ())
    assert cells.spans() == [[(10, 20)]]


def test_two_usages_are_added():
    assert Usage(1, 2, 3, (4, 5)).plus(Usage(10, 20, 30, (40, 50))) == Usage(11, 22, 33, (44, 55))


def add_and_die(cells):
    cells.add(1, 3, 8, 100, nodes(4))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_outlives_those_who_add_to_it_and_their_successors_go_on(method):
    cells = Timings(2, 1)
    for times, start in enumerate([method, "fork"], 1):
        process = multiprocessing.get_context(start).Process(target=add_and_die, args=(cells,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert (cells.usage().bytes, cells.usage().nodes) == (100 * times, (times * 4,))
        assert cells.spans() == [[], [(3, 8)] * times]
    cells.close()
    assert cells.usage().bytes == 200

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
from stateful_pipes.prefetch.timings import KEPT_TASKS, Stopwatch, TimedMethod, Timings, Usage


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
    """Asks those below, takes `ticks` before and after, and fails if it is to."""

    def __init__(self, clock, ticks, *below, fails=False):
        self.clock, self.ticks, self.below, self.fails = clock, ticks, below, fails

    def run(self, ticket):
        self.clock.pass_by(self.ticks)
        made = [layer.run(ticket=ticket) for layer in self.below]
        if self.fails:
            raise ValueError(ticket)
        self.clock.pass_by(self.ticks)
        return [ticket, *made]


def timed_own(layers):
    watch = Stopwatch()
    return watch, [watch.time(layer, "run") for layer in layers]


def test_what_a_node_calls_is_taken_off(ticks):
    low, other = Layer(ticks, 10), Layer(ticks, 100)
    middle = Layer(ticks, 1000, low, other, low)
    top = Layer(ticks, 0, middle)
    _, timed = timed_own([low, other, middle, top])
    assert top.run(7) == [7, [7, [7], [7], [7]]]
    # A tick between two looks, of which there are two for each call.
    assert [one.own for one in timed] == [2 * 21, 201, 2004, 2]
    top.run(7)
    assert [one.own for one in timed] == [4 * 21, 402, 4008, 4]


def test_a_node_that_fails_has_its_time_and_no_other_s(ticks):
    low = Layer(ticks, 10, fails=True)
    top = Layer(ticks, 100, low)
    _, timed = timed_own([low, top])
    for times in (1, 2):
        with pytest.raises(ValueError, match="7"):
            top.run(7)
        assert [one.own for one in timed] == [11 * times, 102 * times]
    low.fails = False
    top.run(7)
    assert [one.own for one in timed] == [22 + 21, 204 + 202]


def test_stopwatches_know_nothing_of_one_another(ticks):
    low = Layer(ticks, 10)
    top = Layer(ticks, 100, low)
    timed = [timed_own([layer])[1][0] for layer in (low, top)]
    top.run(7)
    assert [one.own for one in timed] == [21, 200 + 20 + 3]


def test_a_method_of_the_user_s_own_stays(ticks):
    layer = Layer(ticks, 10)
    layer.run = own = lambda ticket: "own"
    _, (timed,) = timed_own([layer])
    assert layer.run is own
    assert (layer.run(7), timed.own) == ("own", 0)


def test_a_timed_node_is_freed_when_it_is_dropped(ticks):
    layer = Layer(ticks, 10)
    _, (timed,) = timed_own([layer])
    layer.run(7)
    gone = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()
    assert timed.own == 21


def test_a_timed_node_can_be_pickled_and_the_copy_times_its_own(ticks):
    low = Layer(ticks, 10)
    top = Layer(ticks, 100, low)
    _, timed = timed_own([low, top])
    copied = pickle.loads(pickle.dumps(top))
    assert copied.run(7) == top.run(7)
    assert [one.own for one in timed] == [21, 202]
    assert copied.run._method is Layer.run
    assert copied.run._node() is copied
    assert copied.run.watch is copied.below[0].run.watch is not top.run.watch


def methods(*own):
    made = [TimedMethod(Layer(None, 0), "run", Stopwatch()) for _ in own]
    for method, ticks in zip(made, own, strict=True):
        method.own = ticks
    return made


def test_each_worker_adds_to_cells_of_its_own(ticks):
    cells = Timings(3, 2)
    cells.add(0, 10, 15, 100, first := methods(1, 2))
    cells.add(2, 20, 50, 1000, methods(10, 20))
    cells.add(0, 30, 37, 200, methods(4, 8))
    assert [method.own for method in first] == [0, 0]
    ticks.now = cells._begun + 100 - 1
    assert cells.usage() == Usage(42e-9, 3 * 100e-9, 1300, (15e-9, 30e-9))
    assert cells.spans() == [[(10, 15), (30, 37)], [], [(20, 50)]]


def test_time_stops_when_it_is_closed(ticks):
    cells = Timings(2, 0)
    ticks.pass_by(98)
    cells.close()
    ticks.pass_by(1000)
    assert cells.usage().present == 2 * 99e-9
    cells.close()
    assert cells.usage() == Usage(0, 2 * 99e-9, 0, ())


@pytest.mark.parametrize("count", [1, KEPT_TASKS, KEPT_TASKS + 1, 3 * KEPT_TASKS - 1])
def test_the_last_tasks_are_kept_in_their_order(count):
    cells = Timings(2, 1)
    for task in range(count):
        cells.add(0, 10 * task, 10 * task + 5, 0, methods(3))
    assert cells.spans() == [[(10 * task, 10 * task + 5) for task in range(count)][-KEPT_TASKS:], []]
    assert cells.usage().nodes == (pytest.approx(3e-9 * count),)


def test_what_is_being_written_is_left_out():
    cells = Timings(1, 0)
    cells.add(0, 10, 20, 0, ())
    cells.add(0, 30, 25, 0, ())
    assert cells.spans() == [[(10, 20)]]


def test_two_usages_are_added():
    assert Usage(1, 2, 3, (4, 5)).plus(Usage(10, 20, 30, (40, 50))) == Usage(11, 22, 33, (44, 55))


def add_and_die(cells):
    cells.add(1, 3, 8, 100, methods(4))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_outlives_those_who_add_to_it_and_their_successors_go_on(method):
    cells = Timings(2, 1)
    for times, start in enumerate([method, "fork"], 1):
        process = multiprocessing.get_context(start).Process(target=add_and_die, args=(cells,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert (cells.usage().bytes, cells.usage().nodes) == (100 * times, (times * 4e-9,))
        assert cells.spans() == [[], [(3, 8)] * times]
    cells.close()
    assert cells.usage().bytes == 200

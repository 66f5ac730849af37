"""The one place where consumption is recorded: what was handed out counts, whatever failed or was pulled ahead."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from array import array

import pytest

from stateful_pipes import positions_of
from stateful_pipes.errors import ConcurrentUseError, IteratorInvalidError, LoaderFailedError
from stateful_pipes.pulled import Pulled, pull_one
from stateful_pipes.stream import Stream
from stateful_pipes.ticket import EpochEnd


class Counting:
    """Epochs of `length` items; an item is (epoch, position). `faults` raise at (what, epoch, position), once each."""

    ends_in_run = False

    def __init__(self, length=3, faults=()):
        self.length = length
        self.faults = dict(faults)
        self.at = (0, 0)
        self.ran = []
        self.during_run = lambda: None

    def _fault(self, what, at):
        error = self.faults.pop((what, *at), None)
        if error is not None:
            raise error

    def pull(self, count):
        epoch, position = self.at
        self._fault("pull", self.at)
        if position == self.length:
            self.at = (epoch + 1, 0)
            raise StopIteration
        self.at = (epoch, position + 1)
        return (epoch, (position, position + 1, 1))

    def pull_ahead(self):
        return pull_one(self)

    def run_here(self, ticket):
        at = (ticket[0], ticket[1][0])
        self.ran.append(at)
        self.during_run()
        self._fault("run", at)
        return [at], []

    def mark(self):
        self._fault("mark", self.at)
        return self.at

    def seek(self, mark):
        self._fault("seek", mark)
        self.at = mark


class Ending(Counting):
    """The same, whose end shows only when a ticket is run."""

    ends_in_run = True

    def pull(self, count):
        epoch, position = self.at
        self._fault("pull", self.at)
        self.at = (epoch, position + 1)
        return (epoch, (position, position + 1, 1))

    def run_here(self, ticket):
        if ticket[1][0] >= self.length:
            raise EpochEnd
        return super().run_here(ticket)

    def next_epoch(self, mark):
        self.at = (mark[0] + 1, 0)


each_kind = pytest.mark.parametrize("kind", [Counting, Ending])


def rest(stream, node, epoch=None):
    epoch = stream.committed(node)[0] if epoch is None else epoch
    found = []
    while True:
        try:
            found.append(stream.take(node, epoch, stream.generation))
        except StopIteration:
            return found


def test_positions_of():
    assert positions_of((0, (3, 9, 2), b"")) == range(3, 9, 2)
    assert positions_of((0, array("q", [5, 2, 2**62]).tobytes())) == [5, 2, 2**62]


def test_pull_one():
    error = OSError("gone")
    node = Counting(1, {("pull", 1, 0): error})
    assert pull_one(node) == Pulled((0, (0, 1, 1)), (0, 1))
    assert pull_one(node) == Pulled(None, (1, 0))
    failed = pull_one(node)
    assert failed.error is error
    assert not failed.is_end
    assert Pulled(None, (1, 0)).is_end


@each_kind
def test_items_in_order_epoch_after_epoch(kind):
    node, stream = kind(), Stream()
    for epoch in range(3):
        assert rest(stream, node) == [(epoch, position) for position in range(3)]
    assert stream.delivered == 9


@each_kind
def test_the_mark_is_what_was_handed_out(kind):
    node, stream = kind(), Stream()
    assert stream.committed(node) == (0, 0)
    for position in (1, 2):
        stream.take(node, 0, 0)
        assert stream.committed(node) == (0, position)
        assert node.at == (0, position + 1)  # one is pulled ahead, which does not count
    stream.take(node, 0, 0)
    assert stream.committed(node) == (1, 0)  # before the StopIteration already
    with pytest.raises(StopIteration):
        stream.take(node, 0, 0)
    assert stream.committed(node) == (1, 0)
    assert node.ran == [(0, 0), (0, 1), (0, 2)]


def test_nothing_is_run_ahead():
    node, stream = Counting(), Stream()
    stream.take(node, 0, 0)
    assert node.ran == [(0, 0)]


@each_kind
def test_an_empty_epoch(kind):
    node, stream = kind(0), Stream()
    assert rest(stream, node) == []
    assert stream.committed(node) == (1, 0)


@each_kind
def test_an_iterator_of_another_epoch_has_ended(kind):
    node, stream = kind(), Stream()
    for epoch in (1, 7):
        with pytest.raises(StopIteration):
            stream.take(node, epoch, 0)
    assert stream.committed(node) == (0, 0)


@each_kind
@pytest.mark.parametrize("mark", [(0, 2), (5, 1), (0, 0)])
@pytest.mark.parametrize("consumed", [0, 1, 3])
def test_move(kind, mark, consumed):
    node, stream = kind(), Stream()
    for _ in range(consumed):
        stream.take(node, 0, 0)
    stream.move(node, mark)
    assert stream.committed(node) == mark
    with pytest.raises(IteratorInvalidError, match=r"Call iter\(\) again"):
        stream.take(node, mark[0], 0)
    assert rest(stream, node) == [(mark[0], position) for position in range(mark[1], 3)]


def test_a_refused_move_changes_nothing():
    node, stream = Counting(faults={("seek", 9, 9): KeyError("no such place")}), Stream()
    stream.take(node, 0, 0)
    with pytest.raises(KeyError):
        stream.move(node, (9, 9))
    assert stream.committed(node) == (0, 1)
    assert stream.take(node, 0, 0) == (0, 1)  # the same iterator goes on


def test_a_refused_move_does_not_clear_an_error():
    node, stream = Counting(faults={("run", 0, 0): ValueError(), ("seek", 9, 9): KeyError()}), Stream()
    with pytest.raises(ValueError):  # noqa: PT011
        stream.take(node, 0, 0)
    with pytest.raises(KeyError):
        stream.move(node, (9, 9))
    with pytest.raises(LoaderFailedError):
        stream.check()


def test_arrive():
    node, stream = Counting(), Stream()
    stream.take(node, 0, 0)
    node.at = (4, 1)
    stream.arrive(node.mark())
    assert stream.committed(node) == (4, 1)
    assert rest(stream, node) == [(4, 1), (4, 2)]


@each_kind
@pytest.mark.parametrize("consumed", [0, 1, 2, 3])
def test_close_goes_on_from_the_last_consumed_item(kind, consumed):
    node, stream = kind(), Stream()
    for _ in range(consumed):
        stream.take(node, 0, 0)
    before = stream.committed(node)
    stream.close(node)
    stream.close(node)
    assert stream.committed(node) == before
    with pytest.raises(IteratorInvalidError):
        stream.take(node, 0, 0)
    assert rest(stream, node, 0) == [(0, position) for position in range(consumed, 3)]
    assert rest(stream, node, 1) == [(1, position) for position in range(3)]


@each_kind
def test_a_failed_run_stops_the_stream_until_it_is_cleared(kind):
    error = ValueError("bad sample")
    node, stream = kind(faults={("run", 0, 1): error}), Stream()
    stream.take(node, 0, 0)
    with pytest.raises(ValueError, match="bad sample") as caught:
        stream.take(node, 0, 0)
    assert caught.value is error
    for again in (lambda: stream.take(node, 0, 0), stream.check):
        with pytest.raises(LoaderFailedError, match="ValueError: bad sample") as caught:
            again()
        assert "close()" in caught.value.remedy
    assert stream.committed(node) == (0, 1)
    stream.close(node)
    assert rest(stream, node) == [(0, 1), (0, 2)]


@each_kind
@pytest.mark.parametrize("clear", [lambda stream, node: stream.move(node, (0, 1)), lambda stream, node: stream.arrive((0, 1))])
def test_a_load_clears_an_error(kind, clear):
    node, stream = kind(faults={("run", 0, 1): ValueError("bad")}), Stream()
    stream.take(node, 0, 0)
    with pytest.raises(ValueError, match="bad"):
        stream.take(node, 0, 0)
    node.at = (0, 1)
    clear(stream, node)
    assert rest(stream, node) == [(0, 1), (0, 2)]


@each_kind
def test_a_failed_pull_comes_when_its_turn_comes(kind):
    node, stream = kind(faults={("pull", 0, 1): OSError("disk")}), Stream()
    assert stream.take(node, 0, 0) == (0, 0)
    assert stream.committed(node) == (0, 1)
    with pytest.raises(OSError, match="disk"):
        stream.take(node, 0, 0)
    with pytest.raises(LoaderFailedError, match="OSError: disk"):
        stream.take(node, 0, 0)
    stream.close(node)
    assert rest(stream, node) == [(0, 1), (0, 2)]


@each_kind
@pytest.mark.parametrize("what", ["pull", "run"])
def test_a_failure_in_the_first_item(kind, what):
    node, stream = kind(faults={(what, 0, 0): OSError("disk")}), Stream()
    with pytest.raises(OSError, match="disk"):
        stream.take(node, 0, 0)
    with pytest.raises(LoaderFailedError):
        stream.take(node, 0, 0)
    stream.close(node)
    assert rest(stream, node) == [(0, 0), (0, 1), (0, 2)]


@each_kind
@pytest.mark.parametrize("at", [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1)])
def test_a_mark_that_fails_loses_no_item(kind, at):
    """A foreign node's state is taken after each pull and may raise: the item that was pulled must not be skipped."""
    node, stream = kind(faults={("mark", *at): OSError("no state")}), Stream()
    found = []
    while len(found) < 9:
        epoch = stream.committed(node)[0]
        try:
            found.append(stream.take(node, epoch, stream.generation))
        except StopIteration:
            continue
        except OSError:
            with pytest.raises(LoaderFailedError):
                stream.take(node, epoch, stream.generation)
            stream.close(node)
    assert found == [(epoch, position) for epoch in range(3) for position in range(3)]


@each_kind
@pytest.mark.parametrize("what", ["pull", "run", "mark"])
@pytest.mark.parametrize("at", [(0, 0), (0, 1), (0, 2), (1, 0)])
def test_an_interrupt_loses_no_item(kind, what, at):
    """Ctrl-C is no failure of the stream: the next call takes the same item again."""
    node, stream = kind(faults={(what, *at): KeyboardInterrupt()}), Stream()
    found, interrupts = [], 0
    while len(found) < 6:
        try:
            found.append(stream.take(node, stream.committed(node)[0], 0))
        except StopIteration:
            continue
        except KeyboardInterrupt:
            interrupts += 1
    assert found == [(epoch, position) for epoch in range(2) for position in range(3)]
    assert interrupts == 1


# After these instructions CPython looks whether a signal has come.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


class InterruptedOnce:
    """Raises KeyboardInterrupt in a function of stateful_pipes.stream, at the n-th place where a signal's handler may run."""

    def __init__(self, at):
        self.left = at
        self.came = False
        self.before = {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith("stateful_pipes/stream.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.came:
            before = self.before.get(frame)
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before in LOOKS:
                self.left -= 1
                if self.left < 0:
                    self.came = True
                    raise KeyboardInterrupt
        return self


@each_kind
def test_ctrl_c_at_any_moment_loses_no_item_and_repeats_none(kind):
    """Not even between the commit and the caller's loop, which has each item that counts as consumed."""
    for at in itertools.count():
        node, stream = kind(), Stream()
        found, trace = [], InterruptedOnce(at)

        def items(stream=stream, node=node):
            return iter(lambda: stream.take(node, 0, stream.generation), None)

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for item in items():
                found.append(item)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert stream.committed(node)[1] % 3 == len(found) % 3, at
        stream.close(node)  # which also frees a lock that was interrupted
        found += rest(stream, node, epoch=0)
        assert found == [(0, 0), (0, 1), (0, 2)], at
        if not trace.came:
            break
    assert at > 20


@each_kind
def test_a_leaked_stop_iteration_is_an_error(kind):
    node, stream = kind(faults={("run", 0, 1): StopIteration()}), Stream()
    stream.take(node, 0, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        stream.take(node, 0, 0)
    with pytest.raises(LoaderFailedError):
        stream.take(node, 0, 0)


@pytest.mark.parametrize("items", [[], [1, 2]])
def test_run_gives_one_item_a_ticket(items):
    node, stream = Counting(), Stream()
    node.run_here = lambda ticket: (items, [])
    with pytest.raises(ValueError, match="values to unpack"):
        stream.take(node, 0, 0)


def test_one_thread_at_a_time():
    node, stream = Counting(), Stream()
    inside, go_on = threading.Event(), threading.Event()
    node.during_run = lambda: (inside.set(), go_on.wait())
    found = []
    thread = threading.Thread(target=lambda: found.append(stream.take(node, 0, 0)))
    thread.start()
    inside.wait()
    with pytest.raises(ConcurrentUseError, match="loader of its own"):
        stream.take(node, 0, 0)
    go_on.set()
    thread.join()
    assert found == [(0, 0)]  # the one inside is not disturbed
    assert rest(stream, node) == [(0, 1), (0, 2)]


def test_a_run_that_asks_for_the_next_item_itself():
    node, stream = Counting(), Stream()
    node.during_run = lambda: stream.take(node, 0, 0)
    with pytest.raises(ConcurrentUseError):
        stream.take(node, 0, 0)


@each_kind
def test_an_interrupt_within_the_commit_repeats_no_item(kind):
    """Between its assignments an item may be ahead that the node no longer stands behind."""
    node, stream = kind(), Stream()
    assert stream.take(node, 0, 0) == (0, 0)
    stream._astray = True
    assert rest(stream, node) == [(0, 1), (0, 2)]


def test_an_interrupt_within_a_move_leaves_the_stream_where_it_was(monkeypatch):
    node, stream = Counting(), Stream()
    assert stream.take(node, 0, 0) == (0, 0)

    def interrupted(ends):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stream, "_drop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.move(node, (7, 0))
    assert rest(stream, node) == [(0, 1), (0, 2)]


def test_an_error_that_waits_for_its_turn_holds_no_frame():
    node = Counting(faults={("pull", 0, 0): OSError("disk")})
    error = pull_one(node).error
    assert error.__traceback__ is None
    assert "in pull" in error.__notes__[0]


@each_kind
def test_a_close_in_the_midst_of_a_commit_loses_nothing(kind):
    """As another thread may do it: what the commit has set by then is of before the close."""

    class ClosedOnce(Stream):
        closes = False

        @property
        def _ahead(self):
            return self.kept

        @_ahead.setter
        def _ahead(self, value):
            if self.closes and value is not None:
                self.closes = False
                self.close(node)
                node.at = (7, 7)  # what a released node makes of its cursor
            self.kept = value

    node, stream = kind(4), ClosedOnce()
    assert stream.take(node, 0, stream.generation) == (0, 0)
    stream.closes = True
    assert stream.take(node, 0, stream.generation) == (0, 1)
    assert rest(stream, node) == [(0, 2), (0, 3)]


def test_a_close_right_before_an_item_is_run_leaves_no_failure():
    node, stream = Counting(), Stream()
    stream.take(node, 0, 0)
    check, node.faults[("run", 0, 1)] = stream._check_turn, ValueError("meanwhile")

    def closed_then(*args):
        check(*args)
        stream.close(node)

    stream._check_turn = closed_then
    with pytest.raises(IteratorInvalidError):
        stream.take(node, 0, 0)
    stream._check_turn = check
    assert rest(stream, node) == [(0, 1), (0, 2)]

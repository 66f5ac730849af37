"""What a worker process does, step by step; run here in this process, over a channel of its own."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import default_collate, get_worker_info

from stateful_pipes.prefetch import worker
from stateful_pipes.prefetch.channel import open_channel, pack, receive, send
from stateful_pipes.prefetch.claims import TAKING, Claims
from stateful_pipes.prefetch.remote_error import restore
from stateful_pipes.prefetch.slots import Arena
from stateful_pipes.prefetch.timings import Timings
from stateful_pipes.prefetch.worker import STARTED, Job, work
from stateful_pipes.rng import WORKER, derive
from tests.streams import generator_states, same
from tests.unit.test_slots import taken, twin

SLOTS = 12


class Squares:
    def run(self, ticket):
        if ticket == "info":
            info = get_worker_info()
            return [info.id, info.num_workers, info.dataset, info.seed, torch.get_num_threads()]
        if ticket == "states":
            return [generator_states()]
        if ticket == "unpicklable":
            return [lambda: 0]
        if ticket == "stop":
            raise StopIteration("leaked")
        return [ticket * ticket]


@pytest.fixture(scope="module", autouse=True)
def this_process_is_as_it_was():
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is handler
    assert threading.current_thread() is threading.main_thread()
    assert get_worker_info() is None


@pytest.fixture
def this_process_as_a_worker(monkeypatch):
    """Puts back what a worker changes in its process for good."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", dict(torch_collate.default_collate_fn_map))
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


Result = namedtuple("Result", ["task", "items", "error"])


def opened(parcel, arena=None):
    items, error, skips = parcel.open(arena)
    assert not skips
    return Result(parcel.task, items, error)


def answers(tickets, *, init=None, worker_id=1, arena=None, runner=None, nodes=(), timings=None):
    """What a worker sends for these tickets until its channel is shut down. Of an arena, each ticket gets a slot."""
    tasks, worker_tasks = open_channel()
    results, worker_results = open_channel()
    for task, ticket in enumerate(tickets):
        send(tasks, pack(ticket), task, arena.borrow() if arena else -1)
    tasks.close()  # after the tickets, the worker reads the end
    own = twin(arena) if arena else Arena(0)
    job = Job(
        runner or Squares(),
        nodes,
        own,
        Claims(3),
        timings or Timings(3, len(nodes)),
        3,
        "the dataset",
        7,
        init,
        os.getpid(),
        worker_id,
    )
    with worker_tasks, results:
        with worker_results:
            work(job, worker_tasks, worker_results)
        found = []
        while True:
            try:
                found.append(opened(receive(results), arena))
            except EOFError:
                return found


@pytest.mark.usefixtures("this_process_as_a_worker")
class TestWork:
    def test_each_ticket_is_answered_until_the_channel_ends(self):
        assert answers([2, 3]) == [(0, [4], None), (1, [9], None)]

    def test_it_counts_what_it_does_before_anybody_has_the_result(self, monkeypatch):
        class Inner:
            def run(self, ticket):
                return ticket * ticket

        class Outer:
            inner = Inner()

            def run(self, ticket):
                return [self.inner.run(ticket)]

        runner, timings, seen = Outer(), Timings(3, 2), []
        ticks = itertools.count()
        monkeypatch.setattr(worker, "monotonic_ns", lambda: next(ticks))
        monkeypatch.setattr("stateful_pipes.prefetch.timings.monotonic_ns", lambda: next(ticks))
        deliver = worker._deliver
        monkeypatch.setattr(worker, "_deliver", lambda results, *sent: (seen.append(timings.usage()), deliver(results, *sent)))
        answers([2, 3], runner=runner, nodes=[runner.inner, runner], timings=timings)
        size = pack(([4], None, [])).size
        assert [(one.busy, one.bytes, one.nodes) for one in seen] == [
            (5, size, (1, 2)),
            (10, 2 * size, (2, 4)),
        ]
        assert [len(spans) for spans in timings.spans()] == [0, 2, 0]

    def test_it_says_what_it_has_in_hand(self, monkeypatch):
        claims, seen = Claims(3), []
        monkeypatch.setattr(sys.modules[__name__], "Claims", lambda workers: claims)

        class Looking(Squares):
            def run(self, ticket):
                seen.append([claims.read(worker_id).task for worker_id in range(3)])
                return super().run(ticket)

        def ready(worker_id):
            seen.append([claims.read(worker_id).task for worker_id in range(3)])

        answers([2, 3], runner=Looking(), init=ready)
        assert seen == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
        assert claims.read(1).task == TAKING

    def test_worker_info_and_threads(self):
        (result,) = answers(["info"])
        assert result.items == [1, 3, "the dataset", derive(7, WORKER, 1) & (2**63 - 1), 1]

    def test_generators_start_from_a_seed_of_the_worker_s_own(self):
        states = [answers(["states"], worker_id=worker_id)[0].items[0] for worker_id in (0, 1, 1)]
        assert states[1] == states[2]
        assert all(one != other for one, other in zip(states[0], states[1], strict=True))

    def test_init_is_called_with_the_number_after_seeding(self):
        called = []
        answers([], init=lambda worker_id: called.append((worker_id, get_worker_info().id, generator_states())))
        assert called[0][:2] == (1, 1)
        assert called[0][2] == answers(["states"])[0].items[0]

    def test_a_failing_init_is_told_and_ends_the_worker(self):
        def init(worker_id):
            raise ValueError("no license")

        (result,) = answers([2, 3], init=init)
        assert (result.task, result.items) == (STARTED, None)
        error = restore(result.error)
        assert type(error) is ValueError
        assert str(error) == "no license"

    @pytest.mark.parametrize(("ticket", "kind", "words"), [("x", TypeError, "multiply"), ("stop", StopIteration, "leaked")])
    def test_an_error_is_told_and_the_worker_goes_on(self, ticket, kind, words):
        failed, good = answers([ticket, 3])
        assert good == (1, [9], None)
        assert failed.items is None
        error = restore(failed.error)
        assert type(error) is kind
        assert words in str(error)
        assert "in run" in str(error.__cause__)

    def test_items_that_cannot_be_sent_are_an_error(self):
        failed, good = answers(["unpicklable", 3])
        assert good.items == [9]
        assert "pickle" in str(restore(failed.error))

    def test_another_worker_may_be_quicker(self):
        """The ticket is gone between the poll and the read: it waits on and takes no harm."""
        tasks, worker_tasks = open_channel()
        results, worker_results = open_channel()
        rival = worker_tasks.dup()
        taken = []

        class Rival(Squares):
            def run(self, ticket):
                if ticket == 2:  # while this worker is busy with one, the other takes the next
                    taken.append(receive(rival))
                return super().run(ticket)

        for task, ticket in enumerate([2, 3, 4]):
            send(tasks, pack(ticket), task)
        tasks.close()
        work(Job(Rival(), (), Arena(0), Claims(2), Timings(2, 0), 2, None, 7, None, os.getpid(), 0), worker_tasks, worker_results)
        worker_results.close()
        assert [(parcel.task, parcel.open()) for parcel in taken] == [(1, 3)]
        assert [opened(receive(results)).items for _ in range(2)] == [[4], [16]]
        for end in (worker_tasks, results, rival):
            end.close()


class Batches:
    """Collates as torch does; keeps, of the tickets of `keeps`, what `part` makes of the batch."""

    def __init__(self, keeps=(), part=lambda batch: batch):
        self.keeps, self.part = keeps, part
        self.kept = []

    def run(self, ticket):
        batch = default_collate([torch.full((2000,), float(ticket)), torch.full((2000,), ticket + 0.5)])
        if ticket in self.keeps:
            self.kept.append(self.part(batch))
        return [batch]


def batch_of(ticket):
    return torch.stack([torch.full((2000,), float(ticket)), torch.full((2000,), ticket + 0.5)])


class Endless(Squares):
    def run(self, ticket):
        while True:
            pass


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("moment", ["before the start", "while it computes", "while it computes, not reaped"])
def test_it_ends_with_the_main_process_whatever_it_does(monkeypatch, has_pidfd, moment):
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/no such file", os.O_RDONLY))  # as where there is none
        monkeypatch.setattr(worker, "_ASK_MS", 1)
    main = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if moment == "before the start":
        main.communicate(b"\n")
    tasks, worker_tasks = open_channel()
    results, worker_results = open_channel()
    send(tasks, pack(None), 5)
    claims = Claims(1)
    job = Job(Endless(), (), Arena(0), claims, Timings(1, 0), 1, None, 7, None, main.pid, 0)
    process = multiprocessing.get_context("fork").Process(target=worker.start, args=(job, worker_tasks, worker_results))
    process.start()
    if moment != "before the start":
        while claims.read(0).task != 5:
            assert process.is_alive()
        main.kill()
        if moment == "while it computes":
            main.wait()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    main.communicate()
    for end in (tasks, worker_tasks, results, worker_results):
        end.close()


@pytest.mark.usefixtures("this_process_as_a_worker")
class TestWithSlots:
    def test_batches_lie_in_them_and_each_is_free_again_with_its_batch(self, arena):
        found = answers([1, 2, 3], arena=arena, runner=Batches())
        assert taken(arena, 12) == [0, 1, 2]
        assert all(same(result.items, [batch_of(ticket)]) for result, ticket in zip(found, [1, 2, 3], strict=True))
        del found[1]
        assert taken(arena, 12) == [0, 2]
        del found
        assert taken(arena, 12) == []

    @pytest.mark.parametrize(
        "part",
        [
            lambda batch: batch,
            lambda batch: batch[1, 3:5],
            lambda batch: batch.numpy(),
            lambda batch: batch.untyped_storage(),
            lambda batch: {"deep": [(batch.T, 1)]},
        ],
        ids=["batch", "slice", "array", "storage", "deep"],
    )
    def test_of_what_is_kept_the_items_are_copies_and_the_slot_is_never_used_again(self, arena, part):
        runner = Batches([1, 2, 4], part)
        found = answers(range(6), arena=arena, runner=runner)
        assert all(same(result.items, [batch_of(ticket)]) for ticket, result in enumerate(found))
        found[1].items[0].zero_()  # the caller's copy is not the runner's
        for ticket, kept in zip([1, 2, 4], runner.kept, strict=True):
            expected = part(batch_of(ticket))
            if isinstance(expected, torch.UntypedStorage):
                kept, expected = bytes(kept), bytes(expected)
            assert same(kept, expected)
        del found
        # The later ones are kept too, but lie elsewhere: no further slot is lost.
        assert taken(arena, 12) == [1]

    def test_what_was_kept_stays_as_it_was_when_every_slot_is_used_again(self, arena):
        runner = Batches([0])
        del answers([0], arena=arena, runner=runner)[0]
        for _ in range(3):
            answers(range(1, 12), arena=arena, runner=runner)
        assert len(arena._shelf.free) == 11
        assert same(runner.kept, [batch_of(0)])

    def test_a_batch_kept_and_sent_again_and_again(self, arena):
        """A cache of ready batches: each time it is the same to the receiver."""

        class Cached(Batches):
            def run(self, ticket):
                if not self.kept:
                    self.kept = super().run(7)
                return self.kept

        found = answers(range(5), arena=arena, runner=Cached())
        assert all(same(result.items, [batch_of(7)]) for result in found)
        found[2].items[0].zero_()
        assert same(found[3].items, [batch_of(7)])

    def test_a_batch_in_a_cycle_is_not_kept(self, arena):
        class Cycle(Batches):
            def run(self, ticket):
                items = super().run(ticket)
                cycle = [items]
                cycle.append(cycle)
                return items

        gc.disable()
        try:
            found = answers(range(6), arena=arena, runner=Cycle())
            assert all(same(result.items, [batch_of(ticket)]) for ticket, result in enumerate(found))
            del found
            assert taken(arena, 12) == []
        finally:
            gc.enable()

    def test_errors_lose_no_slot(self, arena):
        class Failing(Batches):
            def run(self, ticket):
                batch = super().run(ticket)
                if ticket % 3 == 1:
                    raise ValueError(batch)
                return [*batch, lambda: 0] if ticket % 3 == 2 else batch

        found = answers(range(9), arena=arena, runner=Failing())
        assert [result.items is None for result in found] == [False, True, True] * 3
        del found
        assert taken(arena, 12) == []

    def test_a_result_that_cannot_be_delivered_loses_no_slot_but_one_that_is_kept(self, arena, monkeypatch):
        def deliver_at_the_second_time(*arguments):
            attempts.append(arguments)
            if len(attempts) % 2:
                raise OSError(errno.EMFILE, "Too many open files")
            deliver(*arguments)

        attempts, deliver = [], worker._deliver
        monkeypatch.setattr(worker, "_deliver", deliver_at_the_second_time)
        found = answers(range(4), arena=arena, runner=Batches([2]))
        assert ["Too many open files" in str(restore(result.error)) for result in found] == [True] * 4
        assert taken(arena, 12) == [2]

    def test_an_error_that_is_kept_keeps_its_batch_from_being_overwritten(self, arena):
        class Failing(Batches):
            def run(self, ticket):
                batch = super().run(ticket)
                try:
                    raise ValueError
                except ValueError as error:
                    self.kept.append((error, batch))
                    raise

        runner = Failing()
        found = answers(range(3), arena=arena, runner=runner)
        assert all(type(restore(result.error)) is ValueError for result in found)
        assert all(same(kept, [batch_of(ticket)]) for ticket, (_, kept) in enumerate(runner.kept))

    def test_what_can_be_sent_but_not_be_copied_is_told_and_the_worker_goes_on(self, arena):
        """It cannot be unpickled, which otherwise only the receiver would notice."""

        class Broken:
            def __reduce__(self):
                return int, ("x",)

        class Keeping(Batches):
            def run(self, ticket):
                return [*super().run(ticket), Broken()] if ticket == 1 else super().run(ticket)

        found = answers(range(3), arena=arena, runner=Keeping([1]))
        assert same([found[0].items, found[2].items], [[batch_of(0)], [batch_of(2)]])
        assert "invalid literal" in str(restore(found[1].error))

    def test_a_batch_of_which_only_a_part_fits(self, arena):
        class Large(Batches):
            def run(self, ticket):
                return [Batches.run(self, number) for number in range(10)]  # 160 KB

        for keeps in ([], [3]):
            (found,) = answers([0], arena=arena, runner=Large(keeps))
            assert same(found.items, [[batch_of(number)] for number in range(10)])
            del found
            assert len(taken(arena, 12)) == len(keeps)

    def test_arrays_that_view_what_was_collated_lose_no_slot(self, arena):
        """Their bytes lie in the slot without anyone's keeping them, also when they have to travel beside it."""

        class Arrays(Batches):
            def run(self, ticket):
                return [Batches.run(self, ticket)[0].numpy() for _ in range(3)]  # 3 * 16 KB and copies of them

        found = answers(range(4), arena=arena, runner=Arrays())
        for ticket, result in enumerate(found):
            assert same(result.items, [batch_of(ticket).numpy()] * 3)
        del found, result
        assert taken(arena, 12) == []

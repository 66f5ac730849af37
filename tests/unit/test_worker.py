"""What a worker process does, step by step; run here in this process, over a channel of its own."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import get_worker_info

from stateful_pipes.prefetch.channel import open_channel, pack, receive, send
from stateful_pipes.prefetch.remote_error import restore
from stateful_pipes.prefetch.slots import Arena
from stateful_pipes.prefetch.worker import STARTED, Job, Result, work
from stateful_pipes.rng import WORKER, derive
from tests.streams import generator_states


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


def answers(tickets, *, main_pid=None, init=None, worker_id=1):
    """What a worker sends for these tickets until its channel is shut down."""
    tasks, worker_tasks = open_channel()
    results, worker_results = open_channel()
    for task, ticket in enumerate(tickets):
        send(tasks, pack((task, -1, ticket)))
    tasks.close()  # after the tickets, the worker reads the end
    job = Job(Squares(), Arena(0), worker_id, 3, "the dataset", 7, init, os.getpid() if main_pid is None else main_pid)
    work(job, worker_tasks, worker_results)
    worker_results.close()
    found = []
    while True:
        try:
            found.append(Result(*receive(results)))
        except EOFError:
            break
    for end in (worker_tasks, results):
        end.close()
    return found


@pytest.mark.usefixtures("this_process_as_a_worker")
class TestWork:
    def test_each_ticket_is_answered_until_the_channel_ends(self):
        assert answers([2, 3]) == [(0, 1, [4], None), (1, 1, [9], None)]

    def test_worker_info_and_threads(self):
        (result,) = answers(["info"])
        assert result.items == [1, 3, "the dataset", derive(7, WORKER, 1) >> 1, 1]

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
        assert (result.task, result.worker_id, result.items) == (STARTED, 1, None)
        error = restore(result.error)
        assert type(error) is ValueError
        assert str(error) == "no license"

    @pytest.mark.parametrize(("ticket", "kind", "words"), [("x", TypeError, "multiply"), ("stop", StopIteration, "leaked")])
    def test_an_error_is_told_and_the_worker_goes_on(self, ticket, kind, words):
        failed, good = answers([ticket, 3])
        assert good == (1, 1, [9], None)
        assert failed.items is None
        error = restore(failed.error)
        assert type(error) is kind
        assert words in str(error)
        assert "in run" in str(error.__cause__)

    def test_items_that_cannot_be_sent_are_an_error(self):
        failed, good = answers(["unpicklable", 3])
        assert good.items == [9]
        assert "pickle" in str(restore(failed.error))

    def test_without_the_main_process_it_ends(self):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        assert answers([2], main_pid=gone.pid) == []

    def test_interrupts_are_left_to_the_main_process(self):
        handlers = []
        answers([], init=lambda worker_id: handlers.append(signal.getsignal(signal.SIGINT)))
        assert handlers == [signal.SIG_IGN]

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
            send(tasks, pack((task, -1, ticket)))
        tasks.close()
        work(Job(Rival(), Arena(0), 0, 2, None, 7, None, os.getpid()), worker_tasks, worker_results)
        worker_results.close()
        assert taken == [(1, -1, 3)]
        assert [receive(results)[2] for _ in range(2)] == [[4], [16]]
        for end in (worker_tasks, results, rival):
            end.close()


def test_this_process_is_as_it_was():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert threading.current_thread() is threading.main_thread()
    assert get_worker_info() is None

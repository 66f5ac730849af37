"""What a worker process does: take a ticket, run it, send the items back."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.data._utils.worker as torch_worker

from stateful_pipes.caught import add_note
from stateful_pipes.prefetch import collate
from stateful_pipes.prefetch.channel import Message, Parcel, open_channel, pack, receive, send
from stateful_pipes.prefetch.claims import IDLE, TAKING, Claims
from stateful_pipes.prefetch.picklable import unpicklable
from stateful_pipes.prefetch.remote_error import capture
from stateful_pipes.prefetch.slots import Arena, Slot
from stateful_pipes.prefetch.timings import Stopwatch, TimedNode, Timings
from stateful_pipes.rng import GLOBAL_GENERATORS, WORKER, derive, seeder
from stateful_pipes.skips import noting
from stateful_pipes.ticket import Samples

__all__ = ["STARTED", "Job", "Runner", "keep_freed_memory", "prepare_process", "start", "state_of", "work"]

STARTED = -1
"""The task number of what a worker says of its own start."""

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_ASK_MS = 1000
_MOMENT_MS = 5


class Runner(Protocol):
    """The half of a node that its workers need."""

    def run(self, ticket: Any) -> list[Any]: ...
    def samples(self, ticket: Any) -> Samples: ...


class Job(NamedTuple):
    """What a worker is started with."""

    runner: Runner
    nodes: Sequence[Any]  # those whose time is to be told, of the ones that the runner is made of
    arena: Arena
    claims: Claims
    timings: Timings
    num_workers: int
    dataset: Any
    seed: int
    worker_init_fn: Callable[[int], None] | None
    main_pid: int
    worker_id: int


def start(job: Job, tasks: socket.socket, results: socket.socket) -> None:
    """What the process begins with: `work`, while a thread sees to it that the process ends with the main one."""
    # Ctrl-C reaches the whole group; the main process decides what becomes of the workers. It was blocked until here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(job.main_pid,), daemon=True, name="stateful_pipes watch").start()
    work(job, tasks, results)


def work(job: Job, tasks: socket.socket, results: socket.socket) -> None:
    """Runs tickets until the channel is shut down."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare_process()
    collate.install()
    try:
        try:
            _prepare(job)
        except Exception as error:
            _deliver(results, _told(error), STARTED)
            return
        bench = _Bench(job)
        watch = Stopwatch()
        timed = [TimedNode(node, watch) for node in job.nodes]
        for node in timed:
            node.stand_in("run")
        while True:
            job.claims.write(job.worker_id, TAKING)
            try:
                parcel = receive(tasks)
            except BlockingIOError:  # none there, or another worker was quicker
                job.claims.write(job.worker_id, IDLE)
                _wait(tasks, select.POLLIN)
                continue
            job.claims.write(job.worker_id, parcel.task)
            begun = monotonic_ns()
            message = bench.run(parcel)
            # Now, so that whoever has the result finds what it took counted.
            job.timings.add(job.worker_id, begun, monotonic_ns(), message.size, timed)
            try:
                _deliver(results, message, parcel.task, bench.number)
            except ConnectionError:
                raise
            except OSError as error:  # no memory, no descriptor: told for what it is
                _deliver(results, _told(error), parcel.task, bench.number)
    except (EOFError, ConnectionError):
        return  # the channel is shut down


def _deliver(results: socket.socket, message: Message, task: int, number: int = -1) -> None:
    while True:
        try:
            return send(results, message, task, number)
        except BlockingIOError:
            _wait(results, select.POLLOUT)
        except OSError as error:
            # Too many descriptors on their way: the system bounds them for each user.
            if error.errno != errno.ETOOMANYREFS:
                raise
            select.poll().poll(_MOMENT_MS)


def _wait(end: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(end, event)
    poll.poll()


def _end_with(pid: int) -> None:
    """Ends this process, whatever it computes or waits for, when the one of this id is gone.

    A closed channel would be no proof of that, for other forks may hold a copy of it.
    """
    with suppress(ProcessLookupError):
        try:
            poll = select.poll()
            poll.register(os.pidfd_open(pid), select.POLLIN)
            poll.poll()
        except ProcessLookupError:
            raise
        except OSError:  # an older kernel: ask now and then
            while state_of(pid) != "Z":  # ended, but its parent has not yet asked how
                os.kill(pid, 0)
                select.poll().poll(_ASK_MS)
    os.kill(os.getpid(), signal.SIGKILL)


def state_of(pid: int | None) -> str:
    """The letter that the system has for what a process does; none if it does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _prepare(job: Job) -> None:
    """What torch's own workers do at their start: seeds of their own for whatever draws unseeded, worker info, init."""
    seeder(GLOBAL_GENERATORS)(derive(job.seed, WORKER, job.worker_id))
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=job.worker_id, num_workers=job.num_workers, seed=torch.initial_seed(), dataset=job.dataset
    )
    if job.worker_init_fn is not None:
        job.worker_init_fn(job.worker_id)


def _told(error: Exception) -> Message:
    """The error in place of items."""
    return pack((None, capture(error), ()))


class _Bench:
    """Runs tickets, each with a slot to put its items into. What it sends are items and error, one of them None, and skips.

    Attributes:
        number: The slot that goes back with what was made last; -1 for none.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._collates_into = True
        self.number = -1

    def run(self, parcel: Parcel) -> Message:
        self.number = parcel.number
        slot = self._job.arena.open(parcel.number) if parcel.number >= 0 else None
        if self._collates_into:
            collate.into(slot)
        message = self._message(parcel, slot)
        collate.into(None)
        if slot is not None and not slot.let_go():
            # The user's code has kept a tensor that lies in the slot, so nobody may write there again. The items go as
            # copies, the slot is never given back, and from now on it is not collated into.
            self._collates_into, self.number = False, -1
            try:
                message = self._copied(message, parcel.number)
            except Exception as error:
                message = _told(error)
        return message

    def _message(self, parcel: Parcel, slot: Slot | None) -> Message:
        """A function of its own, so that when it returns nothing but the user's code can still hold what it made."""
        try:
            with noting() as skips:
                items = self._job.runner.run(parcel.open())
            left_out = [(skip.node, skip.place, capture(skip.error)) for skip in skips]
            try:
                return pack((items, None, left_out), slot)
            except Exception as error:
                if found := unpicklable(items[0] if len(items) == 1 else items, "the result"):
                    add_note(error, f"a worker sends what it made as a pickle, which cannot take {found}")
                raise
        except Exception as error:
            return _told(error)

    def _copied(self, message: Message, number: int) -> Message:
        one, other = open_channel()
        with one, other:
            send(one, message, number=number)
            parcel = receive(other)
        return pack(parcel.open(self._job.arena))


def prepare_process() -> None:
    """Makes this process one that only works in the background."""
    torch.set_num_threads(1)
    with suppress(OSError):  # else a worker that wakes up would take the training loop's core from it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_freed_memory()
    gc.freeze()  # what is there already is nobody's garbage


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed blocks: a batch's temporaries would else be mapped and faulted in anew each time."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            # An older glibc refuses more than the second for the first of them.
            mallopt(parameter, 2**30) or mallopt(parameter, 2**25)

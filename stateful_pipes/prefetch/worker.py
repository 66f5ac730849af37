"""What a worker process does: take a ticket, run it, send the items back."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.data._utils.worker as torch_worker

from stateful_pipes.prefetch import collate
from stateful_pipes.prefetch.channel import Message, Parcel, open_channel, pack, receive, send
from stateful_pipes.prefetch.remote_error import capture
from stateful_pipes.prefetch.slots import Arena, Slot
from stateful_pipes.rng import GLOBAL_GENERATORS, WORKER, derive, seeder

__all__ = ["STARTED", "Job", "Runner", "keep_freed_memory", "prepare_process", "work"]

STARTED = -1
"""The task number of what a worker says of its own start."""

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_ASK_MS = 1000
_MOMENT_S = 0.005


class Runner(Protocol):
    """The half of a node that a worker needs."""

    def run(self, ticket: Any) -> list[Any]: ...


class Job(NamedTuple):
    """What a worker is started with."""

    runner: Runner
    arena: Arena
    worker_id: int
    num_workers: int
    dataset: Any
    seed: int
    worker_init_fn: Callable[[int], None] | None
    main_pid: int


def work(job: Job, tasks: socket.socket, results: socket.socket) -> None:
    """Runs tickets until the channel is shut down or the main process is gone."""
    # Ctrl-C reaches the whole group; the main process decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare_process()
    collate.install()
    try:
        main = _MainProcess(job.main_pid)
        try:
            _prepare(job)
        except Exception as error:
            _deliver(main, results, pack((None, capture(error)), task=STARTED, sender=job.worker_id))
            return
        bench = _Bench(job)
        while True:
            try:
                parcel = receive(tasks)
            except BlockingIOError:  # none there, or another worker was quicker
                main.wait(tasks, select.POLLIN)
                continue
            message = bench.run(parcel)
            try:
                _deliver(main, results, message)
            except ConnectionError:
                raise
            except OSError as error:  # no memory, no descriptor: told for what it is
                _deliver(main, results, bench.told(parcel, error))
    except (EOFError, ConnectionError, ProcessLookupError):
        return  # the channel is shut down, or the main process gone


def _deliver(main: _MainProcess, results: socket.socket, message: Message) -> None:
    while True:
        try:
            return send(results, message)
        except BlockingIOError:
            main.wait(results, select.POLLOUT)
        except OSError as error:
            # Too many descriptors on their way: the system bounds them for each user.
            if error.errno != errno.ETOOMANYREFS:
                raise
            main.pause()


def _prepare(job: Job) -> None:
    """What torch's own workers do at their start: seeds of their own for whatever draws unseeded, worker info, init."""
    seed = derive(job.seed, WORKER, job.worker_id)
    seeder(GLOBAL_GENERATORS)(seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=job.worker_id, num_workers=job.num_workers, seed=seed >> 1, dataset=job.dataset
    )
    if job.worker_init_fn is not None:
        job.worker_init_fn(job.worker_id)


class _Bench:
    """Runs tickets, each with a slot to put its items into. What it sends are items and error, one of them None."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._collates_into = True
        self._number = -1

    def run(self, parcel: Parcel) -> Message:
        self._number = parcel.number
        slot = self._job.arena.open(parcel.number) if parcel.number >= 0 else None
        if self._collates_into:
            collate.into(slot)
        message = self._message(parcel, slot)
        collate.into(None)
        if slot is not None and not slot.let_go():
            # The user's code has kept a tensor that lies in the slot, so nobody may write there again. The items go as
            # copies, the slot is never given back, and from now on it is not collated into.
            self._collates_into, self._number = False, -1
            try:
                message = self._copied(message)
            except Exception as error:
                message = self.told(parcel, error)
        return message

    def told(self, parcel: Parcel, error: Exception) -> Message:
        """The error in place of items; the slot goes back with it, if it may."""
        return pack((None, capture(error)), task=parcel.task, sender=self._job.worker_id, number=self._number)

    def _message(self, parcel: Parcel, slot: Slot | None) -> Message:
        """A function of its own, so that when it returns nothing but the user's code can still hold what it made."""
        try:
            items = self._job.runner.run(parcel.open())
            return pack((items, None), slot, task=parcel.task, sender=self._job.worker_id)
        except Exception as error:
            return self.told(parcel, error)

    def _copied(self, message: Message) -> Message:
        one, other = open_channel()
        with one, other:
            send(one, message)
            parcel = receive(other)
        return pack(parcel.open(self._job.arena), task=parcel.task, sender=parcel.sender)


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


class _MainProcess:
    """Waits that also end with the main process, for which a closed channel is no proof: other forks may hold a copy of it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise EOFError from None
        except OSError:  # an older kernel: ask now and then
            self._descriptor = -1

    def pause(self) -> None:
        """Waits a moment; EOFError if the main process is gone."""
        if select.select([self._descriptor] if self._descriptor >= 0 else [], [], [], _MOMENT_S)[0]:
            raise EOFError

    def wait(self, end: socket.socket, event: int) -> None:
        """Returns when the end is ready for select's `event`; EOFError if the main process is gone."""
        poll = select.poll()
        poll.register(end, event)
        if self._descriptor >= 0:
            poll.register(self._descriptor, select.POLLIN)
        while not (ready := poll.poll(_ASK_MS if self._descriptor < 0 else None)):
            os.kill(self._pid, 0)  # ProcessLookupError is an OSError, too
        if any(descriptor == self._descriptor for descriptor, _ in ready):
            raise EOFError

"""What a worker process does: take a ticket, run it, send the items back."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.data._utils.worker as torch_worker

from stateful_pipes.prefetch.channel import pack, receive, send
from stateful_pipes.prefetch.remote_error import RemoteError, capture
from stateful_pipes.rng import GLOBAL_GENERATORS, WORKER, derive, seeder

__all__ = ["STARTED", "Job", "Result", "work"]

STARTED = -1
"""The task number of what a worker says of its own start."""


class Runner(Protocol):
    """The half of a node that a worker needs."""

    def run(self, ticket: Any) -> list[Any]: ...


class Job(NamedTuple):
    """What a worker is started with."""

    runner: Runner
    worker_id: int
    num_workers: int
    dataset: Any
    seed: int
    worker_init_fn: Callable[[int], None] | None
    main_pid: int


class Result(NamedTuple):
    """What a worker sends: the items of a task, or the error instead."""

    task: int
    worker_id: int
    items: list[Any] | None
    error: RemoteError | None


def work(job: Job, tasks: socket.socket, results: socket.socket) -> None:
    """Runs tickets until the channel is shut down or the main process is gone."""
    # Ctrl-C reaches the whole group; the main process decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    wait = _waiter(tasks, job.main_pid)
    try:
        try:
            _prepare(job)
        except Exception as error:
            send(results, pack(Result(STARTED, job.worker_id, None, capture(error))))
            return
        while wait():
            # Another worker may have been quicker.
            try:
                task, ticket = receive(tasks, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            send(results, _run(job, task, ticket))
    except (EOFError, OSError):
        return  # the channel is shut down


def _prepare(job: Job) -> None:
    """What torch's own workers do at their start: seeds of their own for whatever draws unseeded, worker info, init."""
    seed = derive(job.seed, WORKER, job.worker_id)
    seeder(GLOBAL_GENERATORS)(seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=job.worker_id, num_workers=job.num_workers, seed=seed >> 1, dataset=job.dataset
    )
    if job.worker_init_fn is not None:
        job.worker_init_fn(job.worker_id)


def _run(job: Job, task: int, ticket: Any) -> list[Any]:
    try:
        return pack(Result(task, job.worker_id, job.runner.run(ticket), None))
    except Exception as error:
        return pack(Result(task, job.worker_id, None, capture(error)))


def _waiter(tasks: socket.socket, main_pid: int) -> Callable[[], bool]:
    """A function that waits for a task and tells whether the main process still lives."""
    poll = select.poll()
    poll.register(tasks, select.POLLIN)
    try:
        # A pipe from the parent would do, had not every sibling that was forked later a copy of its other end.
        main = os.pidfd_open(main_pid)
    except ProcessLookupError:
        return lambda: False
    except OSError:
        return lambda: bool(poll.poll(1000)) or _alive(main_pid)
    poll.register(main, select.POLLIN)
    return lambda: all(fd != main for fd, _ in poll.poll())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""Worker processes that share one queue of tasks: whichever is free takes the next."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from stateful_pipes.errors import ConcurrentUseError, IteratorInvalidError, WorkerDiedError, WorkerTimeoutError
from stateful_pipes.prefetch.channel import Message, Parcel, open_channel, pack, receive, send
from stateful_pipes.prefetch.remote_error import restore
from stateful_pipes.prefetch.slots import Arena
from stateful_pipes.prefetch.worker import STARTED, Job, Runner, work

__all__ = ["WorkerPool"]

_NUMBERS = itertools.count()
"""Of tasks; of all pools, so that a ticket of one that is closed names none of another's."""

_GRACE_S = 0.5
"""How long closing waits for workers to end by themselves, and then again for SIGTERM to end them, before SIGKILL."""


class WorkerPool:
    """Runs tickets in processes. Tasks are numbered in the order of `submit`; results are asked for by number.

    Processes start at construction and end at `close`, or when the pool is dropped, or with the main process.

    Attributes:
        is_broken: Whether it has to be replaced: a worker died, hangs or could not start, or waiting was interrupted.

    Args:
        runner: The node whose `run` the workers call.
        num_workers: At least 1.
        context: The multiprocessing context that starts them.
        slots: How many results may lie in shared memory at once, with those that are held; any more have memory of their own.
        worker_init_fn: Called in each with its number.
        dataset: What `get_worker_info().dataset` shows.
        seed: From it each worker seeds its global generators at the start.
    """

    def __init__(
        self,
        runner: Runner,
        num_workers: int,
        context: BaseContext,
        *,
        slots: int,
        worker_init_fn: Callable[[int], None] | None,
        dataset: Any,
        seed: int,
    ) -> None:
        self._pid = os.getpid()
        self.is_broken = False
        self._method = context.get_start_method()
        self._tasks, worker_tasks = open_channel()
        self._results, worker_results = open_channel()
        # Kept: what no worker has taken yet can be taken back from it.
        self._untaken = worker_tasks
        self._arena = Arena(slots)
        self._unsent: deque[tuple[int, int]] = deque()  # task and slot
        self._packed: dict[int, Message] = {}
        self._running: set[int] = set()
        self._done: dict[int, Parcel] = {}
        self._forgotten: set[int] = set()
        self._heard: set[int] = set()
        self._processes: list[BaseProcess] = []
        sockets = (self._tasks, worker_tasks, self._results, worker_results)
        self._finalizer = weakref.finalize(self, _end, self._processes, sockets, self._arena, self._pid)
        for worker_id in range(num_workers):
            job = Job(runner, self._arena, worker_id, num_workers, dataset, seed, worker_init_fn, self._pid)
            process = context.Process(  # type: ignore[attr-defined]  # typeshed has it on the concrete contexts only
                target=work, args=(job, worker_tasks, worker_results), daemon=True, name=f"stateful_pipes worker {worker_id}"
            )
            try:
                process.start()
            except BaseException:
                self.close()
                raise
            self._processes.append(process)
        self._poll = select.poll()
        self._poll.register(self._results, select.POLLIN)
        for process in self._processes:
            self._poll.register(process.sentinel, select.POLLIN)

    @property
    def outstanding(self) -> int:
        """Tasks whose result has not been handed out, those forgotten but still running included."""
        return len(self._packed) + len(self._running) + len(self._done)

    def submit(self, ticket: Any) -> int:
        """Queues a ticket; returns the number of its task."""
        self._check_process()
        task = next(_NUMBERS)
        # Ends well or in an error: an interrupt may leave a slot on the shelf that a worker has.
        was_broken, self.is_broken = self.is_broken, True
        slot = self._arena.borrow()
        try:
            self._packed[task] = pack(ticket, task=task, number=slot)
            self._unsent.append((task, slot))
            self._flush()
        except Exception:
            self._packed.pop(task, None)
            self._unsent = deque(pair for pair in self._unsent if pair[0] != task)
            self._arena.give_back(slot)
            self.is_broken = was_broken
            raise
        self.is_broken = was_broken
        return task

    def result(self, task: int, timeout: float = 0) -> list[Any]:
        """The items of a task; waits for them.

        Raises:
            WorkerDiedError: a worker ended.
            WorkerTimeoutError: `timeout` seconds have passed; 0 waits for ever.
            IteratorInvalidError: there is no such task.
            Exception: what the worker's `run` raised.
        """
        self._check_process()
        if task not in self._packed and task not in self._running and task not in self._done:
            raise IteratorInvalidError(f"task {task} is none of these workers'; they were closed meanwhile")
        deadline = time.monotonic() + timeout if timeout else None
        # Ends well or not at all: an interrupt may lose a message, and a worker that died has lost its task.
        self.is_broken = True
        while task not in self._done:
            self._flush()
            self._wait(task, deadline)
            self._collect()
        self.is_broken = False
        items, error = self._done.pop(task).open(self._arena)
        if error is not None:
            raise restore(error)
        return items or []

    def forget(self) -> None:
        """Drops all tasks; what no worker has begun is taken back."""
        if os.getpid() != self._pid:
            return  # a fork's copy must not take tasks away
        was_broken, self.is_broken = self.is_broken, True
        for task, slot in self._unsent:
            del self._packed[task]
            self._arena.give_back(slot)
        self._unsent.clear()
        while True:
            try:
                parcel = receive(self._untaken)
            except (OSError, EOFError):  # none left, or closed
                break
            self._arena.give_back(parcel.number)
            self._running.discard(parcel.task)
        for parcel in self._done.values():
            self._arena.give_back(parcel.number)
        self._done.clear()
        self._forgotten = set(self._running)
        self.is_broken = was_broken

    def close(self) -> None:
        """Ends the workers within about a second, however busy they are; idempotent."""
        self._finalizer()

    def _flush(self) -> None:
        while self._unsent:
            task, _ = self._unsent[0]
            try:
                send(self._tasks, self._packed[task])
            except OSError as error:
                # Full; or too many descriptors are under way to workers, if any are.
                if isinstance(error, BlockingIOError) or (error.errno == errno.ETOOMANYREFS and self._running):
                    return
                raise
            self._unsent.popleft()
            del self._packed[task]
            self._running.add(task)

    def _collect(self) -> None:
        """Takes in one result."""
        parcel = receive(self._results)
        self._heard.add(parcel.sender)
        if parcel.task == STARTED:
            raise restore(parcel.open()[1])
        self._running.discard(parcel.task)
        if parcel.task in self._forgotten:
            self._forgotten.discard(parcel.task)
            self._arena.give_back(parcel.number)
        else:
            self._done[parcel.task] = parcel

    def _wait(self, task: int, deadline: float | None) -> None:
        """Returns when there is a result to take in."""
        left = None if deadline is None else max(0, deadline - time.monotonic()) * 1000
        ready = dict(self._poll.poll(left))
        if not self._finalizer.alive:
            raise IteratorInvalidError("the workers were closed by another thread")
        if self._results.fileno() in ready:
            return
        if not ready:
            raise WorkerTimeoutError(f"task {task} is still under way", remedy="Raise timeout, or look at what the workers do")
        for worker_id, process in enumerate(self._processes):
            if process.sentinel in ready:
                raise self._died(worker_id, process)

    def _died(self, worker_id: int, process: BaseProcess) -> WorkerDiedError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        remedy = ""
        if self._method != "fork" and worker_id not in self._heard:
            remedy = 'With spawn and forkserver the main module is imported again: guard it with if __name__ == "__main__":'
        elif code == -signal.SIGKILL:
            remedy = "The system may have run out of memory"
        return WorkerDiedError(f"worker {worker_id} (pid {process.pid}) {how}", remedy=remedy)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConcurrentUseError(
                f"the workers belong to process {self._pid}, and this is a fork of it",
                remedy="Make a loader of its own in the child",
            )


def _end(processes: list[BaseProcess], sockets: tuple[socket.socket, ...], arena: Arena, pid: int) -> None:
    """Ends workers and channels; in a forked child it only closes the child's own copies of the descriptors."""
    try:
        if os.getpid() == pid:
            _end_workers(processes, sockets)
    finally:
        arena.close()
        for end in sockets:
            end.close()


def _end_workers(processes: list[BaseProcess], sockets: tuple[socket.socket, ...]) -> None:
    for end in sockets:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    try:
        _join(processes)
        for process in processes:
            process.terminate()
        _join(processes)
    finally:  # a second Ctrl-C ends the patience, not the ending
        for process in processes:
            process.kill()
            process.join()
            with suppress(ValueError):  # "still running": a thread that waits for a result is about to reap it
                process.close()


def _join(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + _GRACE_S
    waiting = {process.sentinel for process in processes}
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting -= set(multiprocessing.connection.wait(list(waiting), left))

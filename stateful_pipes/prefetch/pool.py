"""Worker processes that share one queue of tasks: whichever is free takes the next."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, cast

from stateful_pipes.errors import ConcurrentUseError, IteratorInvalidError, WorkerDiedError, WorkerTimeoutError
from stateful_pipes.prefetch.channel import Message, Parcel, open_channel, receive
from stateful_pipes.prefetch.claims import STARTING, Claims
from stateful_pipes.prefetch.processes import Death, WorkerProcesses
from stateful_pipes.prefetch.remote_error import restore
from stateful_pipes.prefetch.slots import Arena
from stateful_pipes.prefetch.tasks import TaskQueue
from stateful_pipes.prefetch.timings import Timings
from stateful_pipes.prefetch.worker import STARTED, Job, Runner
from stateful_pipes.skips import Skip
from stateful_pipes.ticket import Samples

__all__ = ["WorkerPool"]

logger = logging.getLogger("stateful_pipes")

_NUMBERS = itertools.count()
"""Of tasks; of all pools, so that a ticket of one that is closed names none of another's."""


class WorkerPool:
    """Runs tickets in processes. Tasks are numbered in the order of `submit`; results are asked for by number.

    Processes start at construction and end at `close`, or when the pool is dropped, or with the main process. One that dies
    is replaced when the next result is asked for, and what it had in hand is run again, with the same result.

    Attributes:
        is_broken: Whether it has to be replaced: it could not start, a worker hangs, or waiting was interrupted.
        restarts: Workers that were replaced.
        timings: What the workers have done.

    Args:
        runner: The node whose `run` the workers call.
        num_workers: At least 1.
        context: The multiprocessing context that starts them.
        slots: How many results may lie in shared memory at once, with those that are held; any more have memory of their own.
        max_restarts: How often a ticket is run again because its worker died.
        worker_init_fn: Called in each with its number.
        dataset: What `get_worker_info().dataset` shows.
        seed: From it each worker seeds its global generators at the start.
        nodes: Those that the runner is made of, whose time is to be told.

    Raises:
        RuntimeError: this process is a daemonic one, which may have no children.
    """

    def __init__(
        self,
        runner: Runner,
        num_workers: int,
        context: BaseContext,
        *,
        slots: int,
        max_restarts: int,
        worker_init_fn: Callable[[int], None] | None,
        dataset: Any,
        seed: int,
        nodes: Sequence[Any] = (),
    ) -> None:
        self._pid = os.getpid()
        self._runner = runner
        self.is_broken = False
        self.restarts = 0
        self._max_restarts = max_restarts
        self._method = context.get_start_method()
        self._done: dict[int, Parcel | WorkerDiedError] = {}
        self._in_vain = 0  # deaths of workers with no task in hand, since the last result
        tasks, worker_tasks = open_channel()
        self._results, worker_results = open_channel()
        sockets = (tasks, worker_tasks, self._results, worker_results)
        self._arena = Arena(slots)
        self._tasks = TaskQueue(tasks, worker_tasks, self._arena)
        self._claims = Claims(num_workers)
        self.timings = Timings(num_workers, len(nodes))
        shared = (self._arena, self._claims, self.timings)
        try:
            self._processes = WorkerProcesses(
                num_workers,
                context,
                self._claims,
                partial(Job, runner, nodes, *shared, num_workers, dataset, seed, worker_init_fn, self._pid),
                (worker_tasks, worker_results),
            )
        except BaseException:
            _end(None, sockets, shared, self._pid)
            raise
        self._finalizer = weakref.finalize(self, _end, self._processes, sockets, shared, self._pid)

    @property
    def outstanding(self) -> int:
        """Tasks whose result has not been handed out, those forgotten but still running included."""
        return len(self._tasks) + len(self._done)

    def submit(self, ticket: Any, message: Message) -> int:
        """Queues a ticket, and the message that it goes as; returns the number of its task."""
        self._check_process()
        number = next(_NUMBERS)
        # Ends well or in an error: an interrupt may leave a slot on the shelf that a worker has.
        was_broken, self.is_broken = self.is_broken, True
        try:
            self._tasks.put(number, ticket, message)
        except Exception:
            self.is_broken = was_broken
            raise
        self.is_broken = was_broken
        return number

    def result(self, number: int, timeout: float = 0) -> tuple[list[Any], list[Skip]]:
        """The items of a task, and the samples that the worker has left out; waits for them.

        Raises:
            WorkerDiedError: the task's worker died, and again whenever it was run; or workers die without any task.
            WorkerTimeoutError: `timeout` seconds have passed; 0 waits for ever.
            IteratorInvalidError: there is no such task.
            Exception: what the worker's `run` raised.
        """
        self._check_process()
        if number not in self._done and number not in self._tasks:
            raise IteratorInvalidError(f"task {number} is none of these workers'; they were closed meanwhile")
        deadline = time.monotonic() + timeout if timeout else None
        # Ends well or not at all: an interrupt may lose a message.
        self.is_broken = True
        if number in self._done:
            self._look(0)  # a worker that has died is replaced at once, and not only when there is nothing left to hand out
        while number not in self._done:
            if self._tasks.unsent:
                self._tasks.flush()
            if not self._look(None if deadline is None else max(0, deadline - time.monotonic())):
                raise self._timeout(number)
        found = self._done.pop(number)
        try:
            opened = self._opened(found)
        except Exception:
            self.is_broken = False
            raise
        self.is_broken = False
        return opened

    def forget(self) -> None:
        """Drops all tasks; what no worker has begun is taken back."""
        if os.getpid() != self._pid:
            return  # a fork's copy must not take tasks away
        was_broken, self.is_broken = self.is_broken, True
        self._tasks.forget()
        for found in self._done.values():
            if isinstance(found, Parcel):
                self._arena.give_back(found.number)
        self._done.clear()
        self.is_broken = was_broken

    def close(self) -> None:
        """Ends the workers within about a second, however busy they are; idempotent."""
        self._finalizer()

    def _opened(self, found: Parcel | WorkerDiedError) -> tuple[list[Any], list[Skip]]:
        """Items, and samples that were left out; raises what the worker raised, or why the items cannot be rebuilt."""
        if isinstance(found, WorkerDiedError):
            raise found
        items, error, skips = found.open(self._arena)
        if error is not None:
            raise restore(error)
        return items, [Skip(node, place, cast(Exception, restore(error))) for node, place, error in skips] if skips else skips

    def _look(self, seconds: float | None) -> bool:
        """Waits for a result to take in, or for dead workers to replace; returns whether there was either in time."""
        has_result, dead = self._processes.wait(self._results, seconds)
        if not self._finalizer.alive:
            raise IteratorInvalidError("the workers were closed by another thread")
        if has_result:
            self._collect()
        if dead:
            self._replace(dead)
        return has_result or bool(dead)

    def _timeout(self, number: int) -> WorkerTimeoutError:
        doings = "; ".join(self._processes.doings(lambda task: str(self._samples(task))))
        return WorkerTimeoutError(
            f"{self._samples(number)} is still under way; {doings}",
            remedy="Raise timeout, or look where a worker stands (py-spy dump --pid PID); close() lets it go on",
        )

    def _collect(self) -> None:
        """Takes in one result."""
        parcel = receive(self._results)
        if parcel.task == STARTED:
            raise restore(parcel.open()[1])
        self._in_vain = 0
        task = self._tasks.pop(parcel.task)
        if task is None:
            return
        if task.is_forgotten:
            self._arena.give_back(parcel.number)
        else:
            self._done[parcel.task] = parcel

    def _replace(self, dead: Collection[int]) -> None:
        """Starts others in the place of dead workers, and has what these had in hand run again."""
        self._tasks.take_back()
        gone, held = self._processes.settle(dead)
        deaths = [self._processes.bury(worker_id) for worker_id in gone]
        # Only now: what somebody has sent before he took the next task is not lost.
        with suppress(BlockingIOError):
            while True:
                self._collect()
        self._in_vain += not all([self._blame(death) for death in deaths])
        if self._in_vain > self._max_restarts:
            raise self._died(deaths[0], None)
        for worker_id in gone:
            self._processes.replace(worker_id)
            self.restarts += 1
        self._tasks.send_again(held)

    def _blame(self, death: Death) -> bool:
        """Counts the death for the task that the worker had in hand, and gives that up where it is one too many.

        Returns:
            Whether there was one.
        """
        task = self._tasks.get(death.task)
        if task is None:
            if death.task == STARTING and death.exit_code is not None and death.exit_code >= 0:
                raise self._died(death, None)
            logger.warning("%s, with no task in hand; another takes its place", death)
            return False
        task.deaths += 1
        samples = self._samples(death.task)
        logger.warning("%s over %s; another takes its place", death, samples)
        if task.deaths > self._max_restarts:
            self._tasks.drop(death.task)
            if not task.is_forgotten:
                self._done[death.task] = self._died(death, samples, task.deaths)
        return True

    def _died(self, death: Death, samples: Samples | str | None, deaths: int = 1) -> WorkerDiedError:
        remedy = "Read these with num_workers=0 to see why" if samples is not None else ""
        if death.task == STARTING and self._method != "fork":
            remedy = 'With spawn and forkserver the main module is imported again: guard it with if __name__ == "__main__":'
        elif death.exit_code == -signal.SIGKILL:
            remedy = f"The system may have run out of memory. {remedy}".rstrip()
        over = "" if samples is None else f" over {samples}"
        over += f", as did {deaths - 1} before it" if deaths > 1 else ""
        known = samples if isinstance(samples, Samples) else None
        return WorkerDiedError(f"{death}{over}", exit_code=death.exit_code, samples=known, remedy=remedy)

    def _samples(self, number: int) -> Samples | str:
        """What a task is about, for people."""
        task = self._tasks.get(number)
        if task is None:
            return "what it has delivered by now"
        try:
            return self._runner.samples(task.ticket)
        except Exception:  # a ticket of a node that does not say
            return f"task {number}"

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConcurrentUseError(
                f"the workers belong to process {self._pid}, and this is a fork of it",
                remedy="Make a loader of its own in the child",
            )


def _end(
    processes: WorkerProcesses | None, sockets: Iterable[socket.socket], shared: Iterable[Arena | Claims | Timings], pid: int
) -> None:
    """Ends workers and channels; in a forked child it only closes the child's own copies of the descriptors."""
    with ExitStack() as stack:  # all of it, wherever an interrupt comes
        for end in sockets:
            stack.callback(end.close)
        for memory in shared:
            stack.callback(memory.close)
        if os.getpid() == pid:
            if processes is not None:
                stack.callback(processes.end)
            for end in sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

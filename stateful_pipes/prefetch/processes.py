"""The worker processes of a pool: started, looked after, replaced, ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

from stateful_pipes.contract import walk
from stateful_pipes.node import Node
from stateful_pipes.prefetch.claims import IDLE, STARTING, TAKING, Claims
from stateful_pipes.prefetch.picklable import unpicklable
from stateful_pipes.prefetch.worker import Job, start, state_of

__all__ = ["Death", "WorkerProcesses", "context_of", "refuse_unpicklable"]

_GRACE_S = 0.4
"""How long ending waits for workers to end by themselves, and then again for SIGTERM to end them, before SIGKILL."""

_TAKING_S = 1.0
"""How long a worker may be between taking a task and saying which: some microseconds, unless it is stopped."""

_LOOK_S = 0.0005
_MAX_MS = 2**31 - 1


def context_of(context: str | BaseContext | None) -> BaseContext:
    """The context that an argument `multiprocessing_context` stands for."""
    if context is None or isinstance(context, str):
        methods = multiprocessing.get_all_start_methods()
        if context is not None and context not in methods:
            raise ValueError(f"multiprocessing_context must be one of {methods}, got {context!r}")
        return multiprocessing.get_context(context)
    if not isinstance(context, BaseContext):
        raise TypeError(f"multiprocessing_context must be a start method or a context, got {context!r}")
    return context


def refuse_unpicklable(top: Node[Any], worker_init_fn: object) -> None:
    """Raises TypeError if a pipeline cannot be sent to a process that is spawned."""
    nodes: list[Any] = list(walk(top))
    held = [
        (part, f"{node.name}.{key}")
        for node in nodes
        for key, part in node.__getstate__().items()
        if key not in ("sources", "_source")
    ]
    for part, path in [*held, (worker_init_fn, "worker_init_fn")]:
        if found := unpicklable(part, path):
            raise TypeError(f"workers that are spawned get the pipeline as a pickle, which cannot take {found}")


class Death(NamedTuple):
    """How a worker ended.

    Attributes:
        worker: Its number and process id, for people.
        exit_code: As multiprocessing has it: a signal's is negative. None if somebody else has asked the system for it.
        task: What it had in hand; IDLE, TAKING or STARTING if nothing.
    """

    worker: str
    exit_code: int | None
    task: int

    def __str__(self) -> str:
        if self.exit_code is None:
            return f"{self.worker} ended"
        if self.exit_code < 0:
            try:
                return f"{self.worker} was killed by {signal.Signals(-self.exit_code).name}"
            except ValueError:  # a real-time signal
                return f"{self.worker} was killed by signal {-self.exit_code}"
        return f"{self.worker} ended with exit code {self.exit_code}"


class WorkerProcesses:
    """Processes that share a channel of tasks and one of results.

    Args:
        count: How many.
        context: The multiprocessing context that starts them.
        claims: Where they say what they have in hand.
        job: What the worker of a number is to do.
        ends: Their ends of both channels.

    Raises:
        RuntimeError: this process is a daemonic one, which may have no children.
    """

    def __init__(
        self,
        count: int,
        context: BaseContext,
        claims: Claims,
        job: Callable[[int], Job],
        ends: tuple[socket.socket, socket.socket],
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise RuntimeError("a daemonic process may have no children: use num_workers=0 here, or make it non-daemonic")
        self._context = context
        self._claims = claims
        self._job = job
        self._ends = ends
        self._processes: list[BaseProcess] = []
        self._ends_of: list[int] = []  # for each worker a descriptor that becomes readable when it ends
        self._poll: select.poll | None = None
        try:
            for worker_id in range(count):
                self._start(worker_id)
        except BaseException:
            self.end()
            raise

    def wait(self, end: socket.socket, seconds: float | None) -> tuple[bool, list[int]]:
        """Waits for something to receive at `end`, or for workers to end; returns whether there is, and which have ended.

        Args:
            end: Always the same.
            seconds: For how long at most; None for ever.
        """
        if self._poll is None:
            self._poll = select.poll()
            for descriptor in (end.fileno(), *self._ends_of):
                self._poll.register(descriptor, select.POLLIN)
        ready = self._poll.poll(None if seconds is None else min(1000 * seconds, _MAX_MS))
        if len(ready) == 1 and ready[0][0] == end.fileno():
            return True, []
        ended = [self._ends_of.index(descriptor) for descriptor, _ in ready if descriptor in self._ends_of]
        return len(ready) > len(ended), ended

    def settle(self, dead: Collection[int]) -> tuple[set[int], set[int]]:
        """To be called when there is no task left to take: waits until all that live have said which one they have.

        One that says nothing in time is stopped, and killed: then it is certain what it had.

        Returns:
            The numbers of the dead, and the tasks in the hands of all others.
        """
        gone, held = set(dead), set()
        for worker_id in range(len(self._processes)):
            deadline = time.monotonic() + _TAKING_S
            while worker_id not in gone and (task := self._claims.read(worker_id).task) == TAKING:
                if time.monotonic() > deadline or multiprocessing.connection.wait([self._ends_of[worker_id]], _LOOK_S):
                    gone.add(worker_id)
            if worker_id not in gone:
                held.add(task)
        return gone, held

    def bury(self, worker_id: int) -> Death:
        """How a dead worker ended. From here on it is certain that it does nothing more."""
        process = self._processes[worker_id]
        self._kill(worker_id)
        self._reap(process)
        code = process.exitcode
        if code == 255 and self._context.get_start_method() == "forkserver":  # what it says when its server is gone
            code = None
        return Death(self._name(worker_id), code, self._claims.read(worker_id).task)

    def replace(self, worker_id: int) -> None:
        """Starts another in the place of a buried one."""
        self._discard(worker_id)
        self._start(worker_id)

    def doings(self, describe: Callable[[int], str]) -> list[str]:
        """What each worker does at this moment, in words; `describe` puts a task into words."""
        return [f"{self._name(worker_id)} {self._doing(worker_id, describe)}" for worker_id in range(len(self._processes))]

    def end(self) -> None:
        """Ends all within about a second, however busy they are; the channels are to be shut down before."""
        try:
            self._join()
            for process in self._processes:
                process.terminate()
            self._join()
        finally:  # a second Ctrl-C ends the patience, not the ending
            for worker_id in range(len(self._processes)):
                self._kill(worker_id)
            for worker_id, process in enumerate(self._processes):
                self._reap(process)
                self._discard(worker_id)

    def _start(self, worker_id: int) -> None:
        self._claims.write(worker_id, STARTING)
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # typeshed has it on the concrete contexts only
            target=start, args=(self._job(worker_id), *self._ends), daemon=True, name=f"stateful_pipes worker {worker_id}"
        )
        with _interrupts_wait():  # until the process is noted: else nobody would end it
            process.start()
            self._processes[worker_id : worker_id + 1] = [process]
            self._ends_of[worker_id : worker_id + 1] = [_end_of(process)]
            self._poll = None

    def _kill(self, worker_id: int) -> None:
        with suppress(ProcessLookupError):
            if self._has_pidfd(worker_id):  # by its number another process might be hit, should this one be gone
                signal.pidfd_send_signal(self._ends_of[worker_id], signal.SIGKILL)
            else:
                self._processes[worker_id].kill()

    def _reap(self, process: BaseProcess) -> None:
        # A child of ours is waited for as such; of forkserver's, only the pipe tells, which may outlive it.
        process.join(_GRACE_S if self._context.get_start_method() == "forkserver" else None)

    def _has_pidfd(self, worker_id: int) -> bool:
        return self._ends_of[worker_id] != self._processes[worker_id].sentinel

    def _discard(self, worker_id: int) -> None:
        """Closes what was kept for a worker that is dead."""
        if self._has_pidfd(worker_id):
            os.close(self._ends_of[worker_id])
        with suppress(ValueError):  # "still running": a thread that waits for a result, or others, have reaped it
            self._processes[worker_id].close()

    def _join(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        waiting = set(self._ends_of)
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(multiprocessing.connection.wait(list(waiting), left))

    def _name(self, worker_id: int) -> str:
        return f"worker {worker_id} (pid {self._processes[worker_id].pid})"

    def _doing(self, worker_id: int, describe: Callable[[int], str]) -> str:
        task, seconds = self._claims.read(worker_id)
        idle = {IDLE: "has nothing to do", TAKING: "takes a task", STARTING: "is starting"}
        what = idle.get(task) or f"is busy with {describe(task)}"
        stopped = state_of(self._processes[worker_id].pid) in ("T", "t")  # by SIGSTOP, or under a debugger
        return f"{what} for {seconds:.1f} s{' and is stopped' if stopped else ''}"


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C is answered at the end of the block, and does not meet a child that has not yet come to ignoring it.

    The mask, which the child inherits, is this thread's alone: the signal goes to another (torch's, the user's), and Python
    answers in the main thread all the same. So there the handler is put off as well.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    # One that was not set from Python is None: it raises nothing here, and could not be put back.
    put_off = threading.current_thread() is threading.main_thread() and before is not None
    if put_off:
        signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if put_off:
            signal.signal(signal.SIGINT, before)
            if came:
                signal.raise_signal(signal.SIGINT)


def _end_of(process: BaseProcess) -> int:
    """A descriptor that becomes readable when the process ends.

    multiprocessing's own is a pipe, which whatever the worker forks holds open, and which ends with the server of forkserver.
    """
    try:
        descriptor: int = os.pidfd_open(cast(int, process.pid))
    except OSError:  # an older kernel
        return process.sentinel
    return descriptor

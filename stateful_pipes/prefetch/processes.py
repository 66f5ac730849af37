"""The worker processes of a pool: started, looked after, replaced, ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from stateful_pipes.prefetch.claims import IDLE, STARTING, TAKING, Claims
from stateful_pipes.prefetch.worker import Job, start

__all__ = ["Death", "WorkerProcesses"]

_GRACE_S = 0.5
"""How long ending waits for workers to end by themselves, and then again for SIGTERM to end them, before SIGKILL."""

_TAKING_S = 1.0
"""How long a worker may be between taking a task and saying which: some microseconds, unless it is stopped."""

_LOOK_S = 0.0005


class Death(NamedTuple):
    """How a worker ended.

    Attributes:
        worker: Its number and process id, for people.
        exit_code: As multiprocessing has it: a signal's is negative.
        task: What it had in hand; IDLE, TAKING or STARTING if nothing.
    """

    worker: str
    exit_code: int
    task: int

    def __str__(self) -> str:
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
        self._poll: select.poll | None = None
        self._watched: dict[int, int] = {}  # descriptors that become readable when a worker ends, and its number
        try:
            for worker_id in range(count):
                self._processes.append(self._start(worker_id))
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
            self._watched = {process.sentinel: worker_id for worker_id, process in enumerate(self._processes)}
            for descriptor in (end.fileno(), *self._watched):
                self._poll.register(descriptor, select.POLLIN)
        ready = self._poll.poll(None if seconds is None else 1000 * seconds)
        ended = [self._watched[descriptor] for descriptor, _ in ready if descriptor in self._watched]
        return len(ready) > len(ended), ended

    def settle(self, dead: Collection[int]) -> tuple[set[int], set[int]]:
        """To be called when there is no task left to take: waits until all that live have said which one they have.

        One that says nothing in time is stopped, and killed: then it is certain what it had.

        Returns:
            The numbers of the dead, and the tasks in the hands of all others.
        """
        gone, held = set(dead), set()
        for worker_id, process in enumerate(self._processes):
            deadline = time.monotonic() + _TAKING_S
            while worker_id not in gone and (task := self._claims.read(worker_id).task) == TAKING:
                if time.monotonic() > deadline:
                    process.kill()
                    gone.add(worker_id)
                elif not process.is_alive():
                    gone.add(worker_id)
                select.select([], [], [], _LOOK_S)
            if worker_id not in gone:
                held.add(task)
        return gone, held

    def bury(self, worker_id: int) -> Death:
        """How a dead worker ended."""
        process = self._processes[worker_id]
        process.join()
        return Death(self._name(worker_id), process.exitcode or 0, self._claims.read(worker_id).task)

    def replace(self, worker_id: int) -> None:
        """Starts another in the place of a buried one."""
        old, self._processes[worker_id] = self._processes[worker_id], self._start(worker_id)
        old.close()
        self._poll = None

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
            for process in self._processes:
                process.kill()
                process.join()
                with suppress(ValueError):  # "still running": a thread that waits for a result is about to reap it
                    process.close()

    def _start(self, worker_id: int) -> BaseProcess:
        self._claims.write(worker_id, STARTING)
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # typeshed has it on the concrete contexts only
            target=start, args=(self._job(worker_id), *self._ends), daemon=True, name=f"stateful_pipes worker {worker_id}"
        )
        process.start()
        return process

    def _join(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        waiting = {process.sentinel for process in self._processes}
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(multiprocessing.connection.wait(list(waiting), left))

    def _name(self, worker_id: int) -> str:
        return f"worker {worker_id} (pid {self._processes[worker_id].pid})"

    def _doing(self, worker_id: int, describe: Callable[[int], str]) -> str:
        task, seconds = self._claims.read(worker_id)
        idle = {IDLE: "has nothing to do", TAKING: "takes a task", STARTING: "is starting"}
        what = idle.get(task) or f"is busy with {describe(task)}"
        return f"{what} for {seconds:.1f} s{' and is stopped' if _is_stopped(self._processes[worker_id].pid) else ''}"


def _is_stopped(pid: int | None) -> bool:
    """Whether a process stands still by SIGSTOP, or under a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False

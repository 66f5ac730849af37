"""Processes to try something out in: copies of this one, and clean ones with a hash seed of their own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

import torch

from stateful_pipes.caught import brief
from stateful_pipes.testing.surroundings import Surroundings, arranged, places

__all__ = ["CleanProcess", "ExperimentFailed", "clean_processes_kept", "hash_seeds", "in_fork"]

Task = Callable[[], Any]
_START_S: Final = 120


class ExperimentFailed(Exception):
    """A process gave no result: it died, took too long, or what it found cannot be pickled."""


def in_fork(task: Task, surroundings: Surroundings, timeout: float) -> Any:
    """What the task returns in a copy of this process, which then ends."""
    return _opened(_answer_of(task, surroundings, timeout))


def _answer_of(task: Task, surroundings: Surroundings, timeout: float) -> bytes:
    places()  # once, and not in each copy
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = _fork()
    if pid == 0:
        _child(task, surroundings, writer)
    writer.close()
    try:
        return _received(reader, timeout)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reader.close()


def _received(connection: Connection, timeout: float) -> bytes:
    try:
        if connection.poll(timeout):
            return connection.recv_bytes()
    except (EOFError, OSError):
        raise ExperimentFailed("the process died") from None
    raise ExperimentFailed(f"no answer within {timeout:.0f} s")


def _opened(answer: bytes) -> Any:
    found, error = pickle.loads(answer)
    if error:
        raise ExperimentFailed(error)
    return found


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads, as with workers started by fork
        return os.fork()


def _child(task: Task, surroundings: Surroundings, writer: Connection) -> None:
    """Never returns: what the parent has opened is not to be closed, flushed or finalized here."""
    try:
        torch.set_num_threads(1)  # as in a worker; OpenMP's threads are not there in a fork
        try:
            with arranged(surroundings):
                found = task()
            answer = pickle.dumps((found, ""))
        except BaseException as error:
            answer = pickle.dumps((None, brief(error)))
        writer.send_bytes(answer)
    finally:
        os._exit(0)


class CleanProcess:
    """A new Python process that runs each task in a copy of itself, which has imported nothing of the user's.

    It starts with the first task, which may take as long as importing torch.

    Args:
        hash_seed: As PYTHONHASHSEED.
    """

    def __init__(self, hash_seed: int) -> None:
        self._hash_seed = hash_seed
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self.is_broken = False

    def run(self, task: Task, surroundings: Surroundings, timeout: float) -> Any:
        """What the task returns there.

        Raises:
            ExperimentFailed: it cannot be sent, or gives nothing; or no process starts, as in a daemonic one, or with a main
                module that is not guarded.
        """
        pickled = _pickled(task)
        connection = self._connection or self._start()
        self.is_broken = True
        connection.send((pickled, dict(os.environ), os.getcwd(), list(sys.path), surroundings, timeout))
        answer = _received(connection, timeout + 10)
        self.is_broken = False  # else an answer may still be on its way
        return _opened(answer)

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        method = multiprocessing.get_start_method()
        process = context.Process(target=_serve, args=(theirs, method), daemon=True, name="stateful_pipes laboratory")
        try:
            with _hash_seed_set(self._hash_seed):
                process.start()
            theirs.close()
            _received(ours, _START_S)
        except Exception as error:
            theirs.close()
            ours.close()
            if process.pid is not None:
                process.kill()
                process.join()
            told = "a main module needs its if __name__ == '__main__'"
            raise ExperimentFailed(f"no new process: {brief(error)}; {told}") from error
        self._process, self._connection = process, ours
        return ours

    def close(self) -> None:
        """Ends it; idempotent."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None


def hash_seeds() -> list[int]:
    """Some for PYTHONHASHSEED, of which none is this process's own."""
    return [seed for seed in range(1, 5) if str(seed) != os.environ.get("PYTHONHASHSEED")][:3]


@contextmanager
def _hash_seed_set(hash_seed: int) -> Iterator[None]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(hash_seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise ExperimentFailed(f"factory cannot be pickled: {brief(error)}") from error


def _serve(connection: Connection, method: str) -> None:
    multiprocessing.set_start_method(method, force=True)  # of its own it would be spawn
    connection.send_bytes(b"here")
    with suppress(EOFError):
        while True:
            task, environment, folder, path, surroundings, timeout = connection.recv()
            try:
                # Unpickled in the copy, so that the user's modules are imported under these surroundings.
                answer = _answer_of(_Sent(task, environment, folder, path).run, surroundings, timeout)
            except ExperimentFailed as error:
                answer = pickle.dumps((None, str(error)))
            connection.send_bytes(answer)


class _Sent(NamedTuple):
    """A task, and where it is to run: as in the process that sent it."""

    task: bytes
    environment: dict[str, str]
    folder: str
    path: list[str]

    def run(self) -> Any:
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        return pickle.loads(self.task)()


class _Shelf:
    """The clean processes that are there, by hash seed."""

    def __init__(self) -> None:
        self.users = 0
        self.processes: dict[int, CleanProcess] = {}


_SHELF = _Shelf()


@contextmanager
def clean_processes_kept() -> Iterator[Callable[[int], CleanProcess]]:
    """From a hash seed to its clean process, which is started when first asked for and ends with the outermost `with`."""
    _SHELF.users += 1
    try:
        yield _clean_process
    finally:
        _SHELF.users -= 1
        if not _SHELF.users:
            while _SHELF.processes:
                _SHELF.processes.popitem()[1].close()


def _clean_process(hash_seed: int) -> CleanProcess:
    there = _SHELF.processes.get(hash_seed)
    if there is not None and there.is_broken:
        _SHELF.processes.pop(hash_seed).close()
    if hash_seed not in _SHELF.processes:
        _SHELF.processes[hash_seed] = CleanProcess(hash_seed)
    return _SHELF.processes[hash_seed]

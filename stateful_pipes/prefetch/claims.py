"""What each worker has in hand, in shared memory: it can be read when the worker is dead, or does not answer."""

from __future__ import annotations

import time
from typing import NamedTuple

from stateful_pipes.prefetch.memory_files import MemoryFile

__all__ = ["IDLE", "STARTING", "TAKING", "Claim", "Claims"]

IDLE, TAKING, STARTING = -1, -2, -3
"""In place of a task's number: waiting for one, taking one (it may have it or not), not yet ready for any."""

_CELL = 2


class Claim(NamedTuple):
    """What a worker does.

    Attributes:
        task: The number of the task in hand; IDLE, TAKING or STARTING if there is none.
        seconds: For how long.
    """

    task: int
    seconds: float


class Claims:
    """A cell for each worker, which that one writes to and the main process reads.

    Args:
        workers: How many.
    """

    def __init__(self, workers: int) -> None:
        self.__setstate__(MemoryFile(workers * _CELL * 8))

    def write(self, worker_id: int, task: int) -> None:
        """Says what the worker does from now on; a store of eight bytes, so that nobody reads half of it."""
        self._cells[_CELL * worker_id + 1] = time.monotonic_ns()
        self._cells[_CELL * worker_id] = task

    def read(self, worker_id: int) -> Claim:
        """What the worker does, or was about when it died."""
        place = _CELL * worker_id
        return Claim(self._cells[place], (time.monotonic_ns() - self._cells[place + 1]) / 1e9)

    def close(self) -> None:
        """Gives up the descriptor."""
        self._file.close()

    def __getstate__(self) -> MemoryFile:
        return self._file

    def __setstate__(self, file: MemoryFile) -> None:
        self._file = file
        self._cells = file.memory.cast("q")

"""One epoch of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from stateful_pipes.node import Node
from stateful_pipes.stats import time_nodes

__all__ = ["LoaderIterator"]

T_co = TypeVar("T_co", covariant=True)


class LoaderIterator(Iterator[T_co]):
    """The rest of the epoch that was current when `iter` was called. It keeps the pipeline alive, not the loader."""

    def __init__(self, root: Node[T_co]) -> None:
        self._root = root
        self._epoch = root.consumed()[0]
        self._generation = root.stream.generation
        self._begun = False
        time_nodes(root)

    def __next__(self) -> T_co:
        """The next batch, whose position is recorded as consumed.

        Raises:
            StopIteration: the epoch is over.
            Exception: whatever reading, mapping or collating raised, with a note that says where; the stream then stops with
                LoaderFailedError until `close`, a load, `restart` or another epoch clears it.
            WorkerDiedError, WorkerTimeoutError: a worker ended, or gave nothing in time.
            IteratorInvalidError: the loader was loaded, restarted or closed since.
            ConcurrentUseError: another thread is in here.
            GlobalGeneratorThreadError: seeded reading without workers, on a thread that is not the main one.
        """
        if not self._begun:
            # Lightning calls iter, then set_epoch, then next: what has read nothing yet goes to that epoch.
            if self._root.stream.ended(self._generation):
                self._epoch, self._generation = self._root.consumed()[0], self._root.stream.generation
            self._begun = True
        item: T_co = self._root.stream.take(self._root, self._epoch, self._generation)
        return item

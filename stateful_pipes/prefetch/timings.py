"""Where the time goes: each node's own, and what each worker has done, in shared memory that outlives the worker."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from stateful_pipes.prefetch.memory_files import MemoryFile

__all__ = ["KEPT_TASKS", "Stopwatch", "TimedNode", "Timings", "Usage"]

KEPT_TASKS = 512
"""Of how many tasks each worker's begin and end are kept, the last ones."""

_TASKS, _BUSY, _BYTES, _NODES = range(4)


class Stopwatch:
    """What the timed nodes share that call one another, in one thread at a time.

    Attributes:
        within: Nanoseconds that those called by the one under way have taken.
    """

    __slots__ = ("within",)

    def __init__(self) -> None:
        self.within = 0


class TimedNode:
    """A node's `run` and `pull`, adding up their own time: what they take, but for what other nodes of the stopwatch take within.

    They stand among the node's attributes, in front of the class's, and refer to the node weakly, so that it is freed as soon as
    it is dropped. Bound methods, slots and two names for one thing: a call is to take 0.3 us more, not 0.7.

    Attributes:
        watch: The stopwatch.
        ran: Nanoseconds in `run`.
        pulled: Nanoseconds in `pull`.
    """

    __slots__ = ("_node", "_pull", "_run", "pulled", "ran", "watch")

    def __init__(self, node: Any, watch: Stopwatch) -> None:
        self.watch = watch
        self.ran = 0
        self.pulled = 0
        self._node = weakref.ref(node)
        self._run = type(node).run
        self._pull = getattr(type(node), "pull", None)

    @staticmethod
    def of(node: Any) -> TimedNode | None:
        """That of a node, if it is timed."""
        methods = [getattr(vars(node).get(name), "__self__", None) for name in ("run", "pull")]
        return next((found for found in methods if isinstance(found, TimedNode)), None)

    def stand_in(self, *names: str) -> None:
        """Times these methods of the node from now on, whoever calls them, but for one that the user has put there."""
        held = vars(self._node())
        for name in names:
            if name not in held or isinstance(getattr(held[name], "__self__", None), TimedNode):
                held[name] = getattr(self, name)

    def run(self, ticket: Any) -> Any:
        watch = self.watch
        outer = watch.within
        watch.within = 0
        begun = monotonic_ns()
        try:
            return self._run(self._node(), ticket)
        finally:
            took = monotonic_ns() - begun
            self.ran += took - watch.within
            watch.within = outer + took

    def pull(self, count: int | None) -> Any:
        watch = self.watch
        outer = watch.within
        watch.within = 0
        begun = monotonic_ns()
        try:
            return self._pull(self._node(), count)  # type: ignore[misc]  # a node that has none is not pulled
        finally:
            took = monotonic_ns() - begun
            self.pulled += took - watch.within
            watch.within = outer + took

    def __reduce__(self) -> tuple[Any, ...]:
        return TimedNode, (self._node(), self.watch)  # with the node, which is sent to a worker


class Usage(NamedTuple):
    """What workers have done.

    Attributes:
        busy: Nanoseconds in which they had a task in hand, each worker's added up; of finished tasks only.
        present: Nanoseconds in which they might have.
        bytes: Of what they have made, as it is sent.
        nodes: Nanoseconds in each node's `run`, inner nodes' time taken off.
    """

    busy: int
    present: int
    bytes: int
    nodes: tuple[int, ...]

    def plus(self, other: Usage) -> Usage:
        """Both together; `other` is of the same nodes."""
        nodes = [one + another for one, another in zip(self.nodes, other.nodes, strict=True)]
        return Usage(self.busy + other.busy, self.present + other.present, self.bytes + other.bytes, tuple(nodes))


class Timings:
    """Some cells for each worker, which only that one adds to, its successors after it, and the main process reads.

    Args:
        workers: How many.
        nodes: How many nodes each of them runs.
    """

    def __init__(self, workers: int, nodes: int) -> None:
        self.__setstate__((MemoryFile(8 * workers * _width(nodes)), workers, nodes))
        self._begun = monotonic_ns()
        self._ended = 0

    def add(self, worker_id: int, begun: int, ended: int, size: int, nodes: Sequence[TimedNode]) -> None:
        """Counts a task, with what the nodes have added up since the last one.

        Args:
            worker_id: The worker's number.
            begun: By `monotonic_ns`, which all processes share.
            ended: Likewise.
            size: In bytes, of the result.
            nodes: In their order; they begin at 0 again.
        """
        cells, place = self._cells, self._width * worker_id
        kept = place + _NODES + self._nodes + 2 * (cells[place + _TASKS] % KEPT_TASKS)
        cells[kept], cells[kept + 1] = begun, ended
        cells[place + _TASKS] += 1
        cells[place + _BUSY] += ended - begun
        cells[place + _BYTES] += size
        place += _NODES
        for node in nodes:
            cells[place] += node.ran
            node.ran = 0
            place += 1

    def usage(self) -> Usage:
        """What all workers have done from when this was made to now, or to `close`."""
        present = self._workers * ((self._ended or monotonic_ns()) - self._begun)
        places = range(0, self._width * self._workers, self._width)
        busy, size = (sum(self._cells[place + cell] for place in places) for cell in (_BUSY, _BYTES))
        nodes = [sum(self._cells[place + _NODES + node] for place in places) for node in range(self._nodes)]
        return Usage(busy, present, size, tuple(nodes))

    def spans(self) -> list[list[tuple[int, int]]]:
        """For each worker, when its last tasks began and ended, by `monotonic_ns`, in their order."""
        return [self._spans(worker_id) for worker_id in range(self._workers)]

    def close(self) -> None:
        """Gives up the descriptor; what is there can still be read."""
        self._file.close()
        self._ended = self._ended or monotonic_ns()

    def __getstate__(self) -> tuple[MemoryFile, int, int]:
        return self._file, self._workers, self._nodes

    def __setstate__(self, state: tuple[MemoryFile, int, int]) -> None:
        self._file, self._workers, self._nodes = state
        self._width = _width(self._nodes)
        self._cells = self._file.memory.cast("q")

    def _spans(self, worker_id: int) -> list[tuple[int, int]]:
        place = self._width * worker_id
        done = self._cells[place + _TASKS]
        place += _NODES + self._nodes
        kept = [place + 2 * (task % KEPT_TASKS) for task in range(max(0, done - KEPT_TASKS), done)]
        found = [(self._cells[begun], self._cells[begun + 1]) for begun in kept]
        return [(begun, ended) for begun, ended in found if begun <= ended]  # others are being written


def _width(nodes: int) -> int:
    """Cells of a worker."""
    return _NODES + nodes + 2 * KEPT_TASKS

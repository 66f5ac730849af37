"""Where the halves of a pipeline part: pulled here, run in worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, TypeGuard, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.errors import IteratorInvalidError
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import as_node, walk_all
from stateful_pipes.nodes.mapper import SeededMapper
from stateful_pipes.prefetch.ahead import Ahead
from stateful_pipes.prefetch.pool import WorkerPool
from stateful_pipes.prefetch.processes import context_of, refuse_unpicklable
from stateful_pipes.prefetch.timings import Usage
from stateful_pipes.pulled import Pulled, kept
from stateful_pipes.rng import GlobalGenerator
from stateful_pipes.skips import Skip, note
from stateful_pipes.ticket import Mark, Ticket, packed, positions_of

__all__ = ["ProcessPrefetcher", "has_workers", "prefetchers_of"]

T_co = TypeVar("T_co", covariant=True)


class ProcessPrefetcher(Node[T_co]):
    """Runs the whole chain below in worker processes, one message for each item (a batch, usually) each way, in order.

    Up to `num_workers * prefetch_factor` items are made ahead of what was handed out, on into the next epoch, so that an
    epoch's end costs no stall; what each is made of may be known some items before. Workers start with the first item, live
    on over epochs and loads, and end with `close()` or when the pipeline is dropped. Nothing of this shows in the stream.

    A batch's large tensors and arrays are views of shared memory that the worker has written to: they are the caller's,
    writable, valid for as long as they are held, also after `close()`, and never written to by a later batch. That memory
    consists of `slots` slots (2 * num_workers * prefetch_factor); one is used again when the last view of it is gone, and
    grows to the largest batch that it has held. Further batches held at once have memory of their own, as has what exceeds 1
    GiB of a batch. It is anonymous: nothing is in /dev/shm, and no descriptor is kept for a batch. In a process that is
    forked while a batch is held, that batch changes when the parent drops it: copy it there first.

    In a worker, torch runs one thread, `torch.utils.data.get_worker_info()` is set, SIGINT is ignored, freed memory is kept
    (glibc's mallopt), what was there at the start is not looked at by the garbage collector (gc.freeze), and the scheduler
    takes it for a batch job. If its functions keep a tensor that default_collate made, it copies batches from then on. The
    nodes and whatever they hold (the dataset) are as they were when the workers started: what the main process changes later
    is not seen until after `close()`.

    A worker that dies (killed, out of memory, a crash in a library, `os._exit`) is replaced, and what it had in hand is run
    again; the stream stays the same, and `restarts` counts it. The replacement starts as the first ones did: with fork, from
    the main process as it is then.

    Args:
        source: The node below.
        num_workers: Worker processes; 0 runs everything inline, in the process and thread that asks.
        prefetch_factor: Items ahead for each worker, at least 1.
        multiprocessing_context: "fork", "spawn", "forkserver", a context, or None for multiprocessing's own default.
        worker_init_fn: Called in each worker with its number, after its generators were seeded.
        timeout: Seconds to wait for an item before WorkerTimeoutError, which says what each worker does; 0 waits for ever.
        max_restarts: How often an item is tried again because its worker died.
        name: The node's name in errors.

    Yields:
        The source's items.

    State: none of its own. Cost: in the main process 0.05 to 0.2 ms an item, whatever its size. In a worker, what torch's
    default_collate stacks is written into the slot at once; what another function makes is copied there once.

    Raises:
        WorkerDiedError: workers died over one item `max_restarts` times and once more, or before they could take any.
        RuntimeError: with workers in a daemonic process, which may have no children.
    """

    kind = "prefetcher"
    MAIN_ONLY = (*Node.MAIN_ONLY, "_pool", "_ahead")

    def __init__(
        self,
        source: BaseNode[T_co],
        num_workers: int,
        *,
        prefetch_factor: int = 2,
        multiprocessing_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        max_restarts: int = 3,
        name: str | None = None,
    ) -> None:
        self.num_workers = as_integer("num_workers", num_workers, 0)
        self.prefetch_factor = as_integer("prefetch_factor", prefetch_factor, 1)
        self.context = context_of(multiprocessing_context)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
            raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
        if not (timeout >= 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout must be at least 0 and finite, got {timeout}")
        if worker_init_fn is not None and not callable(worker_init_fn):
            raise TypeError(f"worker_init_fn must be callable, got {worker_init_fn!r}")
        self.worker_init_fn = worker_init_fn
        self.timeout = float(timeout)
        self.max_restarts = as_integer("max_restarts", max_restarts, 0)
        below = as_node(source)
        if self.num_workers and any(map(has_workers, walk(below))):
            raise ValueError("a ProcessPrefetcher with workers stands below this one already; a pipeline needs one")
        if self.num_workers and self.context.get_start_method() != "fork":
            refuse_unpicklable(below, worker_init_fn)
        super().__init__(below, name=name)
        self._pool: WorkerPool | None = None
        self._ahead = Ahead(below, self.num_workers * self.prefetch_factor)
        self.is_looked_through = False  # whether a look elsewhere ever led it about, so that it has to ask whether one does
        self._is_released = False
        # Of pools that are gone.
        self._restarts = 0
        self._usage = Usage(0, 0, 0, (0,) * len(list(walk(below))))

    def pull(self, count: int | None) -> Ticket:
        if self._runs_here:
            return self._source.pull(count)
        if count is None:
            self.no_batches()
        tickets: list[Ticket] = []
        while len(tickets) < count:
            if not self._ahead.under_way:
                self._ahead.fill(self._started(), at_least=1)
            if tickets and self._ahead.under_way[0].ticket is None:
                break  # the epoch's end, or an error, is told at the next pull
            pulled = self._ahead.pop()
            if pulled.ticket is None:
                raise pulled.error or StopIteration
            tickets.append(pulled.ticket)
        if len(tickets) == 1:
            return tickets[0]
        firsts = [positions_of(ticket)[0] for ticket in tickets]
        return (tickets[0][0], packed(firsts), tuple([task for ticket in tickets for task in ticket[2]]))

    def pull_ahead(self) -> Pulled:
        if not self._is_direct:
            return super().pull_ahead()
        # What `pull(1)` and `mark` would make anew.
        try:
            if not self._ahead.under_way:
                self._ahead.fill(self._started(), at_least=1)
            return self._ahead.pop()
        except Exception as error:
            return Pulled(None, (), kept(error))

    def run(self, ticket: Ticket) -> list[Any]:
        """The finished items of a ticket; waits for them. Unlike other nodes', main process only and once a ticket."""
        if self._runs_here:
            return self._source.run(ticket)
        items, skips = self._results(ticket)
        if skips:
            note(skips)
        return items

    def run_here(self, ticket: Ticket) -> tuple[list[Any], Sequence[Skip]]:
        return self._results(ticket) if self._is_direct else super().run_here(ticket)

    def _results(self, ticket: Ticket) -> tuple[list[Any], list[Skip]]:
        """What the workers have made of a ticket, and left out."""
        pool = self._pool
        if pool is None:
            raise IteratorInvalidError("the workers were closed by another thread")
        items: list[Any] = []
        skips: list[Skip] = []
        for task in ticket[2]:
            made, left_out = pool.result(task, self.timeout)
            items += made
            skips += left_out
        if pool is self._pool:  # else closed by another thread
            # Here and not only at the next pull, so that the workers have it while the caller uses the item.
            self._ahead.fill(pool)
        return items, skips

    def mark(self) -> Mark:
        mark = self._ahead.mark
        return self._source.mark() if mark is None or self._runs_here else mark

    def seek(self, mark: Mark) -> None:
        if not self._runs_here:
            self._drop()
        self._source.seek(mark)

    def next_epoch(self, mark: Mark) -> None:
        self._drop()
        self._source.next_epoch(mark)

    def batches(self) -> int | None:
        return self._source.batches() if self._runs_here else self.no_batches()

    def global_generators(self) -> frozenset[GlobalGenerator]:
        return self._source.global_generators() if self._runs_here else frozenset()

    def release(self) -> None:
        self._is_released = True
        self._end_pool()
        self._drop()
        super().release()

    def open(self) -> None:
        self._is_released = False
        super().open()

    @property
    def _runs_here(self) -> bool:
        """Whether all is pulled and run in this process: without workers, and in a look elsewhere, which leaves alone what these
        have under way."""
        return not self.num_workers or (self.is_looked_through and self.reader().is_elsewhere)

    @property
    def _is_direct(self) -> bool:
        """Whether what is under way may be handed on as it is: made by workers, with no `pull` or `run` of the user's own."""
        own = type(self) is ProcessPrefetcher and vars(self).keys().isdisjoint(("pull", "run"))
        return own and self.num_workers > 0 and not self.is_looked_through

    @property
    def slots(self) -> int:
        """Slots of shared memory."""
        return 2 * self.num_workers * self.prefetch_factor

    @property
    def prefetched(self) -> int:
        """Items that workers have or have made and that were not handed out, those that a load dropped included."""
        return 0 if self._pool is None else self._pool.outstanding

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self._restarts + (0 if self._pool is None else self._pool.restarts)

    @property
    def usage(self) -> Usage:
        """What the workers have done, those that are gone included; its nodes are those of `walk`, from the sources up."""
        return self._usage if self._pool is None else self._usage.plus(self._pool.timings.usage())

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """For each worker that is there, when its last tasks began and ended, by `time.monotonic_ns`."""
        return [] if self._pool is None else self._pool.timings.spans()

    def _drop(self) -> None:
        self._ahead.clear()
        if self._pool is not None:
            if self._pool.is_broken:
                self._end_pool()
            else:
                self._pool.forget()

    def _end_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._restarts += pool.restarts
            try:
                pool.close()
            finally:
                self._usage = self._usage.plus(pool.timings.usage())

    def _started(self) -> WorkerPool:
        if self._pool is None:
            if self._is_released:  # by another thread, while this one was on its way here
                raise IteratorInvalidError("the pipeline was closed", remedy="Call iter() again")
            below: list[Any] = list(walk(self._source))
            datasets = [node.dataset for node in below if isinstance(node, SeededMapper) and node.dataset is not None]
            seeds = [node.seed for node in below if getattr(node, "seed", None) is not None]
            self._pool = WorkerPool(
                self._source,
                self.num_workers,
                self.context,
                slots=self.slots,
                max_restarts=self.max_restarts,
                worker_init_fn=self.worker_init_fn,
                dataset=datasets[0] if datasets else None,
                seed=seeds[0] if seeds else 0,
                nodes=below,
            )
        return self._pool


def prefetchers_of(top: NodeContract) -> list[ProcessPrefetcher[Any]]:
    """All that a pipeline has, those within foreign nodes too, from the sources up."""
    return [node for node in walk_all(top) if isinstance(node, ProcessPrefetcher)]


def has_workers(node: NodeContract) -> TypeGuard[ProcessPrefetcher[Any]]:
    """Whether it leaves what is below it to workers."""
    return isinstance(node, ProcessPrefetcher) and node.num_workers > 0

"""What is pulled ahead of the training loop: some tickets packed already, and in front of them those that workers have."""

from __future__ import annotations

from collections import deque

from stateful_pipes.contract import NodeContract
from stateful_pipes.prefetch.channel import Message, pack
from stateful_pipes.prefetch.pool import WorkerPool
from stateful_pipes.pulled import Pulled, kept, pull_one
from stateful_pipes.ticket import Mark

__all__ = ["Ahead"]

_AT_ONCE = 8


class Ahead:
    """The items of a source from the one that is handed out next on.

    Between two batches the workers have had the caches, so a pull by itself takes about three times as long as one in a loop.
    Where pulling is nothing but counting, up to eight are therefore made and packed together, one at first.

    Attributes:
        under_way: Tickets of one item, which name their task; ends and errors in their places.
        mark: The source's right behind what was popped last; None if it stands there, as at first.

    Args:
        source: The node that is pulled. Who leads it elsewhere has to call `clear`.
        bound: How many items workers may have, or have made, at once.
    """

    def __init__(self, source: NodeContract, bound: int) -> None:
        self._source = source
        self._bound = bound
        self.under_way: deque[Pulled] = deque()
        self.mark: Mark | None = None
        self._packed: deque[tuple[Pulled, Message | None]] = deque()
        self._at_once = 1
        self._most = _AT_ONCE if source.pulls_freely else 1

    def pop(self) -> Pulled:
        """What is under way first."""
        pulled = self.under_way.popleft()
        self.mark = pulled.mark
        return pulled

    def clear(self) -> None:
        """Drops all of it."""
        self.under_way.clear()
        self.mark = None
        self._packed.clear()
        self._at_once = 1

    def fill(self, pool: WorkerPool, at_least: int = 0) -> None:
        """Submits tickets up to the bound. Stops at an error, at an epoch without items, which would go on for ever, and at an
        epoch's end where the next is not to be pulled ahead."""
        if self.mark is None:
            self.mark = self._source.mark()
        room = self._bound - pool.outstanding
        while room > 0 or len(self.under_way) < at_least:
            if self.under_way:
                last = self.under_way[-1]
                if last.ticket is None:
                    is_empty = len(self.under_way) > 1 and self.under_way[-2].is_end
                    if last.error is not None or is_empty or not self._source.runs_on:
                        return
            elif not at_least and (not self.mark or (not self._source.runs_on and self._source.at_start(self.mark))):
                return  # told last were an error, or an epoch's end that nothing may run on from
            if not self._packed:
                self._pull()
            pulled, message = self._packed.popleft()
            if pulled.ticket is not None and message is not None:
                epoch, positions, *_ = pulled.ticket
                try:
                    pulled = Pulled((epoch, positions, (pool.submit(pulled.ticket, message),)), pulled.mark)
                    room -= 1
                except Exception as error:  # it cannot be sent; told when its turn comes
                    pulled = Pulled(None, (), kept(error))
            self.under_way.append(pulled)

    def _pull(self) -> None:
        for _ in range(self._at_once):
            pulled, message = pull_one(self._source), None
            if pulled.ticket is not None:
                try:
                    message = pack(pulled.ticket)
                except Exception as error:  # a foreign node's item that cannot be pickled
                    pulled = Pulled(None, (), kept(error))
            self._packed.append((pulled, message))
            if message is None:
                break  # what lies behind an epoch's end or an error is not wanted yet
        self._at_once = min(2 * self._at_once, self._most)

"""A function of the user's as a source, after DALI's `external_source`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from stateful_pipes.caught import add_note
from stateful_pipes.errors import Difference, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.fields import Rule, Scalar, counter
from stateful_pipes.node import Node
from stateful_pipes.nodes.onwards import Onwards, takes_an_argument
from stateful_pipes.nodes.user_error import raise_noted
from stateful_pipes.ticket import EpochEnd, Mark, Samples, Ticket, positions_of

__all__ = ["BatchInfo", "ExternalSource", "SampleInfo"]

_INSTEAD = "write a function of the batch's index (or of a SampleInfo, with batch=False), which raises StopIteration at the end"


class BatchInfo(NamedTuple):
    """Which batch a source is asked for.

    Attributes:
        iteration: Of its epoch, from 0.
        epoch_idx: The epoch, from 0.
    """

    iteration: int
    epoch_idx: int


class SampleInfo(NamedTuple):
    """Which sample a source is asked for.

    Attributes:
        idx_in_epoch: From 0.
        idx_in_batch: From 0.
        iteration: The batch within its epoch, from 0.
        epoch_idx: The epoch, from 0.
    """

    idx_in_epoch: int
    idx_in_batch: int
    iteration: int
    epoch_idx: int


_GIVEN_BY = {
    **dict.fromkeys(SampleInfo._fields, "batch=False calls it with a SampleInfo"),
    **dict.fromkeys(BatchInfo._fields, "batch_info=True calls it with a BatchInfo"),
}


class ExternalSource(Node[Any]):
    """Yields what a function gives for its place in the stream, epoch after epoch, until it raises StopIteration.

    The function is called in the workers, in any order, ahead of what is handed out, also past the index at which it raises
    StopIteration, and again after a resume or where a worker has died: it has to give the same for the same argument.
    What it draws from global generators is not seeded; draw in a `SeededMapper` above, or from a generator that it makes
    from its argument.

    StopIteration ends the epoch, and the next one begins with index 0. In the middle of a batch it drops that batch. Since
    only the function knows the end, an item is handed out when the one after it has been made, and the length is not known.

    A function of no argument, an iterable or a generator can be read only onwards. That works, in the main process: an iterable
    or generator function is begun anew each epoch; of an iterator, a generator or a function of no argument the next epoch is
    what it still gives, and if that is nothing a warning says so, once. The position is not captured, as is told when it is
    made: every load of a state is refused, and so is a move where it cannot be begun anew. What had been read ahead is lost where
    the loader is closed, a sample fails or Ctrl-C comes.

    Args:
        source: Called with where it is: with batch=True the index of the batch in its epoch, or with batch_info=True a
            `BatchInfo`; with batch=False a `SampleInfo`.
        batch: Whether it gives whole batches, which are this node's items. Without, it gives samples, and a batch is what the
            node above asks for at once.
        batch_info: See `source`.
        name: The node's name in the state.

    Yields:
        What the function returns.

    State: epoch, consumed, iteration, batch, batch_info; constant size. Cost of a resume: O(1).

    Raises:
        TypeError: source is neither callable nor iterable, or takes more than one argument.
        ValueError: batch_info without batch.

    >>> def squares(index):
    ...     if index == 4:
    ...         raise StopIteration
    ...     return index**2
    >>> list(ExternalSource(squares))
    [0, 1, 4, 9]
    """

    kind = "external_source"
    MAIN_ONLY = (*Node.MAIN_ONLY, "_onwards")

    def __init__(
        self,
        source: Callable[..., Any] | Iterable[Any],
        *,
        batch: bool = True,
        batch_info: bool = False,
        name: str | None = None,
    ) -> None:
        for argument, value in (("batch", batch), ("batch_info", batch_info)):
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be a bool, got {value!r}")
        if batch_info and not batch:
            raise ValueError("batch_info=True is for batch=True: a source of samples gets a SampleInfo")
        is_indexed = takes_an_argument(source)
        super().__init__(name=name)
        self.batch = batch
        self.batch_info = batch_info
        self.source = source if is_indexed else None
        self._onwards = None if is_indexed else Onwards(source)
        self._epoch, self._consumed, self._iteration = 0, 0, 0
        self._has_warned = False
        if not is_indexed:
            told = f"{self.name}: the position of {source!r:.80} is not captured in the state"
            warnings.warn(f"{told}, and every load of one will be refused; to resume, {_INSTEAD}", UserWarning, stacklevel=2)

    @property
    def runs_on(self) -> bool:
        return self._onwards is None  # else what the next epoch is for would be taken before that is wanted

    @cached_property
    def ends_in_run(self) -> bool:
        return self._onwards is None

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        read: Any = self._iteration
        if self._onwards is not None:
            read = self._read(self._onwards, count)
            if len(read) < count and not (read and self.batch):
                self.next_epoch((self._epoch,))
                raise StopIteration
            count = len(read)
        ticket = (self._epoch, (self._consumed, self._consumed + count, 1), read)
        self._consumed += count
        self._iteration += count if self.batch else 1
        return ticket

    def _read(self, onwards: Onwards, count: int) -> list[Any]:
        try:
            read = onwards.read(count)
        except Exception as error:
            raise_noted(error, onwards.source, f"in node {self.name!r} at epoch {self._epoch}, position {self._consumed}")
        if not (read or self._consumed or onwards.is_repeatable or self._has_warned) and self._epoch > 0:
            self._has_warned = True
            told = f"{self.name}: epoch {self._epoch} is empty: {onwards.source!r:.80} has ended and cannot be begun anew"
            warnings.warn(f"{told}; give a generator function or an iterable, or {_INSTEAD}", UserWarning, stacklevel=1)
        return read

    def run(self, ticket: Ticket) -> list[Any]:
        if self.source is None:
            return list(ticket[2])
        return [self._call(*place) for place in self._places(ticket)]

    def _places(self, ticket: Ticket) -> list[tuple[int, Any]]:
        """Positions, and what the function is called with there."""
        epoch, positions = ticket[0], positions_of(ticket)
        if not self.batch:
            infos = [SampleInfo(position, number, ticket[2], epoch) for number, position in enumerate(positions)]
            return list(zip(positions, infos, strict=True))
        return [(position, BatchInfo(position, epoch) if self.batch_info else position) for position in positions]

    def _call(self, position: int, argument: Any) -> Any:
        source: Any = self.source
        try:
            return source(argument)
        except StopIteration:
            raise EpochEnd from None
        except Exception as error:
            if isinstance(error, AttributeError) and error.obj is argument and error.name in _GIVEN_BY:
                add_note(error, _GIVEN_BY[error.name])
            raise_noted(error, source, f"in node {self.name!r} at position {position}, called with {argument!r}")

    def samples(self, ticket: Ticket) -> Samples:
        return Samples(ticket[0], list(positions_of(ticket)), [])

    def mark(self) -> Mark:
        return (self._epoch, self._consumed, self._iteration)

    def seek(self, mark: Mark) -> None:
        self._epoch, self._consumed, self._iteration = mark
        if self._onwards is not None and self._consumed == 0:
            self._onwards.begin()

    def settings(self) -> dict[str, Scalar]:
        return {"batch": self.batch, "batch_info": self.batch_info}

    def values(self, mark: Mark) -> dict[str, Scalar]:
        epoch, consumed, iteration = mark
        return {"epoch": epoch, "consumed": consumed, "iteration": iteration}

    def rules(self) -> Mapping[str, Rule]:
        return {"epoch": counter, "consumed": counter, "iteration": counter}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        self._require(self._onwards is None)
        consumed, iteration = entry["consumed"], entry["iteration"]
        fits = consumed == iteration if self.batch else iteration <= consumed and (iteration > 0) == (consumed > 0)
        if not fits:
            wrong = Difference(self.name, "iteration", iteration, f"{consumed} consumed", "the state is damaged")
            raise StateMismatchError(differences=(wrong,))
        return (entry["epoch"], consumed, iteration)

    def start(self, epoch: int) -> Mark:
        self._require(self._onwards is None or self._onwards.is_repeatable)
        return (epoch, 0, 0)

    def _require(self, can_be_moved: bool) -> None:
        if not can_be_moved:
            raise ResumableModeRequiredError("this source can be read only onwards", node=self.name, remedy=_INSTEAD)

    def at_start(self, mark: Mark) -> bool:
        return bool(mark[1] == 0)

    def next_epoch(self, mark: Mark) -> None:
        self.seek((mark[0] + 1, 0, 0))

"""One pipeline's part of a step that several take together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from stateful_pipes.caught import add_note
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.pipeline_state import load, state_at
from stateful_pipes.state import LoaderState
from stateful_pipes.stream import Place
from stateful_pipes.view import Position

__all__ = ["Before", "Part", "end_together", "put_back", "told"]

T = TypeVar("T")


class Part(Generic[T]):
    """Where a pipeline stood before the step, and the batch that it gave for it.

    Until every pipeline has given one the step is nobody's: the state is the one from before, and a batch that was given is
    kept for whoever goes on. So also a source that can be read only onwards loses nothing.
    """

    def __init__(self, loader: StatefulDataLoader[T]) -> None:
        self.loader = loader
        self._root = loader.pipeline
        self._generation = self._root.stream.generation
        self._before = self._root.place()
        self._after: Place | None = None
        self._is_leaving = False
        self.given: list[T] = []

    @property
    def epoch(self) -> int:
        """The epoch that the step is of."""
        return int(self._before.mark[0])

    def take(self, iterator: Iterator[T]) -> bool:
        """Takes the batch, if it has not been given yet; False where the epoch has ended."""
        if not self.given:
            for batch in iterator:
                self.given = [batch]  # nothing is called since the commit, so in CPython no interrupt comes between
                break
            self._after = self._root.place()
        return bool(self.given)

    @property
    def is_moved(self) -> bool:
        """Whether the pipeline was moved or loaded since, by itself. A place that was committed stays the same object."""
        here = self._root.place()
        if here is self._before or here is self._after or self._is_leaving or (self.given and self._after is None):
            return False
        return self._after is not None or self._root.stream.generation != self._generation

    @property
    def is_astray(self) -> bool:
        """Whether the pipeline has gone on without a batch: past an empty epoch, or an iterator of another class lost it."""
        return not self.given and self._root.place() is not self._before

    def state(self) -> LoaderState:
        """The pipeline's state before the step."""
        return state_at(self._root, self._before)

    def position(self) -> Position:
        """Its position before the step."""
        here = self.loader.position
        (epoch, consumed, *_), batch, _ = self._before
        return here._replace(epoch=epoch, batch=batch, consumed=consumed, delivered=here.delivered - len(self.given))

    @property
    def has_ended(self) -> bool:
        """Whether its epoch ends with this step."""
        return bool(self._root.consumed()[0] != self.epoch)

    def leave_epoch(self, *, with_batch: bool) -> None:
        """Goes to the start of the epoch after the step's; the batch counts as consumed, or not."""
        self._is_leaving = True
        stream = self._root.stream
        if not with_batch:
            stream.skipped = self._before.skipped
        if not self.has_ended:
            stream.next_epoch(self._root)


def end_together(parts: Sequence[Part[T]]) -> None:
    """Where the epoch of one ends with this step, the others leave theirs with it, so that the state already says so."""
    if any(part.has_ended for part in parts):
        for part in parts:
            part.leave_epoch(with_batch=True)


def put_back(loader: StatefulDataLoader[T], state: LoaderState) -> None:
    """Leads a pipeline to a state of its own, if it is not there."""
    if loader.pipeline.stream.lost or loader.state_dict() != state:
        load(loader.pipeline, state)


class Before:
    """What a loader was before all were moved: where it stood, and what it told of its checkpoint."""

    def __init__(self, number: int, loader: StatefulDataLoader[Any], state: LoaderState) -> None:
        self._number, self._loader, self._state = number, loader, state
        self._told = loader.is_restored_from_checkpoint, loader.user

    def put_back(self) -> None:
        """Makes it that again."""
        self._loader._take_back(*self._told)
        with told(self._number):
            put_back(self._loader, self._state)


@contextmanager
def told(number: int) -> Iterator[None]:
    """An error inside gets a note that says which pipeline it is of."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in pipeline {number}")
        raise

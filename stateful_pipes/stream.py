"""What is under way at the top of a pipeline, and the one place where consumption is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, NamedTuple, TypeVar

from stateful_pipes.caught import brief
from stateful_pipes.errors import ConcurrentUseError, IteratorInvalidError, LoaderFailedError
from stateful_pipes.pulled import Pullable, Pulled, Runnable, Steppable, looked_at, run_one
from stateful_pipes.skips import LEFT_OUT
from stateful_pipes.ticket import EpochEnd, Mark

__all__ = ["Place", "Stream"]

T = TypeVar("T")


class Place(NamedTuple):
    """How far a stream was consumed; it is replaced as a whole.

    Attributes:
        mark: The node's, after the last item.
        batch: Items of the mark's epoch, those left out whole too.
        skipped: Samples that were left out so far, by node.
    """

    mark: Mark
    batch: int
    skipped: Mapping[str, int]


class Stream:
    """The committed place of a pipeline and the one item pulled ahead of it.

    It belongs to the node at the top but never refers to it (methods take the node), so that dropping a pipeline frees
    it at once. The item ahead is pulled, not run: it tells whether the epoch ends, so that with its last item committed
    the mark already reads (epoch + 1, start).
    """

    def __init__(self) -> None:
        self.generation = 0
        self.delivered = 0
        self.waited = 0  # nanoseconds within `take`, for these
        self._place: Place | None = None
        self._skipped: Mapping[str, int] = {}  # until there is a place
        self._ahead: Pulled | None = None
        self._astray = False  # the node no longer stands right behind what is pulled ahead
        self.lost = ""  # why it is not known what was consumed
        self._failure = ""
        self._ended_since = 0  # iterators of older generations from this one on are at their end, others invalid
        # Holds who is in `take` or `move`, an object of that call's own; entered by setdefault and left by an assignment, which
        # are one step each, so that wherever an interrupt comes it is known whose it was.
        self._inside: dict[str, tuple[int]] = {}
        self._looking: tuple[int] | None = None  # who looks elsewhere, for as long as that one is inside

    def committed(self, node: Pullable) -> Mark:
        """The mark after the last item that was handed out; raises as `place` does."""
        return self.place(node).mark

    def place(self, node: Pullable) -> Place:
        """How far the stream was consumed.

        Raises:
            LoaderFailedError: it is not known; only another load helps.
        """
        if self.lost:
            raise LoaderFailedError(self.lost, remedy="Load a state; close() is no help")
        return self.last(node)

    def last(self, node: Pullable) -> Place:
        """The place that was committed last, whether it is to be trusted or not."""
        if self._place is None:
            self._place = Place(node.mark(), 0, self._skipped)
        return self._place

    @property
    def skipped(self) -> Mapping[str, int]:
        """Samples that were left out of what was handed out, by node."""
        return self._skipped if self._place is None else self._place.skipped

    @skipped.setter
    def skipped(self, counts: Mapping[str, int]) -> None:
        self._skipped = counts
        if self._place is not None:
            self._place = self._place._replace(skipped=counts)

    def take(self, node: Runnable, epoch: int, generation: int) -> Any:
        """Hands out the next item of `epoch` and commits its mark.

        Raises:
            StopIteration: the committed epoch is another.
            IteratorInvalidError: the stream was loaded, moved or closed since `generation`.
            LoaderFailedError: an earlier error is still to be cleared.
            ConcurrentUseError: another thread is in here.
        """
        mine = (threading.get_ident(),)
        begun = monotonic_ns()
        try:
            self._enter(mine)
            while True:
                self._check_turn(node, epoch, generation)
                item, following, place = self._run_next(node, generation)
                took = monotonic_ns() - begun
                # The commit. No line from here on is a call, so in CPython no interrupt comes before a for loop has the item.
                self._ahead, self._place, self._astray = following, place, False
                if generation != self.generation:  # closed by another thread meanwhile
                    self._ahead, self._astray = None, True
                if item is not LEFT_OUT:
                    self.delivered += 1
                    self.waited += took
                    self._inside = {}
                    return item
        except BaseException:
            self._leave(mine)
            raise

    def _check_turn(self, node: Pullable, epoch: int, generation: int) -> None:
        if generation != self.generation:
            if self.ended(generation):
                raise StopIteration
            raise IteratorInvalidError(remedy="Call iter() again")
        place = self._place
        if place is None or self._failure or self.lost:  # which is seldom, and looked at before each batch
            self.check()
            place = self.place(node)
        if place.mark[0] != epoch:
            raise StopIteration

    def ended(self, generation: int) -> bool:
        """Whether nothing but `set_epoch` has moved the stream since `generation`."""
        return self._ended_since <= generation < self.generation

    def _run_next(self, node: Runnable, generation: int) -> tuple[Any, Pulled | None, Place]:
        """The next item; and what is pulled ahead, and where the stream stands, once that is consumed."""
        if self._astray:
            self.settle(node)
        here, current = self._place or self.last(node), self._ahead
        self._ahead, self._astray = None, True
        current = current or node.pull_ahead()
        if current.is_end:
            self._place, self._astray = Place(current.mark, 0, here.skipped), False
            raise StopIteration
        try:
            if current.error is not None:
                raise current.error
            following = node.pull_ahead()
            item, skips = current.ready or run_one(node, current.ticket or ())
            if node.ends_in_run:
                following = looked_at(node, following, current.mark)
            skipped = node.admit(skips) if skips else here.skipped
        except Exception as error:
            if isinstance(error, EpochEnd) and generation == self.generation:
                node.next_epoch(current.mark)
                self._place, self._astray = Place(node.mark(), 0, here.skipped), False
                raise StopIteration from None
            if generation != self.generation:  # closed or moved by another thread meanwhile
                raise IteratorInvalidError(remedy="Call iter() again") from error
            self._failure = brief(error)
            raise
        if generation != self.generation:  # closed by the sample itself, or by another thread
            raise IteratorInvalidError(remedy="Call iter() again")
        if following.is_end:
            return item, None, Place(following.mark, 0, skipped)
        return item, following, Place(current.mark, here.batch + 1, skipped)

    @property
    def failed(self) -> bool:
        """Whether an error is to be cleared."""
        return bool(self._failure)

    def settle(self, node: Pullable) -> None:
        """Puts the node right behind the committed item or the one ahead, if an error or a close has led it astray."""
        if self._astray:
            self._ahead = None  # what an interrupt may have left between two assignments
            node.seek(self.last(node).mark)
            self._astray = False

    def check(self) -> None:
        """Raises LoaderFailedError while an error is to be cleared by `move` or `close`."""
        if self._failure:
            raise LoaderFailedError(
                self._failure, remedy="close() or load_state_dict() lets it go on from the last consumed item"
            )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keeps other threads out, as `take` does; ConcurrentUseError if one is in there."""
        mine = (threading.get_ident(),)
        try:
            self._enter(mine)
            yield
        finally:
            self._leave(mine)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the node is led about by `look`, so that what it runs must not be left to workers."""
        return self._looking is not None and self._inside.get("thread") is self._looking

    def look(self, ask: Callable[[], T], lead_back: Callable[[], None]) -> T:
        """What `ask` finds, which may lead the node anywhere, for one who has entered and settled.

        Then it is led back. Wherever an interrupt or an error keeps it from that, it is known to be astray.
        """
        generation = self.generation
        self._astray, self._looking = True, self._inside["thread"]
        try:
            return ask()
        finally:
            lead_back()
            self._looking = None
            if generation == self.generation:  # else closed by another thread meanwhile
                self._astray = False

    def move(self, node: Pullable, mark: Mark, ends: bool = False) -> None:
        """Goes to the start of an epoch; what was pulled ahead is dropped, older iterators become invalid or, with `ends`, end.

        If the node refuses the mark it is led back to the committed one, and nothing has changed.
        """
        with self.entered():
            self.relocate(node, Place(mark, 0, self.skipped), ends)

    def relocate(self, node: Pullable, place: Place, ends: bool = False) -> None:
        """What `move` does, to any place, for one who has entered."""
        self.last(node)
        self._ahead, self._astray = None, True
        node.seek(place.mark)
        self._drop(ends)
        self._place = place
        self._astray = False

    def pass_over(self, node: Pullable, place: Place) -> None:
        """Goes on to a later place, for one who has entered; iterators go with it, and an error before it is left behind."""
        self._ahead, self._astray = None, True
        node.seek(place.mark)
        self._place, self._astray, self._failure = place, False, ""

    def remark(self, node: Pullable) -> None:
        """Takes the committed mark anew from where the node stands, which has taken over other arguments than the mark's."""
        self._place = self.last(node)._replace(mark=node.mark())

    def next_epoch(self, node: Steppable) -> None:
        """Leaves the epoch for the start of the next one, which a foreign source alone may know."""
        mark = self.committed(node)
        self._ahead, self._astray = None, True
        node.next_epoch(mark)
        self.arrive(node.mark())

    def arrive(self, mark: Mark) -> None:
        """Commits the mark where the node already stands, as after a foreign source was reset."""
        self._drop()
        self._place = Place(mark, 0, self.skipped)
        self._astray = False

    def close(self, node: Pullable) -> None:
        """Drops what was pulled ahead, clears an error, and ends older iterators; the next one starts at the committed mark."""
        self.last(node)
        self._astray = True
        self._drop()
        if self._inside.get("thread") == (threading.get_ident(),):  # left there by an interrupt; another thread leaves by itself
            self._inside = {}

    def hand_over(self, node: Pullable) -> None:
        """Puts the node behind the last item that was handed out, for another node that is to pull from it."""
        self._astray |= self._ahead is not None
        self.settle(node)
        # Should that node be dropped, this one goes on from where it stood.
        self.committed(node)
        self._astray = True

    def _enter(self, mine: tuple[int]) -> None:
        if self._inside.setdefault("thread", mine) is not mine:
            raise ConcurrentUseError(remedy="Give each thread a loader of its own; after an interrupt, close() sets it free")

    def _leave(self, mine: tuple[int]) -> None:
        if self._inside.get("thread") is mine:
            self._inside = {}

    def _drop(self, ends: bool = False) -> None:
        self.generation += 1
        if not ends:
            self._ended_since = self.generation
        self._ahead = None
        self._failure = ""

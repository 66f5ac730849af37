"""What is under way at the top of a pipeline, and the one place where consumption is recorded."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from stateful_pipes.caught import add_note, brief
from stateful_pipes.errors import ConcurrentUseError, IteratorInvalidError, LoaderFailedError
from stateful_pipes.skips import LEFT_OUT, Skip, noting
from stateful_pipes.ticket import Mark, Ticket

__all__ = ["Pullable", "Pulled", "Stream", "kept", "pull_one"]


class Pullable(Protocol):
    """What a stream needs of a node to move its cursor."""

    def pull(self, count: int | None) -> Ticket: ...
    def mark(self) -> Mark: ...
    def seek(self, mark: Mark) -> None: ...


class Steppable(Pullable, Protocol):
    """What it needs of one that may leave an epoch before its end."""

    def next_epoch(self, mark: Mark) -> None: ...


class Runnable(Pullable, Protocol):
    """What it needs of a node that it runs, too."""

    def run(self, ticket: Ticket) -> list[Any]: ...
    def scope(self) -> AbstractContextManager[None]: ...
    def admit(self, skips: Sequence[Skip]) -> dict[str, int]: ...


class Pulled(NamedTuple):
    """What one pull came to: a ticket, the end of the epoch (neither), or an error; and the mark right after it."""

    ticket: Ticket | None
    mark: Mark
    error: Exception | None = None

    @property
    def is_end(self) -> bool:
        return self.ticket is None and self.error is None


def pull_one(node: Pullable) -> Pulled:
    """Pulls one item; its error is kept for when its turn comes, since the items before it are still good."""
    ticket: Ticket | None
    try:
        try:
            ticket = node.pull(1)
        except StopIteration:
            ticket = None
        return Pulled(ticket, node.mark())
    except Exception as error:
        return Pulled(None, (), kept(error))


def kept(error: Exception) -> Exception:
    """The error for later: its traceback as a note, since the frames in it would keep the pipeline and its workers alive."""
    add_note(error, "".join(["when it was pulled ahead:\n", *traceback.format_tb(error.__traceback__)]).rstrip())
    linked: BaseException | None = error
    while linked is not None:
        linked.with_traceback(None)
        linked = linked.__cause__ or linked.__context__
    return error


class Stream:
    """The committed mark of a pipeline and the one item pulled ahead of it.

    It belongs to the node at the top but never refers to it (methods take the node), so that dropping a pipeline frees
    it at once. The item ahead is pulled, not run: it tells whether the epoch ends, so that with its last item committed
    the mark already reads (epoch + 1, start).
    """

    def __init__(self) -> None:
        self.generation = 0
        self.delivered = 0
        self.skipped: Mapping[str, int] = {}  # samples that were left out of what was handed out, by node
        self._committed: Mark | None = None
        self._ahead: Pulled | None = None
        self._astray = False  # the node no longer stands right behind what is pulled ahead
        self.lost = ""  # why it is not known what was consumed
        self._failure = ""
        self._ended_since = 0  # iterators of older generations from this one on are at their end, others invalid
        # Holds who is in `take` or `move`, an object of that call's own; entered by setdefault and left by an assignment, which
        # are one step each, so that wherever an interrupt comes it is known whose it was.
        self._inside: dict[str, tuple[int]] = {}

    def committed(self, node: Pullable) -> Mark:
        """The mark after the last item that was handed out.

        Raises:
            LoaderFailedError: it is not known; only another load helps.
        """
        if self.lost:
            raise LoaderFailedError(self.lost, remedy="Load a state; close() is no help")
        return self.last(node)

    def last(self, node: Pullable) -> Mark:
        """The mark that was committed last, whether it is to be trusted or not."""
        if self._committed is None:
            self._committed = node.mark()
        return self._committed

    def take(self, node: Runnable, epoch: int, generation: int) -> Any:
        """Hands out the next item of `epoch` and commits its mark.

        Raises:
            StopIteration: the committed epoch is another.
            IteratorInvalidError: the stream was loaded, moved or closed since `generation`.
            LoaderFailedError: an earlier error is still to be cleared.
            ConcurrentUseError: another thread is in here.
        """
        mine = (threading.get_ident(),)
        try:
            self._enter(mine)
            while True:
                self._check_turn(node, epoch, generation)
                item, following, mark, skipped = self._run_next(node)
                # The commit. No line from here on is a call, so in CPython no interrupt comes before a for loop has the item.
                self._ahead, self._committed, self.skipped, self._astray = following, mark, skipped, False
                if generation != self.generation:  # closed by another thread meanwhile
                    self._ahead, self._astray = None, True
                if item is not LEFT_OUT:
                    self.delivered += 1
                    self._inside = {}
                    return item
        except BaseException:
            self._leave(mine)
            raise

    def _check_turn(self, node: Pullable, epoch: int, generation: int) -> None:
        if self._ended_since <= generation < self.generation:
            raise StopIteration
        if generation != self.generation:
            raise IteratorInvalidError(remedy="Call iter() again")
        self.check()
        if self.committed(node)[0] != epoch:
            raise StopIteration

    def _run_next(self, node: Runnable) -> tuple[Any, Pulled | None, Mark, Mapping[str, int]]:
        """The next item; and what is pulled ahead, committed and left out once that is consumed."""
        generation = self.generation
        self.settle(node)
        current = self._ahead
        self._ahead, self._astray = None, True
        current = current or pull_one(node)
        if current.is_end:
            self._committed, self._astray = current.mark, False
            raise StopIteration
        try:
            if current.error is not None:
                raise current.error
            following = pull_one(node)
            with noting() as skips, node.scope():
                (item,) = node.run(current.ticket or ())
            skipped = node.admit(skips) if skips else self.skipped
        except StopIteration as error:
            self._failure = "StopIteration"
            raise RuntimeError("run() raised StopIteration; only pull() may, to end an epoch") from error
        except Exception as error:
            if generation != self.generation:  # closed or moved by another thread meanwhile
                raise IteratorInvalidError(remedy="Call iter() again") from error
            self._failure = brief(error)
            raise
        if generation != self.generation:  # closed by the sample itself, or by another thread
            raise IteratorInvalidError(remedy="Call iter() again")
        if following.is_end:
            return item, None, following.mark, skipped
        return item, following, current.mark, skipped

    @property
    def failed(self) -> bool:
        """Whether an error is to be cleared."""
        return bool(self._failure)

    def settle(self, node: Pullable) -> None:
        """Puts the node right behind the committed item or the one ahead, if an error or a close has led it astray."""
        if self._astray:
            self._ahead = None  # what an interrupt may have left between two assignments
            node.seek(self.last(node))
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

    def move(self, node: Pullable, mark: Mark, ends: bool = False) -> None:
        """Goes to another mark; what was pulled ahead is dropped, and older iterators become invalid or, with `ends`, end.

        If the node refuses the mark it is led back to the committed one, and nothing has changed.
        """
        with self.entered():
            self.relocate(node, mark, ends)

    def relocate(self, node: Pullable, mark: Mark, ends: bool = False) -> None:
        """What `move` does, for one who has entered."""
        self._committed = self.last(node)
        self._ahead, self._astray = None, True
        node.seek(mark)
        self._drop(ends)
        self._committed = mark
        self._astray = False

    def remark(self, node: Pullable) -> None:
        """Takes the committed mark anew from where the node stands, which has taken over other arguments than the mark's."""
        self._committed = node.mark()

    def next_epoch(self, node: Steppable) -> None:
        """Leaves the epoch for the start of the next one, which a foreign source alone may know."""
        mark = self.committed(node)
        self._ahead, self._astray = None, True
        node.next_epoch(mark)
        self.arrive(node.mark())

    def arrive(self, mark: Mark) -> None:
        """Commits the mark where the node already stands, as after a foreign source was reset."""
        self._drop()
        self._committed = mark
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

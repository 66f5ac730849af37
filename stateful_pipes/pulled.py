"""One item pulled ahead, and run."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from stateful_pipes.caught import add_note
from stateful_pipes.skips import Skip
from stateful_pipes.ticket import EpochEnd, Mark, Ticket

__all__ = ["Pullable", "Pulled", "Runnable", "Steppable", "kept", "looked_at", "pull_one", "run_one"]


class Pullable(Protocol):
    """What a stream needs of a node to move its cursor."""

    def pull(self, count: int | None) -> Ticket: ...
    def mark(self) -> Mark: ...
    def seek(self, mark: Mark) -> None: ...


class Steppable(Pullable, Protocol):
    """What it needs of one that may leave an epoch before its end."""

    def next_epoch(self, mark: Mark) -> None: ...


class Runnable(Steppable, Protocol):
    """What it needs of a node that it runs, too."""

    @property
    def ends_in_run(self) -> bool: ...
    def pull_ahead(self) -> Pulled: ...
    def run_here(self, ticket: Ticket) -> tuple[list[Any], Sequence[Skip]]: ...
    def admit(self, skips: Sequence[Skip]) -> dict[str, int]: ...


class Pulled(NamedTuple):
    """What one pull came to: a ticket, the end of the epoch (neither), or an error; and the mark right after it.

    Attributes:
        ready: What the ticket was run to, if that was needed to see whether it lies past the end.
    """

    ticket: Ticket | None
    mark: Mark
    error: Exception | None = None
    ready: tuple[Any, Sequence[Skip]] | None = None

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


def run_one(node: Runnable, ticket: Ticket) -> tuple[Any, Sequence[Skip]]:
    """Runs a ticket of one item: the item, and the samples that it was made without."""
    try:
        (item,), skips = node.run_here(ticket)
    except StopIteration as error:
        raise RuntimeError("run() raised StopIteration; only pull() may, to end an epoch") from error
    return item, skips


def looked_at(node: Runnable, pulled: Pulled, mark: Mark) -> Pulled:
    """What was pulled behind `mark`, run: an end, if it lies past the end of the epoch, from where the node goes on."""
    if pulled.ticket is None:
        return pulled
    try:
        return pulled._replace(ready=run_one(node, pulled.ticket))
    except EpochEnd:
        node.next_epoch(mark)
        return Pulled(None, node.mark())
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

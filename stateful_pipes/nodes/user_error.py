"""An error of the user's own function, raised on with the place in the stream at which it happened."""

from __future__ import annotations

from typing import NoReturn

from stateful_pipes.caught import add_note

__all__ = ["raise_noted"]


def raise_noted(error: Exception, function: object, note: str) -> NoReturn:
    """Raises the error with the note; a StopIteration, which would end the epoch in silence, as a RuntimeError."""
    if isinstance(error, StopIteration):
        stopped = RuntimeError(f"{function!r} raised StopIteration")
        stopped.add_note(note)
        raise stopped from error
    add_note(error, note)
    raise error

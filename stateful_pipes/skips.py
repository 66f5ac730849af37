"""Samples that are left out of the stream: noted where one raises, counted and logged where the rest is consumed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from stateful_pipes.caught import add_note, brief

__all__ = ["LEFT_OUT", "Skip", "admitted", "note", "noting"]

logger = logging.getLogger("stateful_pipes")


class _LeftOut:
    """Pickles as the one object that it is."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"

    def __repr__(self) -> str:
        return "LEFT_OUT"


LEFT_OUT: Final[Any] = _LeftOut()
"""Stands in a node's items for one that was left out, so that the others keep their places."""


class Skip(NamedTuple):
    """A sample that was left out.

    Attributes:
        node: The name of the mapper that it raised in.
        place: Epoch, position and index, for people.
        error: What it raised.
    """

    node: str
    place: str
    error: Exception


class _Noted(threading.local):
    skips: list[Skip] | None = None


_noted = _Noted()


class noting:  # used as a function
    """A scope that gathers what `note` is told in this thread; an inner scope keeps its own."""

    def __enter__(self) -> list[Skip]:
        self._outer = _noted.skips
        found: list[Skip] = []
        _noted.skips = found
        return found

    def __exit__(self, *raised: object) -> None:
        _noted.skips = self._outer


def note(skips: Sequence[Skip]) -> None:
    """Tells the scope around it, if there is one, of samples that were left out."""
    if _noted.skips is not None:
        _noted.skips += skips


def admitted(skips: Sequence[Skip], budgets: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Logs samples that an item about to be consumed was made without, and counts them.

    Args:
        skips: These samples.
        budgets: How many each node may leave out in all.
        counts: How many each has left out so far.

    Returns:
        The counts with these.

    Raises:
        Exception: that of the first sample which its node may not leave out any more.
    """
    found = dict(counts)
    for name, place, error in skips:
        found[name] = found.get(name, 0) + 1
        if found[name] > budgets[name]:
            add_note(error, f"max_skipped={budgets[name]} samples have been left out by {name!r} already")
            raise error
        logger.warning("%s: %s is left out (%d of %d): %s", name, place, found[name], budgets[name], brief(error))
    return found

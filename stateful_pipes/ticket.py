"""Blocks of work, and the marks between them."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from stateful_pipes.wording import listed

__all__ = ["EpochEnd", "Mark", "Samples", "Ticket", "packed", "positions_of"]

Mark = tuple[Any, ...]
"""The moving part of a node and its sources: a small plain tuple, epoch first."""

Ticket = tuple[Any, ...]
"""A block of work: (epoch, positions, what to read, seeds...); plain tuples, ints and bytes."""

_SHOWN = 8


class EpochEnd(Exception):
    """Raised by `run` where the ticket lies past the end of its epoch, which then ends before it (see `ends_in_run`)."""


def positions_of(ticket: Ticket) -> range | list[int]:
    """The positions of a ticket's items within their epoch."""
    positions = ticket[1]
    return range(*positions) if isinstance(positions, tuple) else memoryview(positions).cast("q").tolist()


def packed(positions: list[int]) -> tuple[int, int, int] | bytes:
    """Positions as a ticket holds them."""
    return (positions[0], positions[0] + 1, 1) if len(positions) == 1 else array("q", positions).tobytes()


class Samples(NamedTuple):
    """What a ticket is made of.

    Attributes:
        epoch: The epoch.
        positions: Of its samples.
        indices: What is read at these; empty if that is not known.
    """

    epoch: int
    positions: list[int]
    indices: list[Any]

    def __str__(self) -> str:
        indices = f" (indices {listed(self.indices, _SHOWN)})" if self.indices else ""
        return f"epoch {self.epoch}, positions {listed(self.positions, _SHOWN)}{indices}"

"""What a reader's passes over its shards give: files in their order, or out of a buffer that shuffles them."""

from __future__ import annotations

from collections.abc import Iterable

from stateful_pipes.nodes.file_order import FileOrder
from stateful_pipes.nodes.shards import Shards, Stretch
from stateful_pipes.nodes.shuffle_buffer import Held, ShuffleBuffer

__all__ = ["FilePasses"]


class FilePasses:
    """A pure function from places of the passes, and what a buffer holds there, to indices of files.

    Args:
        shards: The passes.
        seed: Of the buffer; None if there is none.
        initial_fill: How many files the buffer holds.
        shuffle_seed: Under which all files are shuffled anew for each pass; None if they are not.
    """

    def __init__(self, shards: Shards, *, seed: int | None, initial_fill: int, shuffle_seed: int | None) -> None:
        self.files = shards.files
        self._order = FileOrder(shards, is_mixed=seed is not None, seed=shuffle_seed)
        self._buffer = None if seed is None else ShuffleBuffer(seed, initial_fill, shards.size, self._order.at)

    def read(self, held: Held | None, stretches: Iterable[Stretch]) -> tuple[list[int], Held | None]:
        """The indices at these places, and what is held then."""
        indices: list[int] = []
        for number, place, steps in stretches:
            if self._buffer is None:
                indices += self._order.at(number, place, steps)
            else:
                given, held = self._buffer.take(self._buffer.at(held, number, place), steps)
                indices += given
        return indices, held

    def held_at(self, held: Held | None, number: int, place: int) -> Held | None:
        """What is held at a place of a pass: from `held` on, if that comes before in it."""
        return None if self._buffer is None else self._buffer.at(held, number, place)

    def parsed(self, shown: str, number: int, place: int) -> Held | None:
        """What `str` of what is held there told; None if that cannot be."""
        return None if self._buffer is None else self._buffer.parsed(shown, number, place, self.files)

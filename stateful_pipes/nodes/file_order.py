"""The order in which a pass over a shard takes its files in."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from stateful_pipes.nodes.shards import Shards
from stateful_pipes.permutation import permute
from stateful_pipes.rng import ORDER, derive

__all__ = ["FileOrder"]

# A permutation costs the same numpy calls for one index as for thousands.
_CHUNK: Final = 4096


class _Chunk(NamedTuple):
    """Indices made ahead: of which pass, from which place on."""

    number: int
    first: int
    indices: list[int]


class FileOrder:
    """A pure function from places of a pass to indices of files.

    Args:
        shards: The passes.
        is_mixed: Whether the files are dealt out to the shards in an order without pattern. Its seed is no argument: all
            shards have to agree on whose each file is.
        seed: If given, all files are shuffled anew for each pass.
    """

    def __init__(self, shards: Shards, *, is_mixed: bool, seed: int | None) -> None:
        self.shards = shards
        self.is_mixed = is_mixed
        self.seed = seed
        self._chunk = _Chunk(-1, 0, [])

    def at(self, number: int, place: int, count: int) -> list[int]:
        """The indices at `count` places of a pass; at those past its end, its last one."""
        first, stop = self.shards.bounds(number)
        beyond = min(count, place + count - (stop - first))
        if beyond > 0:
            return (self.at(number, place, count - beyond) if beyond < count else []) + self.at(
                number, stop - first - 1, 1
            ) * beyond
        if self.seed is None and not self.is_mixed:
            return list(range(first + place, first + place + count))
        made, start, indices = self._chunk
        if made != number or not start <= place <= place + count <= start + len(indices):
            ahead = max(count, min(_CHUNK, stop - first - place))
            key = derive(0, ORDER) if self.seed is None else derive(self.seed, ORDER, number)
            positions = np.arange(first + place, first + place + ahead, dtype=np.int64)
            start, indices = place, permute(key, self.shards.files, positions).tolist()
            self._chunk = _Chunk(number, start, indices)
        return indices[place - start : place - start + count]

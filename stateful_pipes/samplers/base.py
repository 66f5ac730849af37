"""Samplers: orders that are walked one index at a time."""

from __future__ import annotations

import torch

from stateful_pipes.integers import as_integer
from stateful_pipes.samplers.cursor import OrderCursor
from stateful_pipes.samplers.order import Order, is_order, length_of
from stateful_pipes.samplers.passes import OrderPass

__all__ = ["OrderSampler", "ResumableSampler", "SamplerIterator"]

_CHUNK = 1024


class ResumableSampler(OrderCursor[int]):
    """Base of the samplers: each item is an index.

    The iterator has its own state, as torchdata's `StatefulDataLoader` wants it; `advance` moves the sampler's cursor.

    State: see `SamplerState`; constant size. Cost of a resume: O(1).
    """

    def __init__(
        self,
        order: Order,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        seeded: bool = True,
        resumable: bool = True,
    ) -> None:
        length = length_of(order) if hasattr(order, "__len__") else None
        super().__init__(order, length, seed=seed, generator=generator, seeded=seeded, resumable=resumable)

    def __len__(self) -> int:
        """Items in a whole epoch; TypeError for an endless order, which is how torch wants to be told."""
        if self.length is None:
            raise TypeError(f"{self.name} is endless and has no len()")
        return self.length

    def iterator(self, epoch: int, consumed: int) -> SamplerIterator:
        return SamplerIterator(self, epoch, consumed)

    def advance(self, count: int = 1) -> None:
        """Moves the cursor past `count` items that were consumed; at the end of the epoch, to the next one's start.

        Raises:
            ValueError: `count` is negative, or more than the epoch has left.
            NodeAttachedError: the sampler belongs to a node, which moves it itself.
        """
        self.require_resumable("advance")
        self.refuse_attached("advance")
        left = None if self.length is None else self.length - self._consumed
        count = as_integer("count", count, 0, left, f"the {left} items that the epoch has left")
        self.place(self._epoch, self._consumed + count)


class OrderSampler(ResumableSampler):
    """A sampler of a user's own `Order`.

    Args:
        order: Anything with `indices(seed, epoch, positions)` and, unless endless, `__len__`.
        seed: What `indices` gets as its seed, from 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.
    """

    def __init__(
        self,
        order: Order,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        if not is_order(order):
            raise TypeError(f"order must have a method indices(seed, epoch, positions), got {order!r}")
        super().__init__(order, seed=seed, generator=generator, resumable=resumable)

    @property
    def name(self) -> str:
        return type(self.order).__name__


class SamplerIterator(OrderPass[int]):
    """Makes its indices in chunks."""

    def _seek(self, epoch: int, consumed: int) -> None:
        super()._seek(epoch, consumed)
        self._chunk: list[int] = []
        self._chunk_start = consumed

    def __next__(self) -> int:
        offset = self._consumed - self._chunk_start
        if offset == len(self._chunk):
            start, stop = self._consumed, self._consumed + _CHUNK
            if self._sampler.length is not None:
                stop = min(stop, self._sampler.length)
            if start >= stop:
                raise StopIteration
            self._chunk = self._sampler.indices(self._epoch, range(start, stop)).tolist()
            self._chunk_start, offset = start, 0
        self._consumed += 1
        return self._chunk[offset]

"""Shuffled orders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.fields import Scalar
from stateful_pipes.permutation import permute
from stateful_pipes.rng import ORDER, derive, derive_each
from stateful_pipes.samplers.base import ResumableSampler
from stateful_pipes.samplers.order import SizedOrLength, as_array, length_of

__all__ = ["InfiniteRandomSampler", "RandomSampler"]


class _RandomOrder:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        return permute(derive(seed, ORDER, epoch), self.length, as_array(positions))


class _InfiniteRandomOrder:
    def __init__(self, length: int, replacement: bool) -> None:
        self.length = length
        self.replacement = replacement

    def arguments(self) -> dict[str, Scalar]:
        return {"items": self.length, "replacement": self.replacement}

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        if self.replacement:
            drawn = np.array(derive_each(derive(seed, ORDER, epoch), positions), dtype=np.uint64)
            return (drawn % np.uint64(self.length)).astype(np.int64)
        cycles, offsets = np.divmod(as_array(positions), self.length)
        out = np.empty(len(positions), dtype=np.int64)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            out[chosen] = permute(derive(seed, ORDER, epoch, cycle), self.length, offsets[chosen])
        return out


class RandomSampler(ResumableSampler):
    """Every index once an epoch, in a new permutation each epoch.

    Args:
        data_source: A sized dataset, or a length from 1 to 2**62.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: length, seed, epoch, consumed. Cost: O(1) memory, O(1) resume, about 60 ns an index.

    >>> sampler = RandomSampler(10**12, seed=0)
    >>> sampler.advance(10**11)
    >>> next(iter(sampler))
    314947445883
    """

    def __init__(
        self,
        data_source: SizedOrLength,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        super().__init__(_RandomOrder(length_of(data_source)), seed=seed, generator=generator, resumable=resumable)


class InfiniteRandomSampler(ResumableSampler):
    """Indices without end: permutation after permutation, or independent draws. It has no `len()` and no epoch's end.

    Args:
        data_source: A sized dataset, or a length from 1 to 2**62.
        replacement: Draw each index independently of the others.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: items, replacement, seed, epoch, consumed. Cost: as `RandomSampler`.
    """

    def __init__(
        self,
        data_source: SizedOrLength,
        *,
        replacement: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement must be a bool, got {replacement!r}")
        order = _InfiniteRandomOrder(length_of(data_source), replacement)
        super().__init__(order, seed=seed, generator=generator, resumable=resumable)

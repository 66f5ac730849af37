"""Consecutive batches of an order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.integers import as_integer
from stateful_pipes.permutation import permute
from stateful_pipes.samplers.batches import ResumableBatchSampler
from stateful_pipes.samplers.order import SizedOrLength, length_of

__all__ = ["NaiveBatchSampler"]


class _WholeCycle:
    """All samples, in a permutation or in the dataset's order."""

    def __init__(self, length: int, shuffle: bool) -> None:
        self.length = length
        self.shuffle = shuffle

    def indices(self, key: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return permute(key, self.length, offsets) if self.shuffle else offsets


class NaiveBatchSampler(ResumableBatchSampler):
    """Consecutive batches of a permutation, or of the dataset's own order. A cycle is one pass over the dataset.

    Args:
        dataset: A sized dataset, or a length from 1 to 2**62.
        batch_size: At least 1.
        repeat: Cycle after cycle in one endless epoch; else each epoch is one cycle.
        shuffle: A new permutation each cycle.
        drop_last: Leave out what is left of a cycle after its last full batch; else it is a smaller batch.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: see `ResumableBatchSampler`. Memory: O(1).

    Raises:
        ResumableBatchConfigurationError: there is no sample, or every batch would be dropped.

    >>> list(NaiveBatchSampler(5, 2, repeat=False, shuffle=False, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: SizedOrLength,
        batch_size: int,
        *,
        repeat: bool = True,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        length = length_of(dataset)
        batch_size = as_integer("batch_size", batch_size, 1)
        super().__init__(
            _WholeCycle(length, shuffle),
            length // batch_size * batch_size if drop_last else length,
            batch_size,
            repeat=repeat,
            drop_last=drop_last,
            arguments={"items": length, "shuffle": shuffle},
            seed=seed,
            generator=generator,
            resumable=resumable,
        )

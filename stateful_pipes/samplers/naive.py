"""Consecutive batches of an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.fields import Scalar
from stateful_pipes.integers import as_integer
from stateful_pipes.permutation import permute
from stateful_pipes.samplers.batches import Cycle, ResumableBatchSampler
from stateful_pipes.samplers.order import Order, SizedOrLength, as_array, is_order, length_of

__all__ = ["NaiveBatchSampler"]


class _WholeCycle:
    """All samples, in a permutation or in the dataset's order."""

    def __init__(self, length: int, shuffle: bool) -> None:
        self.length = length
        self.shuffle = shuffle

    def indices(self, key: int, number: int, offsets: range) -> npt.NDArray[np.int64]:
        return permute(key, self.length, as_array(offsets)) if self.shuffle else as_array(offsets)


class _OwnCycle:
    """A user's order, each cycle as an epoch of it."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def indices(self, key: int, number: int, offsets: range) -> npt.NDArray[np.int64] | Sequence[int]:
        return self.order.indices(key, number, offsets)


class NaiveBatchSampler(ResumableBatchSampler):
    """Consecutive batches of a permutation, of the dataset's own order, or of one of yours. A cycle is one pass over it.

    Args:
        dataset: A sized dataset, a length from 1 to 2**62, or an `Order` that is not endless. An order is asked for each cycle
            under a seed of the cycle's own, and with epoch + cycle as the epoch.
        batch_size: At least 1.
        repeat: Cycle after cycle in one endless epoch; else each epoch is one cycle.
        shuffle: A new permutation each cycle; of no meaning for an order.
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
        dataset: SizedOrLength | Order,
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
        own: dict[str, Scalar] = {}
        cycle: Cycle = _WholeCycle(length, shuffle)
        if is_order(dataset) and not hasattr(dataset, "__getitem__"):  # a dataset may have indices of its own
            cycle = _OwnCycle(dataset)
            of_order: dict[str, Scalar] = getattr(dataset, "arguments", dict)()
            own = {"of": type(dataset).__name__, **{f"of.{key}": value for key, value in of_order.items()}}
        super().__init__(
            cycle,
            length // batch_size * batch_size if drop_last else length,
            batch_size,
            repeat=repeat,
            shuffle=shuffle,
            drop_last=drop_last,
            arguments={"items": length, **own},
            seed=seed,
            generator=generator,
            resumable=resumable,
        )

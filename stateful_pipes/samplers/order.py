"""What an order is: a pure function of (seed, epoch, position)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.integers import as_integer
from stateful_pipes.permutation import MAX_LENGTH

__all__ = ["Order", "SizedOrLength", "as_array", "check_epoch", "is_order", "length_of"]

SizedOrLength = Any
"""A sized dataset or a number of items; torch's own samplers leave it as loose."""


@runtime_checkable
class Order(Protocol):
    """What a user's own order has to offer; pass it to `OrderSampler`, or to `SamplerNode` as it is.

    `indices` must be a pure function of its arguments: whatever asks again gets the same answer. An order with
    `__len__` has that many positions in each epoch; one without is endless. Where it has arguments that shape it, a
    method `arguments()` returns them as a mapping of plain values: they go into the state, and a state saved with
    others is refused.

    >>> from stateful_pipes import OrderSampler
    >>> class Interleaved:
    ...     '''Even indices, then odd ones; every other epoch from the back.'''
    ...     def __init__(self, length):
    ...         self.length = length
    ...     def __len__(self):
    ...         return self.length
    ...     def indices(self, seed, epoch, positions):
    ...         half = (self.length + 1) // 2
    ...         forward = [2 * p if p < half else 2 * (p - half) + 1 for p in positions]
    ...         return [self.length - 1 - i for i in forward] if epoch % 2 else forward
    >>> list(OrderSampler(Interleaved(5), seed=0))
    [0, 2, 4, 1, 3]
    """

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64] | Sequence[int]:
        """Dataset indices at `positions` (within the epoch) of `epoch`, int64 of the same length."""
        ...


def is_order(value: object) -> bool:
    """Whether a value follows the protocol; torch's SubsetRandomSampler has indices, too, but a list of them, and its tensors
    other ones."""
    return isinstance(value, Order) and not isinstance(value, (type, torch.Tensor)) and callable(value.indices)


def as_array(positions: range) -> npt.NDArray[np.int64]:
    """The numbers of a range."""
    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)


def check_epoch(epoch: object) -> int:
    """The epoch as an `int`, refused with ValueError or TypeError where it is none."""
    return as_integer("epoch", epoch, 0, 2**63 - 2, "2**63 - 2")


def length_of(data_source: SizedOrLength) -> int:
    """How many items a sized dataset or a plain length stands for.

    Raises:
        TypeError: neither a length nor sized.
        ValueError: negative, or above 2**62.
        ResumableBatchConfigurationError: nothing to sample from.
    """
    if isinstance(data_source, Sampler):
        raise TypeError(f"expected a sized dataset or a length, got a sampler: {type(data_source).__name__}")
    if isinstance(data_source, bool):
        raise TypeError(f"expected a sized dataset or a length, got {data_source!r}")
    try:
        # Not whatever has __index__: a tensor of one number has that, and is a dataset of one.
        length = operator.index(data_source) if isinstance(data_source, (int, np.integer)) else len(data_source)
    except TypeError as error:
        raise TypeError(f"expected a sized dataset or a length, got {type(data_source).__name__}") from error
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"length must be from 1 to 2**62, got {length}")
    if length == 0:
        raise ResumableBatchConfigurationError("there is nothing to sample from", expected="at least 1 item", found=0)
    return length

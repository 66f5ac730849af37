"""The order of the dataset itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stateful_pipes.samplers.base import ResumableSampler
from stateful_pipes.samplers.order import SizedOrLength, as_array, length_of

__all__ = ["SequentialSampler"]


class _SequentialOrder:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        return as_array(positions)


class SequentialSampler(ResumableSampler):
    """0, 1, ... length - 1 in every epoch.

    Args:
        data_source: A sized dataset, or a length from 1 to 2**62.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: length, epoch, consumed. Cost of a resume: O(1).

    >>> list(SequentialSampler(4))
    [0, 1, 2, 3]
    """

    def __init__(self, data_source: SizedOrLength, *, resumable: bool = True) -> None:
        super().__init__(_SequentialOrder(length_of(data_source)), seeded=False, resumable=resumable)

"""Batch samplers: orders that are walked one batch at a time, cycle after cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.errors import Difference, ResumableBatchConfigurationError, StateMismatchError
from stateful_pipes.fields import Scalar
from stateful_pipes.integers import as_integer
from stateful_pipes.rng import ORDER, derive
from stateful_pipes.samplers.cursor import OrderCursor
from stateful_pipes.samplers.passes import OrderPass

__all__ = ["BatchIterator", "Cycle", "ResumableBatchSampler"]


class Cycle(Protocol):
    """The samples of any cycle, as a pure function of its key."""

    def indices(self, key: int, number: int, offsets: range) -> npt.NDArray[np.int64] | Sequence[int]:
        """Dataset indices at `offsets` of the cycle that `key` names; `number` is for orders that tell epochs apart by one."""
        ...


class _CycleOrder:
    """Cycle after cycle as an `Order`; without end, or one cycle an epoch."""

    def __init__(self, cycle: Cycle, samples: int, arguments: Mapping[str, Scalar]) -> None:
        self.cycle = cycle
        self.samples = samples
        self._arguments = arguments

    def arguments(self) -> Mapping[str, Scalar]:
        return self._arguments

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        parts = [np.empty(0, dtype=np.int64)]
        while positions:
            number, first = divmod(positions.start, self.samples)
            within = len(range(first, self.samples, positions.step))
            part, positions = positions[:within], positions[within:]
            offsets = range(first, first + len(part) * part.step, part.step)
            parts.append(np.asarray(self.cycle.indices(derive(seed, ORDER, epoch, number), epoch + number, offsets)))
        return np.concatenate(parts) if len(parts) > 2 else parts[-1]


class ResumableBatchSampler(OrderCursor[list[int]]):
    """Base of the batch samplers: each item is a list of indices.

    Batches do not cross the end of a cycle: its last one is smaller where the cycle does not divide. With `repeat` cycle
    follows cycle in one endless epoch, else each epoch is one cycle. A cycle's samples are a pure function of (seed,
    epoch, cycle). In a plain `DataLoader`, say `advance_batch()` for each batch that was consumed.

    State: the order's arguments, seed, epoch, cycle, offset (samples consumed of the cycle) and consumed (of the epoch).
    """

    def __init__(
        self,
        cycle: Cycle,
        samples: int,
        batch_size: int,
        *,
        repeat: bool,
        shuffle: bool,
        drop_last: bool,
        arguments: Mapping[str, Scalar],
        seed: int | None,
        generator: torch.Generator | None,
        resumable: bool,
    ) -> None:
        self.batch_size = as_integer("batch_size", batch_size, 1)
        shape = {"repeat": repeat, "shuffle": shuffle, "drop_last": drop_last}
        for name, value in shape.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {value!r}")
        self.repeat, self.drop_last = repeat, drop_last
        if samples == 0:
            raise ResumableBatchConfigurationError(
                "every batch would be dropped", expected=f"at least {batch_size} samples", remedy="Use drop_last=False"
            )
        self.samples = samples
        """Samples in a cycle."""
        order = _CycleOrder(cycle, samples, {"batch_size": self.batch_size, "samples": samples, **shape, **arguments})
        length = None if repeat else samples
        super().__init__(order, length, seed=seed, generator=generator, resumable=resumable)

    @property
    def cycle(self) -> int:
        """The current cycle of the current epoch, counted from 0."""
        return self.consumed // self.samples

    def __len__(self) -> int:
        """Batches in a cycle."""
        return -(-self.samples // self.batch_size)

    def iterator(self, epoch: int, consumed: int) -> BatchIterator:
        return BatchIterator(self, epoch, consumed)

    def advance_batch(self, count: int = 1) -> None:
        """Moves the cursor past `count` batches that were consumed; at the end of an epoch, to the next one's start.

        Raises:
            ValueError: `count` is negative, or more than the epoch has left.
            NodeAttachedError: the sampler belongs to a node, which moves it itself.
        """
        self.require_resumable("advance_batch")
        self.refuse_attached("advance_batch")
        left = None if self.length is None else len(self) - self._consumed // self.batch_size
        count = as_integer("count", count, 0, left, f"the {left} batches that the epoch has left")
        self.place(self._epoch, self.after(self._consumed, count))

    def after(self, consumed: int, count: int) -> int:
        """Samples consumed, once `count` more batches are; cycle follows cycle, whatever the epoch's length."""
        if count == 0:
            return consumed
        cycle, offset = divmod(consumed, self.samples)
        more, batch = divmod(offset // self.batch_size + count, len(self))
        return (cycle + more) * self.samples + batch * self.batch_size

    def position(self, consumed: int) -> dict[str, int]:
        cycle, offset = divmod(consumed, self.samples)
        return {"consumed": consumed, "cycle": cycle, "offset": offset}

    def located(self, entry: Mapping[str, Any], name: str) -> int:
        consumed = super().located(entry, name)
        told = {key: entry[key] for key in ("consumed", "cycle", "offset")}
        if told != self.position(consumed):
            wrong = Difference(
                name,
                "consumed, cycle, offset",
                ", ".join(map(str, told.values())),
                f"cycles of {self.samples} samples",
                "they contradict each other: the state is damaged",
            )
            raise StateMismatchError(differences=(wrong,))
        return consumed


class BatchIterator(OrderPass[list[int]]):
    """Makes a batch at a time."""

    _sampler: ResumableBatchSampler

    def __next__(self) -> list[int]:
        if self._consumed == self._sampler.length:
            raise StopIteration
        stop = self._sampler.after(self._consumed, 1)
        batch: list[int] = self._sampler.indices(self._epoch, range(self._consumed, stop)).tolist()
        self._consumed = stop
        return batch

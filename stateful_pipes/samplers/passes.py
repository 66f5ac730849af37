"""One pass over an order, with a position of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

from stateful_pipes.samplers.cursor import OrderCursor
from stateful_pipes.state import SamplerState

__all__ = ["OrderPass"]

T_co = TypeVar("T_co", covariant=True)


class OrderPass(Iterator[T_co]):
    """One pass over what is left of an epoch. Its state holds the raw position: the end of an epoch is (e, its samples)."""

    def __init__(self, sampler: OrderCursor[T_co], epoch: int, consumed: int) -> None:
        self._sampler = sampler
        self._seek(epoch, consumed)

    def _seek(self, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed = epoch, consumed

    def __iter__(self) -> Self:
        return self

    def state_dict(self) -> SamplerState:
        """The position of this pass."""
        return self._sampler.state_at(self._epoch, self._consumed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position; the sampler adopts the seed, its cursor stays.

        Raises:
            StateMismatchError: the state is of another order, or damaged; nothing is changed.
            ResumableSamplerGeneratorError: all is right but the order's seed; nothing is changed.
        """
        self._sampler.refuse_attached("load_state_dict on an iterator")
        entry = self._sampler.take(state_dict)
        self._seek(entry["epoch"], entry["consumed"])

"""A sampler is an order with a cursor."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from stateful_pipes.errors import NodeAttachedError
from stateful_pipes.fields import Field, Scalar, adopted_seed, counter, fixed, ruled
from stateful_pipes.rng import as_seed, draw_seed
from stateful_pipes.samplers.order import Order, check_epoch, is_order, length_of
from stateful_pipes.state import SamplerState, validate_entry

__all__ = ["OrderSampler", "ResumableSampler", "SamplerIterator"]

_CHUNK = 1024
_RESERVED = frozenset({"type", "order", "length", "seed", "epoch", "consumed", "world_size", "uneven"})


class SamplerOwner(Protocol):
    """What an attached sampler asks of the node that it belongs to."""

    def cursor(self) -> tuple[int, int]:
        """The consumed position: epoch, and samples consumed in it."""
        ...

    def set_epoch(self, epoch: int) -> None: ...


class ResumableSampler(Sampler[int]):
    """Base of this library's samplers: an order, its seed, and a cursor of (epoch, consumed).

    Iterating starts at the cursor, ends with the epoch and does not move it, so two passes are alike until `advance`
    or `set_epoch`; the iterator has its own state, as torchdata's `StatefulDataLoader` wants it. Once given to a
    node or loader the cursor follows what that has consumed.

    State: see `SamplerState`; constant size. Cost of a resume: O(1).
    """

    def __init__(
        self, order: Order, *, seed: int | None = None, generator: torch.Generator | None = None, seeded: bool = True
    ) -> None:
        if seed is not None and generator is not None:
            raise ValueError("seed and generator exclude each other: one seed is drawn from a generator")
        self.order = order
        self.length = length_of(order) if hasattr(order, "__len__") else None
        self.arguments()
        self.seed = None if not seeded else as_seed(seed) if seed is not None else draw_seed(generator)
        self._epoch = 0
        self._consumed = 0
        self._owner: weakref.ref[SamplerOwner] | None = None

    @property
    def name(self) -> str:
        """The name of the order, as it stands in the state."""
        return type(self).__name__

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._cursor()[0]

    @property
    def consumed(self) -> int:
        """How many items of the current epoch have been consumed."""
        return self._cursor()[1]

    def indices(self, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        """Dataset indices at `positions` of `epoch`, int64 of shape (len(positions),).

        Raises:
            ValueError: the order's answer has another shape or type.
        """
        found = np.asarray(self.order.indices(self.seed or 0, epoch, positions))
        if found.shape != (len(positions),) or (found.size and not np.issubdtype(found.dtype, np.integer)):
            raise ValueError(
                f"{self.name}.indices must give {len(positions)} integers for {positions}, "
                f"got {found.dtype} of shape {found.shape}"
            )
        return found.astype(np.int64, copy=False)

    def __len__(self) -> int:
        """Items in a whole epoch; TypeError for an endless order, which is how torch wants to be told."""
        if self.length is None:
            raise TypeError(f"{self.name} is endless and has no len()")
        return self.length

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, *self._cursor())

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; does nothing where that is the current epoch, at whatever position.

        On a sampler that belongs to a loader this is the loader's own `set_epoch`.
        """
        epoch = check_epoch(epoch)
        owner = self.owner()
        if owner is not None:
            owner.set_epoch(epoch)
        elif epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def advance(self, count: int = 1) -> None:
        """Moves the cursor past `count` items that were consumed; at the end of the epoch, to the next one's start.

        Raises:
            ValueError: `count` is negative, or more than the epoch has left.
            NodeAttachedError: the sampler belongs to a node, which moves it itself.
        """
        self.refuse_attached("advance")
        count = operator.index(count)
        left = None if self.length is None else self.length - self._consumed
        if count < 0 or (left is not None and count > left):
            raise ValueError(f"count must be from 0 to the {left} items that the epoch has left, got {count}")
        self._consumed += count
        if self._consumed == self.length:
            self._epoch, self._consumed = self._epoch + 1, 0

    def state_dict(self) -> SamplerState:
        """The cursor and what shapes the order, as a fresh plain mapping."""
        return self.state_at(*self._cursor())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes seed and cursor from a state.

        Raises:
            StateMismatchError: the state is of another order, or damaged; nothing is changed.
            NodeAttachedError: the sampler belongs to a node; load the node or loader instead.
        """
        self.refuse_attached("load_state_dict")
        entry = self.take(state_dict)
        self._epoch, self._consumed = entry["epoch"], entry["consumed"]
        if self._consumed == self.length:
            self._epoch, self._consumed = self._epoch + 1, 0

    # What follows is for nodes and iterators.

    def arguments(self) -> dict[str, Scalar]:
        """What shapes the order besides its length and seed."""
        arguments = getattr(self.order, "arguments", None)
        found = {} if arguments is None else dict(arguments())
        for name, value in found.items():
            if name in _RESERVED:
                raise ValueError(f"{self.name}.arguments() must not use the name {name!r}, which the state has already")
            if type(value) not in (int, float, str, bool):
                raise TypeError(f"{self.name}.arguments()[{name!r}] must be an int, float, str or bool, got {value!r}")
        return found

    def values(self) -> dict[str, Scalar]:
        """Length, arguments and seed, as a state has them."""
        values = {"length": -1 if self.length is None else self.length, **self.arguments()}
        if self.seed is not None:
            values["seed"] = self.seed
        return values

    def state_at(self, epoch: int, consumed: int) -> SamplerState:
        """`state_dict()` with another cursor."""
        entry = {key: field.value for key, field in self._entry(epoch, consumed).items()}
        return cast(SamplerState, entry)

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Validates a state and adopts its seed; returns it."""
        entry = validate_entry(state, self._entry(0, 0), self.name)
        if self.seed is not None:
            self.seed = entry["seed"]
        return entry

    def _entry(self, epoch: int, consumed: int) -> dict[str, Field]:
        below = None if self.length is None else self.length + 1
        return {
            "type": fixed(self.name),
            **ruled(self.values(), {"seed": adopted_seed}),
            "epoch": counter(epoch),
            "consumed": counter(consumed, below),
        }

    def attach(self, owner: SamplerOwner) -> None:
        """Makes the sampler follow `owner`.

        Raises:
            NodeAttachedError: it belongs to another owner that is still open.
        """
        current = self.owner()
        if current is not None and current is not owner:
            raise NodeAttachedError(
                f"this {self.name} already belongs to a loader or node",
                remedy="Close that one first, or make a second sampler",
            )
        self._owner = weakref.ref(owner)

    def detach(self, owner: SamplerOwner) -> None:
        """Ends `attach`, keeping the owner's last position as the cursor."""
        if self.owner() is owner:
            self._epoch, self._consumed = owner.cursor()
            self._owner = None

    def owner(self) -> SamplerOwner | None:
        """The node that the sampler belongs to, while that is open."""
        return None if self._owner is None else self._owner()

    def _cursor(self) -> tuple[int, int]:
        owner = self.owner()
        return (self._epoch, self._consumed) if owner is None else owner.cursor()

    def refuse_attached(self, method: str) -> None:
        if self.owner() is not None:
            raise NodeAttachedError(
                f"{method} of a {self.name} that a loader or node moves", remedy="Use the loader's own methods"
            )

    def __getstate__(self) -> dict[str, Any]:
        epoch, consumed = self._cursor()
        return {**self.__dict__, "_epoch": epoch, "_consumed": consumed, "_owner": None}


class OrderSampler(ResumableSampler):
    """A sampler of a user's own `Order`.

    Args:
        order: Anything with `indices(seed, epoch, positions)` and, unless endless, `__len__`.
        seed: What `indices` gets as its seed, from 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
    """

    def __init__(self, order: Order, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if not is_order(order):
            raise TypeError(f"order must have a method indices(seed, epoch, positions), got {order!r}")
        super().__init__(order, seed=seed, generator=generator)

    @property
    def name(self) -> str:
        return type(self.order).__name__


class SamplerIterator(Iterator[int]):
    """One pass over what is left of an epoch. Its state holds the raw position: the end of an epoch is (e, length)."""

    def __init__(self, sampler: ResumableSampler, epoch: int, consumed: int) -> None:
        self._sampler = sampler
        self._seek(epoch, consumed)

    def _seek(self, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed = epoch, consumed
        self._chunk: list[int] = []
        self._chunk_start = consumed

    def __iter__(self) -> Self:
        return self

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

    def state_dict(self) -> SamplerState:
        """The position of this pass."""
        return self._sampler.state_at(self._epoch, self._consumed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position; the sampler adopts the seed, its cursor stays.

        Raises:
            StateMismatchError: the state is of another order, or damaged; nothing is changed.
        """
        self._sampler.refuse_attached("load_state_dict on an iterator")
        entry = self._sampler.take(state_dict)
        self._seek(entry["epoch"], entry["consumed"])

"""An order with a cursor: what all samplers and batch samplers are."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from stateful_pipes.errors import (
    NodeAttachedError,
    ResumableModeRequiredError,
    ResumableSamplerGeneratorError,
    StateMismatchError,
)
from stateful_pipes.fields import Field, Scalar, adopted_seed, counter, fixed, ruled
from stateful_pipes.rng import as_seed, draw_seed
from stateful_pipes.samplers.order import Order, check_epoch
from stateful_pipes.state import SamplerState, validate_entry

__all__ = ["OrderCursor"]

T_co = TypeVar("T_co", covariant=True)
_RESERVED = frozenset({"type", "order", "length", "seed", "epoch", "consumed", "cycle", "offset", "world_size", "uneven"})


class SamplerOwner(Protocol):
    """What an attached sampler asks of the node that it belongs to."""

    def cursor(self) -> tuple[int, int]:
        """The consumed position: epoch, and samples consumed in it."""
        ...

    def set_epoch(self, epoch: int) -> None: ...


class OrderCursor(Sampler[T_co]):
    """Base of this library's samplers: an order, its seed, and a cursor of (epoch, samples consumed).

    Iterating starts at the cursor, ends with the epoch and does not move it, so two passes are alike until the cursor
    is moved. Once given to a node or loader the cursor follows what that has consumed.

    With `resumable=False` there is no cursor: each `iter()` starts anew, in an order drawn anew, as torch's samplers do.
    """

    def __init__(
        self,
        order: Order,
        length: int | None,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        seeded: bool = True,
        resumable: bool = True,
    ) -> None:
        if seed is not None and generator is not None:
            raise ValueError("seed and generator exclude each other: one seed is drawn from a generator")
        if not isinstance(resumable, bool):
            raise TypeError(f"resumable must be a bool, got {resumable!r}")
        self.order = order
        self.length = length
        """Samples in an epoch; None for an endless order."""
        self.resumable = resumable
        self.arguments()  # refuses wrong ones
        self._generator = generator
        self._draws_each_pass = seeded and seed is None and not resumable
        self.seed: int | None = None
        if seeded and not self._draws_each_pass:
            self.seed = draw_seed(generator) if seed is None else as_seed(seed)
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
        """How many samples of the current epoch have been consumed."""
        return self._cursor()[1]

    def indices(self, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        """Dataset indices at `positions` of `epoch`, int64 of shape (len(positions),).

        Raises:
            ValueError: the order's answer has another shape or type.
            RuntimeError: it raised StopIteration.
        """
        try:
            found = np.asarray(self.order.indices(self.seed or 0, epoch, positions))
        except StopIteration as error:
            raise RuntimeError(f"{self.name}.indices raised StopIteration") from error
        if found.shape != (len(positions),) or (found.size and not np.issubdtype(found.dtype, np.integer)):
            raise ValueError(
                f"{self.name}.indices must give {len(positions)} integers for {positions}, "
                f"got {found.dtype} of shape {found.shape}"
            )
        return found.astype(np.int64, copy=False)

    def __iter__(self) -> Iterator[T_co]:
        if self.resumable:
            return self.iterator(*self._cursor())
        one = copy.copy(self)  # so that a pass under way is not changed by the next
        if self._draws_each_pass:
            one.seed = draw_seed(self._generator)
            return one.iterator(0, 0)
        self._epoch += 1
        return one.iterator(self._epoch - 1, 0)

    def iterator(self, epoch: int, consumed: int) -> Iterator[T_co]:
        """One pass over what is left of an epoch."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; does nothing where that is the current epoch, at whatever position.

        On a sampler that belongs to a loader this is the loader's own `set_epoch`.
        """
        epoch = check_epoch(epoch)
        if not self.resumable:
            self._epoch = epoch  # frameworks call it on any sampler that has it
            return
        owner = self.owner()
        if owner is not None:
            owner.set_epoch(epoch)
        elif epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def state_dict(self) -> SamplerState:
        """The cursor and what shapes the order, as a fresh plain mapping.

        Raises:
            ResumableModeRequiredError: it was made with `resumable=False`.
        """
        return self.state_at(*self._cursor())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes seed and cursor from a state.

        Raises:
            StateMismatchError: the state is of another order, or damaged; nothing is changed.
            ResumableSamplerGeneratorError: all is right but the order's seed; nothing is changed.
            NodeAttachedError: the sampler belongs to a node; load the node or loader instead.
            ResumableModeRequiredError: it was made with `resumable=False`.
        """
        self.refuse_attached("load_state_dict")
        entry = self.take(state_dict)
        self.place(entry["epoch"], entry["consumed"])

    def validate_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises what `load_state_dict` would, and changes nothing."""
        self.refuse_attached("validate_state_dict")
        self._valid(state_dict)

    # What follows is for nodes, iterators and subclasses here.

    def place(self, epoch: int, consumed: int) -> None:
        """Puts the cursor there; the end of an epoch is the start of the next."""
        over = consumed == self.length
        self._epoch, self._consumed = (epoch + 1, 0) if over else (epoch, consumed)

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

    def position(self, consumed: int) -> dict[str, int]:
        """The cursor within an epoch, as a state has it."""
        return {"consumed": consumed}

    def located(self, entry: Mapping[str, Any], name: str) -> int:
        """Samples consumed, of a valid entry of node `name`; StateMismatchError if it contradicts itself."""
        return int(entry["consumed"])

    def state_at(self, epoch: int, consumed: int) -> SamplerState:
        """`state_dict()` with another cursor."""
        self.require_resumable("a state")
        entry = {key: field.value for key, field in self._entry(epoch, consumed).items()}
        return cast(SamplerState, entry)

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Validates a state and adopts its seed; returns it."""
        entry = self._valid(state)
        if self.seed is not None:
            self.seed = entry["seed"]
        return entry

    def _valid(self, state: Mapping[str, Any]) -> dict[str, Any]:
        self.require_resumable("load_state_dict")
        try:
            entry = validate_entry(state, self._entry(0, 0), self.name)
        except StateMismatchError as error:
            (first, *more) = error.differences
            if first.field != "seed" or "seed" not in state or more:
                raise
            raise ResumableSamplerGeneratorError(str(first), node=self.name) from error
        self.located(entry, self.name)
        return entry

    def _entry(self, epoch: int, consumed: int) -> dict[str, Field]:
        below = None if self.length is None else self.length + 1
        return {
            "type": fixed(self.name),
            **ruled(self.values(), {"seed": adopted_seed}),
            "epoch": counter(epoch),
            **{key: counter(value, below) for key, value in self.position(consumed).items()},
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
            self.place(*owner.cursor())
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

    def require_resumable(self, what: str) -> None:
        if not self.resumable:
            raise ResumableModeRequiredError(
                f"{what} of a {self.name} that was made with resumable=False", remedy="Make it with resumable=True"
            )

    def __getstate__(self) -> dict[str, Any]:
        epoch, consumed = self._cursor()
        return {**self.__dict__, "_epoch": epoch, "_consumed": consumed, "_owner": None}

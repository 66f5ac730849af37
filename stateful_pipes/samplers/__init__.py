"""Orders: torch samplers that are pure functions of (seed, epoch, position)."""

from __future__ import annotations

from typing import cast

from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.samplers.base import OrderSampler, ResumableSampler
from stateful_pipes.samplers.order import Order, is_order
from stateful_pipes.samplers.random import InfiniteRandomSampler, RandomSampler
from stateful_pipes.samplers.sequential import SequentialSampler

__all__ = [
    "InfiniteRandomSampler",
    "Order",
    "OrderSampler",
    "RandomSampler",
    "ResumableSampler",
    "SequentialSampler",
    "as_resumable",
]

_EXACT = frozenset({InfiniteRandomSampler, OrderSampler, RandomSampler, SequentialSampler})


def as_resumable(sampler: object) -> ResumableSampler:
    """The sampler itself if it is one of this library's, a user's `Order` as an `OrderSampler`.

    Raises:
        ResumableModeRequiredError: a subclass of one of ours, whose iteration and cursor may differ, or a foreign sampler.
    """
    if isinstance(sampler, ResumableSampler):
        if type(sampler) in _EXACT:
            return sampler
        raise ResumableModeRequiredError(
            f"{type(sampler).__name__} is a subclass of {type(sampler).__mro__[1].__name__}: its iteration and its cursor "
            "may differ",
            remedy="Write the order as a class with indices(seed, epoch, positions) and pass OrderSampler(order)",
        )
    if is_order(sampler):
        return OrderSampler(cast(Order, sampler))
    raise ResumableModeRequiredError(
        f"a {type(sampler).__name__} has no position that could be resumed",
        remedy="Use a sampler of stateful_pipes, or pass OrderSampler(order) for an order of your own",
    )

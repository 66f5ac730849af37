"""Orders: torch samplers that are pure functions of (seed, epoch, position)."""

from __future__ import annotations

from typing import cast

from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.samplers.balanced import BalancedBatchSampler, ClassBalancedBatchSampler
from stateful_pipes.samplers.base import OrderSampler, ResumableSampler
from stateful_pipes.samplers.batches import ResumableBatchSampler
from stateful_pipes.samplers.build import build_batch_sampler
from stateful_pipes.samplers.cursor import OrderCursor
from stateful_pipes.samplers.naive import NaiveBatchSampler
from stateful_pipes.samplers.order import Order, is_order
from stateful_pipes.samplers.random import InfiniteRandomSampler, RandomSampler
from stateful_pipes.samplers.sequential import SequentialSampler
from stateful_pipes.samplers.weighted import WeightedRandomSampler

__all__ = [
    "BalancedBatchSampler",
    "ClassBalancedBatchSampler",
    "InfiniteRandomSampler",
    "NaiveBatchSampler",
    "Order",
    "OrderCursor",
    "OrderSampler",
    "RandomSampler",
    "ResumableBatchSampler",
    "ResumableSampler",
    "SequentialSampler",
    "WeightedRandomSampler",
    "as_resumable",
    "build_batch_sampler",
]

_EXACT = frozenset(
    {
        BalancedBatchSampler,
        ClassBalancedBatchSampler,
        InfiniteRandomSampler,
        NaiveBatchSampler,
        OrderSampler,
        RandomSampler,
        SequentialSampler,
        WeightedRandomSampler,
    }
)


def as_resumable(sampler: object) -> ResumableSampler | ResumableBatchSampler:
    """The sampler itself if it is one of this library's, a user's `Order` as an `OrderSampler`.

    Raises:
        ResumableModeRequiredError: a foreign sampler, one made with `resumable=False`, or a subclass of one of ours, whose
            iteration and cursor may differ.
    """
    if isinstance(sampler, (ResumableSampler, ResumableBatchSampler)):
        if not sampler.resumable:
            raise ResumableModeRequiredError(
                f"a {sampler.name} that was made with resumable=False, in a pipeline with resume",
                remedy="Make it with resumable=True, or the StatefulDataLoader with resumable=False",
            )
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
        remedy="Use a sampler or batch sampler of stateful_pipes, pass OrderSampler(order) for an order of your own, or make the "
        "StatefulDataLoader with resumable=False",
    )

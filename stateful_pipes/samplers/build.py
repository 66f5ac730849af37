"""Batch samplers by name, as configuration files want them."""

from __future__ import annotations

from typing import Any, Final

import torch

from stateful_pipes.samplers.balanced import BalancedBatchSampler, ClassBalancedBatchSampler
from stateful_pipes.samplers.batches import ResumableBatchSampler
from stateful_pipes.samplers.naive import NaiveBatchSampler

__all__ = ["build_batch_sampler"]

_BY_NAME: Final[dict[str, type[ResumableBatchSampler]]] = {
    "naive": NaiveBatchSampler,
    "class_balance": ClassBalancedBatchSampler,
    "balance": BalancedBatchSampler,
}


def build_batch_sampler(
    _target_: str,
    dataset: Any,
    batch_size: int,
    *,
    repeat: bool = True,
    shuffle: bool = True,
    drop_last: bool = True,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    resumable: bool = True,
    **arguments: Any,
) -> ResumableBatchSampler:
    """The batch sampler of a name.

    Args:
        _target_: "naive", "class_balance" or "balance".
        dataset: A sized dataset, or its length.
        batch_size: At least 1.
        repeat: Cycle after cycle in one endless epoch; else each epoch is one cycle.
        shuffle, drop_last, seed, generator, resumable: As of the class.
        arguments: What else `ClassBalancedBatchSampler` or `BalancedBatchSampler` takes.

    Raises:
        ValueError: there is none of this name.
        ResumableBatchConfigurationError: no valid batch is possible.

    >>> build_batch_sampler("naive", range(10), 4, drop_last=False).samples
    10
    """
    if _target_ not in _BY_NAME:
        raise ValueError(f"_target_ must be one of {', '.join(map(repr, _BY_NAME))}, got {_target_!r}")
    make: Any = _BY_NAME[_target_]
    sampler: ResumableBatchSampler = make(
        dataset,
        batch_size,
        repeat=repeat,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
        generator=generator,
        resumable=resumable,
        **arguments,
    )
    return sampler

"""torch's DataLoader parameters, turned into a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, MapDataPipe, default_collate, default_convert

from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError
from stateful_pipes.node import Node
from stateful_pipes.nodes.batcher import SeededBatcher
from stateful_pipes.nodes.mapper import SeededMapper
from stateful_pipes.nodes.pin_memory import PinnedMemory
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher
from stateful_pipes.rng import GLOBAL_GENERATORS, Rng, as_seed, draw_seed
from stateful_pipes.samplers import OrderCursor, RandomSampler, ResumableBatchSampler, SequentialSampler, as_resumable

__all__ = ["DatasetArguments", "build", "collate_of", "refuse_another_length", "refuse_arguments"]


class DatasetArguments(NamedTuple):
    """What the dataset door was given; see `StatefulDataLoader`."""

    dataset: Any
    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | BaseContext | None = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    seed: int | None = None
    rng: Rng = GLOBAL_GENERATORS
    reseed: Callable[[Any, int], object] | None = None
    max_skipped: int = 0
    max_restarts: int = 3
    fingerprint: str | Callable[[], str] | None = None
    resumable: bool = True


def build(a: DatasetArguments) -> Node[Any]:
    """The pipeline: sampler, mapper, batcher, prefetcher.

    One seed serves all its nodes, since each hashes it with a purpose of its own.
    """
    _check_dataset(a)
    _check_workers(a)
    _check_order(a)
    order_seed = draw_seed(a.generator) if a.generator is not None else None
    seed = as_seed(a.seed) if a.seed is not None else draw_seed() if order_seed is None else order_seed
    source = _source(a, seed if order_seed is None else order_seed)
    try:
        return _compose(source, a, seed)
    except BaseException:
        source.release()  # the caller may try other arguments with the same sampler
        raise


def _compose(node: Node[Any], a: DatasetArguments, seed: int) -> Node[Any]:
    node = SeededMapper(
        node,
        a.dataset.__getitem__,
        seed=seed,
        rng=a.rng,
        reseed=a.reseed,
        max_skipped=a.max_skipped,
        fingerprint=a.fingerprint,
    )
    if a.batch_sampler is not None:
        node = SeededBatcher(node, None, collate_fn=a.collate_fn, seed=seed)
    elif a.batch_size is None:
        # torch converts each sample; a collate_fn of the caller's takes the place of that.
        plain = a.collate_fn is None or a.collate_fn is default_convert
        node = SeededMapper(
            node, a.collate_fn or default_convert, seed=seed, rng=() if plain else GLOBAL_GENERATORS, name="collate"
        )
    else:
        node = SeededBatcher(node, a.batch_size, drop_last=a.drop_last, collate_fn=a.collate_fn, seed=seed)
    node = ProcessPrefetcher(
        node,
        a.num_workers,
        prefetch_factor=2 if a.prefetch_factor is None else a.prefetch_factor,
        multiprocessing_context=a.multiprocessing_context,
        worker_init_fn=a.worker_init_fn,
        timeout=a.timeout,
        max_restarts=a.max_restarts,
    )
    return PinnedMemory(node, a.pin_memory_device) if _pins(a) else node


def collate_of(a: DatasetArguments) -> Callable[[Any], Any]:
    """The collate function in force."""
    if a.collate_fn is not None:
        return a.collate_fn
    return default_convert if a.batch_size is None else default_collate


def _source(a: DatasetArguments, seed: int) -> Node[Any]:
    given = a.sampler if a.batch_sampler is None else a.batch_sampler
    if given is None:
        order = RandomSampler(a.dataset, seed=seed, resumable=a.resumable) if a.shuffle else None
        given = order or SequentialSampler(a.dataset, resumable=a.resumable)
    if a.resumable:
        sampler = as_resumable(given)
        if isinstance(sampler, ResumableBatchSampler) != (a.batch_sampler is not None):
            raise TypeError(f"{sampler.name} is {'a' if a.batch_sampler is None else 'no'} batch sampler")
        return SamplerNode(sampler)
    for part in (given, getattr(given, "sampler", None)):  # torch's BatchSampler holds one
        if isinstance(part, OrderCursor) and part.resumable:
            raise ResumableModeRequiredError(
                f"a {part.name} with resume in a StatefulDataLoader that was made with resumable=False",
                remedy="Make both with resumable=True, or both without",
            )
    return PlainSamplerNode(given, a.batch_sampler is not None)


def _check_order(a: DatasetArguments) -> None:
    if a.batch_sampler is not None and (a.batch_size != 1 or a.shuffle or a.sampler is not None or a.drop_last):
        raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
    if a.batch_size is None and a.drop_last:
        raise ValueError("batch_size=None turns batching off, so drop_last=True has no meaning")
    if a.sampler is not None and a.shuffle:
        raise ValueError("sampler and shuffle=True exclude each other")


def _check_dataset(a: DatasetArguments) -> None:
    dataset = a.dataset
    if isinstance(dataset, IterableDataset):
        raise ResumableModeRequiredError(
            f"{type(dataset).__name__} is an IterableDataset, which has no positions",
            remedy="Pass a pipeline over IterableDatasetReader(dataset), or one of torchdata.nodes.IterableWrapper(dataset)",
        )
    if isinstance(dataset, MapDataPipe):
        raise ResumableModeRequiredError(
            f"{type(dataset).__name__} is a MapDataPipe, whose graph has settings of its own",
            remedy="Pass a pipeline of SamplerNode and SeededMapper(node, pipe.__getitem__) instead",
        )
    if a.resumable and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        raise ResumableModeRequiredError(
            f"{type(dataset).__name__} has a state of its own, which workers would each change for themselves",
            remedy="Make __getitem__ a function of the index alone, or make the stateful part a torchdata node",
        )
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset must be a map-style dataset or a torchdata node, got {type(dataset).__name__}")


def _check_workers(a: DatasetArguments) -> None:
    if a.num_workers == 0 and a.prefetch_factor is not None:
        raise ValueError(f"prefetch_factor={a.prefetch_factor} has no meaning with num_workers=0")
    if a.num_workers == 0 and a.persistent_workers:
        raise ValueError("persistent_workers=True has no meaning with num_workers=0")
    if a.num_workers == 0 and a.multiprocessing_context is not None:
        raise ValueError(f"multiprocessing_context={a.multiprocessing_context!r} has no meaning with num_workers=0")


def _pins(a: DatasetArguments) -> bool:
    if a.pin_memory and not torch.accelerator.is_available():
        warnings.warn("pin_memory=True, but there is no accelerator: memory is not pinned", UserWarning, stacklevel=5)
        return False
    return a.pin_memory


def refuse_another_length(dataset: Any, length: int) -> None:
    """Raises ResumableBatchConfigurationError if the dataset is no longer as long as the order that was made for it."""
    if len(dataset) != length:
        raise ResumableBatchConfigurationError(
            "the dataset has another length than when the loader was made",
            expected=length,
            found=len(dataset),
            remedy="Make another loader",
        )


def refuse_arguments(given: DatasetArguments, in_order: bool) -> None:
    """With a node there is nothing left that torch's parameters could mean."""
    if given.resumable is not True:
        raise ResumableModeRequiredError(
            f"resumable={given.resumable!r} with a {type(given.dataset).__name__}, which has a position",
            remedy="Use it with a dataset",
        )
    plain = DatasetArguments(given.dataset)
    named = [name for name, one, other in zip(given._fields, given, plain, strict=True) if one is not other and one != other]
    named += ["in_order"] * (not in_order)
    if named:
        raise ValueError(f"{', '.join(named)} given beside a node: say it in the pipeline's own nodes")

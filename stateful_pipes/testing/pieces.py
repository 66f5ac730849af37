"""A pipeline read piece by piece: opened by the user's factory, with any number of workers, from any state."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import BaseNode

from stateful_pipes.caught import brief
from stateful_pipes.contract import NodeContract
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.nodes.flat_mapper import SeededFlatMapper
from stateful_pipes.nodes.foreign import sources_of
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher, prefetchers_of
from stateful_pipes.testing.comparison import Mismatch, first_mismatch
from stateful_pipes.testing.surroundings import move_generators
from stateful_pipes.ticket import Samples
from stateful_pipes.training import cpu_state

__all__ = [
    "Factory",
    "FactoryError",
    "Step",
    "chosen_prefetcher",
    "difference",
    "kept",
    "opened",
    "read_pieces",
    "row_of",
    "samples_behind",
    "steps",
    "takes_workers",
]

Factory = Callable[..., Any]
_EMPTY_EPOCHS = 3
"""So many in a row, and no more is expected."""


class FactoryError(TypeError):
    """What the factory makes is nothing that could be verified."""


class Step(NamedTuple):
    """One batch, and the epoch and number that `loader.position` had before it."""

    epoch: int
    batch: int
    content: Any


def opened(factory: Factory, workers: int | None = None) -> StatefulDataLoader[Any]:
    """A loader over what the factory makes, with so many workers where it lets itself be told; None: as it comes.

    Raises:
        FactoryError: it makes neither a `StatefulDataLoader` nor a torchdata node.
    """
    told = workers is not None and takes_workers(factory)
    made = factory(num_workers=workers) if told else factory()
    if not isinstance(made, (StatefulDataLoader, BaseNode)):
        raise FactoryError(
            f"factory must return a StatefulDataLoader or a torchdata node, got {type(made).__name__}{_hint(made)}"
        )
    loader = made if isinstance(made, StatefulDataLoader) else StatefulDataLoader(made)
    if workers is not None and not told:
        chosen = chosen_prefetcher(loader)
        for node in prefetchers_of(loader.pipeline):
            node.num_workers = workers if node is chosen else 0  # none has started yet
    return loader


def takes_workers(factory: Factory) -> bool:
    """Whether it has a parameter `num_workers`."""
    try:
        return "num_workers" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable in C
        return False


def chosen_prefetcher(loader: StatefulDataLoader[Any]) -> ProcessPrefetcher[Any] | None:
    """The one that has workers, else the highest that may have some: none below a mixture or a flat mapper."""
    for prefetcher in prefetchers_of(loader.pipeline):
        if prefetcher.num_workers:
            return prefetcher
    node: NodeContract = loader.pipeline
    while not isinstance(node, ProcessPrefetcher):
        sources = sources_of(node)
        if len(sources) != 1 or isinstance(node, SeededFlatMapper):
            return None
        node = sources[0]
    return node


def steps(loader: StatefulDataLoader[Any]) -> Iterator[Step]:
    """What is left of the epoch under way, and all that follow."""
    empty = 0
    while empty < _EMPTY_EPOCHS:
        batches, empty = iter(loader), empty + 1
        while True:
            at = loader.position
            try:
                content = next(batches)
            except StopIteration:
                break
            empty = 0
            yield Step(at.epoch, at.batch, content)


def read_pieces(factory: Factory, state: str, counts: list[int]) -> tuple[list[Step], str]:
    """So many steps from each of a chain of pipelines, without workers, each from the state of the one before it.

    Returns:
        The steps, until something raised, and what that was.
    """
    found: list[Step] = []
    try:
        for number, count in enumerate(counts):
            move_generators((number, number, number))
            with closing(opened(factory, 0)) as loader:
                loader.load_state_dict(json.loads(state))
                found += [kept(step) for _, step in zip(range(count), steps(loader), strict=False)]
                state = json.dumps(loader.state_dict())
    except Exception as error:
        return found, brief(error)
    return found, ""


def kept(step: Step) -> Step:
    """A copy that no later batch can change."""
    try:
        return step._replace(content=cpu_state(step.content))
    except Exception:  # something in it cannot be copied
        return step


def difference(expected: Step, found: Step | None) -> Mismatch | None:
    """What differs in a step; None if nothing does."""
    if found is None or expected[:2] != found[:2]:
        there = "nothing" if found is None else f"epoch {found.epoch}, batch {found.batch}"
        return Mismatch("position", f"epoch {expected.epoch}, batch {expected.batch}", there)
    return first_mismatch(expected.content, found.content)


def samples_behind(factory: Factory, state: str) -> Samples | None:
    """What the batch behind a state is made of, which is pulled and not read; None where that cannot be told."""
    try:
        with closing(opened(factory, 0)) as loader:
            loader.load_state_dict(json.loads(state))
            root = loader.pipeline
            root.stream.settle(root)
            return root.samples(root.pull(1))
    except Exception:
        return None


def row_of(expected: Any, found: Any, rows: int) -> int | None:
    """The first sample, of so many in a batch, that differs; None where its rows cannot be told apart."""
    for row in range(rows):
        one, other = _row(expected, row, rows), _row(found, row, rows)
        if one is None or other is None:
            return None
        if first_mismatch(one, other) is not None:
            return row
    return None


def _row(batch: Any, row: int, rows: int) -> Any:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[row] if batch.ndim and len(batch) == rows else None
    if isinstance(batch, dict):
        found = {key: _row(one, row, rows) for key, one in batch.items()}
        return {key: one for key, one in found.items() if one is not None} or None
    if isinstance(batch, (list, tuple)):
        fields = [one for one in (_row(field, row, rows) for field in batch) if one is not None]
        if fields and len(fields) == len(batch):
            return fields
        return cast(Any, [batch[row]]) if len(batch) == rows else None
    return None


def _hint(made: object) -> str:
    if made is None:
        return "; does it lack a return?"
    return ": give the same arguments to stateful_pipes.StatefulDataLoader" if isinstance(made, DataLoader) else ""

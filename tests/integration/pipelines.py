"""The pipelines and the walks over them that the tests of this folder share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from stateful_pipes import ProcessPrefetcher, RandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader, as_node
from tests.streams import DrawingDataset, disturb, drawing_collate, same

LENGTH, BATCH_SIZE, EPOCHS = 7, 2, 3


def samples(length: int = LENGTH, **options: Any) -> SeededMapper[Any]:
    """Shuffled samples that draw from every generator. The seeds are fixed: what is resumed must not depend on luck."""
    return SeededMapper(SamplerNode(RandomSampler(length, seed=1)), DrawingDataset(length).__getitem__, **{"seed": 2, **options})


def batches(workers: int, length: int = LENGTH, *, drop_last: bool = False) -> ProcessPrefetcher[Any]:
    """Those samples in batches whose collate function draws too."""
    batcher = SeededBatcher(samples(length), BATCH_SIZE, collate_fn=drawing_collate, seed=3, drop_last=drop_last)
    return ProcessPrefetcher(batcher, workers)


def shut(loader: Any) -> None:
    """Ends the workers below any of the three doors."""
    if isinstance(loader, StatefulDataLoader):
        loader.close()
    else:
        # torchdata's Loader holds the node as root, its StatefulDataLoader the dataset over it.
        as_node(loader.root if hasattr(loader, "root") else loader.dataset.node).close()


def epochs(loader: Any, count: int) -> list[list[Any]]:
    """So many epochs, while the training loop draws from the global generators between batches."""
    read: list[list[Any]] = []
    for _ in range(count):
        read.append([])
        for batch in loader:
            read[-1].append(batch)
            disturb()
    return read


def check_resumes(make: Callable[[], Any], count: int = EPOCHS, remake: Callable[[], Any] | None = None) -> list[list[Any]]:
    """Saves at every step of `count` epochs; each state resumes a new loader exactly. Returns the epochs.

    The steps: before the first batch, after each batch, after each StopIteration. What an epoch's last batch leaves
    and what its StopIteration leaves are both the start of the next epoch.

    Args:
        make: A new loader; it is asked once for each state, and once for the uninterrupted stream.
        remake: What makes the loaders that resume, if not `make`.
    """
    loader = make()
    try:
        whole = epochs(loader, count)
    finally:
        shut(loader)
    assert all(whole), "a test over empty epochs would show nothing"
    for epoch, position, state in list(states(make, count)):
        resumed = (remake or make)()
        try:
            resumed.load_state_dict(state)
            expected = [whole[epoch][position:], *whole[epoch + 1 :]]
            if not expected[0]:
                del expected[0]
            found = epochs(resumed, len(expected))
        finally:
            shut(resumed)
        assert same(found, expected), f"resumed at epoch {epoch} after batch {position}"
    return whole


def states(make: Callable[[], Any], count: int) -> Iterator[tuple[int, int, Any]]:
    """(epoch, batches read, state) at each step of one loader."""
    loader = make()
    try:
        yield 0, 0, loader.state_dict()
        for epoch in range(count):
            position = 0
            for position, _ in enumerate(loader, 1):
                disturb()
                yield epoch, position, loader.state_dict()
            yield epoch, position, loader.state_dict()
    finally:
        shut(loader)


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next items, exactly so many."""
    taken = list(islice(iterator, count))
    assert len(taken) == count
    return taken


def worker_pids() -> set[int]:
    """The workers that this process has now."""
    return {
        child.pid for child in multiprocessing.active_children() if child.name.startswith("stateful_pipes worker") and child.pid
    }

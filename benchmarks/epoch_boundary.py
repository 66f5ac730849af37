"""From the last batch of an epoch to the first of the next: how long does a training loop stand still?

    python benchmarks/epoch_boundary.py [--json PATH] [--smoke]

Epochs of 8 batches, shuffled, two workers, and a consumer that is slower than they are: it keeps each batch of u8 for 40
ms, of tiny for 10. The clock runs from asking for what follows the last batch, through StopIteration and `iter(loader)`,
until the first batch of the next epoch is there. Ours is compared with torch's `DataLoader` with `persistent_workers=True`,
which like ours keeps its workers, but has them begin an epoch only when it is asked for one. In each round both are made
anew and go through some epochs; what counts is the median of their boundaries. Beside it stands what ours takes for any
other batch. Before that it is checked that each epoch of both has all of its samples once, and that no two are alike.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                         unit  times  lower q.   median  upper q.       target  reached
    u8, stateful_pipes             ms     11      0.46    0.512     0.547            -        -
    u8, torch DataLoader           ms     11     18.19    20.45      23.1            -        -
    u8, ours, any other batch      ms     11    0.3614   0.3992     0.436            -        -
    u8, ours / torch                x     11   0.02154  0.02655   0.02891  at most 0.1      yes
    tiny, stateful_pipes           ms     11    0.5034   0.5263    0.5628            -        -
    tiny, torch DataLoader         ms     11     6.026    6.233      6.35            -        -
    tiny, ours, any other batch    ms     11    0.4173   0.4343     0.443            -        -
    tiny, ours / torch              x     11    0.0803  0.08794   0.08974  at most 0.1      yes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require, timed
from torch.utils.data import DataLoader, Subset
from workloads import workload

from stateful_pipes import StatefulDataLoader

WORKERS = 2
BATCHES = 8
CONSUMER_S = {"u8": 0.04, "tiny": 0.01}

Make = Callable[[Any, int], AbstractContextManager[Any]]


class Times(NamedTuple):
    """Milliseconds, medians of one run."""

    boundary: float
    within: float


def ours(dataset: Any, batch_size: int) -> AbstractContextManager[Any]:
    return StatefulDataLoader(dataset, batch_size, shuffle=True, num_workers=WORKERS)


def torch_loader(dataset: Any, batch_size: int) -> AbstractContextManager[Any]:
    return nullcontext(DataLoader(dataset, batch_size, shuffle=True, num_workers=WORKERS, persistent_workers=True))


def check(make: Make) -> None:
    """Two epochs of numbers in place of samples."""
    count = 4 * BATCHES
    with make(range(count), 4) as loader:
        first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    require(sorted(first) == sorted(second) == list(range(count)), "an epoch has not each of its samples once")
    require(first != second, "two epochs have the same order")


def run(make: Make, dataset: Any, batch_size: int, epochs: int, consumer_s: float) -> Times:
    boundaries, within = [], []
    with make(dataset, batch_size) as loader:
        batches = iter(loader)
        next(batches)
        for _ in range(epochs):
            for _ in range(BATCHES - 1):
                time.sleep(consumer_s)
                within.append(1e3 * timed(next, batches))
            time.sleep(consumer_s)
            start = time.perf_counter()
            ended = next(batches, None) is None
            batches = iter(loader)
            next(batches)
            boundaries.append(1e3 * (time.perf_counter() - start))
            require(ended, "an epoch has more batches than belong to it")
    return Times(statistics.median(boundaries), statistics.median(within))


def main() -> None:
    options = arguments(__doc__)
    rounds, epochs = (2, 1) if options.smoke else (ROUNDS, 5)
    contestants = {"stateful_pipes": ours, "torch DataLoader": torch_loader}
    for make in contestants.values():
        check(make)
    figures = []
    for name, consumer_s in CONSUMER_S.items():
        held = workload(name)
        dataset = Subset(held.dataset, range(BATCHES * held.batch_size))
        runs = {what: partial(run, make, dataset, held.batch_size, epochs, consumer_s) for what, make in contestants.items()}
        found = in_turn(runs, rounds)
        boundaries = {what: [times.boundary for times in each] for what, each in found.items()}
        figures += [Figure(f"{name}, {what}", "ms", values) for what, values in boundaries.items()]
        figures += [
            Figure(f"{name}, ours, any other batch", "ms", [times.within for times in found["stateful_pipes"]]),
            Figure(f"{name}, ours / torch", "x", ratios(*boundaries.values()), target=0.1, at_most=True),
        ]
    report("epoch_boundary", figures, options)


if __name__ == "__main__":
    main()

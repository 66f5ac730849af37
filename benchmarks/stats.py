"""What does the main process pay for `loader.stats()`: the time within `next`, and each node's own?

    python benchmarks/stats.py [--json PATH] [--smoke]

The tiny workload with two workers, and the cheapest pipeline that there is, without: a sampler and a mapper that seeds nothing,
each index a batch. One and the same loader is read by blocks of 50 and of 500 batches, in turn with its accounting
and without (the timed methods taken away, the clock replaced by nothing), so that processes, memory and caches are the same; a
single value is the median of 30 pairs of blocks.
What workers pay, they pay in both: they add up in shared memory, and nothing of it is sent. Before that it is checked that the
batches are the same in both. Asking `stats()` itself is measured, too; it is not done for each batch.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                 unit  times  lower q.  median  upper q.     target  reached
    two workers, without         CPU us/batch     11       123   157.5       167          -        -
    two workers, with            CPU us/batch     11     125.7     164     172.3          -        -
    two workers, with / without             x     11     1.029   1.032     1.038          -        -
    two workers, more            CPU us/batch     11     3.938   4.248     6.058  at most 5       no
    two workers, stats()                   us     11     56.02   57.01     64.01          -        -
    no workers, without          CPU us/batch     11     8.797   9.675     15.51          -        -
    no workers, with             CPU us/batch     11     10.39   10.58     18.45          -        -
    no workers, with / without              x     11     1.183   1.197     1.202          -        -
    no workers, more             CPU us/batch     11     1.559    1.74     3.037  at most 5      yes
    no workers, stats()                    us     11     32.99   33.84      40.9          -        -
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require, timed
from peers import WARMUP, WORKERS
from workloads import workload

from stateful_pipes import SamplerNode, SeededMapper, SequentialSampler, StatefulDataLoader, iterator, stream
from stateful_pipes.contract import walk

Loader = StatefulDataLoader[Any]
WITH, WITHOUT = "with", "without"
PAIRS = 30


@contextmanager
def uncounted(loader: Loader) -> Iterator[None]:
    """Within, the main process times nothing."""
    nodes = list(walk(loader.pipeline))
    held = [(node, name, vars(node).pop(name)) for node in nodes for name in ("run", "pull") if name in vars(node)]
    with patch.object(iterator, "time_nodes", lambda root: None), patch.object(stream, "monotonic_ns", int):
        yield
    for node, name, method in held:
        vars(node)[name] = method


def cheapest() -> Loader:
    return StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(2**20)), abs, rng=()))


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def cpu_us(loader: Loader, batches: Iterator[Any], count: int, counts: bool) -> float:
    """Microseconds of the main process's CPU time for each of the next batches."""

    def take() -> float:
        start = time.process_time()
        for _ in range(count):
            next(batches)
        return 1e6 * (time.process_time() - start) / count

    if counts:
        return take()
    with uncounted(loader):
        return take()


def check(make: Callable[[], Loader]) -> None:
    with make() as one, make() as other:
        first = next(iter(other))
        counted = [batch for batch, _ in zip(one, range(4), strict=False)]
        with uncounted(other):
            rest = [batch for batch, _ in zip(other, range(3), strict=False)]
        for batch, another in zip(counted, [first, *rest], strict=True):
            require(same(batch, another), "the batches are others without the accounting")
        require(sum(one.stats()["nodes"].values()) > 0, "nothing was counted")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return all(map(same, one, other))
    return bool(one == other)


def figures(name: str, make: Callable[[], Loader], count: int, rounds: int) -> list[Figure]:
    check(make)
    with make() as loader:
        batches = endless(loader)
        for _ in range(WARMUP):
            next(batches)
        blocks = {name: partial(cpu_us, loader, batches, count, name == WITH) for name in (WITHOUT, WITH)}
        turns = [in_turn(blocks, PAIRS) for _ in range(rounds)]
        asked = [1e6 * timed(loader.stats) for _ in range(rounds)]
    found = {name: [median(turn[name]) for turn in turns] for name in blocks}
    more = [median(one - other for one, other in zip(turn[WITH], turn[WITHOUT], strict=True)) for turn in turns]
    times = [median(ratios(turn[WITH], turn[WITHOUT])) for turn in turns]
    return [
        Figure(f"{name}, without", "CPU us/batch", found[WITHOUT]),
        Figure(f"{name}, with", "CPU us/batch", found[WITH]),
        Figure(f"{name}, with / without", "x", times),
        Figure(f"{name}, more", "CPU us/batch", more, target=5, at_most=True),
        Figure(f"{name}, stats()", "us", asked),
    ]


def main() -> None:
    options = arguments(__doc__)
    tiny = workload("tiny", options.smoke)
    pooled = partial(StatefulDataLoader, tiny.dataset, tiny.batch_size, True, num_workers=WORKERS, seed=1)
    few, many, rounds = (1, 10, 2) if options.smoke else (50, 500, ROUNDS)
    report(
        "stats",
        [*figures("two workers", pooled, few, rounds), *figures("no workers", cheapest, many, rounds)],
        options,
    )


if __name__ == "__main__":
    main()

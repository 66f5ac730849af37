"""What does a shuffled order of 10^12 samples cost, to have and to read?

    python benchmarks/order.py [--json PATH] [--smoke]

To have: making a `RandomSampler(10**12)` and asking it for its first index, the clock and the peak of what Python and
NumPy allocate meanwhile. To read: 10^6 consecutive indices from its middle, against `torch.randperm(10**6)`, which makes
as many but has to hold all of its order. Both use one thread. Before that the indices are checked: distinct, inside the
length, and the same when asked for one by one.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                      unit  times  lower q.  median  upper q.        target  reached
    an order of 10^12, built    ms     21    0.1348   0.138     0.147    at most 10      yes
    its memory at the peak      kB     21     2.936    2.94     2.944  at most 1000      yes
    10^6 consecutive indices    ms     21     34.72   36.25     40.22             -        -
    torch.randperm(10**6)       ms     21     7.427   9.387     10.08             -        -
    indices / randperm           x     21     3.588   4.079     4.648     at most 4       no
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import numpy.typing as npt
import torch
from harness import Figure, arguments, in_turn, ratios, report, require, timed

from stateful_pipes import RandomSampler

LENGTH = 10**12
BLOCK = range(LENGTH // 2, LENGTH // 2 + 10**6)


def build(seed: int) -> float:
    """Milliseconds until the first index is there."""
    start = time.perf_counter()
    RandomSampler(LENGTH, seed=seed).indices(0, range(1))
    return 1e3 * (time.perf_counter() - start)


def memory(seed: int) -> float:
    """Kilobytes at the peak of the same; apart from the clock, which tracing slows down."""
    tracemalloc.start()
    sampler = RandomSampler(LENGTH, seed=seed)
    sampler.indices(0, range(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e3


def check(sampler: RandomSampler) -> None:
    found = sampler.indices(0, BLOCK)
    require(len(np.unique(found)) == len(BLOCK), "an index comes twice")
    require(bool(found.min() >= 0) and bool(found.max() < LENGTH), "an index lies outside the length")
    require(bool(np.ptp(found) > 0.99 * LENGTH), "the indices are of one region of the order")
    for offset in range(0, len(BLOCK), 99_991):
        (single,) = sampler.indices(0, BLOCK[offset : offset + 1])
        require(single == found[offset], f"the index at {BLOCK[offset]:,} is another when asked for alone")


def main() -> None:
    options = arguments(__doc__)
    rounds = 3 if options.smoke else 21
    torch.set_num_threads(1)  # with more, randperm's is no quicker, and less even
    sampler = RandomSampler(LENGTH, seed=0)
    check(sampler)

    def ours() -> npt.NDArray[np.int64]:
        return sampler.indices(0, BLOCK)

    seconds = in_turn({"ours": lambda: timed(ours), "torch": lambda: timed(torch.randperm, len(BLOCK))}, rounds)
    report(
        "order",
        [
            Figure("an order of 10^12, built", "ms", [build(seed) for seed in range(rounds)], target=10, at_most=True),
            Figure("its memory at the peak", "kB", [memory(seed) for seed in range(rounds)], target=1000, at_most=True),
            Figure("10^6 consecutive indices", "ms", [1e3 * s for s in seconds["ours"]]),
            Figure("torch.randperm(10**6)", "ms", [1e3 * s for s in seconds["torch"]]),
            Figure("indices / randperm", "x", ratios(seconds["ours"], seconds["torch"]), target=4, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()

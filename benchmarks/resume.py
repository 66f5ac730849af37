"""How long does a resume take, from `load_state_dict` to the first batch, and does it depend on the position?

    python benchmarks/resume.py [--json PATH] [--smoke]

Each loader goes to its positions in turn, in one run: `num_workers=0`, shuffled, batches of 64, a `__getitem__` that
returns its index, into a loader that exists already. Ours is over 2 * 10^12 samples, torchdata's `StatefulDataLoader`
over 10^7 and one batch, since its sampler makes the permutation of the whole dataset at each start and walks to the
position: compare each loader with itself at position 0. Every batch is compared with the one that belongs there: for ours
what the order says when asked directly, for torchdata's the slice of that permutation. Then the size of the state at each
of the positions, and `state_dict()` while two workers stand by with their batches ready.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                       unit  times  lower q.  median  upper q.        target  reached
    stateful_pipes at 0                          ms    200     1.172   1.191     1.208             -        -
    stateful_pipes at 1,000,000                  ms    200     1.171   1.191     1.209             -        -
    stateful_pipes at 1,000,000,000              ms    200     1.165   1.193     1.207             -        -
    stateful_pipes at 1,000,000,000,000          ms    200     1.165   1.186     1.206             -        -
    slowest / fastest of these medians            x      1     1.005   1.005     1.005   at most 1.2      yes
    torchdata at 0                               ms      3     2,346   2,370     2,443             -        -
    torchdata at 1,000,000                       ms      3     2,546   2,552     2,633             -        -
    torchdata at 3,200,000                       ms      3     2,964   2,977     3,002             -        -
    torchdata at 10,000,000                      ms      3     4,256   4,294     4,366             -        -
    state as JSON, at the largest             bytes      1       563     563       563  at most 1024      yes
    state_dict(), the first after each batch     us   2000     11.82   13.16     17.23             -        -
    state_dict(), 2 workers                      us   2000     11.89   12.53     12.94    at most 20      yes
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torchdata.stateful_dataloader
from harness import Figure, arguments, in_turn, report, require, timed
from torch.utils.data import Dataset

from stateful_pipes import RandomSampler, StatefulDataLoader

BATCH = 64
SEED = 2**64 - 1
LENGTH = 2 * 10**12
POSITIONS = (0, 10**6, 10**9, 10**12)
PEER_POSITIONS = (0, 10**6, 3_200_000, 10**7)  # whole batches

Loader = StatefulDataLoader[torch.Tensor]


class Indices(Dataset[int]):
    """Sample i is i: what is left to time is the loader."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def load(loader: Any, state: Any, expected: torch.Tensor) -> float:
    """Milliseconds until the first batch is there; checked once the clock stands."""
    start = time.perf_counter()
    loader.load_state_dict(state)
    batch = next(iter(loader))
    seconds = time.perf_counter() - start
    require(torch.equal(batch, expected), f"{loader} gives another batch than belongs at the position")
    return 1e3 * seconds


def states(loader: Loader) -> Iterator[tuple[int, Any]]:
    """The loader's state at each position, which nobody can wait for it to reach."""
    for position in POSITIONS:
        state: Any = loader.state_dict()
        state["nodes"]["sampler"]["consumed"] = position
        yield position, state


def ours(rounds: int) -> list[Figure]:
    loader: Loader = StatefulDataLoader(Indices(LENGTH), batch_size=BATCH, shuffle=True, seed=SEED)
    order = RandomSampler(LENGTH, seed=SEED)
    contestants = {}
    for position, state in states(loader):
        expected = torch.from_numpy(order.indices(0, range(position, position + BATCH)))
        contestants[f"stateful_pipes at {position:,}"] = partial(load, loader, state, expected)
    found = in_turn(contestants, rounds)
    medians = [statistics.median(values) for values in found.values()]
    flat = Figure("slowest / fastest of these medians", "x", [max(medians) / min(medians)], target=1.2, at_most=True)
    return [*(Figure(what, "ms", values) for what, values in found.items()), flat]


def peer(positions: tuple[int, ...], rounds: int) -> list[Figure]:
    dataset = Indices(positions[-1] + BATCH)
    permutation = torch.randperm(len(dataset), generator=torch.Generator())
    make = torchdata.stateful_dataloader.StatefulDataLoader
    loader = make(dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator())
    next(iter(loader))
    first = loader.state_dict()
    contestants = {}
    for position in positions:
        # Walking there takes minutes; every batch shows that the loader takes this for a state of its own.
        state = copy.deepcopy(first)
        state["_num_yielded"] = state["_sampler_iter_yielded"] = position // BATCH
        state["_sampler_iter_state"]["samples_yielded"] = position
        state["_sampler_iter_state"]["sampler_iter_state"]["yielded"] = position
        expected = permutation[position : position + BATCH]
        contestants[f"torchdata at {position:,}"] = partial(load, loader, state, expected)
    return [Figure(what, "ms", values) for what, values in in_turn(contestants, rounds).items()]


def state(calls: int) -> list[Figure]:
    loader: Loader
    with StatefulDataLoader(Indices(LENGTH), batch_size=BATCH, shuffle=True, seed=SEED, num_workers=2) as loader:
        sizes = [float(len(json.dumps(state))) for _, state in states(loader)]
        loader.load_state_dict(list(states(loader))[-1][1])
        next(iter(loader))
        time.sleep(0.5)  # until the workers have made all that they may
        micros = [1e6 * timed(loader.state_dict) for _ in range(calls)]
        cold = [1e6 * timed(loader.state_dict) for _, _batch in zip(range(calls), loader, strict=False)]
    return [
        Figure("state as JSON, at the largest", "bytes", [max(sizes)], target=1024, at_most=True),
        Figure("state_dict(), the first after each batch", "us", cold),
        Figure("state_dict(), 2 workers", "us", micros, target=20, at_most=True),
    ]


def main() -> None:
    options = arguments(__doc__)
    loads, positions, peer_loads, calls = (5, (0, 64_000), 2, 20) if options.smoke else (200, PEER_POSITIONS, 3, 2000)
    figures = [*ours(loads), *peer(positions, peer_loads), *state(calls)]
    report("resume", figures, options)


if __name__ == "__main__":
    main()

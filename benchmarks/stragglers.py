"""Batches of very different cost: how near does dispatch to free workers come to the best that it can be?

    python benchmarks/stragglers.py [--json PATH] [--smoke]

A batch waits (it sleeps, so that the number of cores does not matter) for a time drawn from a lognormal of sigma 1, 30 ms
in the mean: a function of its position, the same for every contestant. 4 workers, prefetch_factor 4, and a consumer that
takes each batch as soon as its turn comes. The limit is a simulation of the same costs, in which a free worker takes the
next task at once, results go out in order, and 16 are outstanding. Its costs are what each sleep really took in the very
run that it is compared with; the nominal ones, which no sleep quite keeps, stand beside. torch's `DataLoader`, which deals
tasks to its workers in turn, is compared with ours and with a simulation of its own. The clock starts with batch 32, when
the workers are all there. Every run is checked for its batches' order.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                  unit  times  lower q.  median  upper q.         target  reached
    stateful_pipes                         1/s     11     128.6   128.7     128.8              -        -
    torch DataLoader                       1/s     11       108     108     108.1              -        -
    ours / free-worker simulation            x     11    0.9839   0.985    0.9857  at least 0.95      yes
    ours / the same, nominal costs           x     11     0.981   0.982     0.983              -        -
    torch / round-robin simulation           x     11    0.9862  0.9867    0.9868              -        -
    ours / torch                             x     11     1.191   1.192     1.193              -        -
    free-worker / round-robin, simulated     x      1     1.195   1.195     1.195              -        -
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require
from torch.utils.data import DataLoader, Dataset

from stateful_pipes import StatefulDataLoader

WORKERS = 4
PREFETCH = 4
MEAN_S = 0.03
SIGMA = 1.0
WARMUP = 32


class Waits(Dataset[tuple[int, float]]):
    """Sample i waits for its time, and is i and the seconds that it took."""

    def __init__(self, batches: int) -> None:
        drawn = np.random.RandomState(0).lognormal(0, SIGMA, batches)
        self.seconds: list[float] = (MEAN_S * drawn / drawn.mean()).tolist()

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> tuple[int, float]:
        start = time.perf_counter()
        time.sleep(self.seconds[index])
        return index, time.perf_counter() - start


class Run(NamedTuple):
    """Seconds from batch WARMUP to the last, and what every batch's sleep took."""

    seconds: float
    slept: list[float]


def run(batches: Iterable[Any], count: int) -> Run:
    slept: list[float] = []
    start = 0.0
    for number, (index, seconds) in enumerate(batches):
        if number == WARMUP - 1:
            start = time.perf_counter()
        require(int(index) == number, f"batch {int(index)} came in the place of {number}")
        slept.append(float(seconds))
        if number == count - 1:  # and not the end of the epoch, which is another question
            break
    return Run(time.perf_counter() - start, slept)


def ours(dataset: Waits) -> Run:
    loader: StatefulDataLoader[Any]
    with StatefulDataLoader(dataset, batch_size=1, num_workers=WORKERS, prefetch_factor=PREFETCH) as loader:
        return run(loader, len(dataset))


def torch_loader(dataset: Waits) -> Run:
    loader = DataLoader(dataset, batch_size=1, num_workers=WORKERS, prefetch_factor=PREFETCH)
    return run(loader, len(dataset))


def free_worker(number: int, free_at: Sequence[float]) -> int:
    """The first to be free takes the next task."""
    return free_at.index(min(free_at))


def round_robin(number: int, free_at: Sequence[float]) -> int:
    """Task n is for worker n mod 4, free or not."""
    return number % WORKERS


def simulated(costs: Sequence[float], worker_of: Callable[[int, Sequence[float]], int]) -> float:
    """Seconds from batch WARMUP to the last, where nothing costs anything but the batches."""
    free_at = [0.0] * WORKERS
    handed_out: list[float] = []
    for number, cost in enumerate(costs):
        worker = worker_of(number, free_at)
        # A task is given out when the one that many places before it was handed to the consumer.
        given_out = handed_out[-WORKERS * PREFETCH] if number >= WORKERS * PREFETCH else 0.0
        free_at[worker] = max(free_at[worker], given_out) + cost
        handed_out.append(max([free_at[worker], *handed_out[-1:]]))
    return handed_out[-1] - handed_out[WARMUP - 1]


def main() -> None:
    options = arguments(__doc__)
    warnings.filterwarnings("ignore", "This DataLoader will create 4 worker processes")  # they only wait
    count, rounds = (WARMUP + 8, 2) if options.smoke else (400, ROUNDS)
    dataset = Waits(count)
    runs = in_turn({"ours": lambda: ours(dataset), "torch": lambda: torch_loader(dataset)}, rounds)
    rates = {name: [(count - WARMUP) / one.seconds for one in found] for name, found in runs.items()}

    def of_limit(name: str, worker_of: Callable[[int, Sequence[float]], int], nominal: bool = False) -> list[float]:
        """The simulation's seconds over the run's: its part of the simulated throughput."""
        return [simulated(dataset.seconds if nominal else one.slept, worker_of) / one.seconds for one in runs[name]]

    best = [simulated(dataset.seconds, worker_of) for worker_of in (round_robin, free_worker)]
    report(
        "stragglers",
        [
            Figure("stateful_pipes", "1/s", rates["ours"]),
            Figure("torch DataLoader", "1/s", rates["torch"]),
            Figure("ours / free-worker simulation", "x", of_limit("ours", free_worker), target=0.95),
            Figure("ours / the same, nominal costs", "x", of_limit("ours", free_worker, nominal=True)),
            Figure("torch / round-robin simulation", "x", of_limit("torch", round_robin)),
            Figure("ours / torch", "x", ratios(rates["ours"], rates["torch"])),
            Figure("free-worker / round-robin, simulated", "x", [best[0] / best[1]]),
        ],
        options,
    )


if __name__ == "__main__":
    main()

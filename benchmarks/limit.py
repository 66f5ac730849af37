"""How near is it to the limit, two processes that deliver their batches to nobody?

    python benchmarks/limit.py [--workloads NAME ...] [--json PATH] [--smoke]

The limit: each of two processes reads samples under the same three seeds as ours and collates them into memory that it
uses again and again, with the allocator's settings that ours makes in its workers, and no transport at all. A ratio is
of ours to it, in batches a second, in the same round. Before anything is timed, both give the same bytes.

Beside it, what the distance consists of: the limit where for each batch the two send one byte, for which the main process
waits (what it costs at least, on so many cores, that a third process is woken, runs, and takes the caches with it); where
torch's own `default_collate` collates, as it does for ours, into the same memory, and not lines written for the workload; and
where that memory is one of as many places in turn as ours has on their way.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                            unit  times  lower q.   median  upper q.         target  reached
    tiny: limit                                samples/s     11   147,878  162,755   164,679              -        -
    tiny: limit, main process woken                    x     11    0.9574   0.9892     1.011              -        -
    tiny: limit, torch's collate                       x     11    0.9469   0.9558     1.006              -        -
    tiny: limit, places in turn                        x     11     1.003     1.01     1.027              -        -
    tiny: ours                                         x     11    0.7325   0.7593    0.7633   at least 0.8       no
    tiny: ours / limit with torch's collate            x     11    0.7594   0.7761     0.805              -        -
    u8: limit                                  samples/s     11    27,394   27,769    29,323              -        -
    u8: limit, main process woken                      x     11    0.9744    0.991     1.034              -        -
    u8: limit, torch's collate                         x     11    0.9617   0.9661      1.04              -        -
    u8: limit, places in turn                          x     11    0.9611    1.002     1.089              -        -
    u8: ours                                           x     11    0.8519   0.8736    0.9169   at least 0.8      yes
    u8: ours / limit with torch's collate              x     11     0.859   0.8843    0.9254              -        -
    f32: limit                                 samples/s     11     4,462    5,608     6,717              -        -
    f32: limit, main process woken                     x     11    0.9721   0.9939     1.038              -        -
    f32: limit, torch's collate                        x     11    0.9982    1.029     1.052              -        -
    f32: limit, places in turn                         x     11    0.9883    1.011     1.071              -        -
    f32: ours                                          x     11     0.959   0.9721    0.9998   at least 0.9      yes
    f32: ours / limit with torch's collate             x     11    0.9211   0.9776     1.007              -        -
    tokens: limit                              samples/s     11    85,774   93,008    98,381              -        -
    tokens: limit, main process woken                  x     11     0.917   0.9741     1.027              -        -
    tokens: limit, torch's collate                     x     11    0.8533   0.9713     1.028              -        -
    tokens: limit, places in turn                      x     11    0.8596   0.9314     1.095              -        -
    tokens: ours                                       x     11    0.5872   0.6069    0.6592  at least 0.75       no
    tokens: ours / limit with torch's collate          x     11    0.5929    0.673    0.7023              -        -
    jpeg: limit                                samples/s     11     460.9    499.3     509.2              -        -
    jpeg: limit, main process woken                    x     11    0.9906    1.004     1.025              -        -
    jpeg: limit, torch's collate                       x     11    0.9899    1.015     1.041              -        -
    jpeg: limit, places in turn                        x     11    0.9725   0.9882     1.032              -        -
    jpeg: ours                                         x     11    0.9465   0.9516    0.9894   at least 0.9      yes
    jpeg: ours / limit with torch's collate            x     11    0.9248   0.9512    0.9716              -        -
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import cycle
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from harness import ROUNDS, Cost, Figure, arguments, in_turn, keep, ratios, report, require
from peers import WARMUP, WORKERS, cost, ours, same
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from workloads import LENGTH, Workload, add_workloads, workload

from stateful_pipes.prefetch.worker import prepare_process
from stateful_pipes.rng import GLOBAL_GENERATORS, SAMPLE, derive, derive_each, seeder

TARGETS = {"tiny": 0.8, "u8": 0.8, "f32": 0.9, "tokens": 0.75, "jpeg": 0.9}

start: Barrier
news: socket.socket | None


class Reader:
    """Reads, seeds and collates: batch after batch into the same memory."""

    def __init__(self, workload: Workload, indices: Sequence[int]) -> None:
        self.dataset, self.size, self.indices = workload.dataset, workload.batch_size, indices
        self.seed_all, self.key = seeder(GLOBAL_GENERATORS), derive(0, SAMPLE, 0)
        self.single = not isinstance(self.dataset[0], tuple)
        self.memory = [self._room(first) for first in self._columns([self.dataset[0]])]

    def __call__(self, number: int) -> Any:
        samples = self.read(number)
        for column, room in zip(self._columns(samples), self.memory, strict=True):
            if isinstance(column[0], torch.Tensor):
                torch.stack(column, out=room)
            else:
                room.numpy()[:] = column
        return self.memory[0] if self.single else self.memory

    def read(self, number: int) -> list[Any]:
        positions = range(number * self.size, (number + 1) * self.size)
        samples = []
        for seed, index in zip(derive_each(self.key, positions), self.indices[positions.start : positions.stop], strict=True):
            self.seed_all(seed)
            samples.append(self.dataset[index])
        return samples

    def _columns(self, samples: list[Any]) -> list[Any]:
        return [samples] if self.single else list(zip(*samples, strict=True))

    def _room(self, column: Sequence[Any]) -> torch.Tensor:
        sample = torch.as_tensor(column[0])
        return torch.empty(self.size, *sample.shape, dtype=sample.dtype)


class Collating(Reader):
    """With torch's collate, whose function for tensors alone is another."""

    def __call__(self, number: int) -> Any:
        rooms = iter(self.memory)
        into = {**default_collate_fn_map, torch.Tensor: lambda batch, collate_fn_map: torch.stack(batch, out=next(rooms))}
        return collate(self.read(number), collate_fn_map=into)


class Turning(Reader):
    """Into each of some places in turn."""

    def __init__(self, workload: Workload, indices: Sequence[int]) -> None:
        super().__init__(workload, indices)
        self.places = cycle([self.memory, *([torch.empty_like(room) for room in self.memory] for _ in range(2 * WORKERS))])

    def __call__(self, number: int) -> Any:
        self.memory = next(self.places)
        return super().__call__(number)


def prepare(barrier: Barrier, end: socket.socket | None) -> None:
    """What a process begins with, as a worker of ours."""
    global start, news
    start, news = barrier, end
    prepare_process()


def work(workload: Workload, reader: type[Reader], worker: int) -> float:
    """Batches a second of one process, while the other does the same."""
    read = reader(workload, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0)).tolist())
    for number in range(WARMUP):
        read(number)
    start.wait(60)
    began = time.perf_counter()
    for number in range(workload.batches):
        read(number * WORKERS + worker)
        if news is not None:
            news.send(b"x")
    return workload.batches / (time.perf_counter() - began)


def limit(workload: Workload, reader: type[Reader] = Reader, woken: bool = False) -> Cost:
    """What a batch costs two processes that only make it, or wake the main process for each as well."""
    context = multiprocessing.get_context("fork")
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = (context.Barrier(WORKERS), there if woken else None)
    with here, there, ProcessPoolExecutor(WORKERS, context, prepare, arguments) as processes:
        rates = processes.map(partial(work, workload, reader), range(WORKERS))
        for _ in range(WORKERS * workload.batches if woken else 0):
            here.recv(1)
        return Cost(1 / sum(rates), 0)


def compare(workload: Workload, rounds: int) -> list[Figure]:
    """The figures of one workload."""
    readers = [reader(workload.repeatable(), range(LENGTH)) for reader in (Reader, Collating, Turning)]
    with closing(ours(workload.repeatable(), shuffle=False)) as batches:
        for number in range(3):
            expected = next(batches)
            made = all(same(expected, read(number)) for read in readers)
            require(made, f"{workload.name}: the limit makes other batches than ours")
    contestants = {
        "ours": partial(cost, ours, workload),
        "limit": partial(limit, workload),
        "woken": partial(limit, workload, woken=True),
        "collating": partial(limit, workload, Collating),
        "turning": partial(limit, workload, Turning),
    }
    costs = in_turn(contestants, rounds)
    wall = {name: [one.wall_s for one in found] for name, found in costs.items()}
    return [
        Figure(f"{workload.name}: limit", "samples/s", [workload.batch_size / one for one in wall["limit"]]),
        Figure(f"{workload.name}: limit, main process woken", "x", ratios(wall["limit"], wall["woken"])),
        Figure(f"{workload.name}: limit, torch's collate", "x", ratios(wall["limit"], wall["collating"])),
        Figure(f"{workload.name}: limit, places in turn", "x", ratios(wall["limit"], wall["turning"])),
        Figure(f"{workload.name}: ours", "x", ratios(wall["limit"], wall["ours"]), TARGETS[workload.name]),
        Figure(f"{workload.name}: ours / limit with torch's collate", "x", ratios(wall["collating"], wall["ours"])),
    ]


def main() -> None:
    options = arguments(__doc__, add_workloads)
    figures = []
    for name in options.workloads:
        figures += compare(workload(name, options.smoke), 1 if options.smoke else ROUNDS)
        keep("limit", figures, options)
    report("limit", figures, options)


if __name__ == "__main__":
    main()

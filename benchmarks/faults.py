"""How long does a fault keep a training waiting: a killed worker, a `close()`, the interpreter's end?

    python benchmarks/faults.py [--json PATH] [--smoke]

A killed worker: the u8 workload with two workers, one of which gets SIGKILL; the longest wait for any of the next batches,
less the median wait, with fork. Closing: workers that compute without end, or that ignore SIGTERM and wait, all of
them; 1, 2 and 8. The interpreter: from the last line of a program with 8 busy workers until the process is gone. What
is handed out after the kill is checked to be what it would have been.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                         unit  times  lower q.  median  upper q.     target  reached
    a killed worker                ms     11     27.55    29.4     32.57          -        -
    close(), 1 deaf workers         s     11    0.8373  0.8386    0.8418  at most 1      yes
    close(), 2 deaf workers         s     11     0.835  0.8356    0.8384  at most 1      yes
    close(), 8 deaf workers         s     11    0.9177  0.9209    0.9268  at most 1      yes
    interpreter, 8 busy workers     s     11     1.255   1.284     1.309  at most 2      yes
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from harness import ROUNDS, Figure, arguments, report, require
from peers import WORKERS
from workloads import workload

from stateful_pipes import StatefulDataLoader

AFTER = 12
"""Batches after a kill among which the wait is looked for: more than are under way."""

EXIT = """
import time
from stateful_pipes import StatefulDataLoader

class Busy:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        while index > 7:
            pass
        return index

loader = StatefulDataLoader(Busy(), num_workers=8, collate_fn=list)
iterator = iter(loader)
for _ in range(8):
    next(iterator)
print(time.monotonic(), flush=True)
"""


class Deaf:
    """Samples of which all but the first never come, in a worker that only SIGKILL ends."""

    def __init__(self) -> None:
        self.never = os.pipe()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.read(self.never[0], 1)
        return index


def wait_after_a_kill(whole: list[torch.Tensor]) -> float:
    """Seconds that a killed worker costs, at most, in one epoch of u8."""
    u8 = workload("u8")
    loader: StatefulDataLoader[torch.Tensor]
    waits = []
    with StatefulDataLoader(u8.dataset, u8.batch_size, True, num_workers=WORKERS, seed=0) as loader:
        iterator = iter(loader)
        for number, expected in enumerate(whole):
            if number == len(whole) - AFTER:
                os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            start = time.perf_counter()
            batch = next(iterator)
            waits.append(time.perf_counter() - start)
            require(torch.equal(batch, expected), "after the kill another batch came than without it")
        require(loader.stats()["restarts"] == 1, "the worker was not replaced")
    return max(waits[-AFTER:]) - statistics.median(waits)


def close(workers: int) -> float:
    """Seconds of a close() while all workers are deaf."""
    dataset = Deaf()
    loader: StatefulDataLoader[Any] = StatefulDataLoader(dataset, num_workers=workers, collate_fn=list)
    next(iter(loader))
    start = time.perf_counter()
    loader.close()
    seconds = time.perf_counter() - start
    for end in dataset.never:
        os.close(end)
    return seconds


def interpreter() -> float:
    """Seconds from a program's last line to its end."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=True)
    return time.monotonic() - float(done.stdout)


def main() -> None:
    options = arguments(__doc__)
    rounds = 2 if options.smoke else ROUNDS
    u8 = workload("u8")
    with StatefulDataLoader(u8.dataset, u8.batch_size, True, seed=0) as loader:
        whole = [batch.clone() for batch, _ in zip(loader, range(3 * AFTER), strict=False)]
    report(
        "faults",
        [
            Figure("a killed worker", "ms", [1e3 * wait_after_a_kill(whole) for _ in range(rounds)]),
            *(
                Figure(f"close(), {workers} deaf workers", "s", [close(workers) for _ in range(rounds)], target=1, at_most=True)
                for workers in (1, 2, 8)
            ),
            Figure("interpreter, 8 busy workers", "s", [interpreter() for _ in range(rounds)], target=2, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()

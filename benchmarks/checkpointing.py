"""What does it cost to be able to resume: a state after every batch, and a file after every hundredth?

    python benchmarks/checkpointing.py [--json PATH] [--smoke]

The u8 workload with two workers and a consumer that takes batches and does nothing else. One contestant takes no state,
one calls `state_dict()` after every batch and `checkpoint(path)` after every 100th, and the third does the same with
`os.fsync` replaced by nothing, since what that takes is the disk's: its CPU time is the one that has a bound. The file
lies in the folder for temporary files. Before that it is checked that what was saved resumes at the next batch.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                       unit  times  lower q.  median  upper q.         target  reached
    no states                             batches/s     33     317.5   347.5     383.7              -        -
    states and files                      batches/s     33     332.1   352.9       374              -        -
    the same without fsync                batches/s     33       328   356.7     374.6              -        -
    throughput, with / without                    x     33    0.9203   1.018     1.073  at least 0.97      yes
    the same without fsync                        x     33    0.9584       1     1.079              -        -
    no states, main process                us/batch     33     222.3     249     276.6              -        -
    states and files, main process         us/batch     33     260.8   278.1     316.2              -        -
    the same without fsync, main process   us/batch     33     260.9     284     313.9              -        -
    CPU more, without fsync                us/batch     33     10.29   39.47     60.23     at most 60      yes
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require
from peers import WORKERS, Batches, Contestant, cost
from workloads import Workload, workload

from stateful_pipes import StatefulDataLoader

EVERY = 100


def loading(workload: Workload, path: Path, every: int, sync: bool = True) -> Batches:
    """Ours, with its states and a file after each `every` batches; with 0, neither."""
    scope: AbstractContextManager[Any] = nullcontext() if sync else patch.object(os, "fsync", lambda _: None)
    loader: StatefulDataLoader[Any]
    with scope, StatefulDataLoader(workload.dataset, workload.batch_size, True, num_workers=WORKERS) as loader:
        for number, batch in enumerate(loader, 1):
            if every:
                loader.state_dict()
                if number % every == 0:
                    loader.checkpoint(path)
            yield batch


def check(workload: Workload, path: Path) -> None:
    with closing(loading(workload, path, every=3)) as batches:
        *_, fourth = islice(batches, 4)
    resumed: StatefulDataLoader[torch.Tensor]
    with StatefulDataLoader(workload.dataset, workload.batch_size, True, checkpoint=path) as resumed:
        require(torch.equal(next(iter(resumed)), fourth), "the checkpoint resumes at another batch than the next")


def main() -> None:
    options = arguments(__doc__)
    u8 = workload("u8", options.smoke)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loader.json")
        check(u8, path)
        every = 2 if options.smoke else EVERY
        contestants: dict[str, Contestant] = {
            "no states": partial(loading, path=path, every=0),
            "states and files": partial(loading, path=path, every=every),
            "the same without fsync": partial(loading, path=path, every=every, sync=False),
        }
        runs = {name: partial(cost, contestant, u8) for name, contestant in contestants.items()}
        found = in_turn(runs, 2 if options.smoke else 3 * ROUNDS)
    rates = {name: [1 / one.wall_s for one in costs] for name, costs in found.items()}
    micros = {name: [1e6 * one.cpu_s for one in costs] for name, costs in found.items()}
    without, synced, unsynced = contestants
    more = [one - other for one, other in zip(micros[unsynced], micros[without], strict=True)]
    report(
        "checkpointing",
        [
            *(Figure(name, "batches/s", values) for name, values in rates.items()),
            Figure("throughput, with / without", "x", ratios(rates[synced], rates[without]), target=0.97),
            Figure("the same without fsync", "x", ratios(rates[unsynced], rates[without])),
            *(Figure(f"{name}, main process", "us/batch", values) for name, values in micros.items()),
            Figure("CPU more, without fsync", "us/batch", more, target=60, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()

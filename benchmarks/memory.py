"""Does memory stay what it is over 10,000 batches of 38.5 MB, and in how many slots do they lie?

    python benchmarks/memory.py [--json PATH] [--smoke]

The f32 workload with two workers and a consumer that touches every page of each batch. Resident memory is the proportional
set size (Pss in smaps_rollup) of this process and its workers, which counts a shared page once, after every 100th batch:
what it is after the first 200 is compared with the highest of all later ones. A slot costs the pages that were ever
written to in it, and the arena is one memory file: what is allocated of that, divided by the size of a batch, is the
number of slots that were in use. Documented are 2 * num_workers * prefetch_factor. Before that the batches are compared
with those of torch's DataLoader. It takes some minutes.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                            unit  times  lower q.  median  upper q.        target  reached
    resident, after 200 batches       MB      1     694.3   694.3     694.3             -        -
    resident, later, up to 10,000     MB     98     654.8     658     694.4             -        -
    highest of these / the first       x      1     1.001   1.001     1.001  at most 1.05      yes
    slots in use, at most          slots      1     6.001   6.001     6.001     at most 8      yes
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from harness import Figure, arguments, report, require
from peers import WORKERS, ours, require_equal
from workloads import workload

from stateful_pipes import ProcessPrefetcher, StatefulDataLoader

MB = 10**6
PAGE_FLOATS = 1024


def resident() -> float:
    """MB of this process and its workers."""
    pids = [os.getpid(), *(process.pid for process in multiprocessing.active_children())]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MB


def arena_bytes() -> int:
    """What is allocated of the library's memory files."""
    allocated = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:stateful_pipes"):
                allocated += os.stat(int(name)).st_blocks * 512
        except OSError:  # the listing's own descriptor
            continue
    return allocated


def main() -> None:
    options = arguments(__doc__)
    count, first, every = (40, 20, 10) if options.smoke else (10_000, 200, 100)
    f32 = workload("f32")
    require_equal({"stateful_pipes": ours}, f32)
    megabytes, slots = [], []
    loader: StatefulDataLoader[torch.Tensor]
    with StatefulDataLoader(f32.dataset, f32.batch_size, shuffle=True, num_workers=WORKERS) as loader:
        epoch_after_epoch: Iterator[torch.Tensor] = chain.from_iterable(repeat(loader))
        for number, batch in enumerate(islice(epoch_after_epoch, count), 1):
            batch.view(-1)[::PAGE_FLOATS].sum()
            if number % every == 0:
                megabytes.append(resident())
                slots.append(arena_bytes() / batch.nbytes)
        require(isinstance(loader.pipeline, ProcessPrefetcher), "the prefetcher is not at the top")
        most = loader.pipeline.slots
        workers = len(multiprocessing.active_children())
    require(workers == WORKERS, f"{workers} worker processes were looked at, and there should have been {WORKERS}")
    require(min(slots) > 1, "no memory file of the library was found")
    level, later = megabytes[first // every - 1], megabytes[first // every :]
    report(
        "memory",
        [
            Figure(f"resident, after {first} batches", "MB", [level]),
            Figure(f"resident, later, up to {count:,}", "MB", later),
            Figure("highest of these / the first", "x", [max(later) / level], target=1.05, at_most=True),
            Figure("slots in use, at most", "slots", [max(slots)], target=most, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()

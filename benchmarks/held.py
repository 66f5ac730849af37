"""Can a training loop keep 500 batches, where a process may have 128 descriptors and /dev/shm holds 64 MB?

    python benchmarks/held.py [--json PATH] [--smoke]

Batches of the tokens workload, 1 MB each, two workers; each contestant in a process of its own with that limit of
descriptors and, as in a container, a /dev/shm of its own that holds 64 MB (in a mount namespace of `unshare`; where that is
not allowed the machine's is used, and said so). All batches are kept, and when the last is there each is compared with
what belongs in it. Reported are how many could be kept, what lay in /dev/shm and how many descriptors were open at most,
and what ended it. Beside ours stands torch's `DataLoader` with both ways of sharing tensors that it has.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                     unit  times  lower q.  median  upper q.        target  reached
    stateful_pipes: batches held          batches      1       500     500       500  at least 500      yes
    stateful_pipes: in /dev/shm               MiB      1         0       0         0     at most 0      yes
    stateful_pipes: descriptors             files      1        17      17        17   at most 128      yes
    torch, file_descriptor: batches held  batches      1        56      56        56             -        -
    torch, file_descriptor: in /dev/shm       MiB      1     59.05   59.05     59.05             -        -
    torch, file_descriptor: descriptors     files      1       126     126       126             -        -
    torch, file_system: batches held      batches      1        61      61        61             -        -
    torch, file_system: in /dev/shm           MiB      1     63.04   63.04     63.04             -        -
    torch, file_system: descriptors         files      1        16      16        16             -        -
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from argparse import ArgumentParser
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from harness import Figure, arguments, report, require
from peers import Batches, ours, torch_loader
from torch.utils.data import default_collate
from workloads import Workload, workload

DESCRIPTORS = 128
SHM_MB = 64
OWN_SHM = ("unshare", "--map-root-user", "--mount", "sh", "-c")
OWN_SHM_SCRIPT = f'mount -t tmpfs -o size={SHM_MB}m tmpfs /dev/shm && exec "$@"'


class Outcome(NamedTuple):
    """What became of a contestant."""

    batches: int
    shm_mb: float
    descriptors: int
    end: str


def by_descriptor(workload: Workload, shuffle: bool) -> Batches:
    """torch's default: a descriptor a tensor, of a file in /dev/shm that has no name."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    return torch_loader(workload, shuffle)


def by_file(workload: Workload, shuffle: bool) -> Batches:
    """A named file in /dev/shm a tensor."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch_loader(workload, shuffle)


CONTESTANTS = {"stateful_pipes": ours, "torch, file_descriptor": by_descriptor, "torch, file_system": by_file}


def hold(name: str, count: int) -> None:
    """Runs in a process of its own: a line for each batch, so that they are known however it ends."""
    tokens = workload("tokens")
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    held: list[Any] = []
    for batch in islice(CONTESTANTS[name](tokens, shuffle=False), count):
        held.append(batch)
        shm = os.statvfs("/dev/shm")
        print(len(held), (shm.f_blocks - shm.f_bfree) * shm.f_frsize / 2**20, len(os.listdir("/proc/self/fd")), flush=True)
    size = tokens.batch_size
    for number, batch in enumerate(held):
        expected = default_collate([tokens.dataset[index] for index in range(number * size, (number + 1) * size)])
        require(all(map(torch.equal, batch, expected)), f"batch {number} is not what it was, or should have been")


def outcome(name: str, count: int, prefix: list[str]) -> Outcome:
    command = [*prefix, sys.executable, __file__, "--hold", name, "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    kept, shm, descriptors = zip(*lines, strict=True) if lines else (("0",), ("0",), ("0",))
    errors = done.stderr.strip().splitlines()
    end = "all kept and right" if done.returncode == 0 else errors[-1] if errors else f"exit code {done.returncode}"
    return Outcome(int(kept[-1]), max(map(float, shm)), max(map(int, descriptors)), end)


def add_child(parser: ArgumentParser) -> None:
    parser.add_argument("--hold", choices=CONTESTANTS, help="what the processes of this benchmark are started with")
    parser.add_argument("--count", type=int, default=0, help="the same")


def main() -> None:
    options = arguments(__doc__, add_child)
    if options.hold is not None:
        hold(options.hold, options.count)
        return
    count = 100 if options.smoke else 500
    prefix = [*OWN_SHM, OWN_SHM_SCRIPT, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        prefix = []
        print("no mount namespace is to be had: /dev/shm is the machine's, whatever its size and whoever else uses it")
    outcomes = {name: outcome(name, count, prefix) for name in CONTESTANTS}
    figures = []
    for name, found in outcomes.items():
        is_ours = name == "stateful_pipes"
        figures += [
            Figure(f"{name}: batches held", "batches", [found.batches], target=count if is_ours else None),
            Figure(f"{name}: in /dev/shm", "MiB", [found.shm_mb], target=0 if is_ours and prefix else None, at_most=True),
            Figure(f"{name}: descriptors", "files", [found.descriptors], target=DESCRIPTORS if is_ours else None, at_most=True),
        ]
        print(f"{name}: {found.end}")
    report("held", figures, options, ends={name: found.end for name, found in outcomes.items()})
    require(outcomes["stateful_pipes"].end == "all kept and right", "ours did not keep them all")


if __name__ == "__main__":
    main()

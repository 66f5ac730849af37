"""How near does the main process come to the least that it can do?

    python benchmarks/main_process.py [--json PATH] [--smoke]

The least, for the small batches of the tiny workload: two processes read, seed and collate as ours do, and send each batch as
a pickle in one packet; the main process waits for one, receives it, makes tensors of it, and sends the indices of the next,
which lie in a list. No position is kept, no worker may die, nothing is counted, and batches come as they are made. CPU time
is the main process's own; a ratio is that of one contestant to another's in the same round. Before that it is checked that
the batches are ours. Beside it what the two give in batches a second, against `limit.py`'s processes that send nothing.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                              unit  times  lower q.  median  upper q.  target  reached
    ours                      CPU us/batch     11     111.9   119.1     125.3       -        -
    bare                      CPU us/batch     11     58.73   62.02     63.44       -        -
    torch                     CPU us/batch     11     580.8   599.9       669       -        -
    DataLoader / ours                    x     11     4.815   5.191     5.682       -        -
    DataLoader / bare                    x     11     9.502   9.963     11.22       -        -
    ours / bare                          x     11     1.805   1.886     2.051       -        -
    throughput, ours / limit             x     11    0.7274  0.7377     0.767       -        -
    throughput, bare / limit             x     11    0.8542   0.872    0.9143       -        -
"""

from __future__ import annotations

import multiprocessing
import pickle
import select
import socket
from contextlib import closing
from functools import partial
from typing import Any

import torch
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require
from limit import Reader, limit
from peers import WORKERS, Batches, cost, ours, same, torch_loader
from workloads import LENGTH, Workload, workload

from stateful_pipes.prefetch.worker import prepare_process

PACKET = 2**16
UNDER_WAY = 2 * WORKERS
PROTOCOL = 5


def work(workload: Workload, tasks: socket.socket, results: socket.socket, order: list[int]) -> None:
    prepare_process()
    read = Reader(workload, order)
    while task := tasks.recv(PACKET):
        number, _ = pickle.loads(task)
        batch = read(number)
        arrays = [one.numpy() for one in ([batch] if read.single else batch)]
        results.send(pickle.dumps((number, arrays), PROTOCOL))


def bare(workload: Workload, shuffle: bool = True) -> Batches:
    """The least that a main process can do for batches that fit a packet."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0)).tolist() if shuffle else list(range(LENGTH))
    tasks, their_tasks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    results, their_results = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork = multiprocessing.get_context("fork").Process
    workers = [fork(target=work, args=(workload, their_tasks, their_results, order), daemon=True) for _ in range(WORKERS)]
    size, sent = workload.batch_size, 0

    def send() -> None:
        nonlocal sent
        tasks.send(pickle.dumps((sent, order[size * sent : size * (sent + 1)]), PROTOCOL))
        sent += 1

    with tasks, their_tasks, results, their_results:
        try:
            for worker in workers:
                worker.start()
            ready = select.poll()
            ready.register(results, select.POLLIN)
            for _ in range(UNDER_WAY):
                send()
            while True:
                ready.poll()
                _, arrays = pickle.loads(results.recv(PACKET))
                send()
                yield [torch.from_numpy(one) for one in arrays]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def check(workload: Workload) -> None:
    repeatable = workload.repeatable()
    with closing(ours(repeatable, shuffle=False)) as batches, closing(bare(repeatable, shuffle=False)) as others:
        expected, found = ([next(one) for _ in range(count)] for one, count in ((batches, 3 * UNDER_WAY), (others, UNDER_WAY)))
    require(all(any(map(partial(same, one), expected)) for one in found), "the bare exchange gives other batches")


def main() -> None:
    options = arguments(__doc__)
    tiny = workload("tiny", options.smoke)
    check(tiny)
    contestants: dict[str, Any] = {"ours": ours, "bare": bare, "torch": torch_loader}
    runs = {name: partial(cost, one, tiny) for name, one in contestants.items()} | {"limit": partial(limit, tiny)}
    costs = in_turn(runs, 1 if options.smoke else ROUNDS)
    wall, cpu = ({name: [getattr(one, kind) for one in found] for name, found in costs.items()} for kind in ("wall_s", "cpu_s"))
    report(
        "main_process",
        [
            *(Figure(name, "CPU us/batch", [1e6 * one for one in found]) for name, found in cpu.items() if name != "limit"),
            Figure("DataLoader / ours", "x", ratios(cpu["torch"], cpu["ours"])),
            Figure("DataLoader / bare", "x", ratios(cpu["torch"], cpu["bare"])),
            Figure("ours / bare", "x", ratios(cpu["ours"], cpu["bare"])),
            Figure("throughput, ours / limit", "x", ratios(wall["limit"], wall["ours"])),
            Figure("throughput, bare / limit", "x", ratios(wall["limit"], wall["bare"])),
        ],
        options,
    )


if __name__ == "__main__":
    main()

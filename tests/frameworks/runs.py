"""Trainings in processes of their own, what they log, and how they are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import torch
import torch._dynamo  # which torch.optim imports when it is first used, else in each forked process for two seconds
import torch.distributed as dist

from tests.streams import DrawingDataset

LIMIT = 120  # seconds for one training, which takes about one; nothing else waits for time
LENGTH, BATCH = 11, 2
STEPS = 6  # in an epoch


def data(length=LENGTH):
    """Sample i shows its index and a draw of each global generator."""
    return DrawingDataset(length)


def shown(batch):
    """A collated batch as JSON takes it; numbers keep every bit."""
    return [part.tolist() for part in batch]


class Log:
    """Lines of JSON in a file. Each is one write, so that a line that was written survives the process."""

    def __init__(self, path):
        self.path = path

    def add(self, entry):
        line = (json.dumps(entry) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            assert os.write(file, line) == len(line)
        finally:
            os.close(file)

    def read(self):
        with open(self.path) as file:
            return [json.loads(line) for line in file]


def killed():
    """What a preempted machine does to a process."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_processes(work, count=1):
    """Calls work(number) in so many forked processes at once, and returns how each ended."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_quietly, args=(work, number)) for number in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def in_ranks(work, count=2):
    """Calls work(rank) in ranks whose process group is still to be made, with torchrun's environment; its store is held here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ranked(rank):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in {**ranks, **place, "OMP_NUM_THREADS": 1}.items()})
        work(rank)

    return in_processes(ranked, count)


def dealt(streams):
    """The samples of the ranks' streams of batches, in the order in which they were dealt out."""
    each = [[sample for batch in stream for sample in zip(*batch, strict=True)] for stream in streams]
    return [sample for turn in zip(*each, strict=True) for sample in turn]


def _quietly(work, number):
    torch.set_num_threads(1)  # OpenMP's threads are not there in a forked child
    work(number)

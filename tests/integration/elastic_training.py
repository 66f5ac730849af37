"""A training under DistributedDataParallel that torchrun starts; `test_torchrun.py` kills it and reads what it logged.

It goes on from the newest checkpoint in its folder, whatever the number of ranks that wrote it, and logs each batch before
the step is taken. What is logged survives the process: each line is one write.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from stateful_pipes import StatefulDataLoader, build_batch_sampler
from stateful_pipes.errors import StateMismatchError

LENGTH, EPOCHS = 41, 3
SAVES_EVERY = 2
STREAMS = ("samples", "balance", "naive")


class Drawing:
    """Sample i is its index and a draw of each global generator."""

    labels = np.arange(LENGTH) % 3

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


def loader_of(stream, workers=0):
    """One loader of each way to be dealt out to ranks: by samples, and by the batches of batch samplers."""
    data = Drawing()
    if stream == "samples":
        return StatefulDataLoader(data, 3, shuffle=True, num_workers=workers, seed=5)
    sampler = build_batch_sampler(stream, data, 4, repeat=False, drop_last=False, seed=6)
    return StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers, seed=7)


def digest(model):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


class Training:
    """Some loaders, a model, and a log for this rank in this life."""

    def __init__(self, folder, workers):
        self.folder = folder
        self.loaders = {stream: loader_of(stream, workers if stream == "samples" else 0) for stream in STREAMS}
        self.iterators = {stream: iter(loader) for stream, loader in self.loaders.items()}
        self.model = DistributedDataParallel(torch.nn.Linear(4, 1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.step = 0
        life = f"{os.environ['LIFE']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        self._log = os.open(folder / f"log.{life}.{dist.get_rank()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def log(self, **entry):
        os.write(self._log, json.dumps(entry).encode() + b"\n")

    def state(self):
        loaders = {stream: loader.state_dict() for stream, loader in self.loaders.items()}
        return {"loaders": loaders, "model": self.model.module.state_dict(), "step": self.step}

    def save(self):
        folder = self.folder / f"step-{self.step}"
        dcp.save(self.state(), checkpoint_id=folder)
        if dist.get_rank() == 0:
            (self.folder / "newest.new").write_text(folder.name)
            os.replace(self.folder / "newest.new", self.folder / "newest")
        self.log(saved=self.step, model=digest(self.model.module))

    def load(self, tampered):
        newest = self.folder / "newest"
        if newest.exists():
            state = self.state()
            dcp.load(state, checkpoint_id=self.folder / newest.read_text())
            if tampered is not None:
                self._load_tampered(state["loaders"], tampered)
            for stream, loader in self.loaders.items():
                loader.load_state_dict(state["loaders"][stream], allow=("world_size",))
                self.iterators[stream] = iter(loader)
            self.model.module.load_state_dict(state["model"])
            self.step = state["step"]
        self.log(loaded=self.step, world_size=dist.get_world_size(), model=digest(self.model.module))

    def _load_tampered(self, states, rank):
        """One rank has another state than the others; all are told, and nothing has changed."""
        for stream, loader in self.loaders.items():
            mine = copy.deepcopy(states[stream])
            if dist.get_rank() == rank:
                mine["nodes"]["sampler"]["seed"] += 1
            before = loader.state_dict()
            try:
                loader.load_state_dict(mine, allow=("world_size",))
                told = "nothing"
            except StateMismatchError as error:
                told = str(error)
            self.log(tampered=stream, told=told, changed=loader.state_dict() != before)

    def batch_of(self, stream):
        """The next batch and its epoch; None after the last epoch."""
        loader = self.loaders[stream]
        epoch = loader.position.epoch
        if epoch == EPOCHS:
            return None, epoch
        batch = next(self.iterators[stream], None)
        if batch is None:
            self.iterators[stream] = iter(loader)
            batch = next(self.iterators[stream])
        return batch, epoch

    def run(self, stop):
        """Trains to the end, or until this rank's `stop` step."""
        while any(loader.position.epoch < EPOCHS for loader in self.loaders.values()):
            if self.step == stop:
                return
            found = []
            for stream in STREAMS:
                batch, epoch = self.batch_of(stream)
                if batch is not None:
                    self.log(step=self.step, stream=stream, epoch=epoch, batch=batch.tolist())
                    found.append(batch)
            self.optimizer.zero_grad()
            self.model(torch.cat(found)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            if self.step % SAVES_EVERY == 0:
                self.save()
        self.log(finished=self.step, model=digest(self.model.module))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--hang-at", type=int, help="rank 0 tells that it is there, and hangs")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself there, in its first life")
    parser.add_argument("--tampered", type=int, help="the rank whose states are other ones at a first attempt to load")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(given.folder, given.workers)
    training.load(given.tampered)
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if given.hang_at is not None and rank == 0:
        training.run(given.hang_at)
        os.write(1, b"hangs\n")
        signal.pause()
    if given.die_at is not None and rank == 1 and first:
        training.run(given.die_at)
        os.kill(os.getpid(), signal.SIGKILL)
    training.run(None)
    for loader in training.loaders.values():
        loader.close()
    # Not by way of torch's own ends of DistributedDataParallel and Gloo, in which ranks were seen to hang for ever.
    os._exit(0)


if __name__ == "__main__":
    main()

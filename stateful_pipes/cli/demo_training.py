"""The training script of the demo. It may be killed at any moment; started again, it goes on from its last checkpoint.

What is needed for that is `Training.save`, `Training.restore` and the two nested loops of `Training.run`; the rest is
an ordinary training, and a log of every batch by which the demo compares two of them. Not meant to be run by hand: its
standard input and output are a conversation with `stateful_pipes.cli.demo_run`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from stateful_pipes import StatefulDataLoader
from stateful_pipes.checkpoint import write_atomically

__all__ = ["CHECKPOINT", "DATA", "LOG", "AugmentedDigits", "Options", "Training", "build_model", "count_steps", "normalize"]

DATA = "digits.npz"
CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
CHECKPOINT_EVERY = 5
DIGITS = 1797

Batch = dict[str, torch.Tensor]


class Options(NamedTuple):
    """What a training is started with."""

    epochs: int
    batch_size: int
    workers: int
    seed: int
    break_resume: bool = False
    """Restores all but the loader: the demo must then find differences."""


def count_steps(options: Options) -> int:
    """Batches of a whole training."""
    return options.epochs * -(-DIGITS // options.batch_size)


class AugmentedDigits(Dataset[Batch]):
    """scikit-learn's handwritten digits, shifted, with another contrast and noise: a draw from each global generator."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as digits:
            self.images = torch.tensor(digits["images"] / 16, dtype=torch.float32)
            self.labels = torch.tensor(digits["labels"])

    def __len__(self) -> int:
        return DIGITS

    def __getitem__(self, index: int) -> Batch:
        shift = [random.randint(-1, 1), random.randint(-1, 1)]
        contrast = float(np.random.uniform(0.8, 1.2))
        noise = torch.randn(8, 8)
        image = self.images[index].roll(shift, (0, 1)) * contrast + 0.05 * noise
        draws = torch.cat((torch.tensor([*shift, contrast], dtype=torch.float64), noise.flatten()))
        return {"id": torch.tensor(index), "image": image, "label": self.labels[index], "draws": draws}


def build_model() -> nn.Module:
    """A small convolutional network with dropout, so that the training itself draws from torch's generator too."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(512, 10),
    )


class Momentum:
    """SGD with momentum. Any of torch.optim would do, but they import torch's compiler: two seconds for each process."""

    def __init__(self, model: nn.Module, *, rate: float = 0.02, momentum: float = 0.9) -> None:
        self.rate, self.momentum = rate, momentum
        self.parameters = list(model.parameters())
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters and clears their gradients."""
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            if parameter.grad is not None:
                parameter.sub_(velocity.mul_(self.momentum).add_(parameter.grad), alpha=self.rate)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The velocities."""
        return {"velocities": self.velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes saved velocities."""
        self.velocities = state["velocities"]


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Images as the model takes them: (count, 1, 8, 8), around 0."""
    return (images.unsqueeze(1) - 0.3) / 0.4


class Training:
    """A training in a folder that holds its last checkpoint and its log; the data is in the folder above."""

    def __init__(self, folder: Path, options: Options) -> None:
        torch.set_num_threads(1)
        # As torch.use_deterministic_algorithms(True), which would import torch's compiler (see Momentum).
        torch.set_deterministic_debug_mode("error")
        random.seed(options.seed)
        np.random.seed(options.seed)
        torch.manual_seed(options.seed)
        self.options = options
        self.checkpoint = folder / CHECKPOINT
        # Unbuffered, and a line before each checkpoint: the log of a killed process is never behind its checkpoint.
        self.log = (folder / LOG).open("ab", buffering=0)
        self.step = 0
        self.model = build_model()
        self.optimizer = Momentum(self.model)
        self.loader: StatefulDataLoader[Batch] = StatefulDataLoader(
            AugmentedDigits(folder.parent / DATA),
            options.batch_size,
            shuffle=True,
            num_workers=options.workers,
            seed=options.seed,
        )

    def save(self) -> None:
        """Writes a checkpoint: a kill leaves the one before or this one, never half of it."""
        name, keys, *rest = np.random.get_state()
        state = {
            "loader": self.loader.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            # The loader gives the samples seeds of their own; these are for what the training loop draws.
            "python": random.getstate(),
            "numpy": (name, np.asarray(keys).tolist(), *rest),
            "torch": torch.get_rng_state(),
            "step": self.step,
            "log": self.log.tell(),
        }
        write_atomically(self.checkpoint, partial(torch.save, state))

    def restore(self) -> None:
        """Goes back to the last checkpoint; to the very start if there is none yet."""
        if not self.checkpoint.exists():
            self.log.seek(self.log.truncate(0))
            return
        state = torch.load(self.checkpoint)
        if not self.options.break_resume:
            self.loader.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        self.step = state["step"]
        # What was logged after the checkpoint will be trained, and logged, again.
        self.log.seek(self.log.truncate(state["log"]))

    def run(self) -> None:
        """Trains to the end from wherever the loader stands."""
        before = time.monotonic()
        self.restore()
        resumed, is_first = self.step, True
        while self.loader.position.epoch < self.options.epochs:
            for batch in self.rest_of_epoch():
                if is_first:
                    say({"resumed": resumed, "load_seconds": time.monotonic() - before})
                    is_first = False
                self.fit(batch)
                self.step += 1
                self.write_log(batch)
                if self.step % CHECKPOINT_EVERY == 0:
                    self.save()
                say({"step": self.step})
                wait_for_answer()
        self.save()
        self.loader.close()

    def rest_of_epoch(self) -> Iterable[Batch]:
        """Its batches under a bar that goes on where the last process was; in the line below the demo's own."""
        epoch, done, *_ = self.loader.position
        total = len(self.loader)
        return tqdm(self.loader, f"epoch {epoch}", total, initial=done, leave=False, position=1, unit="batch", disable=None)

    def fit(self, batch: Batch) -> None:
        """One step, with mixup every other time. It draws from all three global generators, as training loops do."""
        images, labels = normalize(batch["image"]), batch["label"]
        share, other = 1.0, torch.arange(len(labels))
        if random.random() < 0.5:
            share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(labels))
        logits = self.model(share * images + (1 - share) * images[other])
        loss = share * nn.functional.cross_entropy(logits, labels)
        loss = loss + (1 - share) * nn.functional.cross_entropy(logits, labels[other])
        torch.autograd.backward(loss)
        self.optimizer.step()

    def write_log(self, batch: Batch) -> None:
        """A line that says which samples the batch held, and digests of its draws and of all its bytes."""
        line = {
            "step": self.step,
            "ids": batch["id"].tolist(),
            "draws": digest([batch["draws"]]),
            "batch": digest(batch.values()),
        }
        self.log.write(json.dumps(line).encode() + b"\n")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over type, shape and bytes of each."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def say(message: dict[str, Any]) -> None:
    """Tells the demo, in a line."""
    print(json.dumps(message), flush=True)


def wait_for_answer() -> None:
    """Waits until the demo has heard the step before this one, so that a kill comes within a step of where it was meant."""
    if not sys.stdin.readline():
        raise SystemExit("the demo that this training belongs to is gone")


if __name__ == "__main__":
    Training(Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))).run()

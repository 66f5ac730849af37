"""A small CNN on the digits, with all that a training script has to save. As a script it resumes what another process paused."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from stateful_pipes import StatefulDataLoader
from stateful_pipes.training import TrainingResumeMixin, cpu_state, serialized_training, training_step

STEPS = 11
CONFIG = {"rate": 0.01, "sizes": (8, 16), "accumulate": 2, "load": None}


class Digits(torch.utils.data.Dataset):
    """A slice of them, each with noise and a shift that are drawn."""

    def __init__(self, start, stop):
        digits = load_digits()
        self.images = torch.tensor(digits.images[start:stop] / 16, dtype=torch.float32)
        self.labels = torch.tensor(digits.target[start:stop])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].roll(random.randint(-1, 1), 0) * np.random.uniform(0.8, 1.2)
        return index, (image + 0.05 * torch.randn(8, 8))[None], self.labels[index]


class Trainer(TrainingResumeMixin):
    """Each step takes a batch of each loader; the optimizer steps at every second one."""

    def __init__(self, workers=0, config=CONFIG):
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        self.config = config
        few, many = config["sizes"]
        self.model = nn.Sequential(
            nn.Conv2d(1, few, 3, padding=1),
            nn.BatchNorm2d(few),
            nn.ReLU(),
            nn.Conv2d(few, many, 3, stride=2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(9 * many, 10),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), config["rate"])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        # Epochs of 6 and 4 batches, so that the two are seldom at their end together.
        self.labelled = StatefulDataLoader(Digits(0, 45), 8, True, num_workers=workers, seed=1)
        self.mixed_in = StatefulDataLoader(Digits(100, 132), 8, True, num_workers=workers, seed=2)
        self.losses = []
        self.micro_steps = 0
        self._rebuild_resume_iterators()
        self._initialize_training_resume(config, version=1, device="cpu", amp=torch.bfloat16)

    @training_step
    def step(self):
        (ids, images, labels), (other_ids, others, _) = self.next_of("labelled"), self.next_of("mixed_in")
        share = float(np.random.beta(0.4, 0.4)) if random.random() < 0.5 else 1.0
        count = min(len(images), len(others))
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(share * images[:count] + (1 - share) * others[:count])
            loss = nn.functional.cross_entropy(logits.float(), labels[:count]) / self.config["accumulate"]
        self.scaler.scale(loss).backward()
        self.micro_steps += 1
        if self.micro_steps % self.config["accumulate"] == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return {"loss": loss, "ids": ids, "other_ids": other_ids, "share": share}

    def next_of(self, name):
        for _ in range(2):
            for batch in self.iterators[name]:
                return batch
            self.iterators[name] = iter(self._resume_loaders()[name])
        raise RuntimeError("an epoch without a batch")

    def snapshot(self):
        """What is there, read past the hooks."""
        return {
            "model": dict(self.model.named_parameters()) | dict(self.model.named_buffers()),
            "gradients": [one.grad for one in self.model.parameters()],
            "moments": [self.optimizer.state[one] for one in self.model.parameters()],
            "rate": self.optimizer.param_groups[0]["lr"],
            "scheduler": self.scheduler.last_epoch,
            "scaler": (self.scaler.get_scale(), self.scaler._get_growth_tracker()),
            "losses": self.losses,
            "micro_steps": self.micro_steps,
            "positions": [one.position[:3] for one in self._resume_loaders().values()],
        }

    @serialized_training
    def close(self):
        for loader in self._resume_loaders().values():
            loader.close()

    def _resume_objects(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler")}

    def _resume_loaders(self):
        return {"labelled": self.labelled, "mixed_in": self.mixed_in}

    def _resume_extra_state(self):
        gradients = [one.grad for one in self.model.parameters()]
        return {"losses": self.losses, "micro_steps": self.micro_steps, "gradients": gradients}

    def _load_resume_extra_state(self, state):
        self.losses, self.micro_steps = state["losses"], state["micro_steps"]
        for one, gradient in zip(self.model.parameters(), state["gradients"], strict=True):
            one.grad = gradient

    def _rebuild_resume_iterators(self):
        self.iterators = {name: iter(loader) for name, loader in self._resume_loaders().items()}

    def _validate_resume(self):
        pass

    def _resume_shared_keys(self):
        return ("model",)

    def _ordinary_checkpoint(self):
        return {"model": self.model.state_dict(), "losses": self.losses}


def resume_all(folder, workers):
    """Goes on from the pause after each step, and writes down what came of it."""
    found = {}
    for pause_after in range(1, STEPS):
        trainer = Trainer(workers)
        trainer.resume(folder / f"{pause_after}.pt")
        results = [cpu_state(trainer.step()) for _ in range(pause_after, STEPS)]
        found[pause_after] = {"results": results, "end": cpu_state(trainer.snapshot())}
        trainer.close()
    torch.save(found, folder / f"resumed-{workers}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for workers in sys.argv[2:]:
        resume_all(Path(sys.argv[1]), int(workers))

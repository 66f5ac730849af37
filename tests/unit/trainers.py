"""A trainer to pause and resume in tests: of plain tensors, since torch's own optimizers take seconds to import."""

from __future__ import annotations

import random

import numpy as np
import torch

from stateful_pipes import RandomSampler, StatefulDataLoader
from stateful_pipes.training import TrainingResumeMixin, serialized_training, training_step
from stateful_pipes.training.gate import gate_of


class Planned(Exception):
    """The fault that a test asked for."""


class Momentum:
    """Stands for an optimizer."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.velocity = [torch.zeros_like(one) for one in self.parameters]

    @torch.no_grad()
    def step(self):
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * velocity)

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        for velocity, saved in zip(self.velocity, state["velocity"], strict=True):
            velocity.copy_(saved)


class Counting:
    """A loader of somebody else's: 1, 2, 3..."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        while True:
            self.read += 1
            yield self.read

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Trainer(TrainingResumeMixin):
    """Draws from all generators, reads two loaders and a sampler; tells `on_reach` where it is, which may raise or draw."""

    shared = ()

    def __init__(self, *, version=1, config=None, amp=False):
        seed_all(0)
        self.reached = []
        self.on_reach = lambda place: None
        self.model = torch.nn.Linear(3, 1)
        self.momentum = Momentum(self.model.parameters())
        self.sampler = RandomSampler(7, seed=2)
        self.ours = StatefulDataLoader(torch.arange(30.0).view(10, 3), 2, shuffle=True, seed=3, rng=())
        self.theirs = Counting()
        self.count = 0
        self._make_iterators()
        for name in ("model", "momentum", "sampler", "ours", "theirs"):
            self._watch(name)
        config = {"rate": 0.01, "layers": [3, 1], "load": "anything"} if config is None else config
        self._initialize_training_resume(config, version=version, device="cpu", amp=amp)

    def reach(self, place):
        self.reached.append(place)
        self.on_reach(place)

    @training_step
    def step(self):
        try:
            batch = next(self.batches)
        except StopIteration:
            self.batches = iter(self.ours)
            batch = next(self.batches)
        self.sampler.set_epoch(self.sampler.epoch + 1)
        index = next(iter(self.sampler))
        self.model.zero_grad()
        noise = random.gauss(0, 1) + np.random.normal() + torch.randn(3)
        loss = self.model(batch / 30 + noise + index).square().mean() + next(self.numbers)
        loss.backward()
        self.reach("step")
        self.momentum.step()
        self.count += 1
        return batch.tolist(), index, loss.item().hex()

    @serialized_training
    def add(self):
        self.reach("add")
        self.count += 1

    def _make_iterators(self):
        self.batches, self.numbers = iter(self.ours), iter(self.theirs)

    def _watch(self, name):
        one = getattr(self, name)
        for method in ("state_dict", "validate_state_dict", "load_state_dict"):
            if hasattr(one, method):
                setattr(one, method, self._watched(f"{name}.{method}", getattr(one, method)))

    def _watched(self, place, method):
        def watched(*arguments, **options):
            found = method(*arguments, **options)
            self.reach(place)
            return found

        return watched

    def _resume_objects(self):
        self.reach("_resume_objects")
        return {"model": self.model, "momentum": self.momentum, "sampler": self.sampler}

    def _resume_loaders(self):
        self.reach("_resume_loaders")
        return {"ours": self.ours, "theirs": self.theirs}

    def _resume_extra_state(self):
        self.reach("_resume_extra_state")
        return {"count": self.count}

    def _load_resume_extra_state(self, state):
        self.reach("_load_resume_extra_state")
        self.count = state["count"]

    def _rebuild_resume_iterators(self):
        self.reach("_rebuild_resume_iterators")
        self._make_iterators()

    def _validate_resume(self):
        self.reach("_validate_resume")

    def _resume_shared_keys(self):
        self.reach("_resume_shared_keys")
        return self.shared

    def _ordinary_checkpoint(self):
        self.reach("_ordinary_checkpoint")
        return {"model": self.model.state_dict(), "epoch": 3}


class Sharing(Trainer):
    shared = ("model",)


def raising(place, error=Planned):
    """For `on_reach`: fails there."""

    def at(reached):
        if reached == place:
            raise error(place)

    return at


def drawing(place=None):
    """For `on_reach`: moves all generators, everywhere or at one place; never in a step, which would be another one then."""

    def at(reached):
        if reached != "step" and place in (None, reached):
            seed_all(random.getrandbits(32))

    return at


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def run(trainer, steps):
    return [trainer.step() for _ in range(steps)]


def trained(steps, kind=Trainer, **options):
    """One that has taken steps; the generators are as it left them."""
    trainer = kind(**options)
    run(trainer, steps)
    return trainer


def paused(path, steps, kind=Trainer, **options):
    trainer = trained(steps, kind, **options)
    trainer.pause(path)
    return trainer


def generators():
    """The states of Python's, NumPy's and torch's, as what can be compared."""
    numpy = np.random.get_state()
    return random.getstate(), (numpy[1].tobytes(), *numpy[2:]), torch.default_generator.get_state().numpy().tobytes()


def look(trainer):
    """All that shapes the steps to come, bit for bit, and whether they may be taken; past what is watched."""
    parameters = list(trainer.model.parameters())
    return {
        "weights": [bits(one) for one in parameters],
        "gradients": [one.grad if one.grad is None else bits(one.grad) for one in parameters],
        "velocity": [bits(one) for one in trainer.momentum.velocity],
        "sampler": type(trainer.sampler).state_dict(trainer.sampler),
        "ours": type(trainer.ours).state_dict(trainer.ours),
        "theirs": trainer.theirs.read,
        "iterators": [id(one) for one in (trainer.batches, trainer.numbers)],
        "count": trainer.count,
        "generators": generators(),
        "gate": {name: value for name, value in vars(gate_of(trainer)).items() if name != "_lock"},
    }


def bits(tensor):
    return tensor.detach().numpy().tobytes()

"""What does a pause of a whole training cost, and a resume, against torch.save, fsync and torch.load of the same states?

    python benchmarks/pausing.py [--json PATH] [--smoke]

A model of 8 million parameters and Adam's moments: 96 MB. `pause` copies all of it, since a trainer's own threads may go on,
writes it with a SHA-256 beside the target, looks whether `weights_only=True` would take it, and syncs file and folder;
`resume` compares the SHA-256 and all that it validates. The file lies in the folder for temporary files. Before that it is
checked that a new trainer has the weights of the one that was paused.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                     unit  times  lower q.  median  upper q.  target  reached
    torch.save and fsync                       ms     22     281.9   291.1     300.4       -        -
    pause                                      ms     22     375.1   393.7     414.1       -        -
    torch.load and load_state_dict             ms     22     31.42   46.21     49.89       -        -
    resume                                     ms     22     116.3   121.8       137       -        -
    pause / torch.save and fsync                x     22     1.292    1.36     1.449       -        -
    resume / torch.load and load_state_dict     x     22     2.351   2.825     4.256       -        -
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import ROUNDS, Figure, arguments, in_turn, ratios, report, require, timed

from stateful_pipes import StatefulDataLoader
from stateful_pipes.training import TrainingResumeMixin, training_step


class Trainer(TrainingResumeMixin):
    """The least that has something to save."""

    def __init__(self, width: int) -> None:
        self.model = torch.nn.Linear(width, width)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loader: StatefulDataLoader[torch.Tensor] = StatefulDataLoader(torch.ones(1000, 1), 10, True)
        self._initialize_training_resume({"width": width}, version=1, device="cpu", amp=False)

    @training_step
    def step(self) -> None:
        inputs = next(iter(self.loader)).expand(-1, self.model.in_features)
        torch.autograd.backward(self.model(inputs).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.loader.load_state_dict(states["loader"])

    def _resume_objects(self) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def _resume_loaders(self) -> Mapping[str, Any]:
        return {"train": self.loader}

    def _resume_extra_state(self) -> None:
        return None

    def _load_resume_extra_state(self, state: None) -> None:
        pass

    def _rebuild_resume_iterators(self) -> None:
        pass

    def _validate_resume(self) -> None:
        pass


def save(trainer: Trainer, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(trainer.states(), file)
        os.fsync(file.fileno())


def main() -> None:
    options = arguments(__doc__)
    width = 100 if options.smoke else 2828
    with tempfile.TemporaryDirectory() as folder:
        paused, saved = Path(folder, "paused.pt"), Path(folder, "saved.pt")
        trainer, other = Trainer(width), Trainer(width)
        trainer.step()
        trainer.pause(paused)
        other.resume(paused)
        require(torch.equal(trainer.model.weight, other.model.weight), "the resumed trainer has other weights")

        def pause() -> float:
            seconds = timed(trainer.pause, paused)
            trainer.resume(paused)
            return seconds

        trainer.resume(paused)
        runs = {
            "torch.save and fsync": partial(timed, save, trainer, saved),
            "pause": pause,
            "torch.load and load_state_dict": partial(timed, lambda: other.load(torch.load(saved))),
            "resume": partial(timed, other.resume, paused),
        }
        save(trainer, saved)
        found = in_turn(runs, 2 if options.smoke else 2 * ROUNDS)
    saving, pausing, loading, resuming = found.values()
    report(
        "pausing",
        [
            *(Figure(name, "ms", [1e3 * one for one in seconds]) for name, seconds in found.items()),
            Figure("pause / torch.save and fsync", "x", ratios(pausing, saving)),
            Figure("resume / torch.load and load_state_dict", "x", ratios(resuming, loading)),
        ],
        options,
    )


if __name__ == "__main__":
    main()

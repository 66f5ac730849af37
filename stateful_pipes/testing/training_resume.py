"""That a trainer which was paused and resumed trains on as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch

from stateful_pipes.caught import add_note, brief
from stateful_pipes.errors import TrainingPausedError
from stateful_pipes.integers import as_integer
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import cpu_state, random_state, restore_random_state
from stateful_pipes.training.random_state import generators_kept

__all__ = ["assert_training_resume"]


class Trainer(Protocol):
    """With `TrainingResumeMixin`, or with these methods of its own."""

    def pause(self, path: Any) -> Any: ...

    def resume(self, path: Any) -> Any: ...


T = TypeVar("T", bound=Trainer)
_ELSEWHERE: Final = 0x5EED0FF


def assert_training_resume(
    factory: Callable[[], T],
    run_step: Callable[[T], Any],
    checkpoint_path: str | PathLike[str],
    pause_after: int,
    total_steps: int,
    snapshot: Callable[[T], Any],
    device: torch.device | str = "cpu",
) -> None:
    """Trains once without a break, and once paused and resumed in a new trainer, and compares the two bit for bit.

    The new trainer's generators are moved before it is made and again before it resumes, so that neither its constructor's
    seeding nor where they happen to stand hides that one was not restored. Compared are the snapshots before and after the
    pause, right after the resume and at the end, the generators at the same places, and the result of every step. A paused
    trainer has to refuse a step.

    All runs in this process and on this device. That workers are spawned, that a process is started anew, that kernels on
    a GPU are deterministic, needs tests of its own.

    Args:
        factory: Makes a trainer, a new one at each call, of equal settings.
        run_step: Takes one training step, and returns what came of it: a loss, a batch's indices... Nothing that varies with
            time, as a duration does. It is called for all steps one after the other, so it may take the batch itself.
        checkpoint_path: Where `pause` writes; what is there is replaced.
        pause_after: How many steps are taken before the pause, at least 1. Try that of an epoch's last batch, too.
        total_steps: How many in all, at least `pause_after`.
        snapshot: Returns what shapes the steps to come: weights, the optimizer's moments, counters, pools, gradients if a step
            adds to them (a resume clears others). It is to read the attributes themselves; what the hooks return shows
            nothing of what they forget.
        device: Of the trainer; a CUDA device's generator is compared and moved, too.

    The caller's generators are as before when it returns or raises. Each trainer is closed: its `close()`, if it has one,
    and that of each of its `_resume_loaders()`.

    Raises:
        AssertionError: something differs; it says where, and names the first path.
        AttributeError: the trainer has no `pause` or no `resume`.
        ValueError, TypeError: wrong numbers of steps.
    """
    pause_after = as_integer("pause_after", pause_after, 1)
    total_steps = as_integer("total_steps", total_steps, pause_after)
    with generators_kept(device):
        _Run(factory, run_step, snapshot, device).check(checkpoint_path, pause_after, total_steps)


class _Run(Generic[T]):
    """Three trainers, one after the other: without a break, paused, resumed."""

    def __init__(
        self, factory: Callable[[], T], run_step: Callable[[T], Any], snapshot: Callable[[T], Any], device: torch.device | str
    ) -> None:
        self.factory = factory
        self.run_step = run_step
        self.snapshot = snapshot
        self.device = device
        self.made: list[T] = []

    def check(self, path: str | PathLike[str], pause_after: int, total_steps: int) -> None:
        start = random_state(self.device)
        with self.trainer() as trainer:
            results = [self.step(trainer) for _ in range(pause_after)]
            at_pause = self.look(trainer)
            results += [self.step(trainer) for _ in range(total_steps - pause_after)]
            at_end = self.look(trainer)

        restore_random_state(start, self.device)
        with self.trainer() as trainer:
            for number, expected in enumerate(results[:pause_after], start=1):
                _compare(f"step {number}, of a second run without a break, gives something else", expected, self.step(trainer))
            _compare("a second run without a break stands elsewhere", at_pause, self.look(trainer))
            trainer.pause(path)
            _compare("the pause has changed the trainer", at_pause, self.look(trainer))
            self.refuse_step(trainer)

        self.move_generators()
        with self.trainer() as trainer:
            self.move_generators()
            trainer.resume(path)
            _compare("right after the resume", at_pause, self.look(trainer))
            for number, expected in enumerate(results[pause_after:], start=pause_after + 1):
                _compare(f"step {number}, after the resume", expected, self.step(trainer))
            _compare(f"at the end, after step {total_steps}", at_end, self.look(trainer))

    @contextmanager
    def trainer(self) -> Iterator[T]:
        made = self.factory()
        if any(made is one for one in self.made):
            raise AssertionError("factory returned a trainer that it had returned before")
        self.made.append(made)
        try:
            yield made
        except BaseException as error:
            try:
                _close(made)
            except Exception as another:
                add_note(error, f"its trainer's close() failed as well: {brief(another)}")
            raise
        _close(made)

    def step(self, trainer: T) -> dict[str, Any]:
        return {"result": cpu_state(self.run_step(trainer))}

    def look(self, trainer: T) -> dict[str, Any]:
        """The snapshot, and the generators."""
        before = random_state(self.device)
        found = cpu_state(self.snapshot(trainer))
        _compare("snapshot moves a generator", {"generators": before}, {"generators": random_state(self.device)})
        again = cpu_state(self.snapshot(trainer))
        _compare("snapshot differs when it is repeated", {"snapshot": found}, {"snapshot": again})
        return {"snapshot": found, "generators": before}

    def refuse_step(self, trainer: T) -> None:
        try:
            self.run_step(trainer)
        except TrainingPausedError:
            return
        except Exception as error:
            raise AssertionError(f"a paused trainer must refuse a step with TrainingPausedError, it raised {error!r}") from error
        raise AssertionError("a paused trainer must refuse a step with TrainingPausedError, it took one")

    def move_generators(self) -> None:
        """To where no training comes: a draw might lead to the very state that is to be restored.

        Python's and NumPy's have a second Gaussian to give there, which a resume has to take from them.
        """
        random.seed(_ELSEWHERE)
        random.gauss(0, 1)
        np.random.seed(_ELSEWHERE)
        np.random.standard_normal()
        torch.default_generator.manual_seed(_ELSEWHERE)
        if torch.device(self.device).type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(_ELSEWHERE)


def _compare(where: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name in expected:
        mismatch = first_mismatch(expected[name], found[name])
        if mismatch is not None:
            raise AssertionError(f"{where}: {name}{mismatch}")


def _close(trainer: Any) -> None:
    closing = [trainer]
    with suppress(Exception):  # a trainer without this hook, or with one that fails
        loaders = trainer._resume_loaders()
        closing += loaders.values() if isinstance(loaders, Mapping) else loaders
    with ExitStack() as stack:
        for one in reversed(closing):
            if hasattr(one, "close"):
                stack.callback(one.close)

"""A pipeline cut at random and resumed, with other workers, after kills and in a new process; and whether it stays the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from stateful_pipes.integers import as_integer
from stateful_pipes.testing.causes import Cause, Scene, find_cause
from stateful_pipes.testing.comparison import Mismatch
from stateful_pipes.testing.laboratory import clean_processes_kept
from stateful_pipes.testing.pieces import Factory, row_of, samples_behind
from stateful_pipes.testing.trials import Differs, Trials
from stateful_pipes.training.random_state import generators_kept

__all__ = ["Difference", "Verdict", "verify"]


class Difference(NamedTuple):
    """The first batch that was not what it should be.

    Attributes:
        trial: In which trial.
        epoch, batch: Its epoch, and its number in that.
        sample: Which sample in it differs first, by position and index, as far as that is known.
        mismatch: The path within the batch, what was expected there, and what was found.
        cause: The likeliest cause.
    """

    trial: str
    epoch: int
    batch: int
    sample: str
    mismatch: Mismatch
    cause: Cause

    def __str__(self) -> str:
        lines = [
            f"the first batch that differs: epoch {self.epoch}, batch {self.batch} ({self.trial})",
            f"  sample: {self.sample}",
            f"  at batch{self.mismatch}",
            f"  likeliest cause: {self.cause.kind}: {self.cause.told}",
            f"  remedy: {self.cause.remedy}",
            f"  tried: {'; '.join(self.cause.tried)}",
        ]
        return "\n".join(lines)


class Verdict(NamedTuple):
    """What `verify` found.

    Attributes:
        difference: None if every batch was the same, bit for bit.
        tried: The trials, in order; the last one is that which differed.
        notes: What could not be tried, and why.
    """

    difference: Difference | None
    tried: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        lines = [*(f"tried: {one}" for one in self.tried), *(f"not tried: {one}" for one in self.notes)]
        return "\n".join([*lines, "exact" if self.difference is None else f"NOT exact: {self.difference}"])


def verify(
    factory: Factory,
    *,
    batches: int = 64,
    seed: int = 0,
    cuts: int = 8,
    workers: Sequence[int] = (0, 2),
    kills: int = 2,
    new_process: bool = True,
    report: Callable[[str], object] = lambda line: None,
) -> Verdict:
    """Reads a pipeline straight through, and again with cuts; the arguments are those of `assert_pipeline_resume`.

    Args:
        report: Called with a line whenever a trial begins.
    """
    batches, cuts, kills = as_integer("batches", batches, 1), as_integer("cuts", cuts, 0), as_integer("kills", kills, 0)
    numbers = tuple(as_integer("workers", one, 0) for one in workers)
    if not numbers:
        raise ValueError("workers must name at least one number of workers")
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        clean = stack.enter_context(clean_processes_kept()) if new_process else None
        trials = Trials(factory, batches, random.Random(as_integer("seed", seed, 0)), numbers, clean, report)
        found = None
        try:
            trials.run(cuts, kills)
        except Differs as differs:
            found = _difference(trials, differs)
        return Verdict(found, tuple(trials.tried), tuple(trials.notes))


def _difference(trials: Trials, found: Differs) -> Difference:
    expected, where = trials.steps[found.place], trials.tried[-1]
    trials.report(f"epoch {expected.epoch}, batch {expected.batch} differs; looking for the cause")
    states = trials.states[: found.place + 1]
    scene = Scene(trials.factory, states, expected.content, where, trials.timeout, trials.clean)
    sample = _sample(trials.factory, states[-1], expected.content, found.found)
    return Difference(where, expected.epoch, expected.batch, sample, found.mismatch, find_cause(scene))


def _sample(factory: Factory, state: str, expected: object, found: object) -> str:
    samples = samples_behind(factory, state)
    if samples is None or not samples.positions:
        return "not known"
    rows = len(samples.positions)
    row = 0 if rows == 1 else None if found is None else row_of(expected, found, rows)
    if row is None:
        return f"one of {samples}"
    index = f", index {samples.indices[row]!r}" if len(samples.indices) == rows else ""
    return f"number {row} of the batch: epoch {samples.epoch}, position {samples.positions[row]}{index}"

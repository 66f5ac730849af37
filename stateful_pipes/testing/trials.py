"""The straight run of a pipeline, and the trials that have to give the same."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Final

from stateful_pipes.caught import brief
from stateful_pipes.prefetch.prefetcher import prefetchers_of
from stateful_pipes.testing.comparison import Mismatch
from stateful_pipes.testing.laboratory import CleanProcess, ExperimentFailed, hash_seeds, in_fork
from stateful_pipes.testing.pieces import (
    Factory,
    FactoryError,
    Step,
    chosen_prefetcher,
    difference,
    kept,
    opened,
    read_pieces,
    steps,
    takes_workers,
)
from stateful_pipes.testing.surroundings import Surroundings, move_generators

__all__ = ["Differs", "Trials"]

_EPOCHS: Final = 2
_CHANGED: Final = "directory listings the other way round and another date"
_DYING_S: Final = 30


class Differs(Exception):
    """A trial has come upon another batch."""

    def __init__(self, place: int, mismatch: Mismatch, found: Any) -> None:
        self.place, self.mismatch, self.found = place, mismatch, found


class Trials:
    """One run of all trials; see `assert_pipeline_resume`."""

    def __init__(
        self,
        factory: Factory,
        batches: int,
        draw: random.Random,
        workers: tuple[int, ...],
        clean: Callable[[int], CleanProcess] | None,
        report: Callable[[str], object],
    ) -> None:
        self.factory, self.batches, self.draw, self.workers = factory, batches, draw, workers
        self.clean, self.report = clean, report
        self.tried: list[str] = []
        self.notes: list[str] = []
        self.steps: list[Step] = []
        self.states: list[str] = []

    def run(self, cuts: int, kills: int) -> None:
        """Makes one after another.

        Raises:
            Differs: a batch was not what it should be; the trial is the last of `tried`.
            FactoryError: there is nothing to try.
        """
        began = time.monotonic()
        self._read_through()
        self.timeout = 60 + 20 * (time.monotonic() - began)
        for told, trial in self._trials(cuts, kills):
            self.tried.append(told)
            self.report(f"trying: {told}")
            trial()

    # The straight run.

    def _read_through(self) -> None:
        self.report("reading it straight through")
        with closing(opened(self.factory, self.workers[0])) as loader:
            self.has_workers = chosen_prefetcher(loader) is not None or takes_workers(self.factory)
            first = loader.position.epoch
            self.states.append(json.dumps(loader.state_dict()))
            for step in steps(loader):
                if step.epoch >= first + _EPOCHS:
                    break
                self.steps.append(kept(step))
                self.states.append(json.dumps(loader.state_dict()))
                if len(self.steps) == self.batches or loader.position.epoch >= first + _EPOCHS:
                    break
                self._disturb()
        if not self.steps:
            raise FactoryError("factory must return a pipeline that has a batch, got one that has none")
        self.ends = [n for n, (one, other) in enumerate(pairwise(self.steps), start=1) if one.epoch != other.epoch]
        if not self.ends:
            self.notes.append(f"a cut at an epoch's end: none lies within the first {len(self.steps)} batches (batches=)")
        if not self.has_workers and any(self.workers):
            self.notes.append("workers: the pipeline has no ProcessPrefetcher for them, and factory no parameter num_workers")
            self.workers = (0,)

    # The trials.

    def _trials(self, cuts: int, kills: int) -> Iterator[tuple[str, Callable[[], None]]]:
        total = len(self.steps)
        with_workers = [number for number in self.workers if number]
        yield f"{total} batches from the first state, in a fresh pipeline", partial(self._chain, [0, total], [0], [])
        places = self._places(cuts)
        yield f"cut and resumed before batches {_listed(places)}", partial(self._chain, [*places, total], [0], [])
        place = self.draw.randrange(total)
        yield f"resumed before batch {place}, and read to the end", partial(self._chain, [0, place, total], [0], [])
        if with_workers:
            places = self._places(cuts)
            told = f"cut before batches {_listed(places)}, with {_listed(self.workers)} workers in turn"
            yield told, partial(self._chain, [*places, total], list(self.workers), [])
        if with_workers and kills:
            places = self._places(cuts // 2)
            if running := [place for place in range(total) if place not in places]:  # elsewhere workers have not started yet
                killed = sorted(self.draw.sample(running, min(kills, len(running))))
                told = f"cut before batches {_listed(places)}, and workers killed with SIGKILL before {_listed(killed)}"
                yield told, partial(self._chain, [*places, total], with_workers, killed)
            else:
                self.notes.append("kills: too few batches")
        if self.clean is not None:
            places = sorted({0, self.draw.randrange(total)})
            counts = [stop - start for start, stop in pairwise([*places, total])]
            task = partial(read_pieces, self.factory, self.states[0], counts)
            yield f"in a new process, with another PYTHONHASHSEED, {_CHANGED}", partial(self._away, task)

    def _places(self, cuts: int) -> list[int]:
        """Always before the first batch and after an epoch's last one, and one of them twice."""
        found = [0, *self.ends, *self.draw.choices(range(len(self.steps)), k=cuts)]
        return sorted([*found, self.draw.choice(found)])

    def _chain(self, places: list[int], workers: list[int], killed: list[int]) -> None:
        """Pipelines one after another, each from the state of the one before."""
        state = self.states[0]
        first = self.draw.randrange(len(workers))
        for number, (start, stop) in enumerate(pairwise(places), start=first):
            state = self._piece(
                state, start, stop, workers[number % len(workers)], [one for one in killed if start <= one < stop]
            )

    def _piece(self, state: str, start: int, stop: int, workers: int, killed: list[int]) -> str:
        self._disturb()
        place = start
        others = set(multiprocessing.active_children())
        with _quiet(killed), ExitStack() as stack:
            try:
                loader = stack.enter_context(closing(opened(self.factory, workers)))
                for node in prefetchers_of(loader.pipeline):
                    node.max_restarts = max(node.max_restarts, len(killed))
                loader.load_state_dict(json.loads(state))
                found = steps(loader)
                while place < stop:
                    for _ in range(killed.count(place)):
                        self._kill(others)
                    step = next(found, None)
                    self._disturb()
                    self._check(place, step)
                    place += 1
                return json.dumps(loader.state_dict())
            except Differs:
                raise
            except Exception as error:
                told = Mismatch("", "a batch", brief(error))
                raise Differs(place, told, None) from error

    def _check(self, place: int, found: Step | None) -> None:
        mismatch = difference(self.steps[place], found)
        if mismatch is not None:
            raise Differs(place, mismatch, None if found is None else kept(found).content)

    def _kill(self, others: set[Any]) -> None:
        workers = [one for one in multiprocessing.active_children() if one not in others]
        if workers:
            chosen = self.draw.choice(sorted(workers, key=lambda one: one.pid or 0))
            os.kill(chosen.pid or 0, signal.SIGKILL)
            chosen.join(_DYING_S)

    def _away(self, task: Callable[[], Any]) -> None:
        """In a new process; where that is not possible, in a fork of this one."""
        away = Surroundings(is_elsewhere=True)
        try:
            found, error = self._clean(task, away)
            if error:
                # As a server may refuse what is signed with a wrong date.
                again, another = self._clean(task, Surroundings())
                if not another:
                    self.notes.append(f"another date and other listings: then {error}")
                    found, error = again, another
        except ExperimentFailed as failed:
            self.notes.append(f"a new process, with another PYTHONHASHSEED: {failed}")
            self.clean = None
            self.tried[-1] = f"in a fork of this process, {_CHANGED}"
            try:
                found, error = in_fork(task, away, self.timeout)
            except ExperimentFailed as again:
                self.notes.append(f"{self.tried.pop()}: {again}")
                return
        for place, step in enumerate(found):
            self._check(place, step)
        if len(found) < len(self.steps):
            raise Differs(len(found), Mismatch("", "a batch", error or "nothing"), None)

    def _clean(self, task: Callable[[], Any], surroundings: Surroundings) -> Any:
        if self.clean is None:
            raise ExperimentFailed("not wanted")
        return self.clean(hash_seeds()[0]).run(task, surroundings, self.timeout)

    def _disturb(self) -> None:
        """What a training loop draws between batches."""
        move_generators((self.draw.getrandbits(32), self.draw.getrandbits(32), self.draw.getrandbits(32)))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@contextmanager
def _quiet(killed: list[int]) -> Iterator[None]:
    """Without the library's warnings of workers that died, where they are killed on purpose."""
    logger = logging.getLogger("stateful_pipes")
    was_disabled, logger.disabled = logger.disabled, logger.disabled or bool(killed)
    try:
        yield
    finally:
        logger.disabled = was_disabled

"""Which of a trainer's methods may run: one at a time, and none that steps while the trainer is paused or half restored."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from stateful_pipes.caught import brief
from stateful_pipes.errors import TrainingPausedError, TrainingResumeIncompleteError, TrainingStepIncompleteError

__all__ = ["Gate", "gate_of", "serialized_training", "training_step"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_RETURNS_EARLY: Final = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class Gate:
    """A trainer's lock, and where the trainer stands."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of the steps under way, which are all the lock's owner's
        self._completed = False
        self._failure = ""
        self._resume_failure = ""
        self.paused = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Alone among threads."""
        with self._lock:
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """A training step; one inside another is a part of it.

        Raises:
            TrainingPausedError: the trainer is paused.
            TrainingResumeIncompleteError: a resume failed halfway.
        """
        with self._lock:
            self._refuse_locked()
            if self.paused:
                raise TrainingPausedError
            self._depth += 1
            try:
                yield
            except BaseException as error:
                if self._depth == 1:
                    self._failure = brief(error)
                raise
            else:
                if self._depth == 1:
                    self._completed, self._failure = True, ""
            finally:
                self._depth -= 1

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """The trainer is paused where this succeeds."""
        with self._lock:
            self._refuse_locked()
            self._refuse_within_step("pause")
            if self.paused:
                raise TrainingPausedError("it was paused already")
            if self._failure:
                remedy = "Complete a step, or resume from a checkpoint, before pausing"
                raise TrainingStepIncompleteError(f"the last one failed with {self._failure}", remedy=remedy)
            if not self._completed:
                raise TrainingStepIncompleteError("none has been taken yet, or it is not decorated with @training_step")
            self.paused = True  # for the hooks, too
            try:
                yield
            except BaseException:
                self.paused = False
                raise

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Alone, and not within a step; what is checked in here changes nothing."""
        with self._lock:
            self._refuse_within_step("resume")
            yield

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """The trainer is locked until this has succeeded once."""
        with self._lock:
            self._resume_failure = "it is under way"
            try:
                yield
            except BaseException as error:
                self._resume_failure = f"it failed with {brief(error)}"
                raise
            self.paused, self._completed, self._failure, self._resume_failure = False, True, "", ""

    def _refuse_locked(self) -> None:
        if self._resume_failure:
            raise TrainingResumeIncompleteError(self._resume_failure)

    def _refuse_within_step(self, what: str) -> None:
        if self._depth:
            remedy = "Call it between two steps; the handler of a signal sets a flag for that"
            raise TrainingStepIncompleteError(f"{what} was called within a step", remedy=remedy)

    def __reduce__(self) -> Any:
        standing = {name: value for name, value in vars(self).items() if name not in ("_lock", "_depth")}
        return Gate, (), standing  # a copied trainer stands where this one does, with a lock of its own


def training_step(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """For the outermost training step of a trainer with `TrainingResumeMixin`: what ends with the optimizer's step.

    One runs at a time, whatever the threads. Where it raises, `pause` is refused until a step has succeeded or a checkpoint has
    been restored. It may be called again, but that takes back nothing: what the failed one has drawn, read from a loader,
    accumulated in gradients, counted or already stepped is changed, and a retry goes on from there. Any exception counts, also
    a StopIteration at an epoch's end.

    Raises:
        TypeError: it is not a plain method: a generator's or a coroutine's body would run after it has returned.
    """
    return _guarded(method, Gate.step)


def serialized_training(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """For every other method that changes what a trainer saves: it waits for a step, a pause or a resume in another thread.

    In the thread that has one under way it runs at once. It is not refused while the trainer is paused.
    """
    return _guarded(method, Gate.entered)


def gate_of(trainer: object) -> Gate:
    """Its gate; AttributeError if it has none yet."""
    gate = getattr(trainer, "_training_gate", None)
    if not isinstance(gate, Gate):
        name = type(trainer).__name__
        raise AttributeError(f"{name} has to call _initialize_training_resume(), of TrainingResumeMixin, in its constructor")
    return gate


def _guarded(
    method: Callable[Concatenate[T, P], R], scope: Callable[[Gate], AbstractContextManager[None]]
) -> Callable[Concatenate[T, P], R]:
    if not _is_plain(method):
        raise TypeError(f"only a plain method can be decorated, got {method!r}")

    @functools.wraps(method)
    def guarded(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with scope(gate_of(self)):
            return method(self, *args, **kwargs)

    return guarded


def _is_plain(method: object) -> bool:
    if not inspect.isfunction(method):
        return False
    return not any(returns_early(one) for one in (method, inspect.unwrap(method)) for returns_early in _RETURNS_EARLY)

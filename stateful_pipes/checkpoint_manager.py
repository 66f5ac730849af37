"""A whole training's checkpoints in one folder: written now and then, the newest valid one read back."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Self

from stateful_pipes.checkpoint import write_atomically
from stateful_pipes.errors import CheckpointFileError
from stateful_pipes.integers import as_integer
from stateful_pipes.sealed_file import read_sealed, write_sealed

__all__ = ["Checkpoint", "CheckpointManager"]

logger = logging.getLogger("stateful_pipes")

_NAME: Final = re.compile(r"checkpoint-([0-9]{12,})\.pt")
# What a save leaves that is killed.
_LEFTOVER: Final = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{16}}")


class Checkpoint(NamedTuple):
    """What `CheckpointManager.restore` found.

    Attributes:
        step: The step after which it was saved.
        state: What was saved.
    """

    step: int
    state: Any


class CheckpointManager:
    """Saves a training's state every so often, keeps the newest few, and finds the newest valid one after a crash.

    Each is a file `checkpoint-<step>.pt` of `torch.save`, which `torch.load` reads as well, sealed with a SHA-256 and
    written atomically: a crash at any moment, or a full disk, leaves the ones before untouched. As a context manager it
    also answers SIGTERM, which clusters send before they take a machine away: the step under way is finished, its
    state saved, then the program ends. Under torch.distributed one rank saves; all may restore.

    Args:
        folder: One training's, made if it is missing: a new training in it would find the old one's checkpoints, and two at once
            would remove each other's.
        every: How many steps, or how much time, between two checkpoints.
        keep: How many of the newest stay.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manager = CheckpointManager(folder, every=100, keep=2)
    ...     for step in range(1, 451):
    ...         _ = manager.save_if_due(step, lambda: {"weights": torch.zeros(2), "step": step})
    ...     manager.steps(), manager.restore().step
    ([300, 400], 400)
    """

    def __init__(self, folder: str | PathLike[str], *, every: int | timedelta, keep: int = 3) -> None:
        if isinstance(every, timedelta):
            if every <= timedelta(0):
                raise ValueError(f"every must be longer than nothing, got {every}")
            self.every: int | timedelta = every
        else:
            self.every = as_integer("every", every, 1)
        self.keep = as_integer("keep", keep, 1)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.is_terminated = False
        self._last_step = 0
        self._last_time = time.monotonic()
        self._handler: Any = None

    def steps(self) -> list[int]:
        """Of which steps there are checkpoints, valid or not, oldest first."""
        return sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _NAME.fullmatch(name)))

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Saves the state after `step` steps and removes older checkpoints but the newest `keep`; returns the path.

        Args:
            step: From 0.
            state: What `torch.load(weights_only=True)` takes: tensors, numbers, strings and containers of them, such as
                the `state_dict()` of models, optimizers and loaders.

        Raises:
            OSError: it could not be written; what was there before still is.
            ValueError: the state holds what `torch.load(weights_only=True)` refuses, such as NumPy's numbers.
        """
        path = self._path(as_integer("step", step, 0))
        write_atomically(path, lambda file: write_sealed(file, state))
        self._last_step, self._last_time = step, time.monotonic()
        old = [self._path(one) for one in self.steps() if one <= step][: -self.keep]
        left = [self.folder / name for name in os.listdir(self.folder) if _LEFTOVER.fullmatch(name)]
        for one in old + left:
            with suppress(OSError):
                one.unlink()
        return path

    def save_if_due(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> bool:
        """To be called after each step; saves `make_state()` if it is time or SIGTERM has come, and returns whether it did.

        Raises:
            SystemExit: with 143 after SIGTERM, once the state is saved; or a handler that was there before is called.
            OSError: as `save`.
        """
        if isinstance(self.every, int):
            is_due = not 0 <= step - self._last_step < self.every
        else:
            is_due = time.monotonic() - self._last_time >= self.every.total_seconds()
        is_due = is_due or self.is_terminated
        if is_due:
            self.save(step, make_state())
        if self.is_terminated:
            self.is_terminated = False
            if callable(self._handler):
                self._handler(signal.SIGTERM, None)
            elif self._handler != signal.SIG_IGN:
                raise SystemExit(128 + signal.SIGTERM)
        return is_due

    def restore(self, **load: Any) -> Checkpoint | None:
        """The newest valid checkpoint; None if there is none at all. Each damaged one that it passes over is logged.

        Args:
            load: For `torch.load`, such as `map_location`; `weights_only` is always True, so no code in a file is run.

        Raises:
            CheckpointFileError: there are checkpoints, and none is valid: starting anew is not for this method to decide.
            Exception: what `torch.load` raises for one that is whole, such as a device that is not there.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                state = read_sealed(self._path(step), **load)
            except (CheckpointFileError, OSError) as error:
                logger.warning("%s is passed over: %s", self._path(step), error)
                continue
            self._last_step, self._last_time = step, time.monotonic()
            return Checkpoint(step, state)
        if steps:
            raise CheckpointFileError(
                f"none of the {len(steps)} in {self.folder}", remedy="Remove them to start anew, or look at what damages them"
            )
        return None

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._handler is None else self._handler)
        if self.is_terminated:  # since the last `save_if_due`
            self.is_terminated = False
            os.kill(os.getpid(), signal.SIGTERM)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.is_terminated = True

    def _path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step:012d}.pt"

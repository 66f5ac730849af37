"""Every error of the library: one base class, direct subclasses only, each with a fixed code and message.

Wrong arguments are plain `ValueError` or `TypeError`. Codes are never renumbered.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

__all__ = [
    "CheckpointFileError",
    "ConcurrentUseError",
    "Difference",
    "GlobalGeneratorThreadError",
    "IteratorInvalidError",
    "LoaderFailedError",
    "NodeAttachedError",
    "ResumableBatchConfigurationError",
    "ResumableModeRequiredError",
    "ResumableSamplerGeneratorError",
    "StateEncodingError",
    "StateMismatchError",
    "StateVersionError",
    "StatefulPipesError",
    "TrainingPausedError",
    "TrainingResumeAMPMismatchError",
    "TrainingResumeCheckpointFormatError",
    "TrainingResumeConfigMismatchError",
    "TrainingResumeDeviceMismatchError",
    "TrainingResumeIncompleteError",
    "TrainingResumeObjectsMismatchError",
    "TrainingResumeVersionMismatchError",
    "TrainingStepIncompleteError",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "get_error_message",
]


class Difference(NamedTuple):
    """One entry in which what was saved and what should load it differ."""

    node: str
    field: str
    saved: object
    current: object
    remedy: str

    def __str__(self) -> str:
        place = f"{self.node}.{self.field}" if self.node and self.field else self.node or self.field
        return f"{place}: saved {self.saved}, here {self.current} ({self.remedy})"


class StatefulPipesError(Exception):
    """Base of every error of this library.

    Args:
        detail: What happened here, in a sentence; follows the class's fixed `message`.
        node: Path of the node that it happened in.
        expected, found: What would have been right, and what was there instead.
        remedy: What to do about it.
        differences: Every entry in which a state and what should load it differ, each in a line of its own.
        message: The same as `detail`; PyTorch passes this keyword when it raises a worker's error again.
    """

    code: ClassVar[int] = 300
    message: ClassVar[str] = "The pipeline cannot go on"

    def __init__(
        self,
        detail: str = "",
        *,
        node: str = "",
        expected: object = None,
        found: object = None,
        remedy: str = "",
        differences: tuple[Difference, ...] = (),
        message: str = "",
    ) -> None:
        detail = detail or message
        super().__init__(*((detail,) if detail else ()))
        self.detail = detail
        self.node = node
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.differences = differences

    def __str__(self) -> str:
        parts = [self.message]
        if self.detail:
            parts.append(f": {self.detail}")
        if self.node:
            parts.append(f" [node {self.node}]")
        seen = [("expected", self.expected), ("found", self.found)]
        shown = [f"{name} {value!r}" for name, value in seen if value is not None]
        if shown:
            parts.append(f"; {', '.join(shown)}")
        if self.remedy:
            parts.append(f". {self.remedy}")
        return "\n  ".join(["".join(parts), *map(str, self.differences)])

    @classmethod
    def api_code(cls, repo_code: int) -> int:
        """The error as a negative integer for interfaces that return numbers: code 324 in repo 3 reads -300324."""
        return -(repo_code * 100_000 + cls.code)


class StateVersionError(StatefulPipesError):
    """The state was written by a newer version of the state format."""

    code = 301
    message = "The state has a version that this library cannot read"


class StateMismatchError(StatefulPipesError):
    """The state belongs to another pipeline, or is damaged. `differences` lists every entry that differs."""

    code = 302
    message = "The state does not fit this pipeline"


class StateEncodingError(StatefulPipesError):
    """A foreign node's state has something in it that cannot be written as JSON."""

    code = 303
    message = "A node's state cannot be written as JSON"


class CheckpointFileError(StatefulPipesError):
    """The bytes are not a whole checkpoint of this library."""

    code = 304
    message = "This is not a valid checkpoint"


class ResumableModeRequiredError(StatefulPipesError):
    """A part with resume and one without were mixed, or a state was asked of something that has none."""

    code = 305
    message = "Exact resume is not possible with this part"


class NodeAttachedError(StatefulPipesError):
    """A sampler or node already belongs to another pipeline that is still open."""

    code = 306
    message = "This part belongs to another pipeline"


class IteratorInvalidError(StatefulPipesError):
    """The iterator was made before the loader was loaded, restarted or closed."""

    code = 307
    message = "This iterator is no longer valid"


class LoaderFailedError(StatefulPipesError):
    """An earlier error stopped the stream; it goes on from the last consumed batch after `close`, a load or a move."""

    code = 308
    message = "The stream stopped at an earlier error"


class WorkerDiedError(StatefulPipesError):
    """A worker process ended although it should not have, and its task was not to be tried once more.

    Attributes:
        exit_code: As `multiprocessing.Process.exitcode`: a signal's is negative; None if it is not known.
        epoch: Where it happened; None if no task was in hand.
        positions: Of the samples that the task is made of.
        indices: What is read at these, if that is known.
    """

    code = 309
    message = "A worker process died"

    def __init__(
        self,
        detail: str = "",
        *,
        exit_code: int | None = None,
        samples: tuple[int, list[int], list[Any]] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(detail, **details)
        self.exit_code = exit_code
        self.epoch: int | None = None if samples is None else samples[0]
        self.positions, self.indices = ([], []) if samples is None else samples[1:]


class WorkerTimeoutError(StatefulPipesError):
    """No result came from the workers within `timeout` seconds."""

    code = 310
    message = "The workers gave no result in time"


class GlobalGeneratorThreadError(StatefulPipesError):
    """Global generators would have been seeded on a thread that is not the main one."""

    code = 311
    message = "Global random generators cannot be seeded on this thread"


class ConcurrentUseError(StatefulPipesError):
    """Two threads asked one stream for its next item at once."""

    code = 312
    message = "The stream is in use by another thread"


class TrainingResumeCheckpointFormatError(StatefulPipesError):
    """The file is not a training checkpoint with a resume part, or it is damaged."""

    code = 321
    message = "The file is not a resumable training checkpoint"


class TrainingStepIncompleteError(StatefulPipesError):
    """A pause or a resume was asked for elsewhere than after a completed step."""

    code = 322
    message = "Training does not stand at a completed step"


class TrainingResumeIncompleteError(StatefulPipesError):
    """A resume failed halfway: the trainer is neither what it was nor what it should be."""

    code = 323
    message = "A resume failed halfway; only a successful one unlocks the trainer"


class TrainingPausedError(StatefulPipesError):
    """A step, or another pause, was asked of a paused trainer."""

    code = 324
    message = "Training is paused; resume it first"


class TrainingResumeConfigMismatchError(StatefulPipesError):
    """The training was started with another configuration. `differences` lists every entry, by its path."""

    code = 325
    message = "The training checkpoint is of another configuration"


class TrainingResumeDeviceMismatchError(StatefulPipesError):
    """The training ran on another kind of device."""

    code = 326
    message = "The training checkpoint is of another kind of device"


class TrainingResumeAMPMismatchError(StatefulPipesError):
    """The training ran with another setting of automatic mixed precision."""

    code = 327
    message = "The training checkpoint is of another AMP setting"


class TrainingResumeObjectsMismatchError(StatefulPipesError):
    """The trainer has other objects or loaders than those that were saved."""

    code = 328
    message = "The training checkpoint is of other objects or loaders"


class TrainingResumeVersionMismatchError(StatefulPipesError):
    """The training checkpoint was written by another version."""

    code = 329
    message = "The training checkpoint was written by another version"


class ResumableBatchConfigurationError(StatefulPipesError):
    """No valid batch is possible with these settings."""

    code = 338
    message = "No valid batch is possible with these settings"


class ResumableSamplerGeneratorError(StatefulPipesError):
    """The seed or generator state of an order is damaged."""

    code = 351
    message = "The seed or generator state of the order is damaged"


def get_error_message(code: int) -> str:
    """The fixed message of the error with this code.

    Raises:
        ValueError: no error has this code.
    """
    errors: list[type[StatefulPipesError]] = [StatefulPipesError, *StatefulPipesError.__subclasses__()]
    for error in errors:
        if error.code == code:
            return error.message
    raise ValueError(f"no error has code {code}")

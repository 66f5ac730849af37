"""Several pipelines stepped together, as DALI's iterators do with one for each GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from os import PathLike
from typing import Any, Generic, Self, TypedDict, TypeVar

from torchdata.nodes import BaseNode

from stateful_pipes.agreement import failing_together
from stateful_pipes.alike_pipelines import check_alike, check_positions, loader_of
from stateful_pipes.checkpoint import dumps, held_in, write_atomically
from stateful_pipes.errors import StateMismatchError
from stateful_pipes.joint_step import Before, Part, end_together, put_back, told
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.multi_view import MultiPipelineView
from stateful_pipes.pipeline_state import allowed
from stateful_pipes.state import LoaderState
from stateful_pipes.view import Position

__all__ = ["MultiPipelineLoader", "MultiPipelineState"]

T_co = TypeVar("T_co", covariant=True)
Checkpoint = bytes | str | PathLike[str] | Mapping[str, Any]


class MultiPipelineState(TypedDict):
    """What `MultiPipelineLoader.state_dict()` returns.

    Attributes:
        pipelines: Each pipeline's state, by its number.
    """

    pipelines: dict[str, LoaderState]


class MultiPipelineLoader(MultiPipelineView, Generic[T_co]):
    """Reads a batch of each of several pipelines at a time, such as one for each shard.

    A step is consumed by all of them or by none: where one fails or Ctrl-C comes, the batches that others have given are
    kept for the next `next`, and until then the state is the one before the step. `loaders` are the pipelines' own; one that
    is moved or loaded by itself stays there. An epoch ends where all of them end; with a mapper that leaves out every sample
    of a batch they would fall out of step.

    Args:
        pipelines: Loaders, or pipelines that you composed, of which loaders are made.
        checkpoint: What `checkpoint()` returned, the path of such a file, or a state of all; or a sequence with one for each,
            as `checkpoints()` returns them (bytes, a path, a state), None for one that starts anew.
        allow: What may be: "unrestored" for some that start anew while others are restored, "position" for pipelines that
            stand at different positions. Where they do, an epoch ends where the first of them ends, and the others leave theirs;
            with "position" every epoch does.

    Yields:
        list: A batch of each.

    State: that of each. Cost of a resume: theirs.

    Raises:
        ValueError: their batch sizes differ, or their readers' sizes, numbers of shards, padding, sticking or seeds of a shuffle,
            or two read the same shard or are the same; as many checkpoints are not given; what `allow` does not name.
        TypeError: one is neither a loader nor a pipeline, such as a dataset.
        StateMismatchError: a state does not fit its pipeline. All errors of a pipeline have a note with its number.
        RuntimeError (when read): an epoch ends for some of them before the others, without `allow="position"`.

    >>> from stateful_pipes import SamplerNode, SequentialSampler
    >>> shards = [SamplerNode(SequentialSampler(6), rank=rank, world_size=2) for rank in range(2)]
    >>> list(MultiPipelineLoader(shards))
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        pipelines: Sequence[StatefulDataLoader[T_co] | BaseNode[T_co]],
        *,
        checkpoint: Checkpoint | Sequence[Checkpoint | None] | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self._allow = allowed(allow, ("unrestored", "position"))
        if not pipelines:
            raise ValueError("pipelines must be one or more, got none")
        self.loaders: list[StatefulDataLoader[T_co]] = []
        self.user: Any = None
        self._parts: list[Part[T_co]] = []  # of a step that is not complete
        self._ending: list[Part[T_co]] | None = None  # those that are still to leave the epoch of that step
        self._is_uneven = False  # an epoch ends where the first of them ends
        self._due: tuple[list[Before], bool] | None = None  # to be put back, unless what moves them all is completed
        try:
            self.loaders += map(loader_of, pipelines)
            with self._moving():
                for number, one in enumerate(self._given(checkpoint)):
                    if one is not None:
                        with told(number):
                            state, self.loaders[number].user = held_in(one)
                            self.loaders[number].load_state_dict(state)
                self._check()
        except BaseException:
            with ExitStack() as closing:
                for loader, given in zip(self.loaders, pipelines, strict=False):
                    if loader is not given:  # those that were given stay the caller's, and open
                        closing.callback(loader.close)
            raise

    def _given(self, checkpoint: Any) -> list[Checkpoint | None]:
        """A checkpoint for each."""
        if checkpoint is None:
            return [None] * len(self.loaders)
        if isinstance(checkpoint, (bytes, str, PathLike, Mapping)):
            state, self.user = held_in(checkpoint)
            return list(self.states_of(state))
        if len(checkpoint) != len(self.loaders):
            raise ValueError(f"checkpoint must have one for each of {len(self.loaders)} pipelines, got {len(checkpoint)}")
        return list(checkpoint)

    def __iter__(self) -> Iterator[list[T_co]]:
        """An iterator over what is left of the current epoch.

        Raises:
            LoaderFailedError: an earlier error is still to be cleared by `close` or a load.
            RuntimeError: the pipelines stand in different epochs.
        """
        epochs = [position.epoch for position in self.positions]
        if not self._is_uneven and len(set(epochs)) > 1:
            raise RuntimeError(f"the pipelines stand in different epochs, {epochs}; load a state, or call set_epoch")
        for part in filter(lambda part: part.is_astray, self._parts):
            put_back(part.loader, part.state())
        iterators: list[Iterator[T_co]] = []
        for number, loader in enumerate(self.loaders):
            with told(number):
                iterators.append(iter(loader))
        return map(self.step, repeat(iterators), repeat(epochs))

    @property
    def positions(self) -> list[Position]:
        """How far the training loop has consumed each pipeline."""
        self._settle()
        return [part.position() for part in self._parts] or [loader.position for loader in self.loaders]

    def state_dict(self) -> MultiPipelineState:
        """Each pipeline's state after the last step that was handed out."""
        return {"pipelines": {str(number): state for number, state in enumerate(self._states())}}

    def checkpoints(self) -> list[bytes]:
        """The same as bytes with a checksum, one for each pipeline."""
        return [dumps(state) for state in self._states()]

    def checkpoint(self, path: str | PathLike[str] | None = None, *, user: object = None) -> bytes:
        """The state of all as one, as `StatefulDataLoader.checkpoint` gives and writes it."""
        data = dumps(self.state_dict(), user)
        if path is not None:
            write_atomically(path, data)
        return data

    def validate_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises what each pipeline would, and changes nothing."""
        if state_dict or not isinstance(state_dict, Mapping):
            for number, state in enumerate(self.states_of(state_dict)):
                with told(number):
                    self.loaders[number].validate_state_dict(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position, in all pipelines; an empty mapping does nothing, as with one loader.

        Raises:
            StateMismatchError: the state is not of as many pipelines, or does not fit one of them; nothing is changed.
            ValueError: the pipelines would stand at different positions; nothing is changed.
        """
        with failing_together([loader.pipeline for loader in self.loaders]):
            self.validate_state_dict(state_dict)
        if not state_dict:
            return
        with self._moving():
            for number, state in enumerate(self.states_of(state_dict)):
                with told(number):
                    self.loaders[number].load_state_dict(state)
            self._check()

    def states_of(self, state_dict: Any) -> list[Mapping[str, Any]]:
        """Each pipeline's part of a state.

        Raises:
            StateMismatchError: it is not of as many pipelines.
        """
        pipelines = state_dict.get("pipelines") if isinstance(state_dict, Mapping) else None
        if not isinstance(pipelines, Mapping) or set(pipelines) != set(map(str, range(len(self.loaders)))):
            raise StateMismatchError(f"this is not a state of {len(self.loaders)} pipelines under 'pipelines'")
        return [pipelines[str(number)] for number in range(len(self.loaders))]

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; nothing where that is the current one."""
        if any(position.epoch != epoch for position in self.positions):
            with self._moving():
                for loader in self.loaders:
                    loader.set_epoch(epoch)

    def restart(self) -> None:
        """Leaves an unfinished epoch and begins it anew."""
        with self._moving():
            for loader in self.loaders:
                loader.restart()

    def close(self) -> None:
        """Ends the workers of all and makes iterators invalid; idempotent."""
        with ExitStack() as closing:
            for loader in self.loaders:
                closing.callback(loader.close)

    def step(self, iterators: Sequence[Iterator[T_co]], epochs: Sequence[int]) -> list[T_co]:
        """The next batch of each, of these epochs; StopIteration where they end."""
        self._settle()
        parts = self._parts or [Part(loader) for loader in self.loaders]
        going_on = [part.epoch == epoch for part, epoch in zip(parts, epochs, strict=True)]
        if not any(going_on):
            raise StopIteration
        self._parts = parts
        for number, (part, iterator) in enumerate(zip(parts, iterators, strict=True)):
            with told(number):
                going_on[number] = going_on[number] and part.take(iterator)
        if all(going_on):
            if self._is_uneven:
                end_together(parts)
            step, self._parts = [part.given[0] for part in parts], []  # the commit: after it nothing is called
            return step
        ended = [number for number, goes_on in enumerate(going_on) if not goes_on]
        if any(going_on) and not self._is_uneven:
            raise RuntimeError(
                f"the epochs of pipelines {ended} of {len(parts)} have fewer batches than the others'; make them equal, or give "
                "allow='position', with which an epoch ends where the first of them ends; set_epoch() leaves this epoch"
            )
        self._ending = [part for part, goes_on in zip(parts, going_on, strict=True) if goes_on]
        self._settle()
        raise StopIteration

    def _settle(self) -> None:
        """Completes what was interrupted, or undoes it; what has been moved by itself stays there."""
        if self._due is not None:
            before, self._is_uneven = self._due
            try:
                with ExitStack() as putting_back:
                    for one in before:
                        putting_back.callback(one.put_back)
            except Exception:
                self._due = None  # a source that can be read only onwards; that was told, now it stands where it stands
                raise
            self._due = None
        if self._ending is not None:
            for part in self._ending:
                part.leave_epoch(with_batch=False)
            self._parts, self._ending = [], None
        for number, part in enumerate(self._parts):
            if part.is_moved:
                self._parts[number] = Part(part.loader)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """All of them are moved by what is inside, or none."""
        states = enumerate(zip(self.loaders, self._states(), strict=True))
        before = [Before(number, loader, state) for number, (loader, state) in states]
        for one in before:
            one.put_back()  # to before a step that is not complete
        self._parts = []
        self._due = before, self._is_uneven
        try:
            yield
            self._due = None
        except BaseException:
            self._settle()
            raise

    def _states(self) -> list[LoaderState]:
        self._settle()
        return [part.state() for part in self._parts] or [loader.state_dict() for loader in self.loaders]

    def _check(self) -> None:
        check_alike(self.loaders)
        self._is_uneven = check_positions(self.loaders, self._allow) or "position" in self._allow

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

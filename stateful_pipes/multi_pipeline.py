"""Several pipelines stepped together, as DALI's iterators do with one for each GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar

from torchdata.nodes import BaseNode

from stateful_pipes.agreement import failing_together
from stateful_pipes.checkpoint import dumps, held_in
from stateful_pipes.errors import LoaderFailedError, StateMismatchError
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.pipeline_state import load
from stateful_pipes.state import LoaderState
from stateful_pipes.ticket import Mark
from stateful_pipes.view import Position

__all__ = ["MultiPipelineLoader", "MultiPipelineState"]

T_co = TypeVar("T_co", covariant=True)
_ALLOWABLE = ("unrestored", "position")
Checkpoint = bytes | str | PathLike[str] | Mapping[str, Any]
_Place = tuple[Mark, Mapping[str, int]]
"""A pipeline's mark, and how many samples it has left out."""


class MultiPipelineState(TypedDict):
    """What `MultiPipelineLoader.state_dict()` returns.

    Attributes:
        pipelines: Each pipeline's state, by its number.
    """

    pipelines: dict[str, LoaderState]


class MultiPipelineLoader(Generic[T_co]):
    """Reads a batch of each of several pipelines at a time, such as one for each shard.

    A step is consumed by all of them or by none: where one fails, those that had given their batch already are led back
    before anything else is done. (One that can be read only onwards cannot be led back.) An epoch ends where all of them
    end; with a mapper that leaves out every sample of a batch they would fall out of step.

    Args:
        pipelines: Loaders, or pipelines that you composed, of which loaders are made.
        checkpoint: One for each, as `checkpoints()` returns them (bytes, a path, a state); None for one that starts anew.
        allow: What may be: "unrestored" for some that start anew while others are restored, "position" for pipelines that
            stand at different positions. Their epoch then ends where the first of them ends, and the others leave theirs.

    Yields:
        list: A batch of each.

    State: that of each. Cost of a resume: theirs.

    Raises:
        ValueError: their batch sizes differ, or their readers' sizes, numbers of shards, padding, sticking or seeds of a shuffle,
            or two read the same shard; as many checkpoints are not given; what `allow` does not name.
        StateMismatchError: a state does not fit its pipeline.

    >>> from stateful_pipes import SamplerNode, SequentialSampler
    >>> shards = [SamplerNode(SequentialSampler(6), rank=rank, world_size=2) for rank in range(2)]
    >>> list(MultiPipelineLoader(shards))
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        pipelines: Sequence[StatefulDataLoader[T_co] | BaseNode[T_co]],
        *,
        checkpoint: Sequence[Checkpoint | None] | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self._allow = _allowed(allow)
        if not pipelines:
            raise ValueError("pipelines must be one or more, got none")
        given = [None] * len(pipelines) if checkpoint is None else list(checkpoint)
        if len(given) != len(pipelines):
            raise ValueError(f"checkpoint must have one for each of {len(pipelines)} pipelines, got {len(given)}")
        self.loaders: list[StatefulDataLoader[T_co]] = []
        self._half: list[_Place] = []  # where each stood before a step that is not complete
        try:
            self.loaders += [_loader_of(one) for one in pipelines]
            before = self._states()
            try:
                for loader, one in zip(self.loaders, given, strict=True):
                    if one is not None:
                        state, loader.user = held_in(one)
                        loader.load_state_dict(state)
                self._check()
            except BaseException:
                self._put_back(before)
                raise
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[list[T_co]]:
        """An iterator over what is left of the current epoch.

        Raises:
            LoaderFailedError: an earlier error is still to be cleared by `close` or a load.
            RuntimeError: the pipelines stand in different epochs.
        """
        self._settle()
        if "position" not in self._allow and len({loader.position.epoch for loader in self.loaders}) > 1:
            raise RuntimeError(f"the pipelines stand in different epochs, at {self.positions}; load them, or set_epoch")
        return _Steps(self, [iter(loader) for loader in self.loaders])

    def __len__(self) -> int:
        """Steps in a full epoch; TypeError where a pipeline does not know."""
        return min(map(len, self.loaders))

    @property
    def positions(self) -> list[Position]:
        """How far the training loop has consumed each pipeline."""
        self._settle()
        return [loader.position for loader in self.loaders]

    def state_dict(self) -> MultiPipelineState:
        """Each pipeline's state after the last step that was handed out."""
        self._settle()
        return {"pipelines": {str(number): state for number, state in enumerate(self._states())}}

    def checkpoints(self) -> list[bytes]:
        """The same as bytes with a checksum, one for each pipeline."""
        return [dumps(state) for state in self.state_dict()["pipelines"].values()]

    def validate_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises what each pipeline would, and changes nothing."""
        if state_dict or not isinstance(state_dict, Mapping):
            for loader, state in zip(self.loaders, self.states_of(state_dict), strict=True):
                loader.validate_state_dict(state)

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
        self._settle()
        before = self._states()
        try:
            for loader, state in zip(self.loaders, self.states_of(state_dict), strict=True):
                loader.load_state_dict(state)
            self._check()
        except BaseException:
            self._put_back(before)
            raise

    def states_of(self, state_dict: Any) -> list[Mapping[str, Any]]:
        """Each pipeline's part of a state.

        Raises:
            StateMismatchError: it is not of as many pipelines.
        """
        pipelines = state_dict.get("pipelines") if isinstance(state_dict, Mapping) else None
        numbers = [str(number) for number in range(len(self.loaders))]
        if not isinstance(pipelines, Mapping) or set(pipelines) != set(numbers):
            raise StateMismatchError(f"this is not a state of {len(self.loaders)} pipelines under 'pipelines'")
        return [pipelines[number] for number in numbers]

    @property
    def is_restored_from_checkpoint(self) -> bool:
        """Whether a state was loaded into all of them."""
        return all(loader.is_restored_from_checkpoint for loader in self.loaders)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; nothing where that is the current one."""
        self._settle()
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def restart(self) -> None:
        """Leaves an unfinished epoch and begins it anew."""
        self._settle()
        for loader in self.loaders:
            loader.restart()

    def close(self) -> None:
        """Ends the workers of all and makes iterators invalid; idempotent."""
        for loader in self.loaders:
            loader.close()

    def step(self, iterators: Sequence[Iterator[T_co]]) -> list[T_co]:
        """The next batch of each; StopIteration where the epoch ends."""
        if self._half:
            raise LoaderFailedError("a pipeline failed within a step", remedy="close() or load_state_dict(), then iter()")
        self._half = [(loader.pipeline.consumed(), loader.pipeline.stream.skipped) for loader in self.loaders]
        batches: list[T_co] = []
        ended: list[int] = []
        for number, iterator in enumerate(iterators):
            try:
                batches.append(next(iterator))
            except StopIteration:
                ended.append(number)
        if not ended:
            self._half = []
            return batches
        self._settle()
        if batches and "position" not in self._allow:
            raise RuntimeError(f"the epochs of pipelines {ended} of {len(iterators)} have fewer batches than the others'")
        for number, loader in enumerate(self.loaders):
            if number not in ended:
                loader.pipeline.stream.next_epoch(loader.pipeline)
        raise StopIteration

    def _settle(self) -> None:
        """Leads those back which gave a batch in a step that another one did not complete."""
        half, self._half = self._half, []
        for loader, (mark, skipped) in zip(self.loaders, half, strict=bool(half)):
            root = loader.pipeline
            if root.consumed() != mark:
                root.stream.move(root, mark)
                root.stream.skipped = skipped

    def _states(self) -> list[LoaderState]:
        return [loader.state_dict() for loader in self.loaders]

    def _put_back(self, states: Sequence[LoaderState]) -> None:
        for loader, state in zip(self.loaders, states, strict=True):
            if loader.state_dict() != state:
                load(loader.pipeline, state)

    def _check(self) -> None:
        _check_alike(self.loaders)
        restored = {loader.is_restored_from_checkpoint for loader in self.loaders}
        if "unrestored" not in self._allow and len(restored) > 1:
            raise ValueError("some pipelines were restored from a checkpoint and some were not; or allow='unrestored'")
        counting = [loader for loader in self.loaders if restored == {False} or loader.is_restored_from_checkpoint]
        if "position" not in self._allow and len({loader.position for loader in counting}) > 1:
            raise ValueError(f"the pipelines stand at different positions, {self.positions}; or allow='position'")
        if len({loader.position for loader in self.loaders}) > 1:
            self._allow |= {"position"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Steps(Iterator[list[T_co]]):
    """One epoch."""

    def __init__(self, loader: MultiPipelineLoader[T_co], iterators: list[Iterator[T_co]]) -> None:
        self._loader, self._iterators = loader, iterators

    def __next__(self) -> list[T_co]:
        return self._loader.step(self._iterators)


def _allowed(allow: Collection[str]) -> frozenset[str]:
    names = frozenset((allow,) if isinstance(allow, str) else allow)
    for name in names.difference(_ALLOWABLE):
        raise ValueError(f"allow may name {_ALLOWABLE}, got {name!r}")
    return names


def _loader_of(pipeline: Any) -> StatefulDataLoader[Any]:
    return pipeline if isinstance(pipeline, StatefulDataLoader) else StatefulDataLoader(pipeline)


def _check_alike(loaders: Sequence[StatefulDataLoader[Any]]) -> None:
    told = [{"batch_size": loader.batch_size, **_reader_of(loader)} for loader in loaders]
    shards = [one.pop("shard_id", None) for one in told]
    for number, one in enumerate(told):
        if one != told[0]:
            differ = [key for key in {**told[0], **one} if told[0].get(key) != one.get(key)]
            raise ValueError(f"pipelines 0 and {number} differ in {', '.join(differ)}: {told[0]} and {one}")
    if None not in shards and len(set(shards)) < len(shards):
        raise ValueError(f"each pipeline has to read a shard of its own, got shard_id {shards}")


def _reader_of(loader: StatefulDataLoader[Any]) -> dict[str, Any]:
    """What the reader at the source tells of itself, if there is one that does."""
    for node in walk_all(loader.pipeline):
        held = node.node if isinstance(node, ForeignNode) else node
        if hasattr(held, "reader_meta"):
            own = {name: getattr(held, name) for name in ("batch_size", "shuffle_after_epoch_seed") if hasattr(held, name)}
            return {**held.reader_meta(), **own}
    return {}

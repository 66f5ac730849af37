"""Several pipelines stepped together, as DALI's iterators do with one for each GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar

from torchdata.nodes import BaseNode

from stateful_pipes.checkpoint import dumps, held_in
from stateful_pipes.errors import StateMismatchError
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.pipeline_state import state_at
from stateful_pipes.state import LoaderState
from stateful_pipes.ticket import Mark

__all__ = ["MultiPipelineLoader", "MultiPipelineState"]

T_co = TypeVar("T_co", covariant=True)
_ALLOWABLE = ("unrestored", "position")
Checkpoint = bytes | str | PathLike[str] | Mapping[str, Any]


class MultiPipelineState(TypedDict):
    """What `MultiPipelineLoader.state_dict()` returns.

    Attributes:
        pipelines: Each pipeline's state, by its number.
    """

    pipelines: dict[str, LoaderState]


class MultiPipelineLoader(Generic[T_co]):
    """Reads a batch of each of several pipelines at a time, such as one for each shard.

    A step is consumed by all of them or by none: where one fails, those that had given their batch already are led back
    before anything else is done. An epoch ends where all of them end.

    Args:
        pipelines: Loaders, or pipelines that you composed, of which loaders are made.
        checkpoint: One for each, as `checkpoints()` returns them (bytes, a path, a state); None for one that starts anew.
        allow: What `checkpoint` may be: "unrestored" for some only, "position" at different ones.

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
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        for name in allow:
            if name not in _ALLOWABLE:
                raise ValueError(f"allow may name {_ALLOWABLE}, got {name!r}")
        if not pipelines:
            raise ValueError("pipelines must be one or more, got none")
        given = [None] * len(pipelines) if checkpoint is None else list(checkpoint)
        if len(given) != len(pipelines):
            raise ValueError(f"checkpoint must have one for each of {len(pipelines)} pipelines, got {len(given)}")
        if "unrestored" not in allow and len({one is None for one in given}) > 1:
            raise ValueError(f"checkpoint must have all or none, got {given!r:.200}; or allow='unrestored'")
        self.loaders: list[StatefulDataLoader[T_co]] = []
        try:
            for one, found in zip(pipelines, given, strict=True):
                self.loaders.append(_loader_of(one, found))
            _check_alike(self.loaders)
            positions = [loader.position for loader in self.loaders]
            if "position" not in allow and len(set(positions)) > 1:
                raise ValueError(f"the pipelines stand at different positions, {positions}; load them alike, or allow='position'")
        except BaseException:
            self.close()
            raise
        self._marks = self._consumed()

    def __iter__(self) -> Iterator[list[T_co]]:
        """An iterator over what is left of the current epoch."""
        self._settle()
        iterators = [iter(loader) for loader in self.loaders]
        while True:
            self._settle()
            batches, ended = [], []
            for number, iterator in enumerate(iterators):
                for batch in iterator:
                    batches.append(batch)
                    break
                else:
                    ended.append(number)
            if ended and batches:
                self._settle()
                raise RuntimeError(f"the epochs of pipelines {ended} of {len(iterators)} have fewer batches than the others'")
            self._marks = self._consumed()
            if ended:
                return
            yield batches

    def __len__(self) -> int:
        """Steps in a full epoch; TypeError where a pipeline does not know."""
        return min(map(len, self.loaders))

    def state_dict(self) -> MultiPipelineState:
        """Each pipeline's state after the last step that was handed out."""
        self._settle()
        return {"pipelines": {str(number): loader.state_dict() for number, loader in enumerate(self.loaders)}}

    def checkpoints(self) -> list[bytes]:
        """The same as bytes with a checksum, one for each pipeline."""
        return [dumps(state) for state in self.state_dict()["pipelines"].values()]

    def validate_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises what `load_state_dict` would, and changes nothing."""
        for loader, state in zip(self.loaders, self._states_of(state_dict), strict=True):
            loader.validate_state_dict(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved position, in all pipelines.

        Raises:
            StateMismatchError: the state is not of as many pipelines, or does not fit one of them; nothing is changed.
        """
        self.validate_state_dict(state_dict)
        for loader, state in zip(self.loaders, self._states_of(state_dict), strict=True):
            loader.load_state_dict(state)
        self._marks = self._consumed()

    @property
    def is_restored_from_checkpoint(self) -> bool:
        """Whether a state was loaded into all of them."""
        return all(loader.is_restored_from_checkpoint for loader in self.loaders)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; nothing where that is the current one."""
        self._each(lambda loader: loader.set_epoch(epoch))

    def restart(self) -> None:
        """Leaves an unfinished epoch and begins it anew."""
        self._each(lambda loader: loader.restart())

    def close(self) -> None:
        """Ends the workers of all and makes iterators invalid; idempotent."""
        for loader in self.loaders:
            loader.close()

    def _each(self, move: Callable[[StatefulDataLoader[T_co]], None]) -> None:
        self._settle()
        for loader in self.loaders:
            move(loader)
        self._marks = self._consumed()

    def _consumed(self) -> list[Mark]:
        return [loader.pipeline.consumed() for loader in self.loaders]

    def _settle(self) -> None:
        """Leads those back which gave a batch in a step that another one did not complete."""
        for loader, mark in zip(self.loaders, self._marks, strict=True):
            if loader.pipeline.consumed() != mark:
                loader.load_state_dict(state_at(loader.pipeline, mark))

    def _states_of(self, state: Any) -> list[Mapping[str, Any]]:
        pipelines = state.get("pipelines") if isinstance(state, Mapping) else None
        numbers = [str(number) for number in range(len(self.loaders))]
        if not isinstance(pipelines, Mapping) or sorted(pipelines) != sorted(numbers):
            raise StateMismatchError(f"this is not a state of {len(self.loaders)} pipelines under 'pipelines'")
        return [pipelines[number] for number in numbers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _loader_of(pipeline: Any, checkpoint: Checkpoint | None) -> StatefulDataLoader[Any]:
    if not isinstance(pipeline, StatefulDataLoader):
        return StatefulDataLoader(pipeline, checkpoint=checkpoint)
    if checkpoint is not None:
        state, pipeline.user = held_in(checkpoint)
        pipeline.load_state_dict(state)
    return pipeline


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

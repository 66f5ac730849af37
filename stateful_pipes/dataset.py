"""A pipeline as an IterableDataset, for torchdata's own StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from stateful_pipes.errors import ResumableModeRequiredError, StateMismatchError
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import as_node

__all__ = ["IterableDatasetReader", "as_dataset"]


def as_dataset(node: BaseNode[Any]) -> IterableDataset[Any]:
    """The pipeline as an `IterableDataset` whose iterator has the pipeline's state.

    Give it to torchdata's `StatefulDataLoader(as_dataset(node), batch_size=None)`: the stream and the resume are those
    of the pipeline. The workers are the pipeline's own (`ProcessPrefetcher`).

    Raises (at the first iter):
        ResumableModeRequiredError: that loader has workers: each would run the whole pipeline.
    """
    return _PipelineDataset(as_node(node))


class _PipelineDataset(IterableDataset[Any]):
    def __init__(self, node: Node[Any]) -> None:
        self.node = node

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ResumableModeRequiredError(
                "each worker of the outer loader would run the whole pipeline",
                node=self.node.name,
                remedy="Use num_workers=0 there and a ProcessPrefetcher in the pipeline",
            )
        self.node.reset(None)
        return _PipelineIterator(self.node)


class _PipelineIterator(Iterator[Any]):
    def __init__(self, node: Node[Any]) -> None:
        self.node = node

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self.node)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.node.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.node.load_state_dict(state_dict)


class IterableDatasetReader(BaseNode[Any]):
    """A torchdata node over an iterable dataset that has a state and epochs, such as Hugging Face's `datasets.IterableDataset`.

    The items and their order are the dataset's. Each epoch begins with its `set_epoch`; a resume goes on with the next item,
    and the epochs after it are whole. (torchdata's `IterableWrapper` sets no epoch: such a dataset is then shuffled alike each
    time, and begins every later epoch where it was resumed.)

    Args:
        dataset: An iterable with `set_epoch`, `state_dict` and `load_state_dict`, to which an empty state is its start. It
            belongs to this node, and is read in the main process, whatever workers do above.
        replay: False to resume by the dataset's own state, at the cost of its `load_state_dict`. True to read its epoch again,
            up to where it was: the cost of reading so many items, but exact whatever the dataset does, and a state of two
            numbers. A shuffle buffer needs it, since Hugging Face's state leaves out what is in there.

    Yields:
        What the dataset does, to one rank: deal it out with `datasets.distributed.split_dataset_by_node`; the state is then each
        rank's own.

    State: epoch, position, and without `replay` the dataset's own (as large as that is).

    Raises:
        TypeError: the dataset lacks one of these methods.
        ResumableModeRequiredError: it has a shuffle buffer, and `replay` is False.
        StateMismatchError (at a load, with `replay`): the epoch has fewer items now.

    >>> from stateful_pipes import SeededBatcher, StatefulDataLoader
    >>> class Lines:
    ...     def set_epoch(self, epoch):
    ...         self.epoch = epoch
    ...     def state_dict(self):
    ...         return {"line": self.line}
    ...     def load_state_dict(self, state):
    ...         self.line = state.get("line", 0)
    ...     def __iter__(self):
    ...         while self.line < 5:
    ...             self.line += 1
    ...             yield 100 * self.epoch + self.line
    >>> loader = StatefulDataLoader(SeededBatcher(IterableDatasetReader(Lines()), 2, collate_fn=list))
    >>> next(iter(loader))
    [1, 2]
    >>> resumed = StatefulDataLoader(SeededBatcher(IterableDatasetReader(Lines()), 2, collate_fn=list))
    >>> resumed.load_state_dict(loader.state_dict())
    >>> list(resumed), list(resumed)
    ([[3, 4], [5]], [[101, 102], [103, 104], [105]])
    """

    def __init__(self, dataset: Iterable[Any], *, replay: bool = False) -> None:
        missing = [name for name in ("__iter__", "set_epoch", "state_dict", "load_state_dict") if not hasattr(dataset, name)]
        if missing:
            raise TypeError(f"dataset must have {', '.join(missing)}, which {type(dataset).__name__} has not")
        if not replay and _has_shuffle_buffer(dataset):
            raise ResumableModeRequiredError(
                f"the state of a {type(dataset).__name__} leaves out what is in its shuffle buffer",
                remedy="Give replay=True, which reads the epoch again up to its position, or shuffle with buffer_size=1",
            )
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it unannotated
        self.dataset: Any = dataset
        self.replay = replay
        self._epoch, self._position = 0, 0
        self._items: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """As torchdata's: to a state, or to the start of an epoch, which is the next one if this one was read from."""
        super().reset(initial_state)
        if initial_state is None:
            self._begin(self._epoch + (self._position > 0), {})
            return
        self._begin(initial_state["epoch"], {} if self.replay else initial_state["dataset"])
        self._position = initial_state["position"]
        if self.replay and sum(1 for _ in islice(self._items, self._position)) < self._position:
            raise StateMismatchError(f"epoch {self._epoch} of the dataset has fewer than {self._position} items")

    def _begin(self, epoch: int, state: Mapping[str, Any]) -> None:
        self.dataset.set_epoch(epoch)
        self.dataset.load_state_dict(state)  # an empty one too: else it may begin where it was resumed before
        self._epoch, self._position = epoch, 0
        self._items = iter(self.dataset)

    def next(self) -> Any:
        """The next item of this epoch."""
        item = next(self._items)
        self._position += 1
        return item

    def get_state(self) -> dict[str, Any]:
        """The position after the last item."""
        state = {"epoch": self._epoch, "position": self._position}
        return state if self.replay else {**state, "dataset": self.dataset.state_dict()}


def _has_shuffle_buffer(value: object) -> bool:
    """Whether a dataset of Hugging Face's shuffles through a buffer somewhere: it tells nobody."""
    if type(value).__name__ == "BufferShuffledExamplesIterable":
        return getattr(value, "buffer_size", 2) > 1
    parts = getattr(value, "_ex_iterable", None), getattr(value, "ex_iterable", None), *getattr(value, "ex_iterables", ())
    return any(_has_shuffle_buffer(part) for part in parts if part is not None)

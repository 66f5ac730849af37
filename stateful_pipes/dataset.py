"""A pipeline as an IterableDataset, for torchdata's own StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import as_node

__all__ = ["as_dataset"]


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

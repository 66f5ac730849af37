"""What several pipelines tell of themselves; it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.view import Position

__all__ = ["MultiPipelineView"]


class MultiPipelineView:
    """The read-only half of a `MultiPipelineLoader`."""

    loaders: list[StatefulDataLoader[Any]]

    @property
    def positions(self) -> list[Position]:
        """How far each pipeline was consumed."""
        raise NotImplementedError

    @property
    def position(self) -> Position:
        """How far the training loop has consumed them: the first one's position, where all stand alike.

        Raises:
            RuntimeError: they stand at different positions; `positions` has each.
        """
        first, *others = self.positions
        if any(one[:3] != first[:3] for one in others):
            raise RuntimeError("the pipelines stand at different positions; ask for one's, as positions[0].epoch")
        return first

    def __len__(self) -> int:
        """Steps in a full epoch; TypeError where a pipeline does not know."""
        return min(map(len, self.loaders))

    def stats(self) -> list[Mapping[str, Any]]:
        """Each pipeline's own `stats()`, in which a batch counts as delivered from when it was given for a step."""
        return [loader.stats() for loader in self.loaders]

    def describe(self) -> str:
        """A picture of each pipeline, one under the other, where it stands by itself."""
        return "\n".join(f"pipeline {number}\n{loader.describe()}" for number, loader in enumerate(self.loaders))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loaders!r})"

    @property
    def is_restored_from_checkpoint(self) -> bool:
        """Whether a state was loaded into all of them."""
        return all(loader.is_restored_from_checkpoint for loader in self.loaders)

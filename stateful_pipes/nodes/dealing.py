"""Which part of the stream this process gets: a node deals it out to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import torch.distributed as dist

from stateful_pipes.contract import NodeContract
from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node

__all__ = ["DealingNode", "Uneven", "ranks_of", "take_over"]

T_co = TypeVar("T_co", covariant=True)
Uneven = Literal["pad", "drop"]


class DealingNode(Node[T_co]):
    """A node of which each rank yields its own share: rank r of W the positions p with p mod W == r.

    Where such nodes stand above each other the highest deals, and those below yield everything on each rank.
    """

    rank: int
    world_size: int
    uneven: Uneven
    alone_by_default: bool = False
    """Whether it has all because there was no process group when it was made."""

    def deal(self, rank: int, world_size: int, uneven: Uneven) -> None:
        """Sets the share; what deals below yields everything from now on."""
        self.rank, self.world_size, self.uneven = rank, world_size, uneven
        self._settings = None
        for node in (node for source in self.sources for node in _dealing(source)):
            if isinstance(node, DealingNode):
                self.alone_by_default |= node.alone_by_default
                node.alone_by_default = False
                node.deal(0, 1, node.uneven)

    def open(self) -> None:
        super().open()
        if self.alone_by_default and ranks_of(None, None)[1] > 1:
            raise ResumableBatchConfigurationError(
                "it was made before torch.distributed was initialised, and gives each rank everything",
                node=self.name,
                remedy="Make it after init_process_group (after Accelerate's Accelerator or transformers' TrainingArguments; "
                "with Lightning in train_dataloader), or with rank and world_size",
            )

    def leaves_none(self, items: str) -> NoReturn:
        """Refuses an epoch without items."""
        raise ResumableBatchConfigurationError(
            f"{items} over {self.world_size} ranks with uneven={self.uneven!r} leave none for each", node=self.name
        )


def take_over(sources: Sequence[Node[Any]]) -> tuple[int, int, Uneven]:
    """The share that a node above these pipelines takes over from them; its `deal` then has them yield everything.

    Raises:
        ResumableBatchConfigurationError: the shares differ, or a part has none: it would be the same on each rank, or another.
    """
    found = [node for source in sources for node in _dealing(source)]
    uneven = {node.uneven for node in found if isinstance(node, DealingNode)} or {"pad"}
    shares = {(node.rank, node.world_size) if isinstance(node, DealingNode) else (0, 1) for node in found}
    if len(shares) > 1 or len(uneven) > 1:
        raise ResumableBatchConfigurationError(
            f"the sources are dealt out to ranks in different ways: (rank, world_size) {sorted(shares)}, uneven {sorted(uneven)}",
            remedy="Give all SamplerNodes the same; a source that is not this library's cannot be dealt out",
        )
    (rank, world_size), *_ = shares
    return rank, world_size, uneven.pop()


def _dealing(node: NodeContract) -> Iterator[NodeContract]:
    """Where the shares of a pipeline are dealt out: its highest nodes that do; or else sources, which have no share."""
    if isinstance(node, DealingNode) or not node.sources:
        yield node
    else:
        for source in node.sources:
            yield from _dealing(source)


def refuse_workers(below: Iterable[NodeContract], above: str) -> None:
    """Raises ValueError if worker processes stand below a node that may ask them for one item twice, or never for one."""
    if any(getattr(node, "num_workers", 0) for node in below):
        raise ValueError(f"a ProcessPrefetcher with workers stands below the {above}; it belongs above")


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks: as given, else torch.distributed's, else one."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size together, got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        up = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
    world_size = as_integer("world_size", world_size, 1)
    return as_integer("rank", rank, 0, world_size - 1, f"world_size - 1 = {world_size - 1}"), world_size

"""What a loader tells of its pipeline; it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch.utils.data import BatchSampler

from stateful_pipes.contract import NodeContract
from stateful_pipes.door import DatasetArguments, collate_of
from stateful_pipes.drawing import chain, drawn, mermaid
from stateful_pipes.node import Node
from stateful_pipes.nodes.batcher import SeededBatcher
from stateful_pipes.nodes.foreign import sources_of, walk_all
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.pipeline_state import state_at
from stateful_pipes.prefetch.prefetcher import prefetchers_of
from stateful_pipes.stats import Stats, stats_of

__all__ = ["PipelineView", "Position"]


class Position(NamedTuple):
    """How far the training loop has come. Where two trainings are compared, `[:3]`: the other two are this process's own.

    Attributes:
        epoch: The epoch.
        batch: Batches of it that were consumed on this rank: `tqdm(loader, initial=loader.position.batch)`.
        consumed: What was consumed of it by the count of the source: samples over all ranks of a `SamplerNode`, places of its
            shard of a `FileReader`, items of an `ExternalSource` or a foreign node.
        delivered: Batches that this loader has handed out, over all epochs.
        prefetched: Batches that workers have or have made, and that were not handed out.
    """

    epoch: int
    batch: int
    consumed: int
    delivered: int
    prefetched: int


class PipelineView:
    """The read-only half of a loader: its position, its parts by torch's names, its picture."""

    _root: Node[Any]
    _arguments: DatasetArguments | None

    @property
    def position(self) -> Position:
        """How far the training loop has come, whatever is prefetched."""
        (epoch, consumed, *_), batch, _ = self._root.place()
        prefetched = sum(node.prefetched for node in prefetchers_of(self._root))
        return Position(epoch, batch, consumed, self._root.stream.delivered, prefetched)

    def __len__(self) -> int:
        """Batches in a full epoch on this rank (of a `FileReader`: in the current one); TypeError where that is not known."""
        length = self._root.length()
        if length is None:
            raise TypeError("this pipeline is endless or over a source that does not know its length")
        return length

    def stats(self) -> Stats:
        """What was delivered, and where the time went: see `Stats`. For that the main process takes some microseconds a batch.

        >>> from stateful_pipes import StatefulDataLoader
        >>> loader = StatefulDataLoader(range(6), batch_size=2)
        >>> batches = list(loader)
        >>> loader.stats()["delivered"], list(loader.stats()["nodes"])
        (3, ['sampler', 'mapper', 'batcher', 'prefetcher'])
        """
        return stats_of(self._root)

    def describe(self, format: Literal["text", "mermaid"] = "text") -> str:
        """A picture of the pipeline.

        Args:
            format: "text" for a tree, the top first and the sources at its leaves, a line each node with what its state holds;
                "mermaid" for the text of a flowchart that shows what runs in the main process and what in workers.

        Raises:
            ValueError: another format.
        """
        if format not in ("text", "mermaid"):
            raise ValueError(f"format must be 'text' or 'mermaid', got {format!r}")
        if format == "mermaid":
            return mermaid(self._root)
        return drawn(self._root, state_at(self._root, self._root.place())["nodes"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({chain(self._root)})"

    @property
    def pipeline(self) -> Node[Any]:
        """The node at the top; a foreign one in its adapter."""
        return self._root

    @property
    def dataset(self) -> Any:
        """The dataset; None for a composed pipeline. Read-only, as what follows: a pipeline is fixed at construction."""
        return None if self._arguments is None else self._arguments.dataset

    @property
    def sampler(self) -> Any:
        """The sampler at the source, if there is just one."""
        return None if self._keeps_batches else self._source

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler at the source; else the sampler's batches as torch shows them, from its position on."""
        if self._keeps_batches or self._source is None or self.batch_size is None:
            return self._source if self._keeps_batches else None
        return BatchSampler(self._source, self.batch_size, self.drop_last)

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch; None if unbatched, or, as torch has it, where a batch sampler says it."""
        return None if self._batcher is None else self._batcher.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a smaller last batch is left out; False where a batch sampler says it."""
        return self._batcher is not None and self._batcher.drop_last

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """The collate function in force."""
        if self._arguments is not None:
            return collate_of(self._arguments)
        return None if self._batcher is None else self._batcher.collate_fn

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return sum(node.num_workers for node in prefetchers_of(self._root))

    @property
    def _source(self) -> Any:
        """The sampler or batch sampler at the source, if there is just one."""
        found = [node.sampler for node in walk_all(self._root) if isinstance(node, (SamplerNode, PlainSamplerNode))]
        return found[0] if len(found) == 1 else None

    @property
    def _keeps_batches(self) -> bool:
        return self._batcher is not None and self._batcher.batch_size is None

    @property
    def _batcher(self) -> SeededBatcher[Any] | None:
        """The highest one that makes each item."""
        node: NodeContract = self._root
        while not isinstance(node, SeededBatcher):
            sources = sources_of(node)
            if len(sources) != 1:
                return None
            node = sources[0]
        return node

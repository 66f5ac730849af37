"""How a loader is moved to another place; it reads nothing for that."""

from __future__ import annotations

from typing import Any

from stateful_pipes.contract import walk
from stateful_pipes.elsewhere import item_at, place_behind
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode
from stateful_pipes.samplers.order import check_epoch

__all__ = ["PipelineMoves"]


class PipelineMoves:
    """The half of a loader that changes its position, other than by reading or loading."""

    _root: Node[Any]

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`, dropping what was prefetched; nothing where that is the epoch of `position`.

        Older iterators end; one that has read nothing yet goes to that epoch, too.

        Raises:
            ResumableModeRequiredError: the pipeline has a foreign source, which alone knows its epochs.
        """
        self._root.refuse_loader(self)
        self._root.set_epoch(epoch)
        for node in walk(self._root):
            if isinstance(node, PlainSamplerNode):
                node.set_sampler_epoch(epoch)

    def restart(self) -> None:
        """Leaves an unfinished epoch and begins it anew; older iterators become invalid.

        Raises:
            ResumableModeRequiredError: as `set_epoch`.
        """
        self._root.refuse_loader(self)
        mark = self._root.consumed()
        if self._root.stream.failed or not self._root.at_start(mark):
            self._root.stream.move(self._root, self._root.start(mark[0]))

    def skip(self, count: int) -> int:
        """Leaves out the next `count` batches of this epoch, at most those that are left, without reading them.

        Iterators go on behind them; with the epoch's last one left out they end. What was prefetched is dropped. So a run of
        another loader is gone on with, or a batch passed over that cannot be read. Cost: some microseconds a batch.

        Returns:
            How many batches were left out.

        Raises:
            ResumableModeRequiredError: a source tells its end only when it is read (`ExternalSource`), or cannot be led back: a
                foreign one, a generator, any with `resumable=False`.
            LoaderFailedError: the consumed position is not known; only a load helps.

        >>> from stateful_pipes import StatefulDataLoader
        >>> loader = StatefulDataLoader(range(6), batch_size=2)
        >>> loader.skip(2), next(iter(loader)).tolist()
        (2, [4, 5])
        """
        count = as_integer("count", count, 0)
        self._root.refuse_loader(self)
        stream = self._root.stream
        with stream.entered():
            here = stream.place(self._root)
            stream.settle(self._root)
            behind, passed = place_behind(self._root, here, count)
            stream.pass_over(self._root, behind)
        return passed

    def replay(self, epoch: int, position: int, *, node: str | None = None) -> Any:
        """Makes a batch again, to see what it was; nothing moves, and nothing that was prefetched is lost.

        It is made in this process, from the dataset as it is here, under the same seeds: what was handed out where
        `loader.position` read (epoch, consumed=position). With several cursors in the pipeline (a `Mixer`) it is the batch that
        the epoch, read from its start, has at or behind that position. From a position at which no batch began, it is the batch
        that would begin there.

        Args:
            epoch: From 0.
            position: Samples of the epoch consumed before it, by the count of `position.consumed`.
            node: The name of a node, as `describe` and errors tell it, whose item is wanted: "mapper" for one sample.

        Raises:
            ValueError: the epoch has nothing there, or no node has that name.
            ResumableModeRequiredError: a source cannot be led back: a foreign one, a generator, any with `resumable=False`.
            Exception: what making it raises, with the note that it had; also where it is left out for that (`max_skipped`).

        >>> from stateful_pipes import StatefulDataLoader
        >>> loader = StatefulDataLoader(range(6), batch_size=2)
        >>> loader.replay(3, 4).tolist(), loader.replay(3, 4, node="mapper"), loader.position.batch
        ([4, 5], 4, 0)
        """
        self._root.refuse_loader(self)
        stream = self._root.stream
        with stream.entered():
            stream.place(self._root)
            stream.settle(self._root)
            return item_at(self._root, check_epoch(epoch), as_integer("position", position, 0), node)

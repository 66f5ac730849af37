"""A filter by index: what it leaves out is known before anything is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.fields import Rule, Scalar, allowable
from stateful_pipes.nodes.dealing import DealingNode, take_over
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.nodes.user_error import raise_noted
from stateful_pipes.samplers import OrderCursor, RandomSampler, ResumableBatchSampler, SequentialSampler
from stateful_pipes.ticket import Mark, Samples, Ticket, packed, positions_of

__all__ = ["IndexFilter"]

_MAX_BLOCK = 2**16  # where little is kept, so much is looked at at once


class IndexFilter(DealingNode[int]):
    """Yields those indices of a `SamplerNode` that are to be kept. These keep their positions, and so their seeds.

    Of several ranks, r of W takes every W-th of the kept ones, beginning with the r-th, so all get equally many; the
    SamplerNode below then yields everything on each rank.

    Args:
        source: The SamplerNode.
        keep: A boolean for each index, as an array, of which a copy is held; or a function of an index, which runs in the
            main process and has to give the same answer each time. Of an endless order it has to keep something.
        name: The node's name in the state.

    Yields:
        int

    State: keep (a hash, if it is an array), world_size, uneven; constant. Cost in the main process: `keep` for each index of
    all ranks, for some of them more than once.

    Raises:
        ResumableBatchConfigurationError: the source's batch sampler has made its batches already: have it make others. Or,
            when pulled: nothing is kept, or less than one index for each rank and the rest is to be dropped.

    >>> from stateful_pipes import SequentialSampler
    >>> list(IndexFilter(SamplerNode(SequentialSampler(6)), lambda index: index % 3 > 0))
    [1, 2, 4, 5]
    """

    kind = "index_filter"
    MAIN_ONLY = (*DealingNode.MAIN_ONLY, "keep", "_sampler")

    def __init__(
        self,
        source: SamplerNode,
        keep: Callable[[int], Any] | npt.ArrayLike,
        *,
        name: str | None = None,
    ) -> None:
        if not isinstance(source, SamplerNode):
            raise TypeError(f"source must be a SamplerNode, got {type(source).__name__}")
        if isinstance(source.sampler, ResumableBatchSampler):
            raise ResumableBatchConfigurationError(
                f"the batches of a {source.sampler.name} are made before the filter",
                remedy="Make it over a torch.utils.data.Subset of what is to be kept",
            )
        self.keep: Any = keep if callable(keep) else _flags_of(keep, source.sampler)
        super().__init__(source, name=name)
        self.deal(*take_over([source]))
        self._sampler = source.sampler
        self._ended = False

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        if self._ended:
            self._ended = False
            raise StopIteration
        before = self._source.mark()
        wanted = count * self.world_size
        kept = self._kept(wanted)
        rest = len(kept) % self.world_size
        if rest and self.uneven == "pad":
            kept += self._padding(before[0], self.world_size - rest)
        elif rest:
            kept = kept[:-rest]
        if not kept:
            self._ended = False
            if self._source.at_start(before):
                self.leaves_none(f"{rest} kept samples")
            raise StopIteration
        positions, indices = zip(*kept[self.rank :: self.world_size], strict=True)
        return (before[0], packed(list(positions)), np.array(indices, dtype=np.int64).tobytes())

    def _kept(self, wanted: int) -> list[tuple[int, int]]:
        """Position and index of the next so many that are kept; fewer at the end of the epoch, which is then to be told."""
        kept: list[tuple[int, int]] = []
        block = wanted
        while len(kept) < wanted:
            try:
                ticket = self._source.pull(block)
            except StopIteration:
                self._ended = True
                return kept
            indices = self._source.run(ticket)
            flags = self._flags(ticket, indices)
            kept += [(p, i) for p, i, flag in zip(positions_of(ticket), indices, flags, strict=True) if flag]
            block = max(wanted, min(2 * block, _MAX_BLOCK))
        # The cursor stands right behind the last one that is taken, however far ahead was looked.
        self._source.seek((ticket[0], kept[wanted - 1][0] + 1))
        return kept[:wanted]

    def _flags(self, ticket: Ticket, indices: list[int]) -> list[bool]:
        flags: list[bool] = []
        try:
            if isinstance(self.keep, np.ndarray):
                flags = self.keep[indices].tolist()
            else:
                for index in indices:
                    flags.append(bool(self.keep(index)))
        except Exception as error:
            at = len(flags)
            is_array = isinstance(self.keep, np.ndarray)
            place = self.samples(ticket) if is_array else Samples(ticket[0], [positions_of(ticket)[at]], [indices[at]])
            raise_noted(error, self.keep, f"in node {self.name!r} at {place}, asked what to keep")
        return flags

    def _padding(self, epoch: int, count: int) -> list[tuple[int, int]]:
        """The epoch's first ones once more, at positions of their own after its end; as often as it takes."""
        following = self._source.mark()
        found: list[tuple[int, int]] = []
        while len(found) < count:
            self._source.seek(self._source.start(epoch))
            past = (1 + len(found)) * (self._sampler.length or 0)
            found += [(past + position, index) for position, index in self._kept(count - len(found))]
        self._source.seek(following)
        self._ended = True
        return found

    def run(self, ticket: Ticket) -> list[Any]:
        return memoryview(ticket[2]).cast("q").tolist()

    def samples(self, ticket: Ticket) -> Samples:
        return Samples(ticket[0], list(positions_of(ticket)), self.run(ticket))

    def seek(self, mark: Mark) -> None:
        self._ended = False
        self._source.seek(mark)

    def next_epoch(self, mark: Mark) -> None:
        self._ended = False
        self._source.next_epoch(mark)

    def settings(self) -> dict[str, Scalar]:
        kept = "function"
        if isinstance(self.keep, np.ndarray):
            kept = hashlib.sha256(np.packbits(self.keep).tobytes()).hexdigest()[:16]
        return {"keep": kept, "world_size": self.world_size, "uneven": self.uneven}

    def rules(self) -> Mapping[str, Rule]:
        return {"world_size": allowable}

    def length(self) -> int | None:
        if not isinstance(self.keep, np.ndarray) or not _takes_each_once(self._sampler):
            return None
        kept = int(self.keep[: self._sampler.length].sum())
        return -(-kept // self.world_size) if self.uneven == "pad" else kept // self.world_size

    def batches(self) -> int | None:
        self.no_batches()


def _takes_each_once(sampler: OrderCursor[Any]) -> bool:
    return type(sampler) in (RandomSampler, SequentialSampler)


def _flags_of(keep: npt.ArrayLike, sampler: OrderCursor[Any]) -> npt.NDArray[np.bool_]:
    flags = np.asarray(keep).copy()
    if flags.dtype != np.bool_ or flags.ndim != 1:
        raise TypeError(f"keep must be a function or a flat array of booleans, got {flags.dtype} of shape {flags.shape}")
    if _takes_each_once(sampler) and len(flags) < (sampler.length or 0):
        raise ValueError(f"keep must have a boolean for each of {sampler.length} indices, got {len(flags)}")
    if not flags.any():
        raise ResumableBatchConfigurationError("nothing is kept", expected="at least 1 index", found=0)
    return flags

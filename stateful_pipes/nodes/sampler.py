"""The source of a pipeline: a cursor over an order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch.distributed as dist

from stateful_pipes.errors import LoaderFailedError, ResumableBatchConfigurationError
from stateful_pipes.fields import Rule, Scalar, adopted_seed, allowable, counter
from stateful_pipes.nodes.dealing import DealingNode, Uneven, ranks_of
from stateful_pipes.samplers import Order, ResumableBatchSampler, ResumableSampler, as_resumable
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["SamplerNode"]

# An order costs the same numpy calls for one index as for thousands, so they are made ahead in blocks that grow to this.
_CHUNK = 4096


class _Chunk(NamedTuple):
    """Indices made ahead: of which epoch, from which position on."""

    epoch: int
    first: int
    indices: bytes


_NO_CHUNK = _Chunk(-1, 0, b"")


class SamplerNode(DealingNode[int]):
    """Yields the dataset indices of an order, on each rank its own share.

    Rank r of W takes the positions p with p mod W == r, counted from where the state stands, so that the ranks in
    lockstep consume a prefix of one global order. A batch sampler is dealt out likewise by whole batches, which a
    `SeededBatcher(batch_size=None)` above keeps. A rank's padding sample has its own position, and so its own seed.

    Args:
        sampler: A sampler or batch sampler of this library, or an `Order`. It belongs to this node while that is open.
        rank: This process, from 0 to world_size - 1; torch.distributed's by default, else 0.
        world_size: Number of ranks; torch.distributed's by default, else 1.
        uneven: What to do where the epoch does not divide by the ranks: "pad" it by wrapping around to its start, or
            "drop" the rest. Either way all ranks get the same number of samples, or of batches.
        name: The node's name in the state.

    Yields:
        int

    State: order, its length, arguments and seed, epoch, consumed (samples over all ranks), world_size, uneven; constant
    size, equal on all ranks. Cost of a resume: O(1), with a balanced batch sampler one cycle's list.

    Raises:
        ResumableBatchConfigurationError: dropping leaves no sample for each rank.
        ResumableModeRequiredError: the sampler has no position that could be resumed.
        NodeAttachedError: the sampler belongs to another pipeline that is still open.

    >>> from stateful_pipes import RandomSampler
    >>> node = SamplerNode(RandomSampler(3, seed=0))
    >>> sorted(node)
    [0, 1, 2]
    """

    kind = "sampler"
    MAIN_ONLY = (*DealingNode.MAIN_ONLY, "sampler", "_batches", "_chunk")

    def __init__(
        self,
        sampler: ResumableSampler | ResumableBatchSampler | Order,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "pad",
        name: str | None = None,
    ) -> None:
        self.sampler = as_resumable(sampler)
        self._batches = self.sampler if isinstance(self.sampler, ResumableBatchSampler) else None
        self._unit = 1 if self._batches is None else self._batches.batch_size  # what is dealt out as a whole
        share = ranks_of(rank, world_size)
        if uneven not in ("pad", "drop"):
            raise ValueError(f'uneven must be "pad" or "drop", got {uneven!r}')
        super().__init__(name=name)
        self.deal(*share, uneven)
        self.alone_by_default = rank is None and not (dist.is_available() and dist.is_initialized())
        self._epoch, self._consumed = self.sampler.epoch, self.sampler.consumed
        self.sampler.attach(self)

    @property
    def pulls_freely(self) -> bool:
        return self._batches is None and type(self).pull is SamplerNode.pull  # a cycle's list may take seconds to make

    def deal(self, rank: int, world_size: int, uneven: Uneven) -> None:
        super().deal(rank, world_size, uneven)
        self._chunk = _NO_CHUNK  # those made ahead are the old share's

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            return self._pull_batch(self._made_by())
        if self._batches is not None and self.world_size > 1:
            raise ResumableBatchConfigurationError(
                f"the batches of a {self.sampler.name} are dealt out to {self.world_size} ranks as they are",
                node=self.name,
                remedy="Put a SeededBatcher(batch_size=None) above it",
            )
        left = self._share(self._consumed, 1)
        taken = count if left is None else min(count, left)
        if taken == 0:
            self._end_epoch()
        step = self.world_size
        start = self._consumed + self.rank
        ticket = (self._epoch, (start, start + taken * step, step), self._indices(start, taken, step))
        self._consume(self._consumed + taken * step)
        return ticket

    def _pull_batch(self, sampler: ResumableBatchSampler) -> Ticket:
        if self._share(self._consumed, self._unit) == 0:
            self._end_epoch()
        # Past the end, where the last round of ranks is padded by wrapping around, positions go on as if there were a next cycle.
        start, stop = (sampler.after(self._consumed, self.rank + more) for more in (0, 1))
        first = start if sampler.length is None else start % sampler.length
        ticket = (self._epoch, (start, stop, 1), self._indices(first, stop - start, 1))
        self._consume(sampler.after(self._consumed, self.world_size))
        return ticket

    def _consume(self, consumed: int) -> None:
        self._consumed = consumed if self.sampler.length is None else min(consumed, self.sampler.length)

    def _end_epoch(self) -> NoReturn:
        if self._consumed == 0:
            self.leaves_none(f"{self.sampler.length} samples" if self._batches is None else f"{len(self._batches)} batches")
        self._epoch, self._consumed = self._epoch + 1, 0
        raise StopIteration

    def run(self, ticket: Ticket) -> list[Any]:
        return memoryview(ticket[2]).cast("q").tolist()

    def samples(self, ticket: Ticket) -> Samples:
        return Samples(ticket[0], list(positions_of(ticket)), self.run(ticket))

    def mark(self) -> Mark:
        return (self._epoch, self._consumed)

    def seek(self, mark: Mark) -> None:
        self._epoch, self._consumed = mark

    def settings(self) -> dict[str, Scalar]:
        return {
            "order": self.sampler.name,
            **self.sampler.values(),
            "world_size": self.world_size,
            "uneven": self.uneven,
        }

    def values(self, mark: Mark) -> dict[str, Scalar]:
        epoch, consumed = mark
        return {"epoch": epoch, **self.sampler.position(consumed)}

    def rules(self) -> Mapping[str, Rule]:
        # A source of a mixture may stand at its end before that is found out.
        below = None if self.sampler.length is None else self.sampler.length + 1
        within = dict.fromkeys(self.sampler.position(0), partial(counter, below=below))
        return {"seed": adopted_seed, "epoch": counter, "world_size": allowable, **within}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        return (entry["epoch"], self.sampler.located(entry, self.name))

    def adopt(self, entry: Mapping[str, Any]) -> None:
        if self.sampler.seed is not None:
            self.sampler.seed = entry["seed"]
        self._chunk = _NO_CHUNK

    def start(self, epoch: int) -> Mark:
        return (epoch, 0)

    def at_start(self, mark: Mark) -> bool:
        return bool(mark[1] == 0)

    def next_epoch(self, mark: Mark) -> None:
        self.seek((mark[0] + 1, 0))

    def length(self) -> int | None:
        if self._batches is not None:
            return self.sampler.length if self.world_size == 1 else None
        return self._share(0, 1)

    def batches(self) -> int | None:
        self._made_by()
        return self._share(0, self._unit)

    def _made_by(self) -> ResumableBatchSampler:
        return self.no_batches() if self._batches is None else self._batches

    def release(self) -> None:
        self.sampler.detach(self)

    def open(self) -> None:
        super().open()
        self.sampler.attach(self)
        self._settings, self._chunk = None, _NO_CHUNK  # it may have been loaded meanwhile

    def cursor(self) -> tuple[int, int]:
        """The consumed position: epoch, and samples consumed in it over all ranks."""
        try:
            epoch, consumed = self.consumed()
        except LoaderFailedError:  # a load was cut short, and nothing is known until the next
            return self._epoch, self._consumed
        return epoch, consumed

    def _share(self, consumed: int, unit: int) -> int | None:
        """How many units of so many samples each rank still gets in an epoch of which so many samples are consumed."""
        if self.sampler.length is None:
            return None
        left = -(-(self.sampler.length - consumed) // unit)
        return -(-left // self.world_size) if self.uneven == "pad" else left // self.world_size

    def _indices(self, start: int, count: int, step: int) -> bytes:
        """Indices at `count` positions from `start` on, int64, in blocks made ahead."""
        epoch, first, indices = self._chunk
        offset, misaligned = divmod(start - first, step)
        if epoch != self._epoch or misaligned or not 0 <= offset <= len(indices) // 8 - count:
            indices, offset = self._make(start, count, step), 0
            self._chunk = _Chunk(self._epoch, start, indices)
        return indices[8 * offset : 8 * (offset + count)]

    def _make(self, start: int, count: int, step: int) -> bytes:
        length = self.sampler.length
        ahead = max(count, min(_CHUNK, 4 * (len(self._chunk.indices) // 8) or 64))
        if step != self.world_size:  # what lies ahead is for other ranks
            ahead = count
        elif self._batches is not None:  # the next cycle's list is made when it is begun
            ahead = min(ahead, max(count, self._batches.samples - start % self._batches.samples))
        if length is not None:
            ahead = min(ahead, max(0, -(-(length - start) // step)))
        made = self.sampler.indices(self._epoch, range(start, start + ahead * step, step))
        if length is not None and ahead < count:
            # Past the end, where the last round of ranks is padded by wrapping around.
            past = range(start + ahead * step, start + count * step, step)
            made = np.concatenate([made, *(self.sampler.indices(self._epoch, range(p % length, p % length + 1)) for p in past)])
        return made.tobytes()

"""The source of a pipeline: a cursor over an order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from stateful_pipes.errors import LoaderFailedError, ResumableBatchConfigurationError
from stateful_pipes.fields import Rule, Scalar, adopted_seed, allowable, counter
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node
from stateful_pipes.samplers import Order, ResumableSampler, as_resumable
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["SamplerNode"]

# An order costs the same numpy calls for one index as for thousands, so they are made ahead in blocks that grow to this.
_CHUNK = 4096


class _Chunk(NamedTuple):
    """Indices made ahead: of which epoch, from which position on."""

    epoch: int
    first: int
    indices: bytes


class SamplerNode(Node[int]):
    """Yields the dataset indices of an order, on each rank its own share.

    Rank r of W takes the positions p with p mod W == r, counted from where the state stands, so that the ranks in
    lockstep consume a prefix of one global order. A rank's padding sample has its own position, and so its own seed.

    Args:
        sampler: A sampler of this library, or an `Order`. It belongs to this node while that is open.
        rank: This process, from 0 to world_size - 1; torch.distributed's by default, else 0.
        world_size: Number of ranks; torch.distributed's by default, else 1.
        uneven: What to do where the epoch does not divide by the ranks: "pad" it by wrapping around to its start, or
            "drop" the rest. Either way all ranks get the same number of samples.
        name: The node's name in the state.

    Yields:
        int

    State: order, its length, arguments and seed, epoch, consumed (samples over all ranks), world_size, uneven; constant
    size, equal on all ranks. Cost of a resume: O(1).

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
    MAIN_ONLY = (*Node.MAIN_ONLY, "sampler", "_chunk")

    def __init__(
        self,
        sampler: ResumableSampler | Order,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Literal["pad", "drop"] = "pad",
        name: str | None = None,
    ) -> None:
        self.sampler = as_resumable(sampler)
        self.rank, self.world_size = _ranks(rank, world_size)
        if uneven not in ("pad", "drop"):
            raise ValueError(f'uneven must be "pad" or "drop", got {uneven!r}')
        self.uneven = uneven
        super().__init__(name=name)
        if self.length() == 0:
            raise ResumableBatchConfigurationError(
                f'{self.sampler.length} samples over {self.world_size} ranks with uneven="drop" leave none for each',
                remedy='Use uneven="pad"',
            )
        self._epoch, self._consumed = self.sampler.epoch, self.sampler.consumed
        self._chunk = _Chunk(-1, 0, b"")
        self.sampler.attach(self)

    def pull(self, count: int) -> Ticket:
        left = self._share(self._consumed)
        taken = count if left is None else min(count, left)
        if taken == 0:
            self._epoch, self._consumed = self._epoch + 1, 0
            raise StopIteration
        step = self.world_size
        start = self._consumed + self.rank
        positions = (start, start + taken * step, step)
        ticket = (self._epoch, positions, self._indices(start, taken))
        self._consumed += taken * step
        if self.sampler.length is not None:
            self._consumed = min(self._consumed, self.sampler.length)
        return ticket

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
        return {"epoch": epoch, "consumed": consumed}

    def rules(self) -> Mapping[str, Rule]:
        consumed = partial(counter, below=self.sampler.length)
        return {"seed": adopted_seed, "epoch": counter, "consumed": consumed, "world_size": allowable}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        return (entry["epoch"], entry["consumed"])

    def adopt(self, entry: Mapping[str, Any]) -> None:
        if self.sampler.seed is not None:
            self.sampler.seed = entry["seed"]
        self._chunk = _Chunk(-1, 0, b"")

    def start(self, epoch: int) -> Mark:
        return (epoch, 0)

    def at_start(self, mark: Mark) -> bool:
        return bool(mark[1] == 0)

    def next_epoch(self, mark: Mark) -> None:
        self.seek((mark[0] + 1, 0))

    def length(self) -> int | None:
        return self._share(0)

    def release(self) -> None:
        self.sampler.detach(self)

    def open(self) -> None:
        self.sampler.attach(self)
        self._settings = None  # it may have been loaded meanwhile

    def cursor(self) -> tuple[int, int]:
        """The consumed position: epoch, and samples consumed in it over all ranks."""
        try:
            epoch, consumed = self.consumed()
        except LoaderFailedError:  # a load was cut short, and nothing is known until the next
            return self._epoch, self._consumed
        return epoch, consumed

    def _share(self, consumed: int) -> int | None:
        """How many samples each rank still gets in an epoch of which so many are consumed."""
        if self.sampler.length is None:
            return None
        left = self.sampler.length - consumed
        return -(-left // self.world_size) if self.uneven == "pad" else left // self.world_size

    def _indices(self, start: int, count: int) -> bytes:
        """Indices at `count` of this rank's positions from `start` on, int64, in blocks made ahead."""
        epoch, first, indices = self._chunk
        offset, misaligned = divmod(start - first, self.world_size)
        if epoch != self._epoch or misaligned or not 0 <= offset <= len(indices) // 8 - count:
            indices, offset = self._make(start, count), 0
            self._chunk = _Chunk(self._epoch, start, indices)
        return indices[8 * offset : 8 * (offset + count)]

    def _make(self, start: int, count: int) -> bytes:
        step, length = self.world_size, self.sampler.length
        ahead = max(count, min(_CHUNK, 4 * (len(self._chunk.indices) // 8) or 64))
        if length is not None:
            ahead = min(ahead, max(0, -(-(length - start) // step)))
        made = self._ask(range(start, start + ahead * step, step))
        if length is not None and ahead < count:
            # Past the end, where the last round of ranks is padded by wrapping around.
            past = range(start + ahead * step, start + count * step, step)
            made = np.concatenate([made, *(self._ask(range(p % length, p % length + 1)) for p in past)])
        return made.tobytes()

    def _ask(self, positions: range) -> npt.NDArray[np.int64]:
        try:
            return self.sampler.indices(self._epoch, positions)
        except StopIteration as error:
            raise RuntimeError(f"{self.sampler.name}.indices raised StopIteration") from error


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size together, got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        up = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
    world_size = as_integer("world_size", world_size, 1)
    return as_integer("rank", rank, 0, world_size - 1, f"world_size - 1 = {world_size - 1}"), world_size

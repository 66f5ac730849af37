"""Groups samples into batches and collates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import default_collate
from torchdata.nodes import BaseNode

from stateful_pipes.contract import walk
from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.fields import Rule, Scalar, adopted_seed, allowable
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import as_node, walk_all
from stateful_pipes.nodes.user_error import raise_noted
from stateful_pipes.rng import COLLATE, GLOBAL_GENERATORS, GlobalGenerator, as_seed, derive, derive_each, draw_seed, seeder
from stateful_pipes.skips import LEFT_OUT, noting
from stateful_pipes.ticket import Mark, Samples, Ticket, packed, positions_of

__all__ = ["SeededBatcher"]

T_co = TypeVar("T_co", covariant=True)


class SeededBatcher(Node[T_co]):
    """Groups `batch_size` items and collates them, a `collate_fn` of your own under a seed of the batch's own.

    That seed is a hash of (seed, epoch, position of the first sample), so unlike the samples' seeds it changes with the
    batch size and the number of ranks. A batch's position, for nodes above, is that of its first sample. Where the source
    gives an empty batch, as a `FileReader` may with PARTIAL, it is default_collate's tensors with 0 samples, or `collate_fn([])`.

    Args:
        source: The node below.
        batch_size: At least 1; None keeps the batches that a batch sampler at the source makes.
        drop_last: Leave out the last batch of an epoch if it is smaller.
        collate_fn: Callable of a list of items; torch's `default_collate` by default, which draws nothing and gets no seed.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out. The state's replaces it at a load.
        name: The node's name in the state.

    Yields:
        What `collate_fn` returns.

    State: batch_size, drop_last, seed; constant. Cost: 10 us a batch for the seed.

    Raises:
        ResumableBatchConfigurationError: the epoch is shorter than a batch and the last one is to be dropped; or with
            batch_size=None, the source makes no batches.
        GlobalGeneratorThreadError: a collate_fn run on a thread that is not the main one.
    """

    kind = "batcher"

    def __init__(
        self,
        source: BaseNode[Any],
        batch_size: int | None,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], T_co] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn must be callable, got {collate_fn!r}")
        self.batch_size = None if batch_size is None else as_integer("batch_size", batch_size, 1)
        self.drop_last = bool(drop_last)
        if self.batch_size is None and self.drop_last:
            raise ValueError("drop_last=True has no meaning with batch_size=None: say it to the batch sampler")
        self.collate_fn: Callable[[list[Any]], Any] = default_collate if collate_fn is None else collate_fn
        self._seeds_collate = self.collate_fn is not default_collate
        below = as_node(source)
        self._purpose = COLLATE + (sum(isinstance(node, SeededBatcher) for node in walk_all(below)) << 8)
        if self.batch_size is None:
            below.batches()
        samples = below.length()
        if self.batch_size is not None and self.drop_last and samples is not None and samples < self.batch_size:
            raise ResumableBatchConfigurationError(
                "every batch would be dropped", expected=f"at least {batch_size} samples an epoch", found=samples
            )
        given = None if seed is None else as_seed(seed)
        super().__init__(below, name=name)
        self.seed = draw_seed() if given is None else given

        self._ended = False

    @property
    def pulls_freely(self) -> bool:
        return type(self).pull is SeededBatcher.pull and self._source.pulls_freely

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        if self._ended:
            self._ended = False
            raise StopIteration
        tickets: list[Ticket] = []
        while len(tickets) < count:
            try:
                tickets.append(self._pull_batch())
            except StopIteration:
                if not tickets:
                    raise
                # The source already stands in the next epoch; the end of this one is told at the next pull.
                self._ended = True
                break
        epoch = tickets[0][0]
        firsts = list(map(_first_position, tickets))
        key = derive(self.seed, self._purpose, epoch) if self._seeds_collate else 0
        if all(map(positions_of, tickets)):
            return (epoch, packed(firsts), tuple(tickets), key)
        return (epoch, packed(firsts), tuple(tickets), key, self._first_samples(epoch))

    def _pull_batch(self) -> Ticket:
        ticket = self._source.pull(self.batch_size)
        if self.drop_last and len(positions_of(ticket)) < (self.batch_size or 0):
            # Only an epoch's last block may be short, so this ends it.
            return self._source.pull(self.batch_size)
        return ticket

    def _first_samples(self, epoch: int) -> tuple[Ticket, ...]:
        """Tickets of an epoch's first samples: one more than may be left out. They show what an empty batch would be made of."""
        mark = self._source.mark()
        self._source.seek(self._source.start(epoch))
        tickets: list[Ticket] = []
        have, wanted = 0, 1 + sum(node.max_skipped for node in walk(self._source))
        try:
            while have < wanted:
                asked = min(have or 1, wanted - have)  # one, and then as many as before: mostly only the first is run
                tickets.append(self._source.pull(asked))
                have += asked
        except StopIteration:  # so many may be left out that the epoch has no more
            pass
        finally:
            self._source.seek(mark)
        return tuple(tickets)

    def run(self, ticket: Ticket) -> list[Any]:
        _, _, tickets, key, *models = ticket
        seeds = derive_each(key, positions_of(ticket)) if self._seeds_collate else ()
        out = []
        for i, below in enumerate(tickets):
            samples = [sample for sample in self._source.run(below) if sample is not LEFT_OUT]
            if not positions_of(below) and not self._seeds_collate:
                out.append(self._empty(models[0]))
                continue
            if not samples and positions_of(below):
                out.append(LEFT_OUT)
                continue
            if self._seeds_collate:
                _seed_all(seeds[i])
            try:
                out.append(self.collate_fn(samples))
            except Exception as error:
                held = positions_of(below) or [_first_position(below)]
                place = f"in node {self.name!r} at epoch {ticket[0]}, collating positions {held[0]} to {held[-1]}"
                raise_noted(error, self.collate_fn, place)
        return out

    def _empty(self, models: tuple[Ticket, ...]) -> Any:
        """A batch without samples: what default_collate makes of another sample, cut to none."""
        for model in models:
            with noting():  # what is left out of those counts in its own batch
                samples = [sample for sample in self._source.run(model) if sample is not LEFT_OUT]
            if samples:
                return emptied(self.collate_fn(samples[:1]))
        return []

    def samples(self, ticket: Ticket) -> Samples:
        below = [self._source.samples(one) for one in ticket[2]]
        positions = [position for one in below for position in one.positions]
        return Samples(ticket[0], positions, [index for one in below for index in one.indices])

    def seek(self, mark: Mark) -> None:
        self._ended = False
        self._source.seek(mark)

    def next_epoch(self, mark: Mark) -> None:
        self._ended = False
        self._source.next_epoch(mark)

    def settings(self) -> dict[str, Scalar]:
        size = {} if self.batch_size is None else {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**size, "seed": self.seed}

    def rules(self) -> Mapping[str, Rule]:
        return {"batch_size": allowable, "seed": adopted_seed}

    def adopt(self, entry: Mapping[str, Any]) -> None:
        self.seed = entry["seed"]

    def length(self) -> int | None:
        if self.batch_size is None:
            return self._source.batches()
        samples = self._source.length()
        if samples is None:
            return None
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def batches(self) -> int | None:
        self.no_batches()

    def global_generators(self) -> frozenset[GlobalGenerator]:
        own = frozenset(GLOBAL_GENERATORS if self._seeds_collate else ())
        return own | self._source.global_generators()


def _first_position(ticket: Ticket) -> int:
    """Of the ticket's first sample; of an empty one, that which comes next."""
    positions = ticket[1]
    return int(positions[0]) if isinstance(positions, tuple) else positions_of(ticket)[0]


def emptied(batch: Any) -> Any:
    """A batch of the same structure, types and shapes, but with no samples."""
    if isinstance(batch, torch.Tensor):
        return batch[:0].clone()
    if isinstance(batch, Mapping):
        return {key: emptied(one) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(emptied, batch))
    if isinstance(batch, (list, tuple)):  # of fields; of the samples themselves where these are strings
        return type(batch)(emptied(one) for one in batch if not isinstance(one, (str, bytes)))
    return batch


_seed_all = seeder(GLOBAL_GENERATORS)

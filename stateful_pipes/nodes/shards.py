"""Which samples each batch of each epoch has, by DALI's rules: pure arithmetic, so any epoch is as near as the next.

A reader goes round its shards for ever: an endless sequence of passes, each over one shard. A `BatchPlan` says where in
this sequence an epoch begins and how many places of it that epoch takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stateful_pipes.nodes.last_batch import LastBatchPolicy

__all__ = ["BatchPlan", "Shards", "Stretch"]


class Stretch(NamedTuple):
    """Places that follow each other in one pass.

    Attributes:
        number: Of the pass, from 0.
        place: The first one's place in the pass.
        steps: How many.
    """

    number: int
    place: int
    steps: int


class Shards(NamedTuple):
    """How a reader goes round: pass k reads shard (shard_id + k) mod num_shards, or always its own.

    Attributes:
        files: How many there are in all.
        num_shards: From 1 to `files`; shard i has those from i * files // num_shards on.
        shard_id: The first one to read.
        stick: Whether it is the only one.
    """

    files: int
    num_shards: int
    shard_id: int
    stick: bool

    @property
    def largest(self) -> int:
        """Samples in the largest shard."""
        return -(-self.files // self.num_shards)

    @property
    def smallest(self) -> int:
        """Samples in the smallest shard."""
        return self.files // self.num_shards

    def meta(self, padded: bool) -> dict[str, int]:
        """What DALI's `Pipeline.reader_meta` tells of a reader, padded by `pad_last_batch` or not."""
        return {
            "epoch_size": self.files,
            "epoch_size_padded": self.largest * self.num_shards if padded else self.files,
            "number_of_shards": self.num_shards,
            "shard_id": self.shard_id,
            "pad_last_batch": int(padded),
            "stick_to_shard": int(self.stick),
        }

    def bounds(self, number: int) -> tuple[int, int]:
        """First sample of the shard that pass `number` reads, and the one after its last."""
        shard = self.shard_id if self.stick else (self.shard_id + number) % self.num_shards
        return shard * self.files // self.num_shards, (shard + 1) * self.files // self.num_shards

    def size(self, number: int) -> int:
        """Samples in the shard that pass `number` reads."""
        first, stop = self.bounds(number)
        return stop - first

    def most(self, passes: int) -> int:
        """Samples that so many passes have, on the shard where they have most."""
        return passes * self.largest if self.stick else -(-passes * self.files // self.num_shards)

    def pass_at(self, offset: int) -> tuple[int, int]:
        """The pass that has the sample at `offset` of the endless sequence, and its place there."""
        if self.stick:
            return divmod(offset, self.size(0))
        first, _ = self.bounds(0)
        # Shard j, counted on past the last one, begins at j * files // num_shards; this is the last that does so by `at`.
        at = first + offset
        shard = ((at + 1) * self.num_shards - 1) // self.files
        return shard - self.shard_id, at - shard * self.files // self.num_shards


class BatchPlan(NamedTuple):
    """How epochs and batches are cut out of the endless sequence.

    Attributes:
        shards: The passes.
        padded: Whether each pass goes on with its last sample, to whole batches, as many as the largest shard needs.
        batch_size: Places in a batch.
        policy: What is done with an epoch's last batch.
    """

    shards: Shards
    padded: bool
    batch_size: int
    policy: LastBatchPolicy

    def begin(self, epoch: int) -> int:
        """The offset of an epoch's first place."""
        return self.batch_size * self._batches_before(epoch)

    def places(self, epoch: int) -> int:
        """How many places an epoch hands out; a multiple of the batch size."""
        return self.left(epoch, 0, self.batch_size)

    def left(self, epoch: int, place: int, batch_size: int) -> int:
        """How many places an epoch still hands out from `place` on, in whole batches of a size that may be another."""
        if self.policy is LastBatchPolicy.DROP:
            return max(0, self.shards.smallest - place) // batch_size * batch_size
        samples = self.shards.largest - place
        if self.policy is LastBatchPolicy.FILL and not self.padded:  # up to where the next epoch begins, cut by that size
            samples = self._replace(batch_size=batch_size).begin(epoch + 1) - self.begin(epoch) - place
        return max(0, -(-samples // batch_size) * batch_size)

    def kept(self, epoch: int, place: int, count: int) -> int:
        """How many of `count` places from `place` on have a sample that is handed out; the rest come after those."""
        if self.policy is not LastBatchPolicy.PARTIAL:
            return count
        return min(count, max(0, self.shards.size(epoch) - place))

    def stretches(self, epoch: int, place: int, count: int) -> Iterator[Stretch]:
        """The passes that `count` places from `place` of an epoch on belong to."""
        # Padded, an epoch is a pass, with padding up to wherever its last batch ends.
        is_pass = self.padded and self.policy is not LastBatchPolicy.DROP
        while count:
            number, first = self.pass_at(epoch, place)
            length = self._padded_pass if self.padded else self.shards.size(number)
            taken = count if is_pass else min(count, length - first)
            yield Stretch(number, first, taken)
            place, count = place + taken, count - taken

    def pass_at(self, epoch: int, place: int) -> tuple[int, int]:
        """The pass that a place of an epoch belongs to, and its place there."""
        offset = self.begin(epoch) + place
        return divmod(offset, self._padded_pass) if self.padded else self.shards.pass_at(offset)

    @property
    def _padded_pass(self) -> int:
        return self._batches(self.shards.largest) * self.batch_size

    def _batches(self, samples: int) -> int:
        return -(-samples // self.batch_size)

    def _batches_before(self, epoch: int) -> int:
        if self.policy is LastBatchPolicy.DROP:  # one that is left out is read, if any shard has a part of it
            return epoch * self._batches(self.shards.smallest)
        if self.padded or self.policy is LastBatchPolicy.PARTIAL:
            return epoch * self._batches(self.shards.largest)
        # Until every shard has read its passes to the end. What is read beyond counts for the next epoch, which still has
        # one batch where nothing is left for it: then DALI's iterator skips an epoch and begins to count anew.
        return max(epoch, self._batches(self.shards.most(epoch)))

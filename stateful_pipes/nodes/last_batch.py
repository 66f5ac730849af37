"""What becomes of an epoch's last batch."""

from __future__ import annotations

from enum import Enum

__all__ = ["LastBatchPolicy"]


class LastBatchPolicy(Enum):
    """What to do with an epoch's last batch where there are not enough samples for it; as DALI's class of this name.

    On samples 1 to 7 in batches of 2, padded by `pad_last_batch` / not padded:

    * FILL: fill it up, with the last sample / by running on into the next shard: [7, 7] / [7, 1].
    * PARTIAL: hand out what is there: [7] / [7]. Where shards differ in size, it is empty on some of them: `default_collate`'s
      tensors of the epoch's first sample with 0 samples, or `[]` where `max_skipped` has all of that epoch's samples left out.
    * DROP: leave it out on every shard where one shard could not fill it: [5, 6] / [5, 6] is the last.

    The next epoch begins at 1 / at 2: what filled a batch is not read again, whether it was handed out or not. So with
    DROP and padding, on shards of different sizes, a batch that is all padding is left for the next epoch; DALI has it so.

    >>> LastBatchPolicy("PARTIAL")
    <LastBatchPolicy.PARTIAL: 'PARTIAL'>
    """

    FILL = "FILL"
    DROP = "DROP"
    PARTIAL = "PARTIAL"

    @classmethod
    def _missing_(cls, value: object) -> LastBatchPolicy | None:
        """DALI's own member of the same name."""
        if type(value).__name__ != cls.__name__ or not isinstance(value, Enum):
            return None
        return cls.__members__.get(value.name)

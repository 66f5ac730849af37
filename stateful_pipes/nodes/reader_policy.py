"""How a loader's policy for last batches gets down to its reader."""

from __future__ import annotations

from typing import Any

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.node import Node
from stateful_pipes.nodes.file_reader import FileReader
from stateful_pipes.nodes.foreign import walk_all
from stateful_pipes.nodes.last_batch import LastBatchPolicy

__all__ = ["set_last_batch_policy"]


def set_last_batch_policy(top: Node[Any], policy: LastBatchPolicy | str | None) -> None:
    """Gives a loader's policy down to the one `FileReader` of its pipeline; None means FILL, and that there may be none.

    Raises:
        ValueError: no such policy; or not one `FileReader` below one `SeededBatcher`, with nothing but maps between; or that
            batcher drops the last batch itself; or the reader stands in the middle of an epoch of another policy.
        ResumableBatchConfigurationError: every batch would be dropped.
    """
    wanted = LastBatchPolicy(LastBatchPolicy.FILL if policy is None else policy)
    readers = [node for node in walk_all(top) if isinstance(node, FileReader)]
    if policy is not None:
        if len(readers) != 1:
            raise ValueError(
                f"last_batch_policy={wanted.name} belongs to a loader over one FileReader, here are {len(readers)}; a DALI "
                "pipeline's is an argument of DALIPipelineNode"
            )
        batcher = readers[0].batcher()
        if batcher is None or batcher.batch_size is None:
            raise ValueError(
                f"last_batch_policy={wanted.name} needs a SeededBatcher with a batch_size above the FileReader, with nothing "
                "but maps between; a ProcessPrefetcher belongs above it"
            )
        if batcher.drop_last:
            raise ValueError(f"last_batch_policy={wanted.name} excludes the SeededBatcher's drop_last=True")
    for reader in readers:
        if reader.last_batch_policy is not wanted:
            _change_policy(top, reader, wanted)


def _change_policy(top: Node[Any], reader: FileReader, wanted: LastBatchPolicy) -> None:
    epoch, consumed, *_ = reader.consumed()
    if consumed:
        raise ValueError(
            f"last_batch_policy={wanted.name} in the middle of an epoch that {reader.last_batch_policy.name} began: go to the "
            "start of an epoch first"
        )
    plan = reader.plan()._replace(policy=wanted)
    if plan.places(epoch) == 0:
        raise ResumableBatchConfigurationError(
            "every batch would be dropped",
            node=reader.name,
            expected=f"at least {plan.batch_size} samples in each shard",
            found=reader.shards.smallest,
        )
    reader.last_batch_policy = wanted
    top.stream.move(top, top.consumed())  # what was pulled ahead is another policy's

"""The batches of a DALI pipeline: as torch tensors, epoch by epoch, with a checkpoint of what was handed out."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

try:
    from nvidia.dali import Pipeline
    from nvidia.dali.plugin import base_iterator
    from nvidia.dali.plugin.pytorch.torch_utils import to_torch_tensor
except ImportError as error:
    raise ImportError("this needs NVIDIA DALI: pip install 'stateful_pipes[dali]'") from error

from stateful_pipes.errors import StateMismatchError
from stateful_pipes.nodes.last_batch import LastBatchPolicy

__all__ = ["DALIBatches", "Pipeline"]

# A forked child would hang where it drops one of its parent's pipelines, be it as garbage, so there they are kept for good.
_kept: list[Any] = []
os.register_at_fork(after_in_child=lambda: _kept.extend(pipeline() for pipeline in Pipeline._pipes))


class DALIBatches(base_iterator._DaliBaseIterator):  # type: ignore[misc]  # the type checker does not look into DALI
    """What DALI's own `DALIGenericIterator` gives over one pipeline, whose base it shares, ragged outputs included.

    It prepares no batch before it is asked for one: a checkpoint after an epoch's last batch would not tell of the end.

    Args:
        pipeline: Not yet built.
        output_names: The keys of a batch.
        ragged: Those that are lists of samples whatever their shapes.
        reader_name, last_batch_policy: As `DALIGenericIterator`'s.

    Attributes:
        batch_size: The pipeline's.
        reader_sizes: How many samples each of its readers has, over all shards.
    """

    _pipes: list[Any]
    batch_size: int
    reader_sizes: list[str]

    def __init__(
        self,
        pipeline: Pipeline,
        output_names: Sequence[str],
        ragged: Collection[str],
        reader_name: str | None,
        last_batch_policy: LastBatchPolicy,
    ) -> None:
        self._names, self._ragged = output_names, ragged
        policy = base_iterator.LastBatchPolicy[last_batch_policy.name]
        super().__init__([pipeline], reader_name=reader_name, last_batch_policy=policy, prepare_first_batch=False)
        self.reader_sizes = [f"{name}: {meta['epoch_size']}" for name, meta in sorted(pipeline.reader_meta().items())]

    def __next__(self) -> dict[str, Any]:
        """The next batch; StopIteration at the end of the epoch, until `next_epoch`."""
        if self.ended:
            raise StopIteration
        (outputs,) = self._get_outputs()
        if not all(map(len, outputs)):  # DALI gives this first, and its own error with the next batch only
            raise RuntimeError("the pipeline gave a batch without samples; an external_source must give one at least")
        # With LastBatchPolicy.DROP a batch that is not full is read and ends the epoch.
        dropped = self._advance_and_check_drop_last(dry_run=True, end_iteration=False)
        batch = {} if dropped else {name: self._to_torch(name, one) for name, one in zip(self._names, outputs, strict=True)}
        self._schedule_runs()
        self._advance_and_check_drop_last(end_iteration=False)
        if dropped:
            raise StopIteration
        padded, left = self._remove_padded()
        return {name: _first(value, int(left[0])) for name, value in batch.items()} if np.any(padded) else batch

    @property
    def ended(self) -> bool:
        """Whether the epoch has no further batch."""
        if 0 < self._size <= self._counter:
            return True
        if not self._ever_scheduled:
            self._schedule_runs(release_outputs=False)
        # Asked of the pipeline before its outputs are, which would count an iteration that was none.
        exhausted = bool(self._pipes[0].empty())
        if exhausted and self._size > 0:
            raise RuntimeError(f"an external_source of the pipeline ended before the epoch of reader {self._reader_name!r}")
        return exhausted

    def next_epoch(self) -> None:
        """Goes on to the next epoch, once this one has ended."""
        if not self._ever_scheduled:
            self._schedule_runs(release_outputs=False)
        self.reset()

    def checkpoint(self) -> bytes:
        """DALI's own checkpoint, after the last batch handed out; `DALIGenericIterator` takes it too."""
        data: bytes = self._pipes[0]._get_checkpoint(iterator_data=self._save_state())
        return data

    def reader_meta(self) -> dict[str, Any]:
        """What DALI tells of the reader, if there is one."""
        return dict(self._pipes[0].reader_meta(self._reader_name)) if self._reader_name else {}

    def _restore_state(self, iterator_data: str) -> None:
        if iterator_data:
            try:
                saved = json.loads(iterator_data)
            except ValueError as error:
                raise StateMismatchError("the checkpoint of the iterator is damaged") from error
            fields = [name for name, _ in self._checkpointed_fields() if hasattr(self, name)]
            if not isinstance(saved, dict) or sorted(saved) != sorted(fields) or len(saved.get("_shards_id", [0])) != 1:
                raise StateMismatchError("the checkpoint is of an iterator over several pipelines, or with another reader_name")
            samples = sum(saved.get("_shard_sizes_per_gpu", ()))
            if self._reader_name and samples != self._size_no_pad:
                raise StateMismatchError(f"the reader had {samples} samples, and has {self._size_no_pad}")
            super()._restore_state(iterator_data)
        elif self._size > 0:  # of a pipeline that was run by hand: it tells no epochs, but how often it ran
            (pipeline,), self._pipes = self._pipes, []
            for _ in range(pipeline._consumer_iter):
                if self._counter >= self._size:
                    self.reset()
                self._advance_and_check_drop_last(end_iteration=False)
            self._pipes = [pipeline]

    def _to_torch(self, name: str, output: Any) -> torch.Tensor | list[torch.Tensor]:
        """Copies: an executor may write to its buffers again, and a constant's is the same in all batches."""
        try:
            if name not in self._ragged and output.is_dense_tensor():
                return to_torch_tensor(output.as_tensor(), copy=True)  # type: ignore[no-any-return]
            return [to_torch_tensor(output[i], copy=True) for i in range(len(output))]
        except KeyError:
            raise TypeError(f"output {name!r} is of {output.dtype}, which DALI cannot give to torch; use fn.cast") from None


def _first(value: torch.Tensor | list[torch.Tensor], count: int) -> torch.Tensor | list[torch.Tensor]:
    return value[:count].clone() if isinstance(value, torch.Tensor) else value[:count]

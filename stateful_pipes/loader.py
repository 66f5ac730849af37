"""The top of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from multiprocessing.context import BaseContext
from os import PathLike
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch
from torch.utils.data import Dataset
from torchdata.nodes import BaseNode

from stateful_pipes.agreement import check_agreement, keeping_nobody_waiting
from stateful_pipes.checkpoint import dumps, held_in, write_atomically
from stateful_pipes.door import DatasetArguments, build, refuse_another_length, refuse_arguments
from stateful_pipes.errors import NodeAttachedError, ResumableModeRequiredError
from stateful_pipes.iterator import LoaderIterator
from stateful_pipes.moves import PipelineMoves
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import as_node
from stateful_pipes.nodes.last_batch import LastBatchPolicy
from stateful_pipes.nodes.reader_policy import set_last_batch_policy
from stateful_pipes.pipeline_state import allowed, check, load, state_at
from stateful_pipes.rng import GLOBAL_GENERATORS, Rng
from stateful_pipes.samplers import Order
from stateful_pipes.state import LoaderState
from stateful_pipes.view import PipelineView

__all__ = ["StatefulDataLoader"]

T_co = TypeVar("T_co", covariant=True)


class StatefulDataLoader(PipelineView, PipelineMoves, Generic[T_co]):
    """A data loader whose state of a few hundred bytes resumes the stream bit for bit.

    Two front doors: `StatefulDataLoader(node)` over a pipeline that you composed, whose seeds belong to its nodes; and
    `StatefulDataLoader(dataset, batch_size=32, shuffle=True, ...)` with torch's own parameters, which composes one.

    The state is the position after the last batch handed out, whatever is prefetched. `iter` called again shares the
    current stream (`restart` begins the epoch anew); an iterator ends with the epoch in which it was made, and the
    next `iter` is the next epoch. With the last batch of an epoch handed out the state is already the next one's start.

    Args:
        dataset: A map-style dataset, or a torchdata node; with a node only the last two may be given besides.
        batch_size: Samples in a batch; None for samples as they are, unbatched.
        shuffle: A new permutation of the dataset each epoch.
        sampler: A sampler of this library, or an `Order`. It belongs to this loader while that is open.
        batch_sampler: A batch sampler of this library, likewise; in place of batch_size, shuffle, sampler and drop_last.
        num_workers: Worker processes; 0 loads inline. May be another after a resume.
        collate_fn: Callable of a list of samples; torch's `default_collate` by default. Runs under a seed of the batch's own.
        pin_memory: Copy batches to page-locked memory, in the calling thread; without an accelerator it warns and does not.
        drop_last: Leave out the last batch of an epoch if it is smaller.
        timeout: Seconds to wait for a batch before WorkerTimeoutError; 0 waits for ever.
        worker_init_fn: Called in each worker with its number at its start.
        multiprocessing_context: Start method or context; None for multiprocessing's own default.
        generator: The order's seed is drawn from it once, and all seeds if `seed` is not given. It is not used again.
        prefetch_factor: Batches ahead for each worker, on into the next epoch; 2 by default.
        persistent_workers: Both values mean the same: workers live on, and see what a changed dataset holds only after
            `close()`; one of another length needs another loader.
        pin_memory_device: As torch's.
        in_order: Only True: a position has a meaning in order only.
        seed: From 0 to 2**64 - 1, the same on all ranks; drawn once from torch's CPU generator if left out, kept in the state.
        rng: Global generators for reading a sample (see `SeededMapper`). With `()`, no `reseed` and no `max_skipped`,
            a dataset's `__getitems__` is used.
        reseed: For generators that a transform owns: called as `reseed(dataset, seed)` before each sample is read, to bring
            them to that sample's own seed (see `SeededMapper`).
        max_skipped: How many samples may be left out in all because reading them raised (see `SeededMapper`).
        max_restarts: How often a batch is tried again because its worker died (see `ProcessPrefetcher`).
        fingerprint: What says which data these are, as a string or a function of no argument (see `SeededMapper`): a state that
            was saved over others is refused.
        resumable: With False any sampler and batch sampler will do, each `iter()` starts anew and ends older iterators, and
            there is no state; what a rank gets is the sampler's own affair. All else is as with True.
        last_batch_policy: Over one `FileReader` only: how its epochs end; a `LastBatchPolicy` or its name, FILL by default.
        checkpoint: What `checkpoint()` returned, the path of such a file, or a state: where to start.

    State: a few hundred bytes; see `LoaderState`. Cost of a resume: O(1) at any position, for this library's nodes.

    Raises:
        ResumableModeRequiredError: a part whose position cannot be resumed; the error says what to use instead.
        ResumableBatchConfigurationError: no batch is possible.
        NodeAttachedError: the sampler or node belongs to another loader that is still open.
        StateMismatchError, StateVersionError: `checkpoint` does not fit.
        CheckpointFileError, FileNotFoundError: it is not a whole checkpoint, or not there.

    >>> loader = StatefulDataLoader(list(range(6)), batch_size=2, shuffle=True, seed=0)
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> rest = list(loader)
    >>> resumed = StatefulDataLoader(list(range(6)), batch_size=2, shuffle=True)
    >>> resumed.load_state_dict(state)
    >>> [batch.tolist() for batch in resumed] == [batch.tolist() for batch in rest]
    True
    """

    def __init__(
        self,
        dataset: Dataset[Any] | BaseNode[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | Order | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], T_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        rng: Rng = GLOBAL_GENERATORS,
        reseed: Callable[[Any, int], object] | None = None,
        max_skipped: int = 0,
        max_restarts: int = 3,
        fingerprint: str | Callable[[], str] | None = None,
        resumable: bool = True,
        last_batch_policy: LastBatchPolicy | str | None = None,
        checkpoint: bytes | str | PathLike[str] | Mapping[str, Any] | None = None,
    ) -> None:
        arguments = DatasetArguments(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            seed=seed,
            rng=rng,
            reseed=reseed,
            max_skipped=max_skipped,
            max_restarts=max_restarts,
            fingerprint=fingerprint,
            resumable=resumable,
        )
        self._arguments = None if isinstance(dataset, BaseNode) else arguments
        self._root: Node[Any]
        if isinstance(dataset, BaseNode):
            refuse_arguments(arguments, in_order)
            self._root = as_node(dataset)
        elif in_order:
            self._root = build(arguments)
        else:
            raise ValueError("in_order=False: a stream out of order has no position to resume at")
        self._root.attach_loader(self)
        own_order = self._arguments is not None and sampler is None and batch_sampler is None
        self._length = self.sampler.length if own_order else None  # of the dataset, then
        self._resumable = resumable
        self._restored = False
        self.user: Any = None
        self._begun = -1  # the epoch of the last iterator, without resume
        try:
            set_last_batch_policy(self._root, last_batch_policy)
            if checkpoint is not None:
                with keeping_nobody_waiting(self._root):
                    state, self.user = held_in(checkpoint)
                self.load_state_dict(state)
        except BaseException:
            self.close()  # the caller may try an older one, over the same nodes
            raise

    def __iter__(self) -> LoaderIterator[T_co]:
        """An iterator over what is left of the current epoch.

        Raises:
            LoaderFailedError: an earlier error is still to be cleared by `close` or a load.
            NodeAttachedError: after `close`, the sampler or node was given to another loader.
            ResumableBatchConfigurationError: the dataset has grown or shrunk.
        """
        if self._length is not None:
            refuse_another_length(self.dataset, self._length)
        self._root.attach_loader(self)
        self._root.open()
        if not self._resumable:
            self._begin_anew()
        self._root.stream.check()
        return LoaderIterator(self._root)

    def _begin_anew(self) -> None:
        """Leaves a pass that was begun; an older iterator that has read nothing yet must not share the new one."""
        stream, mark = self._root.stream, self._root.consumed()
        if stream.failed or not self._root.at_start(mark):
            stream.next_epoch(self._root)
        elif self._begun == mark[0]:
            stream.move(self._root, mark)
        self._begun = self._root.consumed()[0]

    def state_dict(self) -> LoaderState:
        """The position after the last batch handed out, as a fresh plain mapping.

        Starts no process and draws no random number; a foreign node's own `state_dict` may reset that node.

        Raises:
            StateEncodingError: a foreign node's state holds something that JSON cannot.
            ResumableModeRequiredError: the loader was made with `resumable=False`.
        """
        self._require_resumable("a state")
        return state_at(self._root, self._root.place())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Goes to a saved position; worker processes live on, older iterators become invalid.

        A loader that torch.distributed's ranks share has to be loaded on all of them, which first compare their states.

        Args:
            state_dict: Of a pipeline with the same nodes and arguments. Seeds are taken from it. An empty mapping does
                nothing, as with torchdata's loader: training frameworks load one when they start afresh.
            allow: Arguments that may differ from the state's: "batch_size", "world_size".

        Raises:
            StateMismatchError: it lists every entry that differs, or the ranks whose state does; nothing is changed.
            StateVersionError: a newer version of the library wrote it; nothing is changed.
            ResumableModeRequiredError: the loader was made with `resumable=False`.
        """
        with keeping_nobody_waiting(self._root):
            allow = self._allowed(allow, "load_state_dict")
        check_agreement(self._root, state_dict, allow)
        if isinstance(state_dict, Mapping) and not state_dict:
            return
        load(self._root, state_dict, allow)
        self._restored = True

    def validate_state_dict(self, state_dict: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Raises what `load_state_dict` would, but for a comparison of the ranks, and changes nothing."""
        allow = self._allowed(allow, "validate_state_dict")
        if state_dict or not isinstance(state_dict, Mapping):
            check(self._root, state_dict, allow)

    def _allowed(self, allow: Collection[str], method: str) -> tuple[str, ...]:
        self._require_resumable(method)
        names = allowed(allow, ("batch_size", "world_size"))
        self._root.refuse_loader(self)
        return names

    def checkpoint(self, path: str | PathLike[str] | None = None, *, user: object = None) -> bytes:
        """The state, and what JSON takes of the caller's own (`loader.user` of one made from it), as bytes with a checksum; with
        a path, written there atomically and durably as well."""
        data = dumps(self.state_dict(), user)
        if path is not None:
            write_atomically(path, data)
        return data

    @property
    def is_restored_from_checkpoint(self) -> bool:
        """Whether a state was loaded, at construction or later."""
        return self._restored

    def _take_back(self, was_restored: bool, user: Any) -> None:
        """Tells again what it told before a load that is undone."""
        self._restored, self.user = was_restored, user

    def close(self) -> None:
        """Ends the workers within about a second and makes iterators invalid; idempotent.

        The state stays, and `iter` starts workers anew. Without it, dropping the loader and its iterators ends them too.
        """
        try:
            self._root.refuse_loader(self)
        except NodeAttachedError:  # closed before, and another loader reads from the node now
            return
        self._root.close()

    def _require_resumable(self, what: str) -> None:
        if not self._resumable:
            raise ResumableModeRequiredError(f"{what} of a loader with resumable=False", remedy="Make it with resumable=True")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make one there and load the state")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

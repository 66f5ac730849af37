"""Reads files and their labels, sharded, shuffled and batched as DALI's file reader does it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from stateful_pipes.caught import add_note
from stateful_pipes.errors import Difference, LoaderFailedError, StateMismatchError
from stateful_pipes.fields import Rule, Scalar, adopted_seed, counter, tally, text
from stateful_pipes.integers import as_integer
from stateful_pipes.node import Node
from stateful_pipes.nodes.batcher import SeededBatcher
from stateful_pipes.nodes.file_listing import FILE_FILTERS, Files, list_files
from stateful_pipes.nodes.file_passes import FilePasses
from stateful_pipes.nodes.last_batch import LastBatchPolicy
from stateful_pipes.nodes.shards import BatchPlan, Shards
from stateful_pipes.nodes.shuffle_buffer import Held
from stateful_pipes.rng import as_seed, draw_seed
from stateful_pipes.skips import LEFT_OUT, Skip, note
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["FileReader"]


class FileReader(Node[tuple[torch.Tensor, torch.Tensor]]):
    """Yields the content and the label of files, as `nvidia.dali.fn.readers.file` does; they are read in the workers.

    Epochs and batches are those of DALI's `DALIGenericIterator(reader_name=...)` over such a reader. Shard i of n has the
    files from i * N // n to (i + 1) * N // n. A reader goes on to the next shard each epoch, unless it sticks to its own.
    An epoch lasts until the largest shard is read, in whole batches of the `SeededBatcher` above (with nothing but maps
    between; else of one sample): what is missing there is read from the next shard already, or padded. A loader's
    `last_batch_policy` gives other ways to end it; the default is FILL. What `random_shuffle` and `shuffle_after_epoch` make is
    another order than DALI's under the same seed: to go on with what a DALI pipeline began, use a `DALIPipelineNode`.

    The files are one of:

    * those in the folders of `file_root`, labelled by the number of the folder. Folders that `dir_filters` leaves out are
      not counted, those without a file that matches are; hidden ones are as good as others, files elsewhere than right in a
      folder are not read; all in byte order.
    * `files`, relative to `file_root` if that is given, with `labels`; without, these are 0, 1, 2... Absolute ones tie a state to
      where they lie, while `file_root` may lie elsewhere when a state is loaded.
    * those in the lines of `file_list`, each with its label after white space, relative to `file_root`, else to the list.

    Args:
        file_root: A folder.
        files: Paths.
        labels: From -2**31 to 2**31 - 1, one for each of `files`.
        file_list: Path of a text file.
        file_filters: Globs (fnmatch(3)) for the names of files in folders; DALI's by default, for images and sound.
        dir_filters: Globs for the names of folders; all by default.
        case_sensitive_filter: Whether globs tell capitals from small letters.
        random_shuffle: Give up one of `initial_fill` files at random, over and over, each pass over a shard for itself. The
            files are dealt out to the shards in an order without pattern, the same for all.
        initial_fill: At least 1.
        shuffle_after_epoch: Shuffle all files anew for each pass, the first too, the same on all shards; each then
            sticks to its own.
        shuffle_after_epoch_seed: From 0 to 2**64 - 1, the same on all shards; 0 if left out.
        shard_id: From 0 to num_shards - 1. Nobody is asked for it: on several ranks give `shard_id=rank, num_shards=world_size`.
        num_shards: From 1 to the number of files.
        stick_to_shard: Read the same shard each epoch.
        pad_last_batch: Fill up each pass over a shard with its last sample, to as many whole batches as the largest one has.
        seed: For `random_shuffle`, from 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        max_skipped: How many files may be left out in all because they could not be read, as of `SeededMapper`.
        name: The node's name in the state.

    Yields:
        (uint8 of shape (bytes,), int32 of shape (1,)): an empty file gives shape (0,).

    A sample's position, by which it is seeded, is (its place in the epoch) * num_shards + shard_id.

    State: number and hash of the files (paths and labels), the arguments, the policy; epoch, consumed (places of this epoch) and
    the batch size by which it began; constant size. It serves every shard. With `random_shuffle` also what the buffer holds:
    indices, up to `initial_fill` of them, up to 8 bytes each. With `max_skipped` also how many were skipped. Seeds are taken over
    from a state, all else is to be equal. Where another batch size is allowed, or a `SeededBatcher` put above a reader that was
    read from, batches of that size have what is left of the epoch, and the next one begins by it. Cost of a resume: O(1), with
    `random_shuffle` O(initial_fill), or from another shard's state, as of a jump to another epoch, 0.3 us for each file before it
    in the pass.

    Raises:
        ValueError: an argument is out of its range, or excludes another; no file is found, or fewer than shards.
        OSError: `file_root` or `file_list` cannot be read; or, when run, a file.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in range(3):
    ...         _ = pathlib.Path(folder, f"{number}.bin").write_bytes(bytes([number, 7]))
    ...     reader = FileReader(folder, ["0.bin", "1.bin", "2.bin"])
    ...     [(data.tolist(), label.item()) for data, label in reader]
    [([0, 7], 0), ([1, 7], 1), ([2, 7], 2)]
    """

    kind = "file_reader"
    MAIN_ONLY = (*Node.MAIN_ONLY, "_held", "_passes", "_batcher")

    def __init__(
        self,
        file_root: Files | None = None,
        files: Files | Sequence[Files] | None = None,
        labels: int | Sequence[int] | None = None,
        file_list: Files | None = None,
        *,
        file_filters: str | Sequence[str] = FILE_FILTERS,
        dir_filters: str | Sequence[str] | None = None,
        case_sensitive_filter: bool = False,
        random_shuffle: bool = False,
        initial_fill: int = 1024,
        shuffle_after_epoch: bool = False,
        shuffle_after_epoch_seed: int | None = None,
        shard_id: int = 0,
        num_shards: int = 1,
        stick_to_shard: bool = False,
        pad_last_batch: bool = False,
        seed: int | None = None,
        max_skipped: int = 0,
        name: str | None = None,
    ) -> None:
        if shuffle_after_epoch and (stick_to_shard or random_shuffle):
            raise ValueError(f"shuffle_after_epoch excludes {'stick_to_shard' if stick_to_shard else 'random_shuffle'}")
        self.initial_fill = as_integer("initial_fill", initial_fill, 1)
        num_shards = as_integer("num_shards", num_shards, 1)
        shard_id = as_integer("shard_id", shard_id, 0, num_shards - 1, f"num_shards - 1 = {num_shards - 1}")
        self.max_skipped = as_integer("max_skipped", max_skipped, 0)
        key = 0 if shuffle_after_epoch_seed is None else shuffle_after_epoch_seed
        self.shuffle_after_epoch_seed = as_integer("shuffle_after_epoch_seed", key, 0, 2**64 - 1, "2**64 - 1")
        given = None if seed is None else as_seed(seed)
        self.files = list_files(file_root, files, labels, file_list, file_filters, dir_filters, case_sensitive_filter)
        if num_shards > len(self.files.paths):
            raise ValueError(f"num_shards must be at most the number of files, {len(self.files.paths)}, got {num_shards}")
        super().__init__(name=name)
        self.random_shuffle, self.shuffle_after_epoch = bool(random_shuffle), bool(shuffle_after_epoch)
        self.seed = None if not random_shuffle else draw_seed() if given is None else given
        self.shards = Shards(len(self.files.paths), num_shards, shard_id, bool(stick_to_shard or shuffle_after_epoch))
        self.pad_last_batch = bool(pad_last_batch)
        self.last_batch_policy = LastBatchPolicy.FILL
        self._epoch, self._consumed = 0, 0
        self._began_by = 0  # the batch size by which the epoch that is under way began; 0 at its start
        self._held: Held | None = None
        self._batcher: weakref.ref[SeededBatcher[Any]] | None = None
        self._forget_order()

    def reader_meta(self) -> dict[str, int]:
        """What DALI's `Pipeline.reader_meta` tells of such a reader."""
        return self.shards.meta(self.pad_last_batch)

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        epoch, first, size = self._epoch, self._consumed, self._size()
        self._began_by = self._began_by if first else size
        plan = self.plan(self._began_by)
        taken = min(count, plan.left(epoch, first, size))
        if taken <= 0:
            self.next_epoch((epoch,))
            raise StopIteration
        indices, self._held = self._passes.read(self._held, plan.stretches(epoch, first, taken))
        kept = plan.kept(epoch, first, taken)
        self._consumed = first + taken
        _, step, shard, _ = self.shards
        positions = (first * step + shard, (first + kept) * step + shard, step)
        return (epoch, positions, np.array(indices[:kept], dtype=np.int64).tobytes())

    def _forget_order(self) -> None:
        """Begins anew with what depends on the seeds."""
        key = self.shuffle_after_epoch_seed if self.shuffle_after_epoch else None
        self._passes = FilePasses(self.shards, seed=self.seed, initial_fill=self.initial_fill, shuffle_seed=key)
        self._held = None

    def run(self, ticket: Ticket) -> list[Any]:
        epoch, positions, paths = self.samples(ticket)
        items: list[Any] = []
        for position, path, index in zip(positions, paths, _indices_of(ticket), strict=True):
            try:
                data = np.fromfile(os.path.join(self.files.root, path), dtype=np.uint8)
            except Exception as error:
                items.append(self._left_out(error, f"epoch {epoch}, position {position}, index {path!r}"))
                continue
            label = np.frombuffer(self.files.labels, dtype=np.int32, count=1, offset=4 * index).copy()
            items.append((torch.from_numpy(data), torch.from_numpy(label)))
        return items

    def _left_out(self, error: Exception, place: str) -> Any:
        """Notes that a file could not be read; raises the error itself where none may be skipped."""
        add_note(error, f"in node {self.name!r} at {place}")
        if not self.max_skipped or isinstance(error, MemoryError):  # which may be over the next time
            raise error
        note([Skip(self.name, place, error)])
        return LEFT_OUT

    def samples(self, ticket: Ticket) -> Samples:
        """Its indices are the files' paths, as they were given or found."""
        return Samples(ticket[0], list(positions_of(ticket)), [self.files.paths[index] for index in _indices_of(ticket)])

    def mark(self) -> Mark:
        if self._consumed == 0:
            return self.start(self._epoch)
        if self.random_shuffle:
            self._held = self._passes.held_at(self._held, *self.plan(self._began_by).pass_at(self._epoch, self._consumed))
        return (self._epoch, self._consumed, self._began_by, self._held)

    def seek(self, mark: Mark) -> None:
        self._epoch, self._consumed, self._began_by, self._held = mark

    def settings(self) -> dict[str, Scalar]:
        seed = {"shuffle_after_epoch_seed": self.shuffle_after_epoch_seed}
        found: dict[str, Scalar] = {
            "length": self.shards.files,
            "files": self.files.digest(),
            "num_shards": self.shards.num_shards,
            "stick_to_shard": self.shards.stick,
            "pad_last_batch": self.pad_last_batch,
            "random_shuffle": self.random_shuffle,
            "shuffle_after_epoch": self.shuffle_after_epoch,
        }
        if self.seed is not None:
            found |= {"initial_fill": self.initial_fill, "seed": self.seed}
        return found | (seed if self.shuffle_after_epoch else {})

    def values(self, mark: Mark) -> dict[str, Scalar]:
        epoch, consumed, began_by, held = mark
        plan = self.plan(began_by)
        begun: dict[str, Scalar] = {"batch_size": plan.batch_size, "last_batch_policy": plan.policy.name}
        found = begun | {"epoch": epoch, "consumed": consumed}
        if self.random_shuffle:
            found["buffer"] = f"{self.shards.shard_id}/{self._passes.held_at(held, *plan.pass_at(epoch, consumed))}"
        return found

    def rules(self) -> Mapping[str, Rule]:
        seeds = {"seed": adopted_seed, "shuffle_after_epoch_seed": adopted_seed}
        return {**seeds, "batch_size": counter, "epoch": counter, "consumed": counter, "buffer": text, "skipped": tally}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        epoch, consumed, began_by = entry["epoch"], entry["consumed"], entry["batch_size"]
        if began_by == 0:
            self._refuse("batch_size", began_by, "at least 1")
        held, own, (shard, _, shown) = None, str(self.shards.shard_id), entry.get("buffer", "").partition("/")
        # What another shard's buffer holds says nothing: this one's is found out under the state's seed.
        if self.random_shuffle and (shard == own or shard not in map(str, range(self.shards.num_shards))):
            held = self._passes.parsed(shown, *self.plan(began_by).pass_at(epoch, consumed))
            if held is None or shard != own:
                self._refuse("buffer", entry["buffer"][:40], "what the buffer holds at that position")
        return (epoch, consumed, began_by, held) if consumed else self.start(epoch)

    def _refuse(self, key: str, saved: object, expected: str) -> NoReturn:
        raise StateMismatchError(differences=(Difference(self.name, key, saved, expected, "the state is damaged"),))

    def adopt(self, entry: Mapping[str, Any]) -> None:
        self.seed = entry.get("seed", self.seed)
        self.shuffle_after_epoch_seed = entry.get("shuffle_after_epoch_seed", self.shuffle_after_epoch_seed)
        self._forget_order()

    def start(self, epoch: int) -> Mark:
        return (epoch, 0, 0, None)  # it will begin by the batch size of then; what a buffer holds is found out when needed

    def next_epoch(self, mark: Mark) -> None:
        self.seek(self.start(mark[0] + 1))

    def length(self) -> int | None:
        """Places in the epoch that is being consumed: batches by the batch size, where epochs differ."""
        try:
            epoch = self.consumed()[0]
        except LoaderFailedError:  # a load was cut short, and nothing is known until the next
            epoch = self._epoch
        return self.plan().places(epoch)

    def batches(self) -> int | None:
        self.no_batches()

    def plan(self, began_by: int = 0) -> BatchPlan:
        """The plan of an epoch that began by this batch size, 0 for that of what stands above now."""
        return BatchPlan(self.shards, self.pad_last_batch, began_by or self._size(), self.last_batch_policy)

    def _size(self) -> int:
        batcher = self.batcher()
        return 1 if batcher is None else batcher.batch_size or 1

    def batcher(self) -> SeededBatcher[Any] | None:
        """The one that asks this reader for a batch at a time; None if something stands between that asks otherwise."""
        found = None if self._batcher is None else self._batcher()
        if found is None:  # once there is one it stays as long as it lives, and so does what is between
            node: Node[Any] | None = self
            while node is not None and (node is self or node.asks_as_asked):
                node = None if node._parent is None else node._parent()
            found = node if isinstance(node, SeededBatcher) else None
            self._batcher = None if found is None else weakref.ref(found)
        return found


def _indices_of(ticket: Ticket) -> list[int]:
    """Of files, in the order in which they are listed."""
    return memoryview(ticket[2]).cast("q").tolist()

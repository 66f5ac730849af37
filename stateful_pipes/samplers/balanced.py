"""Batch samplers that balance groups of samples."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.integers import as_integer
from stateful_pipes.permutation import permute
from stateful_pipes.rng import derive, mix64_array
from stateful_pipes.samplers.batches import ResumableBatchSampler
from stateful_pipes.samplers.groups import Groups, as_labels, cycle_shares, fingerprint, group, labels_of, ratios_of

__all__ = ["BalancedBatchSampler", "ClassBalancedBatchSampler"]

_SEQUENCE, _WALK = 0, 1
_BLOCK = 2**16


class _GroupCycle:
    """A cycle as a list: which group is next, and each group's own walk over its samples.

    One list is kept, for whoever asks; it is made anew from its key when another was asked for meanwhile.
    """

    def __init__(self, groups: Groups, length: int, shuffle: bool, patches: _Patches | None = None) -> None:
        self.groups = groups
        self.length = length
        self.shuffle = shuffle
        self.patches = patches
        self._made: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, key: int, number: int, offsets: range) -> npt.NDArray[np.int64]:
        if self._made is None or self._made[0] != key:
            self._made = None  # so that there are never two
            self._made = (key, self._list(key))
            if self.patches is not None:
                self.patches.count(self._made[1])
        taken = self._made[1][offsets.start : offsets.stop : offsets.step].copy()
        if offsets[-1] == self.length - 1:  # the cycle is through
            self._made = None
        return taken

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def sequence(self, key: int) -> npt.NDArray[np.int64]:
        """The number of the group of each sample of the cycle."""
        raise NotImplementedError

    def _list(self, key: int) -> npt.NDArray[np.int64]:
        sequence = self.sequence(key)
        count = len(self.groups.keys)
        places = np.argsort(sequence.astype(np.uint16) if count <= 2**16 else sequence, kind="stable")
        stops = np.cumsum(np.bincount(sequence, minlength=count)).tolist()
        out = np.empty(self.length, dtype=np.int64)
        start = 0
        for number, stop in enumerate(stops):
            out[places[start:stop]] = self._walk(key, number, stop - start)
            start = stop
        return out

    def _walk(self, key: int, number: int, count: int) -> npt.NDArray[np.int64]:
        """So many samples of a group: all of them, in another permutation each time it comes round."""
        members = self.groups.members[self.groups.starts[number] : self.groups.starts[number + 1]]
        size, passes = len(members), -(-count // len(members))
        if not self.shuffle or size == 1:
            return np.resize(members, count)
        if size >= _BLOCK:
            everything = np.arange(size, dtype=np.int64)
            orders = [permute(derive(key, _WALK, number, one), size, everything) for one in range(passes)]
            return members[np.concatenate(orders)[:count]]
        # Many short permutations at once: each sorts its items by a hash.
        rows = _BLOCK // size
        walks = []
        for first in range(0, passes, rows):
            marks = np.arange(first * size, min(first + rows, passes) * size, dtype=np.uint64)
            hashes = mix64_array(mix64_array(marks) ^ np.uint64(derive(key, _WALK, number)))
            walks.append(members[np.argsort(hashes.reshape(-1, size), axis=1, kind="stable").ravel()])
        return np.concatenate(walks)[:count]


class _Drawn(_GroupCycle):
    """Groups in a random order, or with `shuffle=False` spread evenly, each as often as its share says."""

    def __init__(self, groups: Groups, shares: list[int], shuffle: bool) -> None:
        super().__init__(groups, sum(shares), shuffle)
        self.shares = np.array(shares, dtype=np.int64)

    def sequence(self, key: int) -> npt.NDArray[np.int64]:
        groups = np.repeat(np.arange(len(self.shares)), self.shares)
        if self.shuffle:
            return groups[permute(derive(key, _SEQUENCE), self.length, np.arange(self.length, dtype=np.int64))]
        within = np.arange(self.length) - np.repeat(np.cumsum(self.shares) - self.shares, self.shares)
        return groups[np.argsort((within + 0.5) / np.repeat(self.shares, self.shares), kind="stable")]


class _InTurn(_GroupCycle):
    """One group after another: any run of samples holds all of them equally often, but for one sample."""

    def sequence(self, key: int) -> npt.NDArray[np.int64]:
        turn = np.arange(len(self.groups.keys), dtype=np.int64)
        return np.resize(permute(derive(key, _SEQUENCE), len(turn), turn) if self.shuffle else turn, self.length)


class _Patches:
    """Sets `dataset.n_patch` to the number of patches in a cycle's samples."""

    def __init__(self, dataset: Any) -> None:
        counts = getattr(dataset, "patch_counts", None)
        if counts is None:
            raise TypeError(f"calculate_patch_number=True needs {type(dataset).__name__}.patch_counts, one for each sample")
        self.dataset = dataset
        self.counts = as_labels("patch_counts", counts, len(dataset))

    def count(self, indices: npt.NDArray[np.int64]) -> None:
        self.dataset.n_patch = int(self.counts[indices].sum())


class ClassBalancedBatchSampler(ResumableBatchSampler):
    """Batches in which classes, and domains within them, are drawn in given ratios; rare ones repeat within a cycle.

    A cycle is the shortest in which each group's exact part is no less than its size, so it walks every group at least
    once. A group's share of it is its exact part, rounded by the largest remainder: down, then one more for those that
    lost most by that (the first ones, where equal). With `drop_last` the cycle is as much longer as it takes to end with a
    full batch; without, its last batch is smaller. Which group is next is drawn without replacement from the shares, and
    each group walks permutations of its own: no sample comes back within a cycle before its group is through.

    Args:
        dataset: A sized dataset, or its length.
        batch_size: At least 1.
        labels: The class of each sample, integers or strings of shape (len(dataset),); `dataset.targets` or
            `dataset.labels` by default.
        domains: The domain of each sample, likewise; none by default.
        class_ratio: For each class a number above 0; equal by default.
        domain_ratio: For each domain a number above 0, by which a class's part is divided among those that it has; equal
            by default.
        repeat: Cycle after cycle in one endless epoch; else each epoch is one cycle.
        shuffle: Draw; else groups are spread evenly over the cycle, and each is walked in the dataset's order.
        drop_last: Have no batch that is smaller.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: see `ResumableBatchSampler`; ratios and labels by a hash. Memory: 8 bytes a sample of the dataset, and while a
    cycle is under way 8 bytes a sample of that, four times as much while it is made, as by a resume: with equal ratios
    the largest class's size times the number of classes.

    Raises:
        ResumableBatchConfigurationError: no valid batch is possible.

    >>> sampler = ClassBalancedBatchSampler(range(5), 4, labels=[0, 0, 0, 0, 1], seed=0)
    >>> len(sampler), sorted(index for batch, _ in zip(sampler, range(2)) for index in batch)
    (2, [0, 1, 2, 3, 4, 4, 4, 4])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        labels: Any = None,
        domains: Any = None,
        class_ratio: Mapping[Any, float] | None = None,
        domain_ratio: Mapping[Any, float] | None = None,
        repeat: bool = True,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        batch_size = as_integer("batch_size", batch_size, 1)
        groups = _grouped(dataset, labels, domains)
        ratios = ratios_of(groups, class_ratio, domain_ratio)
        samples, shares = cycle_shares(groups.sizes.tolist(), ratios, batch_size if drop_last else 1)
        super().__init__(
            _Drawn(groups, shares, shuffle),
            samples,
            batch_size,
            repeat=repeat,
            shuffle=shuffle,
            drop_last=drop_last,
            arguments={"labels": groups.fingerprint, "ratios": fingerprint(ratios)},
            seed=seed,
            generator=generator,
            resumable=resumable,
        )


class BalancedBatchSampler(ResumableBatchSampler):
    """Batches that each hold as equal a share of every group as the batch size allows, the remainder rotating.

    Groups are taken in turn, in another order each cycle, and each walks permutations of its own. A cycle is the
    shortest in which each group's equal part is no less than its size, so it walks every group at least once; shares
    differ by at most one sample. With `drop_last` the cycle is as much longer as it takes to end with a full batch;
    without, its last batch is smaller.

    Args:
        dataset: A sized dataset, or its length.
        batch_size: At least 1. If it is below the number of groups, they take turns over the batches.
        labels: The class of each sample, integers or strings of shape (len(dataset),); `dataset.targets` or
            `dataset.labels` by default.
        domains: The domain of each sample, likewise: a group is then a class within a domain. None by default.
        calculate_patch_number: Set `dataset.n_patch` to the number of patches in a cycle's samples, the sum of their
            `dataset.patch_counts`, when the main process first makes that cycle's list. That is ahead of consumption, by the
            prefetch bound at most. It is not in the state: after a resume it is that of the cycle resumed in.
        repeat: Cycle after cycle in one endless epoch; else each epoch is one cycle.
        shuffle: Draw; else groups keep their order, and each is walked in the dataset's.
        drop_last: Have no batch that is smaller.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: see `ResumableBatchSampler`; labels by a hash. Memory: as `ClassBalancedBatchSampler`.

    Raises:
        ResumableBatchConfigurationError: no valid batch is possible.

    >>> sampler = BalancedBatchSampler(range(5), 4, labels=[0, 0, 0, 1, 1], seed=0)
    >>> [sum(index > 2 for index in batch) for batch, _ in zip(sampler, range(3))]
    [2, 2, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        labels: Any = None,
        domains: Any = None,
        calculate_patch_number: bool = False,
        repeat: bool = True,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        batch_size = as_integer("batch_size", batch_size, 1)
        groups = _grouped(dataset, labels, domains)
        patches = _Patches(dataset) if calculate_patch_number else None
        sizes = groups.sizes.tolist()
        samples, _ = cycle_shares(sizes, [Fraction(1, len(sizes))] * len(sizes), batch_size if drop_last else 1)
        super().__init__(
            _InTurn(groups, samples, shuffle, patches),
            samples,
            batch_size,
            repeat=repeat,
            shuffle=shuffle,
            drop_last=drop_last,
            arguments={"labels": groups.fingerprint},
            seed=seed,
            generator=generator,
            resumable=resumable,
        )


def _grouped(dataset: Any, labels: Any, domains: Any) -> Groups:
    of_class = labels_of(dataset, labels)
    return group(of_class, None if domains is None else as_labels("domains", domains, len(of_class)))

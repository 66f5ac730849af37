"""Labels as groups of indices, and how many samples of each group a cycle takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.integers import as_fraction
from stateful_pipes.samplers.order import length_of

__all__ = ["Groups", "as_labels", "cycle_shares", "fingerprint", "group", "labels_of", "ratios_of"]

_BLOCK = 2**20
_MAX_CYCLE = 2**34
"""Samples of which a list, of 128 GiB, can still be thought of."""


class Groups(NamedTuple):
    """The samples of each group.

    Attributes:
        keys: What the samples of a group have in common: (class,), or (class, domain); in ascending order.
        members: int64, the dataset indices, group after group and ascending within each.
        starts: int64 of shape (groups + 1,): where each group's members begin.
        fingerprint: A hash of all labels, as 16 hexadecimal digits.
    """

    keys: list[tuple[Any, ...]]
    members: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    fingerprint: str

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples in each group."""
        return np.diff(self.starts)


def labels_of(dataset: Any, labels: object) -> npt.NDArray[Any]:
    """The labels that were given, else the dataset's own, as an array.

    Raises:
        TypeError: there are none, or they are neither integers nor strings.
        ValueError: they are not one for each sample.
    """
    length = length_of(dataset)
    found = labels
    for name in ("targets", "labels"):
        if found is None:
            found = getattr(dataset, name, None)
    if found is None:
        raise TypeError(f"{type(dataset).__name__} has neither targets nor labels: pass labels=, one for each sample")
    return as_labels("labels", found, length)


def as_labels(name: str, labels: object, length: int) -> npt.NDArray[Any]:
    """One label for each sample, as an array of integers or strings."""
    array = labels.numpy(force=True) if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if array.shape != (length,):
        raise ValueError(f"{name} must be one for each of {length} samples, got an array of shape {array.shape}")
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array):
        array = array.astype(str)
    if array.dtype.kind not in "iubU":
        raise TypeError(f"{name} must be integers or strings, got {array.dtype}")
    return array


def group(labels: npt.NDArray[Any], domains: npt.NDArray[Any] | None = None) -> Groups:
    """Groups indices by label, and by domain within it.

    Cost: one stable sort; besides the result, about as much memory again.
    """
    digest = hashlib.sha256()
    if domains is None:
        _hash(digest, labels)
        keys, members, starts = _sorted(labels)
        return Groups([(key,) for key in keys], members, starts, digest.hexdigest()[:16])
    codes = []
    names = []
    for one in (labels, domains):
        _hash(digest, one)
        found, code = np.unique(one, return_inverse=True)
        names.append(found.tolist())
        codes.append(code)
    pairs, members, starts = _sorted(codes[0] * len(names[1]) + codes[1])
    both = [(names[0][pair // len(names[1])], names[1][pair % len(names[1])]) for pair in pairs]
    return Groups(both, members, starts, digest.hexdigest()[:16])


def _sorted(labels: npt.NDArray[Any]) -> tuple[list[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct labels, the indices sorted by label, and where each label's begin."""
    if labels.dtype.kind == "U":
        found, labels = np.unique(labels, return_inverse=True)
        named = found.tolist()
    else:
        named = None
        labels = labels.view(np.uint8) if labels.dtype.kind == "b" else labels
    least, most = int(labels.min()), int(labels.max())
    if most - least < 2**16:  # few enough for a radix sort, which takes a tenth of the time
        narrow = np.empty(len(labels), dtype=np.uint16)
        wide = np.uint64 if labels.dtype.kind == "u" else np.int64  # what a narrower type holds may be further apart
        np.subtract(labels, wide(least), out=narrow, dtype=wide, casting="unsafe")
        counts = np.bincount(narrow, minlength=most - least + 1)
        present = np.flatnonzero(counts)
        members = np.argsort(narrow, kind="stable")
        keys, sizes = [least + one for one in present.tolist()], counts[present]
    else:
        members = np.argsort(labels, kind="stable")
        ordered = labels[members]
        firsts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        keys, sizes = ordered[firsts].tolist(), np.diff(np.append(firsts, len(labels)))
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return keys if named is None else [named[key] for key in keys], members, starts


def _hash(digest: Any, labels: npt.NDArray[Any]) -> None:
    """The same for equal labels, whatever integer type they have."""
    kind = labels.dtype.kind
    is_beyond = kind == "u" and len(labels) > 0 and int(labels.max()) >= 2**63
    digest.update(f"{'U' if kind == 'U' else 'u' if is_beyond else 'i'}{len(labels)}:".encode())
    if kind == "U":
        for start in range(0, len(labels), _BLOCK):
            for label in labels[start : start + _BLOCK].tolist():
                digest.update(label.encode("utf-8", "surrogatepass") + b"\0")
        return
    for start in range(0, len(labels), _BLOCK):
        digest.update(labels[start : start + _BLOCK].astype("<i8").tobytes())


def ratios_of(
    groups: Groups, class_ratio: Mapping[Any, float] | None, domain_ratio: Mapping[Any, float] | None
) -> list[Fraction]:
    """Each group's part of a cycle; together they make 1.

    A class has its part of `class_ratio`, which its domains share in the proportions of `domain_ratio`. A number counts
    as what it is written as: 0.1 is a tenth.
    """
    if class_ratio is None and len(groups.keys[0]) == 1 and domain_ratio is None:
        return [Fraction(1, len(groups.keys))] * len(groups.keys)
    of_class = _parts("class_ratio", class_ratio, dict.fromkeys(key[0] for key in groups.keys))
    domains = dict.fromkeys(key[1] for key in groups.keys if len(key) > 1)
    if domain_ratio is not None and not domains:
        raise ValueError("domain_ratio is given without domains")
    of_domain = _parts("domain_ratio", domain_ratio, domains)
    within: dict[Any, Fraction] = {}
    for key in groups.keys:
        within[key[0]] = within.get(key[0], Fraction(0)) + (of_domain[key[1]] if len(key) > 1 else 1)
    total = sum(of_class.values())
    return [of_class[key[0]] / total * (of_domain[key[1]] if len(key) > 1 else 1) / within[key[0]] for key in groups.keys]


def fingerprint(ratios: Sequence[Fraction]) -> str:
    """A hash of them."""
    return hashlib.sha256(",".join(map(str, ratios)).encode()).hexdigest()[:16]


def _parts(name: str, ratio: Mapping[Any, float] | None, there: Iterable[Any]) -> dict[Any, Fraction]:
    there = dict.fromkeys(there)
    if ratio is None:
        return dict.fromkeys(there, Fraction(1))
    unlike = [key for key in there if key not in ratio] + [key for key in ratio if key not in there]
    if unlike:
        where = "is missing from it" if unlike[0] in there else "has no sample"
        raise ValueError(f"{name} must have a number for each of {len(there)}: {unlike[0]!r} {where}")
    parts = {key: as_fraction(f"{name}[{key!r}]", ratio[key]) for key in there}
    wrong = [key for key in there if not parts[key] > 0]
    if wrong:
        raise ValueError(f"{name} must be above 0, got {ratio[wrong[0]]!r} for {wrong[0]!r}")
    return parts


def cycle_shares(sizes: Sequence[int], ratios: Sequence[Fraction], multiple: int = 1) -> tuple[int, list[int]]:
    """The samples of the shortest cycle in which each group's exact part is no less than its size; and each group's share.

    Shares are rounded by the largest remainder: each part down, then one more for those that lost most, the first ones
    where they lost alike. So a share differs from the exact part by less than one sample.

    Args:
        sizes: Of the groups.
        ratios: Their parts, which make 1 together.
        multiple: What the length of the cycle has to be a multiple of.
    """
    are_equal = all(ratio is ratios[0] for ratio in ratios)  # where there are very many, fractions take long
    pairs = [(max(sizes), ratios[0])] if are_equal else zip(sizes, ratios, strict=True)
    length = max(-(-size // ratio) for size, ratio in pairs)
    length = -(-length // multiple) * multiple
    if length > _MAX_CYCLE:
        raise ResumableBatchConfigurationError(f"a cycle in these ratios has {length} samples", remedy="Use less uneven ratios")
    if are_equal:
        each, more = divmod(length, len(sizes))
        return length, [each + 1] * more + [each] * (len(sizes) - more)
    exact = [ratio * length for ratio in ratios]
    shares = [part.__floor__() for part in exact]
    lost_most = sorted(range(len(exact)), key=lambda one: shares[one] - exact[one])
    for one in lost_most[: length - sum(shares)]:
        shares[one] += 1
    return length, shares

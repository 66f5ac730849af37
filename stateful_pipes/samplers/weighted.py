"""Draws in proportion to weights.

With replacement by the alias method (Walker: "An efficient method for generating discrete random variables with general
distributions", ACM TOMS 3, 1977; Vose, IEEE TSE 17, 1991), its table filled in one sweep over light and heavy items
(Hübschle-Schneider, Sanders: "Parallel weighted random sampling", ESA 2019, section 4.1) by sums in place of a loop.
Without, by a sort of exponential keys (Efraimidis, Spirakis: "Weighted random sampling with a reservoir", IPL 97, 2006).

The draws are frozen, since every stream ever saved depends on them: the table is made of integers alone, the keys of
operations that IEEE 754 rounds correctly everywhere, never of a sum or a logarithm that a library may round otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.fields import Scalar
from stateful_pipes.integers import as_integer
from stateful_pipes.permutation import MAX_LENGTH
from stateful_pipes.rng import ORDER, derive, mix64_array
from stateful_pipes.samplers.base import ResumableSampler
from stateful_pipes.samplers.order import as_array

__all__ = ["WeightedRandomSampler"]

_BLOCK = 2**16
_LN2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476


class _WeightedOrder:
    def __init__(self, weights: npt.NDArray[np.float64], length: int, replacement: bool) -> None:
        self.items = len(weights)
        self.length = length
        self.replacement = replacement
        self.candidates = np.flatnonzero(weights)
        digest = hashlib.sha256()
        for start in range(0, len(weights), _BLOCK):
            digest.update(weights[start : start + _BLOCK].astype("<f8").tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self.length

    def arguments(self) -> dict[str, Scalar]:
        return {"items": self.items, "replacement": self.replacement, "weights": self.fingerprint}


class _WithReplacement(_WeightedOrder):
    """Each position's hash chooses a column of the alias table, a second hash one of the column's two items."""

    def __init__(self, weights: npt.NDArray[np.float64], length: int) -> None:
        super().__init__(weights, length, replacement=True)
        self.thresholds, self.aliases = _alias_table(_in_integers(weights[self.candidates]))

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        where = as_array(positions)
        hashes = _hashes(derive(seed, ORDER, epoch), where)
        columns = (hashes % np.uint64(len(self.candidates))).astype(np.int64)
        return self.candidates[np.where(mix64_array(hashes) < self.thresholds[columns], columns, self.aliases[columns])]


class _WithoutReplacement(_WeightedOrder):
    """Items by ascending keys, each exponentially distributed with its weight as the rate. One epoch's list is kept."""

    def __init__(self, weights: npt.NDArray[np.float64], length: int) -> None:
        super().__init__(weights, length, replacement=False)
        # By a power of two, so exactly, to where no key is infinite or loses digits; a weight so far below the largest
        # that this cannot be counts as 2**-1900 of it.
        scaled = np.ldexp(weights[self.candidates], 900 - _exponent(weights))
        self.rates = np.maximum(scaled, 2.0**-1000)
        self._made: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, seed: int, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        key = derive(seed, ORDER, epoch)
        made = self._made
        if made is None or made[0] != key:
            made = self._made = None  # so that there are never two
            made = self._made = (key, self._list(key))
        return made[1][as_array(positions)]

    def _list(self, key: int) -> npt.NDArray[np.int64]:
        keys = np.empty(len(self.rates))
        for start in range(0, len(keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            # Odd multiples of 2**-53: never 0 or 1.
            uniform = ((_hashes(key, self.candidates[block]) >> np.uint64(11)) | np.uint64(1)).astype(np.float64) * 2.0**-53
            np.divide(_minus_log(uniform), self.rates[block], out=keys[block])
        return self.candidates[np.argsort(keys, kind="stable")[: self.length]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}


class WeightedRandomSampler(ResumableSampler):
    """Indices drawn in proportion to weights, anew each epoch, with or without replacement.

    With replacement a draw is a pure function of its position. Without, each draw is in proportion to the weights of the items
    that are left, as `torch.multinomial` has it: an epoch holds no index twice. A weight of 0 is never drawn. In contrast
    to torch's there may be any number of items, and the same weights give the same indices on every machine.

    Args:
        weights: A number for each item, shape (items,), finite and not negative, at least one above 0: a sequence, an
            array or a tensor. They are taken as float64 and need not sum to 1.
        num_samples: Draws in an epoch, from 1 to 2**62; without replacement at most as many as there are weights above 0.
            By default as many as there are weights.
        replacement: Whether an index may come again within an epoch.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out.
        generator: A `torch.Generator` from which that one seed is drawn instead.
        resumable: Whether it has a position; without one, each `iter()` starts anew.

    State: length (num_samples), items, replacement, weights (a hash), seed, epoch, consumed.

    Cost: with replacement O(items) once, 24 bytes an item, and then O(1) a draw and for a resume; chances are exact to
    within items * 2**-59, and one below 2**-60 may be none. Without, an epoch's list is made when it is first asked for, in
    O(items log items), also after a resume; the latest is kept, 8 bytes a draw, besides 16 bytes an item.

    Raises:
        ValueError: a weight is negative or not finite, they are not in one dimension, or there are too few of them for
            `num_samples` draws without replacement.
        TypeError: weights are no numbers.
        ResumableBatchConfigurationError: no weight is above 0.

    >>> list(WeightedRandomSampler([1, 0, 2, 5], 10, seed=0))
    [3, 2, 2, 2, 0, 2, 3, 3, 3, 3]
    >>> list(WeightedRandomSampler([1, 0, 2, 5], 3, replacement=False, seed=0))
    [3, 0, 2]
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        resumable: bool = True,
    ) -> None:
        found = _checked(weights)
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement must be a bool, got {replacement!r}")
        length = as_integer("num_samples", len(found) if num_samples is None else num_samples, 1, MAX_LENGTH, "2**62")
        above = int(np.count_nonzero(found))
        if not replacement and length > above:
            raise ValueError(f"num_samples must be at most the {above} weights above 0 without replacement, got {length}")
        order = (_WithReplacement if replacement else _WithoutReplacement)(found, length)
        super().__init__(order, seed=seed, generator=generator, resumable=resumable)


def _checked(weights: Any) -> npt.NDArray[np.float64]:
    """The weights as an array of their own."""
    if isinstance(weights, torch.Tensor) and not weights.is_complex():
        weights = weights.to(torch.float64).numpy(force=True)  # NumPy has no bfloat16
    array = np.asarray(weights)
    if array.size and array.dtype.kind not in "biuf":
        raise TypeError(f"weights must be numbers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"weights must be of shape (items,), got {array.shape}")
    found = array.astype(np.float64) + 0.0  # -0.0 is 0.0
    wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if wrong.size:
        raise ValueError(f"weights must be finite and not negative, got {found[wrong[0]]} at index {wrong[0]}")
    if not found.any():
        raise ResumableBatchConfigurationError(
            "there is nothing to sample from", expected="at least one weight above 0", found=f"none of {len(found)}"
        )
    return found


def _hashes(key: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return mix64_array(positions.astype(np.uint64) ^ np.uint64(key))


def _exponent(weights: npt.NDArray[np.float64]) -> int:
    """The least power of two that is above all weights."""
    return int(np.frexp(weights.max())[1])


def _in_integers(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The weights times a power of two, rounded down; their sum is from 2**60 to 2**62, and a multiple of their number.

    To make it one, fewer units than there are items are spread evenly over those that have any, the first ones first.
    """
    items = len(weights)
    shift = 62 - items.bit_length() - _exponent(weights)  # no sum can reach 2**62
    rough = int(np.ldexp(weights, shift).astype(np.int64).sum()) + items
    whole = np.ldexp(weights, shift + 62 - rough.bit_length()).astype(np.int64)
    some = np.flatnonzero(whole)
    each, more = divmod(-int(whole.sum()) % items, len(some))
    whole[some] += each
    whole[some[:more]] += 1
    return whole


def _alias_table(whole: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Thresholds, as parts of 2**64, and aliases: column i is item i's below its threshold, else its alias's.

    Light items, those below a column's capacity, are filled up in ascending order from the first heavy one that has more
    than a column left. That keeps what the last of them leaves it, and is itself filled up from the next heavy one.
    """
    capacity = int(whole.sum()) // len(whole)
    light, heavy = np.flatnonzero(whole < capacity), np.flatnonzero(whole > capacity)
    aliases = np.arange(len(whole))
    if light.size:
        lacking = capacity - whole[light]
        filled = np.cumsum(lacking)
        excess = np.cumsum(whole[heavy] - capacity)
        aliases[light] = heavy[np.searchsorted(excess, filled - lacking, side="right")]
        aliases[heavy[:-1]] = heavy[1:]
        whole[heavy] = capacity - (filled[np.searchsorted(filled, excess)] - excess)
        full = heavy[whole[heavy] == capacity]
        aliases[full] = full  # a part of all 2**64 does not fit
    return _parts_of_2_64(whole.astype(np.uint64), capacity), aliases


def _parts_of_2_64(parts: npt.NDArray[np.uint64], whole: int) -> npt.NDArray[np.uint64]:
    """2**64 * parts / whole, rounded down: long division, as many bits at a time as fit. Anything where a part is all."""
    out = np.zeros(len(parts), dtype=np.uint64)
    bits = 0
    while bits < 64:
        step = min(64 - whole.bit_length(), 64 - bits)
        digits, parts = np.divmod(parts << np.uint64(step), np.uint64(whole))
        out = (out << np.uint64(step)) | digits
        bits += step
    return out


def _minus_log(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-log(x) for 0 < x < 1, to about two units in the last place, and the same bits everywhere.

    x = m * 2**e with m from sqrt(1/2) to sqrt(2), and log(m) = 2 * atanh(f) for f = (m - 1) / (m + 1), of which the
    series up to f**23 is enough. Each operation is a call of its own, so none can be fused with the next.
    """
    m, e = np.frexp(x)
    small = m < _ROOT_HALF
    m[small] *= 2
    e[small] -= 1
    f = np.divide(np.subtract(m, 1.0), np.add(m, 1.0))
    square = np.multiply(f, f)
    series = np.full_like(square, 1 / 23)
    for odd in range(21, 0, -2):
        np.multiply(series, square, out=series)
        np.add(series, 1 / odd, out=series)
    np.multiply(series, f, out=series)
    np.multiply(series, 2.0, out=series)
    return np.negative(np.add(np.multiply(e.astype(np.float64), _LN2), series))

"""Shuffles in O(1) memory: position -> index, a bijection of 0 .. length - 1 chosen by a 64-bit key.

From 1,024 items on, an index cipher: a Feistel network over mixed radix a x b, with a x b just above the length, walked
until it falls inside (Black and Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002, method 3: cycle walking).
Below that a network is visibly not uniform, so the few items are shuffled by NumPy's legacy RandomState, whose stream
is frozen (NEP 19). Both are pinned by tests/golden.
"""

from __future__ import annotations

import functools
import threading
from math import isqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from stateful_pipes.rng import derive, mix64_array

__all__ = ["MAX_LENGTH", "permute"]

MAX_LENGTH: Final = 2**62
_SMALL: Final = 1024
_ROUNDS: Final = 6
# Blocks that stay in the second-level cache: a round makes a dozen passes over them.
_BLOCK: Final = 16384


def permute(key: int, length: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices that stand at `positions` of the permutation of `length` items that `key` names.

    Args:
        key: 64 bits; another key gives an unrelated permutation.
        length: From 1 to 2**62.
        positions: int64 of shape (n,), each from 0 to length - 1.

    Returns:
        int64 of shape (n,).

    Cost: O(n) time and memory whatever the length, about 50 ns a position; below 1,024 items O(length) once per key.
    """
    if length < _SMALL:
        return _shuffled(key, length)[positions]
    a = isqrt(length - 1) + 1
    b = -(-length // a)
    keys = tuple(np.uint64(derive(key, number)) for number in range(_ROUNDS))
    out = np.empty(len(positions), dtype=np.int64)
    for start in range(0, len(positions), _BLOCK):
        block = _feistel(keys, a, b, positions[start : start + _BLOCK].astype(np.uint64))
        outside = np.flatnonzero(block >= length)
        while outside.size:
            block[outside] = _feistel(keys, a, b, block[outside])
            outside = outside[block[outside] >= length]
        out[start : start + _BLOCK] = block
    return out


@functools.lru_cache(maxsize=8)
def _shuffled(key: int, length: int) -> npt.NDArray[np.int64]:
    # One generator a thread, seeded again: making one costs thirty times as much.
    _local.generator.seed([key >> 32, key & 0xFFFFFFFF])
    shuffled: npt.NDArray[np.int64] = _local.generator.permutation(length).astype(np.int64)
    return shuffled


class _Local(threading.local):
    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)


_local = _Local()


def _feistel(keys: tuple[np.uint64, ...], a: int, b: int, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One pass of the network over 0 .. a*b - 1: each round adds a keyed hash of one half to the other, modulo its radix."""
    left = x // np.uint64(b)  # by a constant NumPy multiplies; its divmod divides
    right = x - left * np.uint64(b)
    for number, key in enumerate(keys):
        if number % 2:
            right = _add_hash(right, left, key, np.uint64(b))
        else:
            left = _add_hash(left, right, key, np.uint64(a))
    left *= np.uint64(b)
    left += right
    return left


def _add_hash(
    half: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], key: np.uint64, radix: np.uint64
) -> npt.NDArray[np.uint64]:
    value = mix64_array(other ^ key)
    value >>= np.uint64(32)
    value *= radix  # 32 x 32 bits: the high half of the product is uniform on 0 .. radix - 1
    value >>= np.uint64(32)
    value += half
    # Unsigned, so value - radix wraps to something huge exactly where value is already inside.
    wrapped: npt.NDArray[np.uint64] = np.minimum(value, value - radix)
    return wrapped

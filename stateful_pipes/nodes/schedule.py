"""Weights that may change at given positions, and the choices that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stateful_pipes.integers import as_fraction, as_integer
from stateful_pipes.rng import derive_each

__all__ = ["Schedule"]

_CHUNK = 256


class _Ahead(NamedTuple):
    """Choices made ahead: under which key, with which sources left out, from which position on."""

    key: int
    left: str
    first: int
    choices: list[int]


class Schedule:
    """From which of several sources the item of a position is drawn.

    Args:
        names: Of the sources.
        weights: For each a number that is not negative, in a sequence or by name; or a mapping of positions, from 0 on, to
            such weights. A number counts as what it is written as: 0.1 is a tenth.
    """

    def __init__(self, names: Sequence[Any], weights: Any) -> None:
        self._names = names
        is_schedule = isinstance(weights, Mapping) and weights and not any(isinstance(key, str) for key in weights)
        stages = weights if is_schedule else {0: weights}
        starts = [as_integer("a position of weights", start, 0, 2**63 - 1, "2**63 - 1") for start in stages]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"the positions of weights must ascend from 0, got {starts}")
        self._starts = np.array(starts, dtype=np.int64)
        self._stages = [self._shares(stage) for stage in stages.values()]
        self._ahead = _Ahead(-1, "", 0, [])

    def __str__(self) -> str:
        """The shares, such as "0:1/3,2/3;1000:1/2,1/2": equal if and only if the choices are."""
        stages = (",".join(map(str, stage)) for stage in self._stages)
        return ";".join(f"{start}:{stage}" for start, stage in zip(self._starts.tolist(), stages, strict=True))

    def has_zeros(self, at_last: bool = False) -> bool:
        """Whether a weight is 0, anywhere or in the last stage."""
        return any(0 in stage for stage in self._stages[-1 if at_last else 0 :])

    def choices(self, key: int, first: int, count: int, left: str) -> list[int]:
        """The number of a source for each of so many positions from the first on; made in blocks, ahead.

        Args:
            key: 64 bits.
            first: The first position.
            count: How many.
            left: For each source "0" if it can be drawn; one that can has a weight above 0 at all these positions.
        """
        offset = first - self._ahead.first
        if (key, left) != self._ahead[:2] or not 0 <= offset <= len(self._ahead.choices) - count:
            made = self._make(key, range(first, first + max(count, _CHUNK)), left)
            self._ahead, offset = _Ahead(key, left, first, made), 0
        return self._ahead.choices[offset : offset + count]

    def _make(self, key: int, positions: range, left: str) -> list[int]:
        drawn = np.array(derive_each(key, positions), dtype=np.uint64)
        at = np.arange(positions.start, positions.stop, dtype=np.int64)
        stage_of = np.searchsorted(self._starts, at, side="right") - 1
        out = np.empty(len(positions), dtype=np.int64)
        for stage in np.unique(stage_of).tolist():
            numbers, ends = self._parts(stage, left)
            chosen = stage_of == stage
            out[chosen] = numbers[np.searchsorted(ends, drawn[chosen], side="right")]
        made: list[int] = out.tolist()
        return made

    def _parts(self, stage: int, left: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The sources that can be drawn, and where in 64 bits the part of each but the last one ends."""
        shares = self._stages[stage]
        numbers = [number for number, share in enumerate(shares) if share and left[number] == "0"]
        total = sum(shares[number] for number in numbers)
        ends, end = [], Fraction(0)
        for number in numbers[:-1]:
            end += shares[number] / total
            ends.append(int(end * 2**64))
        return np.array(numbers, dtype=np.int64), np.array(ends, dtype=np.uint64)

    def _shares(self, weights: Any) -> list[Fraction]:
        if isinstance(weights, Mapping):
            if set(weights) != set(self._names):
                raise ValueError(f"weights must name the sources {self._names}, got {list(weights)}")
            weights = [weights[name] for name in self._names]
        try:
            weights = list(weights)
        except TypeError as error:
            raise TypeError(f"weights must be a sequence or a mapping, got {weights!r}") from error
        if len(weights) != len(self._names):
            raise ValueError(f"weights must be one for each of {len(self._names)} sources, got {weights}")
        numbers = [as_fraction("a weight", weight) for weight in weights]
        if min(numbers) < 0 or max(numbers) == 0:
            raise ValueError(f"weights must not be negative, and not all 0, got {weights}")
        total = sum(numbers)
        return [number / total for number in numbers]

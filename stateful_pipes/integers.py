"""Numbers as arguments: integers of any type but bool, within bounds; and fractions of what was written."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from numbers import Real
from typing import Any, cast

__all__ = ["as_fraction", "as_integer"]


def as_integer(name: str, value: object, least: int, most: int | None = None, most_shown: str = "") -> int:
    """The value as an `int`.

    Args:
        name: Of the argument, for the error.
        value: What the caller gave.
        least: The smallest that is right.
        most: The largest that is right, if there is one.
        most_shown: How the error writes that.

    Raises:
        TypeError: not an integer.
        ValueError: out of bounds.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    integer = operator.index(cast(Any, value))
    if most is None and integer < least:
        raise ValueError(f"{name} must be at least {least}, got {integer}")
    if most is not None and not least <= integer <= most:
        raise ValueError(f"{name} must be from {least} to {most_shown or most}, got {integer}")
    return integer


def as_fraction(name: str, value: object) -> Fraction:
    """The number as it is written: 0.1 is a tenth.

    Raises:
        TypeError: not a real number.
        ValueError: not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return Fraction(str(value))

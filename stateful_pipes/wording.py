"""Counts, values and lists in the words of a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["counted", "listed", "short_repr", "shortened"]

T = TypeVar("T")


def counted(number: int, noun: str) -> str:
    """1 batch, 2 batches.

    >>> counted(1, "sample"), counted(1000, "batch"), counted(2, "epoch")
    ('1 sample', '1,000 batches', '2 epochs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('tch') else 's'}"


def listed(values: Sequence[T], most: int, show: Callable[[T], str] = repr) -> str:
    """The first ones, so many at the most.

    >>> listed([1, 2], 2), listed([1, 2, 3], 2)
    ('1, 2', '1, 2, ...')
    """
    return ", ".join(map(show, values[:most])) + (", ..." if len(values) > most else "")


def shortened(text: str, most: int) -> str:
    """A text of so many characters at the most.

    >>> shortened("to be", 5), shortened("to be or", 5)
    ('to be', 'to...')
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def short_repr(value: object, most: int = 80) -> str:
    """Its repr in one line, shortened; its type where that raises."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or an object of anybody's
        return f"a value of type {type(value).__name__}"
    return shortened(" ".join(map(str.strip, text.splitlines())), most)

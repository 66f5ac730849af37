"""The names by which nodes stand in the state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

__all__ = ["instance_name", "snake_case", "told_apart"]


def instance_name(name: str | None, kind: str, taken: Sequence[str]) -> str:
    """The given name, else the kind, numbered when it recurs among the names below.

    Raises:
        ValueError: two nodes have one name.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name must be a non-empty string, got {name!r}")
    there = Counter(taken)
    twice = [one for one, count in there.items() if count > 1 or one == name]
    if twice:
        raise ValueError(f"two nodes of this pipeline are named {twice[0]!r}; give one of them another name=")
    numbered = (kind if number == 1 else f"{kind}_{number}" for number in range(1, len(taken) + 2))
    return name or next(one for one in numbered if one not in there)


def told_apart(names: Sequence[tuple[str, str | None]]) -> list[str]:
    """Names for nodes of several pipelines that come together.

    Args:
        names: The name of each, and its kind if it is named by that: those are numbered anew where they recur.
    """
    found: set[str] = set()
    out: list[str] = []
    numbers: Counter[str] = Counter()
    for given, kind in names:
        name = given
        while kind is not None and name in found:
            numbers[kind] += 1
            name = kind if numbers[kind] == 1 else f"{kind}_{numbers[kind]}"
        found.add(name)
        out.append(name)
    return out


def snake_case(name: str) -> str:
    """IterableWrapper -> iterable_wrapper."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

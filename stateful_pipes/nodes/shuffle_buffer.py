"""A shuffle in the order of reading: each step gives up one of the few indices held, and takes in the next."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from stateful_pipes.rng import ORDER, derive, derive_each

__all__ = ["Held", "ShuffleBuffer"]


class Held(NamedTuple):
    """What a buffer holds.

    Attributes:
        number: Of the pass.
        place: How many steps of it were taken.
        indices: int64, `capacity` of them, or as many as are left of the pass; of one that was read to its end, the last one.
    """

    number: int
    place: int
    indices: bytes

    def __str__(self) -> str:
        return f"{self.number}/{self.place}/{','.join(map(str, memoryview(self.indices).cast('q').tolist()))}"


class ShuffleBuffer:
    """A pure function from what is held and a number of steps to what is given up and held then.

    Each pass begins with a buffer of its own, so it gives each of its indices once. Which of those held is given up is a
    hash of (seed, pass, step).

    Args:
        seed: 64 bits.
        capacity: Indices held, at least 1.
        size: How many indices a pass has.
        order: Of (pass, first place, count): that many indices of it as they come in.
    """

    def __init__(self, seed: int, capacity: int, size: Callable[[int], int], order: Callable[[int, int, int], list[int]]) -> None:
        self.seed = seed
        self.capacity = capacity
        self.size = size
        self.order = order

    def count_at(self, number: int, place: int) -> int:
        """How many indices are held at a place of a pass."""
        return max(1, min(self.capacity, self.size(number) - place))

    def at(self, held: Held | None, number: int, place: int) -> Held:
        """What is held at a place of a pass; from `held` on if that comes before, else from the start of the pass."""
        if held is None or held.number != number or held.place > place:
            first = self.order(number, 0, min(self.capacity, self.size(number)))
            held = Held(number, 0, array("q", first).tobytes())
        steps = min(place, self.size(number)) - held.place
        return (self.take(held, steps)[1] if steps > 0 else held)._replace(place=place)

    def take(self, held: Held, count: int) -> tuple[list[int], Held]:
        """What the next `count` steps give up, and what is held then; after the pass's last one that is given again.

        Cost: about 0.3 us a step.
        """
        number, place, _ = held
        size = self.size(number)
        indices = array("q", held.indices)
        steps = range(place, min(place + count, size))
        first = place + self.capacity
        following = iter(self.order(number, first, min(len(steps), size - first)) if first < size else ())
        given = []
        for drawn in derive_each(derive(self.seed, ORDER, number), steps):
            chosen = drawn % len(indices)
            given.append(indices[chosen])
            replacement = next(following, None)
            if replacement is not None:
                indices[chosen] = replacement
            elif len(indices) > 1:
                indices[chosen] = indices[-1]
                indices.pop()
        given += [indices[0]] * (count - len(steps))
        return given, Held(number, place + count, indices.tobytes())

    def parsed(self, shown: str, number: int, place: int, below: int) -> Held | None:
        """What `str` of a `Held` told; None if that cannot be what is held at this place, or an index is not below `below`."""
        try:
            *at, listed = shown.split("/")
            held = array("q", [int(one) for one in listed.split(",")])
        except (ValueError, OverflowError):
            return None
        if at != [str(number), str(place)] or len(held) != self.count_at(number, place) or len(set(held)) != len(held):
            return None
        return Held(number, place, held.tobytes()) if 0 <= min(held) <= max(held) < below else None

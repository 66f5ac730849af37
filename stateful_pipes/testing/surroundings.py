"""What a process sees of the world around it, set: a clock, entropy, directory listings, its number."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stateful_pipes.testing.fakes import clocks, entropy, listings, process, seeding, shifted_clock

__all__ = ["GENERATORS", "Surroundings", "arranged", "move_generators", "places"]

GENERATORS: Final = ("python", "numpy", "torch")


class Surroundings(NamedTuple):
    """What is set, and to which of two values, 0 or 1; None leaves it as it is.

    Attributes:
        entropy: What the operating system gives as random.
        clock: Where the clocks begin. They move on by 1/16 s whenever they are read, so that a wait for a time ends.
        listing: The order of directory listings: sorted, or the other way round.
        process: The number of the process; and whether it seems to be a worker.
        is_elsewhere: As on another machine: the wall clock is another day's, listings come the other way round.
    """

    entropy: int | None = None
    clock: int | None = None
    listing: int | None = None
    process: int | None = None
    is_elsewhere: bool = False


@contextmanager
def arranged(surroundings: Surroundings) -> Iterator[None]:
    """Within, they are so, wherever a module holds one of the functions concerned. What C code asks of the system is not reached.

    For a process of its own: it is all threads' world that changes.
    """
    pairs: list[tuple[Any, Any]] = []
    if surroundings.entropy is not None:
        pairs += entropy(surroundings.entropy)
    if surroundings.clock is not None:
        pairs += clocks(surroundings.clock)
    if surroundings.listing is not None:
        pairs += listings("reversed" if surroundings.listing else "sorted")
    if surroundings.process is not None:
        pairs += process(surroundings.process)
    if surroundings.is_elsewhere:
        pairs += [*listings("turned"), *shifted_clock()]
    seed = random.Random.seed
    held = [(*place, real, fake) for real, fake in pairs for place in places().get(id(real), ())]
    for module, name, _, fake in held:
        module[name] = fake
    if surroundings.entropy is not None:
        random.Random.seed = seeding(surroundings.entropy)  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = seed  # type: ignore[method-assign]
        for module, name, real, _ in held:
            module[name] = real


def move_generators(values: tuple[int, int, int]) -> None:
    """Seeds the global generators, each with its own number."""
    python, numpy, torch_ = values
    random.seed(python)
    np.random.seed(numpy)
    torch.default_generator.manual_seed(torch_)


def places() -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Where modules hold what there are stand-ins for, by its id. Cost: 50 ms when there are new modules."""
    if _FOUND.modules != len(sys.modules):
        real = {id(one) for one, _ in [*entropy(0), *clocks(0), *listings("sorted"), *process(0)]}
        found: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in list(sys.modules.values()):
            held = getattr(module, "__dict__", None)
            if isinstance(held, dict):
                for name, value in list(held.items()):
                    if id(value) in real:
                        found.setdefault(id(value), []).append((held, name))
        _FOUND.places, _FOUND.modules = found, len(sys.modules)
    return _FOUND.places


class _Found:
    def __init__(self) -> None:
        self.modules = 0
        self.places: dict[int, list[tuple[dict[str, Any], str]]] = {}


_FOUND = _Found()

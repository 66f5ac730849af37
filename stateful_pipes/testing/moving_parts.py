"""What of the user's own objects moves while a batch is read: generators, counters, caches."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.testing.users_code import is_users_object

__all__ = ["UNSEEDED", "Part", "moved", "parts_of", "put_back"]

UNSEEDED: Final = "made without a seed"
_MOST: Final = 20_000
"""Objects that are looked at."""
_LONG: Final = 1_000
"""Of a longer sequence or mapping only the length is looked at."""
_GIVEN: Final = {"map_fn", "collate_fn", "keep", "source"}
"""What the user gives to nodes of this library."""
_OURS: Final = {"sources", "stream", "source", "sampler", "name", "run"}
"""What the user's own nodes have from this library or torchdata."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


class Part(NamedTuple):
    """One that may move: where it is, what it is, and how it stands."""

    path: str
    owner: Any
    value: Any

    @property
    def kind(self) -> str:
        """What kind of generator it is; "" if it is none."""
        if self.owner is None:
            return ""
        named = f"{type(self.owner).__module__.removesuffix('._generator')}.{type(self.owner).__name__}"
        sequence = getattr(getattr(self.owner, "bit_generator", None), "seed_seq", None)
        entropy = getattr(sequence, "entropy", None)
        return f"{named} {UNSEEDED}" if isinstance(entropy, int) and entropy >= 2**64 else named


def parts_of(loader: StatefulDataLoader[Any]) -> dict[str, Part]:
    """All that can be reached from the functions and objects that the pipeline's nodes were given."""
    found: dict[str, Part] = {}
    seen: set[int] = set()
    for node in walk_all(loader.pipeline):
        held: Any = node.node if isinstance(node, ForeignNode) else node
        is_ours = type(held).__module__.startswith("stateful_pipes.")
        for name, value in list(vars(held).items()):
            if name in _GIVEN if is_ours else not name.startswith("_") and name not in _OURS:
                for part in _walk(value, f"{node.name}.{name}", seen):
                    found.setdefault(part.path, part)
    return found


def moved(before: Mapping[str, Part], after: Mapping[str, Part]) -> list[Part]:
    """Those that stand otherwise now; generators first."""
    changed = [
        part for path, part in after.items() if path not in before or first_mismatch(before[path].value, part.value) is not None
    ]
    return sorted(changed, key=lambda part: not part.kind)


def put_back(parts: Mapping[str, Part]) -> None:
    """Leads the generators back to where they stood."""
    for part in parts.values():
        owner = part.owner
        if isinstance(owner, torch.Generator):
            owner.set_state(part.value)
        elif isinstance(owner, random.Random):
            owner.setstate(part.value)
        elif isinstance(owner, np.random.RandomState):
            owner.set_state(part.value)
        elif isinstance(owner, np.random.Generator):
            owner.bit_generator.state = part.value


def _state_of(value: Any) -> Any:
    """A generator's; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else None


def _walk(start: Any, path: str, seen: set[int]) -> Iterator[Part]:
    """Breadth first, so that each is known by its shortest path."""
    rest = [(path, start)]
    for path, value in rest:
        if isinstance(value, _PLAIN):
            yield Part(path, None, value)
            continue
        if id(value) in seen or len(seen) > _MOST:
            continue
        seen.add(id(value))
        if (state := _state_of(value)) is not None:
            yield Part(path, value, state)
            continue
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            yield Part(f"len({path})", None, len(value))
        with suppress(Exception):  # of what has no cache, or is a class of such
            yield Part(f"{path}.cache_info()", None, str(value.cache_info()))
        with suppress(Exception):  # whatever the user's own attributes do
            rest += _inner(value, path)


def _inner(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        return [(f"{path}.func", value.func), *((f"{path}.args[{n}]", one) for n, one in enumerate(value.args))]
    if isinstance(value, types.MethodType):
        return [(path.removesuffix(".map_fn") if value.__name__ == "__getitem__" else path, value.__self__), *_globals(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [*((f"{path} {name}", cell.cell_contents) for name, cell in cells), *_globals(value)]
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{n}]", one) for n, one in enumerate(value)] if len(value) <= _LONG else []
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", one) for key, one in value.items()] if len(value) <= _LONG else []
    if isinstance(value, (torch.Tensor, np.ndarray, types.ModuleType)) or (
        isinstance(value, type) and not is_users_object(value)
    ):
        return []
    inner = [(f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items() if not name.startswith("__")]
    if isinstance(value, type):
        return [
            (f"{value.__name__}.{name}", one) for name, one in vars(value).items() if not name.startswith("__") or callable(one)
        ]
    return [*inner, (type(value).__name__, type(value))]


def _globals(function: Any) -> list[tuple[str, Any]]:
    """The module's names that a function refers to."""
    function = getattr(function, "__func__", function)
    if not is_users_object(function):
        return []
    module = function.__module__
    names = function.__code__.co_names
    return [(f"{module}.{name}", function.__globals__[name]) for name in names if name in function.__globals__]

"""The first place at which two nested values differ."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Mismatch", "first_mismatch"]


class Mismatch(NamedTuple):
    """Where two values differ: a path such as "['model']['0.weight']", and what is there."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def first_mismatch(expected: object, found: object) -> Mismatch | None:
    """The first difference, depth first; None if there is none.

    Tensors and arrays are equal if dtype, shape and every bit are: NaN equals the same NaN, 0.0 not -0.0. Numbers have to
    be of the same type, generators in the same state, mappings of the same keys (those of an OrderedDict in order). Other
    objects are compared by what they hold, or, if they hold nothing that can be seen, by `==`.
    """
    return next(_mismatches(expected, found, "", set()), None)


def _mismatches(expected: Any, found: Any, path: str, seen: set[tuple[int, int]]) -> Iterator[Mismatch]:
    if expected is found or (id(expected), id(found)) in seen:
        return
    if type(expected) is not type(found):
        yield Mismatch(path, _shown(expected), _shown(found))
        return
    leaf = _is_equal_leaf(expected, found)
    if leaf is not None:
        if not leaf:
            yield Mismatch(path, *_told_apart(expected, found))
        return
    seen.add((id(expected), id(found)))  # both live as long as what they were reached from
    one, other = _inner(expected), _inner(found)
    if one is None or other is None:
        if not _is_equal(expected, found):
            yield Mismatch(path, _shown(expected), _shown(found))
        return
    if len(one) != len(other) and isinstance(expected, Sequence):
        yield Mismatch(path, f"{len(one)} items", f"{len(other)} items")
        return
    for key in {**one, **other}:
        if key not in other:
            yield Mismatch(f"{path}{key}", _shown(one[key]), "nothing")
        elif key not in one:
            yield Mismatch(f"{path}{key}", "nothing", _shown(other[key]))
        else:
            yield from _mismatches(one[key], other[key], f"{path}{key}", seen)
    if isinstance(expected, OrderedDict) and list(one) != list(other):
        yield Mismatch(path, f"the keys in the order {list(expected)}", f"in the order {list(found)}")


def _is_equal(expected: Any, found: Any) -> bool:
    """By `==`, unless that compares by identity."""
    kind: Any = type(expected)
    if kind.__eq__ is object.__eq__:
        return True
    try:
        return bool(expected == found)
    except Exception:
        return False


def _inner(value: Any) -> dict[str, Any] | None:
    """What a value holds, by the step of the path that leads there; None if that cannot be seen."""
    state = getattr(value, "__dict__", None)
    attributes = {f".{name}": one for name, one in state.items()} if state else {}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": one for key, one in value.items()} | attributes
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": one for name, one in zip(value._fields, value, strict=True)} | attributes
    if isinstance(value, Sequence) or hasattr(type(value), "popleft"):  # a deque is no Sequence
        return {f"[{index}]": one for index, one in enumerate(value)} | attributes
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                attributes[f".{name}"] = getattr(value, name)
    return attributes or None


def _is_equal_leaf(expected: Any, found: Any) -> bool | None:
    """Of two values of one type; None if they are none that is compared as a whole."""
    if isinstance(expected, torch.Tensor):
        return _tensor_bits(expected) == _tensor_bits(found)
    if isinstance(expected, (np.ndarray, np.generic)) and not expected.dtype.hasobject:
        return (expected.dtype, expected.shape) == (found.dtype, found.shape) and expected.tobytes() == found.tobytes()
    if isinstance(expected, float):
        return struct.pack("d", expected) == struct.pack("d", found)
    if isinstance(expected, complex):
        return struct.pack("dd", expected.real, expected.imag) == struct.pack("dd", found.real, found.imag)
    if isinstance(expected, (int, str, bytes, bytearray, range, Set)):
        return bool(expected == found)
    if isinstance(expected, torch.Generator):
        return torch.equal(expected.get_state(), found.get_state())
    if isinstance(expected, random.Random):
        return bool(expected.getstate() == found.getstate())
    if isinstance(expected, np.random.Generator):
        return first_mismatch(expected.bit_generator.state, found.bit_generator.state) is None
    if isinstance(expected, np.random.RandomState):
        return first_mismatch(expected.get_state(legacy=False), found.get_state(legacy=False)) is None
    return None


def _tensor_bits(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), _bits(value).numpy().tobytes()


def _bits(value: torch.Tensor) -> torch.Tensor:
    """uint8 of shape (elements, bytes of each)."""
    plain = value.detach().cpu()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = plain.int_repr() if plain.is_quantized else plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8).view(plain.numel(), plain.element_size())


def _told_apart(expected: Any, found: Any) -> tuple[str, str]:
    """Both as text; of two tensors of one kind, their first elements that differ."""
    if isinstance(expected, torch.Tensor) and (expected.dtype, expected.shape) == (found.dtype, found.shape):
        differ = (_bits(expected) != _bits(found)).any(dim=1).nonzero().flatten().tolist()
        place = np.unravel_index(differ[0], tuple(expected.shape)) if expected.shape else ()
        where = f"at {[int(index) for index in place]}, the first of {len(differ)} of {expected.numel()} that differ"
        return f"{expected[place].item()!r} {where}", repr(found[place].item())
    return _shown(expected), _shown(found)


def _shown(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    try:
        shown = " ".join(repr(value).split())
    except Exception:
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 200 else f"{shown[:200]}..."

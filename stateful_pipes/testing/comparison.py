"""The first place at which two nested values differ."""

from __future__ import annotations

import enum
import random
import struct
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stateful_pipes.wording import short_repr

__all__ = ["Mismatch", "bits_of", "first_mismatch"]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_PER_CHANNEL: Final = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_NAMED: Final = (type, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS: Final = (Mapping, list, tuple, deque, set, frozenset)
_Seen = dict[tuple[int, int], tuple[Any, Any]]
"""The pairs under way or done, by id; they are kept, since an id is given anew when its object is gone."""


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
    be of the same type, generators in the same state, mappings of the same keys (those of an OrderedDict in order).
    Functions are compared by name and code, classes by name. Other objects are compared by what they hold: their
    attributes, or what pickle would keep of them, or, if neither can be seen, by `==`.
    """
    with torch._C.DisableTorchFunctionSubclass():  # of a tensor's class what torch itself does with it counts
        return next(_mismatches(expected, found, "", {}), None)


def _mismatches(expected: Any, found: Any, path: str, seen: _Seen) -> Iterator[Mismatch]:
    pair = id(expected), id(found)
    if expected is found or pair in seen:
        return
    if type(expected) is not type(found):
        yield Mismatch(path, _shown(expected), _shown(found))
        return
    if type(expected) in _PLAIN or isinstance(expected, PurePath):  # with nothing in it but what a path has cached
        if not _is_equal_leaf(expected, found):
            yield Mismatch(path, _shown(expected), _shown(found))
        return
    seen[pair] = expected, found
    if isinstance(expected, (set, frozenset)):
        missing, extra = _left_over(expected, found, seen)
        if missing or extra:
            yield Mismatch(path, _shown(missing[0]) if missing else "nothing more", _shown(extra[0]) if extra else "nothing")
            return
    leaf = _is_equal_leaf(expected, found)
    if leaf is False:
        yield Mismatch(path, *_told_apart(expected, found))
        return
    one, other = _inner(expected), _inner(found)
    if leaf is None and not (one or other) and not isinstance(expected, _CONTAINERS):
        reduced = _reduced(expected), _reduced(found)
        inside = next(_mismatches(*reduced, f"{path}.__reduce__()", seen), None)
        if (inside or reduced[0] is None) and not _is_equal(expected, found):
            yield Mismatch(path, _shown(expected), _shown(found))
        elif inside:
            yield inside
        return
    if isinstance(expected, (list, tuple, deque)) and len(expected) != len(found):
        yield Mismatch(path, f"{len(expected)} items", f"{len(found)} items")
    for key in {**one, **other}:
        if key not in other:
            yield Mismatch(f"{path}{key}", _shown(one[key]), "nothing")
        elif key not in one:
            yield Mismatch(f"{path}{key}", "nothing", _shown(other[key]))
        else:
            yield from _mismatches(one[key], other[key], f"{path}{key}", seen)
    if isinstance(expected, OrderedDict):
        for number, (key, another) in enumerate(zip(_items(expected), _items(found), strict=True)):
            if key != another:
                yield Mismatch(path, f"{key} as key {number}", another)


def _is_equal_leaf(expected: Any, found: Any) -> bool | None:
    """Of two values of one type, apart from their attributes; None if they are none that is compared as a whole."""
    if isinstance(expected, (int, str, bytes, bytearray, range, PurePath)):
        return bool(expected == found)
    if isinstance(expected, float):
        return struct.pack("d", expected) == struct.pack("d", found)
    if isinstance(expected, complex):
        return struct.pack("dd", expected.real, expected.imag) == struct.pack("dd", found.real, found.imag)
    if isinstance(expected, torch.Tensor):
        if not (_has_bits(expected) and _has_bits(found)):
            return None
        return _is_alike(expected, found) and np.array_equal(bits_of(expected), bits_of(found))
    if isinstance(expected, (np.ndarray, np.generic)):
        return _is_alike(expected, found) and (None if expected.dtype.hasobject else expected.tobytes() == found.tobytes())
    if isinstance(expected, (enum.Enum, torch.dtype, torch.layout)):
        return False  # of these there is one each, and the same one has been seen to
    if isinstance(expected, _NAMED):
        names = ("__module__", "__qualname__", "__code__")
        return all(getattr(expected, name, None) == getattr(found, name, None) for name in names)
    return None


def _inner(value: Any) -> dict[str, Any]:
    """What a value holds beside what makes it a leaf, by the step of the path that leads there."""
    if isinstance(value, type):
        return {}
    if isinstance(value, types.MethodType):
        return {".__self__": value.__self__, ".__func__": value.__func__}
    held: dict[str, Any] = {}
    if isinstance(value, Mapping):
        held = _items(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        held = {f".{name}": one for name, one in zip(value._fields, value, strict=True)}
    elif isinstance(value, (list, tuple, deque)):
        held = {f"[{index}]": one for index, one in enumerate(value)}
    elif isinstance(value, torch.Tensor):
        held = {} if _has_bits(value) else _tensor_parts(value)
    elif isinstance(value, np.ndarray):
        return {str(list(index)): value[index] for index in np.ndindex(value.shape)} if value.dtype.hasobject else {}
    elif isinstance(value, np.void):
        held = {f"[{name!r}]": value[name] for name in value.dtype.names} if value.dtype.hasobject and value.dtype.names else {}
    elif isinstance(value, weakref.ref):
        held = {"()": value()}
    return held | _generator_state(value) | _attributes(value)


def _items(value: Mapping[Any, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for number, (key, item) in enumerate(value.items()):
        step = _key(key)
        if not step or step in held:
            step = f"[key {number}]"
            held[f"{step} itself"] = key
        held[step] = item
    return held


def _key(key: Any) -> str:
    """Its step of the path; "" for one that is known by its identity, as it has another one in another trainer."""
    kind: Any = type(key)
    single = isinstance(key, (type, type(None), torch.dtype))
    if isinstance(key, torch.Tensor) or (kind.__hash__ is object.__hash__ and not single):
        return ""
    try:
        return f"[{key!r}]"
    except Exception:
        return ""


def _attributes(value: Any) -> dict[str, Any]:
    held = {f".{name}": one for name, one in (getattr(value, "__dict__", None) or {}).items()}
    for kind in type(value).__mro__:
        if "__slots__" in kind.__dict__:
            for name, slot in kind.__dict__.items():  # and not by the names in __slots__: those of private ones differ
                if isinstance(slot, types.MemberDescriptorType):
                    with suppress(AttributeError):
                        held[f".{name}"] = slot.__get__(value)
    if isinstance(value, deque):
        held[".maxlen"] = value.maxlen
    if isinstance(value, defaultdict):
        held[".default_factory"] = value.default_factory
    return held


def _generator_state(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Generator):
        return {".get_state()": value.get_state()}
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return {".getstate()": value.getstate()}
    if isinstance(value, np.random.Generator):
        return {".bit_generator.state": value.bit_generator.state}
    if isinstance(value, np.random.RandomState):
        return {".get_state()": value.get_state(legacy=False)}
    return {".state": value.state} if isinstance(value, np.random.BitGenerator) else {}


def _reduced(value: Any) -> Any:
    """What pickle would keep, for what only its own class can look into: an iterator, a partial... None if it can't either."""
    try:
        return value.__reduce_ex__(4)
    except Exception:
        return None


def _is_equal(expected: Any, found: Any) -> bool:
    """By `==`, unless that compares by identity."""
    kind: Any = type(expected)
    if kind.__eq__ is object.__eq__:
        return True
    try:
        return bool(expected == found)
    except Exception:
        return False


def _left_over(expected: Any, found: Any, seen: _Seen) -> tuple[list[Any], list[Any]]:
    """The items of two sets that have no counterpart in the other one."""
    rest = defaultdict(list)
    for item in found:
        rest[_token(item)].append(item)
    left = []
    for item in expected:
        alike = rest[_token(item)]
        places = (n for n, one in enumerate(alike) if next(_mismatches(item, one, "", dict(seen)), None) is None)
        place = next(places, None)
        if place is None:
            left.append(item)
        else:
            del alike[place]
    return left, [item for alike in rest.values() for item in alike]


def _token(item: Any) -> tuple[type, str]:
    """Equal for items that may be equal; exact for plain ones, so that large sets of these are quick."""
    items = item if type(item) is tuple else (item,)
    return type(item), repr(item) if all(type(one) in _PLAIN for one in items) else ""


def _has_bits(value: torch.Tensor) -> bool:
    """In one block of memory, and nowhere else."""
    plain = value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    return plain and not is_lazy(value) and not is_traceable_wrapper_subclass(value)


def _tensor_parts(value: Any) -> dict[str, Any]:
    if is_lazy(value):
        return {}
    parts = {".dtype": value.dtype, ".shape": tuple(value.shape), ".layout": value.layout}
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        return parts | {f".{name}": getattr(value, name) for name in names} | {".__tensor_flatten__()[1]": context}
    if value.device.type == "meta":
        return parts
    if value.is_quantized:
        per_channel = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
        names = ("int_repr", *(per_channel if value.qscheme() in _PER_CHANNEL else ("q_scale", "q_zero_point")))
    elif value.layout is torch.sparse_coo:
        names = ("is_coalesced", "_indices", "_values")
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    else:
        names = ("to_dense",)
    return parts | {f".{name}()": getattr(value.detach(), name)() for name in names}


def _is_alike(expected: Any, found: Any) -> bool:
    return bool(expected.dtype == found.dtype and expected.shape == found.shape)


def bits_of(value: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Its bytes, of shape (elements, bytes of each); of a plain tensor on the CPU without a copy."""
    if isinstance(value, np.ndarray):
        return np.frombuffer(value.tobytes(), np.uint8).reshape(value.size, value.dtype.itemsize)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous whatever its stride
    bits = flat.view(torch.uint8).view(plain.numel(), plain.element_size())
    return cast("npt.NDArray[np.uint8]", bits.as_subclass(torch.Tensor).numpy())


def _told_apart(expected: Any, found: Any) -> tuple[str, str]:
    """Both as text; of two tensors or arrays of one kind, their first elements that differ."""
    if isinstance(expected, (torch.Tensor, np.ndarray)) and _is_alike(expected, found):
        differ = np.flatnonzero((bits_of(expected) != bits_of(found)).any(axis=1))
        place = tuple(int(index) for index in np.unravel_index(differ[0], tuple(expected.shape))) if expected.shape else ()
        where = f"at {list(place)}, the first of {len(differ)} of {len(bits_of(expected))} that differ"
        return f"{expected[place].item()!r} {where}", repr(found[place].item())
    return _shown(expected), _shown(found)


def _shown(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    return short_repr(value, 200)

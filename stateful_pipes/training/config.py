"""A configuration as text, to be compared with that of another process."""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import json
import pathlib
import random
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set, ValuesView
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from stateful_pipes.errors import Difference

__all__ = ["Signature", "differences", "signature_of"]

Signature = dict[str, str]
"""What stands at each path, in the configuration's own order: "config.optimizer.betas[0]" -> "0.9"."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_NAMED: Final = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, functools._lru_cache_wrapper, np.ufunc),
)
_SHOWN: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, range, slice, torch.Size)
_RECORDS: Final = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__")
"""What classes of records have that these libraries make."""
_LONGEST: Final = 200
"""A longer text, or a sequence of more items, is held as a hash."""
_DEEPEST: Final = 4
"""Objects of any class, one within the other, whose attributes are compared."""
_GENERATOR: Final = "generator in state "


def signature_of(value: object, path: str = "config", leave_out: frozenset[str] = frozenset()) -> Signature:
    """What a configuration holds, at all its depths.

    Numbers and strings are compared with their types, mappings with the order of their keys, tensors and arrays by their
    content, generators by their state, functions and classes by name, records by their public attributes, and so are other
    objects, but those that lie deeper than in the fourth, which are compared by class. An object without attributes is
    compared by its `repr`, if that has no address in it.

    Args:
        value: The configuration: a mapping, a dataclass, a namespace...
        path: What it is called.
        leave_out: Entries of its first level that are not compared.

    Raises:
        TypeError: it is a class, a module or a function: nothing in it would be compared.
    """
    if isinstance(value, (type, types.ModuleType, *_NAMED)):
        raise TypeError(f"{path} must hold its entries in a mapping, a dataclass, a namespace..., got {value!r}")
    return _described(value, path, frozenset(f".{name}" for name in leave_out))


def differences(saved: Signature, current: Signature) -> tuple[Difference, ...]:
    """Every path at which two signatures differ; of a branch that one alone has, where it begins."""
    wrong = []
    changed: set[str] = set()
    for path in {**saved, **current}:
        if path in saved and path in current:
            if saved[path] != current[path]:
                wrong.append(_difference(path, saved[path], current[path]))
                changed.add(path)
        elif not any(path[:end] in changed for end, sign in enumerate(path) if sign in ".["):
            wrong.append(_difference(path, saved.get(path, "missing"), current.get(path, "missing")))
            changed.add(path)
    if not wrong:
        moved = [(one, other) for one, other in zip(saved, current, strict=True) if one != other]
        wrong += [Difference("", one, "here", f"{other} in its place", "keep the order of the keys") for one, other in moved[:1]]
    return tuple(wrong)


def _difference(path: str, saved: str, current: str) -> Difference:
    if saved.startswith(_GENERATOR) and current.startswith(_GENERATOR):
        return Difference(
            "",
            path,
            saved,
            current,
            "pass a fresh one, seeded as at the start: this one was seeded otherwise or already advanced",
        )
    return Difference("", path, saved, current, "set it as it was when the training was started")


def _described(
    value: Any, path: str, leave_out: frozenset[str] = frozenset(), above: tuple[int, ...] = (), objects: int = 0
) -> Signature:
    """The signature of a part, given the ids of what it lies in, and in how many objects of any class it does."""
    if type(value) in _PLAIN:
        return {path: _shortened(repr(value))}
    if id(value) in above:
        return {path: f"the one {len(above) - above.index(id(value))} levels above"}
    text, inner = _parts(value)
    if inner is None:  # what such an object refers to may be anything: far down it is seen by its class alone
        objects += 1
        inner = _attributes(value) if objects <= _DEEPEST else ()
    within = (*above, id(value))
    below = [_described(item, f"{path}{step}", above=within, objects=objects) for step, item in inner if step not in leave_out]
    if isinstance(value, Set):  # in any order
        return {path: f"{text} {_digest(sorted(map(_digest, below)))}"}
    if len(below) > _LONGEST and isinstance(value, (Sequence, ValuesView, np.ndarray)):
        return {path: f"{text} of {len(below)} {_digest(below)}"}
    return {place: one for part in ({path: _shortened(text)}, *below) for place, one in part.items()}


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... {_digest(text)}"


def _parts(value: Any) -> tuple[str, Iterable[tuple[str, Any]] | None]:
    """A value's own text, and the values within it, each with its step of the path; None if it is an object of any class."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, _SHOWN):
        return repr(value), ()
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name or value.value!r}", ()
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}", ()
    if isinstance(value, _PLAIN):
        plain: Any = next(one for one in _PLAIN if isinstance(value, one))
        return f"{name} {plain.__repr__(value)}", ()  # a subclass may show all its values alike
    if isinstance(value, pathlib.PurePath):
        return f"path {str(value)!r}", ()
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}", ()
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}", ()
    if isinstance(value, _NAMED):
        return f"function {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}", ()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return f"array {value.dtype} {value.shape}", _numbered(value.ravel().tolist())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _content(value), ()
    if (state := _generator_state(value)) is not None:
        return f"{_GENERATOR}{_digest(state)}", ()
    if isinstance(value, functools.partial):
        return "partial", ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, Mapping) or all(hasattr(kind, one) for one in ("keys", "items", "__getitem__")):
        return "mapping", _items(value)
    if isinstance(value, Set):
        return name, (("", item) for item in value)
    if isinstance(value, (Sequence, ValuesView)):
        return "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else name, _numbered(value)
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or any(hasattr(kind, one) for one in _RECORDS):
        return name, _attributes(value)
    if not hasattr(value, "__dict__") and "0x" not in (shown := repr(value)):
        return f"{name} {shown}", None
    return name, None


def _numbered(items: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    return ((f"[{index}]", item) for index, item in enumerate(items))


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    times: Counter[str] = Counter()  # of a step: keys may be told apart by their addresses alone
    for key, item in value.items():
        step = _step(key)
        times[step] += 1
        yield step if times[step] == 1 else f"{step[:-1]} #{times[step]}]", item


def _step(key: object) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key}"
    found = _described(key, "")
    return f"[{found['']}]" if len(found) == 1 else f"[{found['']} {_digest(found)}]"


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """The public ones, those of its class among them; of a module of torch those below it, too, but no weights."""
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
        names += [name for name, one in kind.__dict__.items() if not callable(one) and not hasattr(one, "__get__")]
    for name in dict.fromkeys(names):
        if not name.startswith("_") and hasattr(value, name):
            yield _step(name), getattr(value, name)
    if isinstance(value, torch.nn.Module):
        yield from ((_step(name), child) for name, child in value.named_children())


def _content(value: torch.Tensor | npt.NDArray[Any]) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {_digest(np.ascontiguousarray(value).tobytes())}"
    if value.device.type == "meta" or is_lazy(value):
        return f"tensor {value.dtype} {'' if is_lazy(value) else tuple(value.shape)} without memory"
    dense = value.detach().cpu()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = dense.dequantize() if dense.is_quantized else dense.resolve_conj().resolve_neg()
    # Cloned, since a single element is contiguous whatever its stride, and cannot be seen as bytes then.
    plain = dense.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return f"tensor {value.dtype} {tuple(value.shape)} {_digest(plain.numpy().tobytes())}"


def _generator_state(value: object) -> object | None:
    if isinstance(value, torch.Generator):
        return [str(value.device.type), value.get_state().tolist()]
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    return value.state if isinstance(value, np.random.BitGenerator) else None


def _digest(value: Any) -> str:
    if not isinstance(value, bytes):
        value = json.dumps(value, default=lambda one: one.tolist() if isinstance(one, np.ndarray) else repr(one)).encode()
    return hashlib.sha256(value).hexdigest()[:16]

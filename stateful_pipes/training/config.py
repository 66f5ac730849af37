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
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.errors import Difference

__all__ = ["Signature", "differences", "signature_of"]

Signature = dict[str, str]
"""What stands at each path, in the configuration's own order: "config.optimizer.betas[0]" -> "0.9"."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_NAMED: Final = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc)
_SHOWN: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, range, slice, torch.Size)
_RECORDS: Final = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__")
"""What classes of records have that these libraries make."""
_LONGEST: Final = 200
"""A longer text, or a sequence of more items, is held as a hash."""
_GENERATOR: Final = "generator in state "


def signature_of(value: object, path: str = "config", leave_out: frozenset[str] = frozenset()) -> Signature:
    """What a configuration holds, at all its depths.

    Numbers and strings are compared with their types, mappings with the order of their keys, tensors and arrays by their
    content, generators by their state, functions and classes by name, records by their public attributes, and so is any
    other object, but for the objects in it, which are compared by class.

    Args:
        value: The configuration: a mapping, a dataclass, a namespace...
        path: What it is called.
        leave_out: Entries of its first level that are not compared.
    """
    found: Signature = {}
    _Walk(frozenset(f".{name}" for name in leave_out)).describe(found, value, path)
    return found


def differences(saved: Signature, current: Signature) -> tuple[Difference, ...]:
    """Every path at which two signatures differ, the highest one where a whole branch is missing."""
    wrong = []
    missing: list[str] = []
    for path in {**saved, **current}:
        if path in saved and path in current:
            if saved[path] != current[path]:
                wrong.append(_difference(path, saved[path], current[path]))
        elif not any(path.startswith((f"{above}.", f"{above}[")) for above in missing):
            missing.append(path)
            wrong.append(_difference(path, saved.get(path, "missing"), current.get(path, "missing")))
    if not wrong:
        moved = [(one, other) for one, other in zip(saved, current, strict=True) if one != other]
        wrong += [Difference("", one, "here", f"{other} in its place", "keep the order of the keys") for one, other in moved[:1]]
    return tuple(wrong)


def _difference(path: str, saved: str, current: str) -> Difference:
    if saved.startswith(_GENERATOR) and current.startswith(_GENERATOR):
        return Difference("", path, saved, current, "pass a fresh one, seeded as at the start: one of them was already advanced")
    return Difference("", path, saved, current, "set it as it was when the training was started")


class _Walk:
    """Through a configuration, depth first."""

    def __init__(self, leave_out: frozenset[str]) -> None:
        self.leave_out = leave_out  # steps of the first level
        self.above: list[int] = []

    def describe(self, found: Signature, value: Any, path: str, in_object: bool = False) -> None:
        if id(value) in self.above:
            found[path] = f"the one {len(self.above) - self.above.index(id(value))} levels above"
            return
        text, inner = _parts(value)
        is_object = inner is None
        if inner is None:  # what such an object refers to may be anything, and endless: it is seen by its class
            inner = () if in_object else _attributes(value)
        self.above.append(id(value))
        below: Signature = {}
        count = 0
        for step, item in inner:
            if len(self.above) > 1 or step not in self.leave_out:
                self.describe(below, item, f"{path}{step}", in_object or is_object)
                count += 1
        self.above.pop()
        if isinstance(value, Set):
            found[path] = f"{text} {_digest(sorted(below.values()))}"
        elif count > _LONGEST and isinstance(value, Sequence):
            found[path] = f"{text} of {count} {_digest(list(below.values()))}"
        else:
            found[path] = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... {_digest(text)}"
            found.update(below)


def _parts(value: Any) -> tuple[str, Iterable[tuple[str, Any]] | None]:
    """A value's own text, and the values within it, each with its step of the path; None if it is an object of any class."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN or isinstance(value, _SHOWN):
        return repr(value), ()
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}", ()
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}", ()
    if isinstance(value, _PLAIN):
        return f"{name} {value!r}", ()
    if isinstance(value, pathlib.PurePath):
        return f"path {str(value)!r}", ()
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}", ()
    if isinstance(value, _NAMED):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}", ()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _content(value), ()
    if (state := _generator_state(value)) is not None:
        return f"{_GENERATOR}{_digest(state)}", ()
    if isinstance(value, functools.partial):
        return "partial", ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, Mapping):
        return "mapping", ((_step(key), item) for key, item in value.items())
    if isinstance(value, (Sequence, Set)):
        text = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else name
        return text, ((f"[{index}]", item) for index, item in enumerate(value))
    is_record = isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or any(hasattr(kind, one) for one in _RECORDS)
    return name, _attributes(value) if is_record else None


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_parts(key)[0]}]"


def _attributes(value: object) -> Iterable[tuple[str, Any]]:
    """The public ones."""
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return ((f".{name}", getattr(value, name)) for name in names if not name.startswith("_") and hasattr(value, name))


def _content(value: torch.Tensor | npt.NDArray[Any]) -> str:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().to_dense() if value.layout is not torch.strided else value.detach().cpu()
        data: Any = dense.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor {value.dtype} {tuple(value.shape)} {_digest(data)}"
    data = value.tolist() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    return f"array {value.dtype} {value.shape} {_digest(data)}"


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

"""Which part of an object it is that no pickle can take."""

from __future__ import annotations

import copyreg
import functools
import pickle
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch

__all__ = ["unpicklable"]

_LIMIT = 10_000
"""Objects to look at: what is wrong is near the top, as a rule, and large data is not to be walked."""

_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_TAKEN = (int, float, complex, str, bytes, bytearray, bool, type(None), np.ndarray, torch.Tensor)


def unpicklable(value: object, path: str) -> str:
    """The first part that cannot be pickled, as "path: why"; empty if none is found.

    It asks objects how they would be reduced, and does not pickle them: tensors and arrays are not copied.

    Args:
        value: Where to begin.
        path: What it is called.
    """
    seen: dict[int, object] = {}  # with the objects, or another might get the number of one that is gone
    queue = deque([(value, path)])
    for _ in range(_LIMIT):
        if not queue:
            break
        value, path = queue.popleft()
        if id(value) in seen or isinstance(value, _TAKEN):
            continue
        seen[id(value)] = value
        try:
            queue.extend(islice(_parts(value, path), _LIMIT))
        except RuntimeError:  # what multiprocessing shares, which can be pickled only while a process is started
            continue
        except Exception as error:
            return f"{path}: {error}"
    return ""


def _parts(value: Any, path: str) -> Iterator[tuple[object, str]]:
    """What an object is pickled with; raises what pickle would raise for it alone."""
    if isinstance(value, _BY_NAME):
        pickle.dumps(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"{path}.__self__"
    elif isinstance(value, functools.partial):
        yield value.func, f"{path}.func"
        yield from _named(value.keywords, f"{path}.keywords")
        yield from _numbered(value.args, f"{path}.args")
    elif type(value) is dict:
        yield from _named(value, path)
    elif type(value) in (list, tuple, set, frozenset):
        yield from _numbered(value, path)
    elif type(value) not in _dispatched():
        yield from _reduced(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL), path)


def _reduced(reduced: Any, path: str) -> Iterator[tuple[object, str]]:
    if isinstance(reduced, str):  # a global's name
        return
    parts: tuple[Any, ...] = (*reduced, None, None, None)
    arguments, state, items, pairs = parts[1:5]
    yield from _numbered(arguments, path)
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            for name, part in attributes.items():
                yield part, f"{path}.{name}"
        else:
            yield attributes, path
    yield from _numbered(items or (), path)
    yield from _named(dict(pairs or ()), path)


def _named(parts: dict[Any, Any], path: str) -> Iterator[tuple[object, str]]:
    for key, part in parts.items():
        yield part, f"{path}[{key!r}]"
        yield key, f"a key of {path}"


def _numbered(parts: Any, path: str) -> Iterator[tuple[object, str]]:
    for number, part in enumerate(parts):
        yield part, f"{path}[{number}]"


def _dispatched() -> set[type]:
    """Types whose pickling is registered, with multiprocessing as well, and takes what the type itself would not."""
    return {*copyreg.dispatch_table, *cast(Any, ForkingPickler)._extra_reducers}

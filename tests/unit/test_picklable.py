"""What cannot be pickled is named by its path, and what can be is not suspected."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import sqlite3
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from stateful_pipes.prefetch.picklable import unpicklable

Pair = namedtuple("Pair", ["one", "other"])


def module_function(value):
    return value


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def method(self):
        return self


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


class Reduced:
    """Leaves out what could not be pickled."""

    def __init__(self):
        self.file = threading.Lock()

    def __reduce__(self):
        return Reduced, ()


@dataclass
class Data:
    inner: object


def culprits():
    yield "x", lambda: 0, "x: "
    yield "attribute", Plain(transform=lambda: 0), "attribute.transform: "
    yield "deep", Plain(a=Plain(b=[1, {"k": threading.Lock()}])), "deep.a.b[1]['k']: cannot pickle '_thread.lock'"
    yield "method", Plain(connection=sqlite3.connect(":memory:")).method, "method.__self__.connection: cannot pickle 'sqlite3"
    yield "partial", functools.partial(module_function, 1, key=(2, lambda: 0)), "partial.keywords['key'][1]: "
    yield "argument", functools.partial(module_function, lambda: 0), "argument.args[0]: "
    yield "slotted", Slotted(lambda: 0), "slotted.inner: "
    yield "data", Data(n for n in range(3)), "data.inner: cannot pickle 'generator'"
    yield "named", Pair(1, lambda: 0), "named"
    yield "ordered", OrderedDict(a=lambda: 0), "ordered['a']: "
    yield "key", {("a", Plain(x=threading.Lock())): 1}, "a key of key[1].x: "

    class Local:
        pass

    yield "local", Local(), "local"
    yield "kind", Local, "kind: "


@pytest.mark.parametrize(("path", "value", "said"), list(culprits()), ids=lambda value: value if isinstance(value, str) else "")
def test_it_is_named(path, value, said):
    with pytest.raises(Exception):  # noqa: B017, PT011  # pickle's errors are of any type
        pickle.dumps(value)
    assert unpicklable(value, path).startswith(said)


def cycle():
    one = Plain()
    one.self = one
    return one


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "x",
        b"x",
        [1, 2.0, (3, {4})],
        {"a": {"b": None}},
        module_function,
        Plain,
        len,
        np.arange(3),
        np.float32(1),
        torch.ones(3),
        torch.nn.Linear(2, 2),
        torch.Generator(),
        functools.partial(module_function, key=1),
        Plain(a=1).method,
        Slotted(1),
        Reduced(),
        Data([1]),
        Pair(1, 2),
        OrderedDict(a=1),
        cycle(),
        range(10**12),
        list(range(20_000)),
        multiprocessing.get_context("spawn"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_suspected_without_reason(value):
    assert unpicklable(value, "x") == ""


def test_what_multiprocessing_takes_only_while_it_starts_a_process_is_not_suspected():
    """Locks and values of multiprocessing, which plain pickle refuses."""
    context = multiprocessing.get_context("spawn")
    for value in (context.Value("i", 1), context.Lock(), context.Queue()):
        assert unpicklable(Plain(shared=value), "x") == ""


def test_what_is_registered_with_multiprocessing_is_not_suspected():
    class Registered:
        def __reduce__(self):
            raise TypeError("not this way")

    assert "not this way" in unpicklable(Registered(), "x")
    ForkingPickler.register(Registered, lambda value: (int, ()))
    try:
        assert unpicklable(Registered(), "x") == ""
    finally:
        del ForkingPickler._extra_reducers[Registered]

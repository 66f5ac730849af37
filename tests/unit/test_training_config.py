"""Signatures of configurations: equal ones in every process, different ones for everything that shapes a training."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap
import types
import uuid
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stateful_pipes.training.config import differences, signature_of

Pair = collections.namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(str, enum.Enum):  # noqa: UP042  # whose text is not its value
    A = "a"


class Bits(enum.IntFlag):
    X = 1
    Y = 2


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple = (0.9, 0.999)


@dataclasses.dataclass(slots=True)
class Slotted:
    lr: float = 0.1


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def nested(depth, value):
    return Plain(a=nested(depth - 1, value)) if depth > 1 else Plain(b=value)


def Defaults(value):
    """Another class each time, of one name."""
    return type("Defaults", (), {"rate": value, "ignored": print})


class Empty:
    pass


class Secret(str):
    def __repr__(self):
        return "'***'"


class Tagged(int):
    pass


class Fields:
    """Of entries, though no Mapping."""

    def __init__(self, **entries):
        self._entries = entries

    def keys(self):
        return self._entries.keys()

    def items(self):
        return self._entries.items()

    def __getitem__(self, key):
        return self._entries[key]


@functools.cache
def cached(x):
    return x


@functools.cache
def cached_as_well(x):
    return x


def function():
    pass


def flagged(*names):
    return functools.reduce(operator.or_, (Bits[name] for name in names))


def paths(saved, current):
    return [one.field for one in differences(signature_of(saved), signature_of(current))]


# No two of these are the same configuration.
APART = [
    (Plain(a=Plain(b=1)), Plain(a=Plain(b=2))),
    (nested(4, 1), nested(4, 2)),
    (Defaults(1)(), Defaults(2)()),
    (torch.nn.Sequential(torch.nn.Dropout(0.1)), torch.nn.Sequential(torch.nn.Dropout(0.2))),
    (torch.nn.Linear(2, 3), torch.nn.Linear(2, 4)),
    *(None, True, False, 1, 1.0, 0, 0.0, -0.0, 1j, "1", b"1", "None", "nan", float("nan"), float("inf"), 2**70, "", b""),
    *([], (), {}, set(), frozenset(), [1], (1,), {1}, frozenset({1}), {"a": 1}, {1: 1}, [True], [1.0], [[1]], [(1,)], [1, 1]),
    *({"a": {"b": 1}}, {"a.b": 1}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a[0]": 1}, {"a": [1]}, {"a": {0: 1}}, {"a": {"0": 1}}),
    *({"a": None}, {"a": {}}, {"a": []}, {"a": {"['b']": 1}}, {"a": {"b]": 1}}, {"config.a": 1}, {"": 1}, {True: 1}, {None: 1}),
    *({1.0: 1}, {"1": 1}, {(1, 2): 1}, {(2, 1): 1}, {(1, 2): 1, (2, 1): 2}, {(1, 2): 2, (2, 1): 1}, {b"a": 1}, {Colour.RED: 1}),
    *({frozenset({1, 2}): 1}, {frozenset({1, 3}): 1}, {torch.float32: 1}, {Mode.A: 1}, {"Mode": {"A": 1}}, {Tagged(1): 1}),
    *({(1, 2), (3, 4)}, {(1, 4), (3, 2)}, {frozenset({1, 2}), frozenset({3})}, {frozenset({1}), frozenset({2, 3})}),
    *([{"a": 1}] * 1, [{"b": 1}], [{"a": 1}] * 201, [{"b": 1}] * 201, [[1, 2], [3]] * 101, [[1], [2, 3]] * 101, list(range(300))),
    *([*range(299), 300], "x" * 300, "x" * 299 + "y", "x" * 301, ["x" * 300], range(3), range(4), slice(1), slice(2)),
    *(Colour.RED, Colour.BLUE, Colour, Level.LOW, Level.HIGH, Mode.A, Bits.X, flagged("X", "Y"), Bits.Y, Tagged(1), Tagged(2)),
    *(Secret("a"), Secret("b"), pathlib.Path("a"), pathlib.Path("b"), uuid.UUID(int=1), uuid.UUID(int=2), re.compile("a")),
    *(re.compile("b"), re.compile("a", re.IGNORECASE), datetime.timedelta(1), datetime.timedelta(2), datetime.date(2020, 1, 1)),
    *(
        decimal.Decimal("0.1"),
        decimal.Decimal("0.10"),
        fractions.Fraction(1, 3),
        fractions.Fraction(2, 3),
        Ellipsis,
        bytearray(b"1"),
    ),
    *(torch.float32, torch.float16, torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1), torch.strided),
    *(
        torch.channels_last,
        torch.Size([1]),
        np.dtype("f4"),
        np.dtype(">f4"),
        np.float32(1),
        np.float64(1),
        np.int64(1),
        np.bool_(True),
    ),
    *(np.datetime64(1, "s"), np.datetime64(1, "m"), np.str_("a"), np.array(1.0), np.array([1.0]), np.array([1.0], "f4")),
    *(np.array([0.0]), np.array([-0.0]), np.arange(4).reshape(2, 2), np.arange(4).reshape(4), np.array([[0, 2], [1, 3]])),
    *(np.array([1, "a"], object), np.array([1, "b"], object), np.zeros((0, 2)), np.array([(1, 2.0)], "i4,f4"), np.array(["a"])),
    *(torch.tensor(1.0), torch.tensor([1.0]), torch.tensor([1]), torch.tensor([True]), torch.tensor([1.0], dtype=torch.float64)),
    *(torch.tensor([0.0]), torch.tensor([-0.0]), torch.zeros(0, 2), torch.zeros(2, 0), torch.tensor([1j]), torch.tensor([-1j])),
    *(
        torch.tensor([1.0]).bfloat16(),
        torch.ones(2).to(torch.float8_e5m2),
        torch.eye(2),
        torch.eye(2) * 2,
        torch.empty(3, device="meta"),
    ),
    *(torch.empty(4, device="meta"), torch.nn.UninitializedParameter(), torch.ones(1, dtype=torch.uint16)),
    *(
        function,
        flagged,
        len,
        max,
        str.lower,
        str.upper,
        "a".join,
        "a".split,
        cached,
        cached_as_well,
        np.add,
        np.multiply,
        torch.relu,
    ),
    *(torch.nn.Linear, torch.nn.ReLU, Empty, Empty(), Plain().__init__, os, re, operator.itemgetter(1), operator.itemgetter(2)),
    *(functools.partial(function), functools.partial(function, 1), functools.partial(function, a=1), functools.partial(flagged)),
    *(Optimizer(), Optimizer(0.2), Optimizer(0.1, [0.9, 0.999]), Slotted(), Slotted(0.2), Pair(1, 2), Pair(2, 1)),
    *(
        Plain(a=1),
        Plain(a=2),
        Plain(b=1),
        Plain(a=[1]),
        Plain(a={"b": 2}),
        types.SimpleNamespace(a=1),
        types.SimpleNamespace(a=2),
    ),
    *(argparse.Namespace(a=1), argparse.Namespace(**{"a.b": 1}), argparse.Namespace(a=argparse.Namespace(b=1))),
    *(collections.deque([1]), {"a": 1}.values(), {"a": 2}.values(), Fields(a=3), torch.nn.ReLU(), torch.nn.ReLU(inplace=True)),
    *(random.Random(1), random.Random(2), np.random.default_rng(1), np.random.default_rng(2), np.random.RandomState(1)),
    *(torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), np.random.SeedSequence(1), np.random.SeedSequence(2)),
    *(datetime.UTC, torch.finfo(torch.float16), torch.finfo(torch.float32), "generator in state 1", "mapping", "list"),
]


def test_no_two_share_a_signature():
    found = {}
    for number, value in enumerate(APART):
        signature = signature_of({"value": value})
        key = tuple(signature.items())
        assert key not in found, (value, APART[found[key]])
        found[key] = number
        assert all(type(path) is str and type(text) is str for path, text in signature.items())
        assert len(max(signature.values(), key=len)) < 250


def test_they_are_told_apart_in_one_another():
    for one, other in combinations(range(0, len(APART), 7), 2):
        saved, current = ({"x": [1, {"y": APART[number]}], "z": 0} for number in (one, other))
        found = paths(saved, current)
        assert found
        assert all(path.startswith("config.x[1].y") for path in found), found
        assert len(found) == len(set(found))


def test_in_a_pair_neither_hides_the_other():
    for one, other in zip(APART[::5], APART[3::5], strict=False):
        assert paths([one, other], [other, one])


LIKE = [
    (collections.OrderedDict(a=1), {"a": 1}),
    (types.MappingProxyType({"a": 1}), {"a": 1}),
    (Fields(a=1), {"a": 1}),
    (collections.ChainMap({"a": 1}), {"a": 1}),
    (Pair(1, 2), (1, 2)),
    (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    (torch.eye(2).to_sparse(), torch.eye(2)),
    (torch.eye(3).T, torch.eye(3)),
    (torch.arange(6).view(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
    (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j])),
    (np.arange(4).reshape(2, 2).T, np.array([[0, 2], [1, 3]])),
    (float("nan"), -float("nan")),
    ({1, 2, 3}, {3, 2, 1}),
    ({"a", ("b", 1), None}, {None, ("b", 1), "a"}),
    (pathlib.PurePosixPath("a"), pathlib.Path("a")),
    (torch.tensor(1.0, requires_grad=True), torch.tensor(1.0)),
    (Plain(a=1, _b=2), Plain(a=1, _b=3)),
    (dict(a=Empty()), dict(a=Empty())),
    (object(), object()),
    (lambda: 1, lambda: 2),
    ([object()] * 300, [object()] * 300),
    ({object(): 1}, {object(): 1}),
    (np.array([object()]), np.array([object()])),
    ({object()}, {object()}),
    (types.SimpleNamespace(a=object()), types.SimpleNamespace(a=object())),
    (operator.itemgetter(object()), operator.itemgetter(object())),
    ({"a": object()}.values(), {"a": object()}.values()),
    (torch.tensor([1 + 2j]).imag, torch.tensor([2.0])),
    (nested(5, 1), nested(5, 2)),  # an object that deep, by class
    (torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)),  # weights are not the configuration's
]


@pytest.mark.parametrize("number", range(len(LIKE)))
def test_what_does_not_count(number):
    one, other = LIKE[number]
    assert signature_of({"x": one}) == signature_of({"x": other})
    assert not paths({"x": one}, {"x": other})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors():
    one, other = (torch.quantize_per_tensor(torch.arange(3.0), scale, 0, torch.qint8) for scale in (0.5, 0.3))
    assert signature_of(one) != signature_of(other)
    assert signature_of(one) == signature_of(one.clone())


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0]), st.text("ab.[]'\" 0", max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text("ab.[]'\" 0", max_size=4), st.integers(0, 2), st.tuples(st.integers(0, 2))), inner, max_size=3
        ),
        st.frozensets(st.one_of(st.integers(0, 3), st.text("ab", max_size=2), st.tuples(st.integers(0, 1))), max_size=3),
    ),
    max_leaves=8,
)


def exactly(value):
    """What two values have to have in common to be the same configuration."""
    if isinstance(value, dict):
        return "dict", tuple((exactly(key), exactly(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(exactly, value))
    if isinstance(value, frozenset):
        return "set", frozenset(map(exactly, value))
    return type(value), repr(value)


@given(VALUES, VALUES)
@settings(max_examples=200)
def test_signatures_are_equal_where_values_are(one, other):
    equal = exactly(one) == exactly(other)
    saved, current = signature_of(one), signature_of(other)
    assert (list(saved.items()) == list(current.items())) is equal
    found = differences(saved, current)
    assert bool(found) is not equal
    assert len({difference.field for difference in found}) == len(found)
    assert not differences(saved, saved)


@given(VALUES, VALUES)
@settings(max_examples=100)
def test_entries_beside_one_another_keep_their_paths(one, other):
    """So that a name cannot pass for a path."""
    assert len(signature_of({"a": one, "b": other})) == 1 + len(signature_of(one)) + len(signature_of(other))


# Paths and order


def test_paths():
    config = {
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)},
        "model": Optimizer(),
        "layers": [{"size": 3}],
        "a b": 1,
        7: {None: 2},
        "class": 3,
    }
    assert signature_of(config) == {
        "config": "mapping",
        "config.optimizer": "mapping",
        "config.optimizer.lr": "0.1",
        "config.optimizer.betas": "tuple",
        "config.optimizer.betas[0]": "0.9",
        "config.optimizer.betas[1]": "0.99",
        "config.model": f"{__name__}.Optimizer",
        "config.model.lr": "0.1",
        "config.model.betas": "tuple",
        "config.model.betas[0]": "0.9",
        "config.model.betas[1]": "0.999",
        "config.layers": "list",
        "config.layers[0]": "mapping",
        "config.layers[0].size": "3",
        "config['a b']": "1",
        "config[7]": "mapping",
        "config[7][None]": "2",
        "config.class": "3",
    }
    assert list(signature_of(torch.bfloat16, "amp").items()) == [("amp", "torch.bfloat16")]


@pytest.mark.parametrize("make", [dict, Plain, types.SimpleNamespace, argparse.Namespace, collections.OrderedDict])
def test_load_is_left_out_at_the_first_level_only(make):
    def of(load, inner=1):
        return signature_of(make(a=1, load=load, b=make(load=inner)), "config", frozenset({"load"}))

    assert of("x") == of(None) == of(object()) == of([1, 2, {"a": 3}]) == of(0)
    assert not any("config.load" in path for path in of([1]))
    if make is not Plain:  # whose objects are compared by class
        assert of("x", 1) != of("x", 2)
    without = signature_of(make(a=1, b=make(load=1)), "config", frozenset({"load"}))
    assert list(of(1).items()) == list(without.items())


def test_load_in_a_dataclass():
    made = dataclasses.make_dataclass("Made", ["load", "lr"])
    first, other = (signature_of(made(load, 1), "config", frozenset({"load"})) for load in (1, 2))
    assert first == other
    assert "config.lr" in first
    assert "config[0]" in signature_of(["load"], "config", frozenset({"load"})), "an entry's name, not its value"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_order_of_keys(depth):
    saved, current = {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3, "b": 2}
    for _ in range(depth):
        saved, current = {"x": [0, saved]}, {"x": [0, current]}
    first, second = signature_of(saved), signature_of(current)
    assert first == second
    (found,) = differences(first, second)
    assert found.field == "config" + ".x[1]" * depth + ".b"
    assert "order" in str(found)


def test_the_order_of_keys_in_what_is_held_as_a_hash():
    assert paths([{"a": 1, "b": 2}] * 300, [{"b": 2, "a": 1}] * 300) == ["config"]
    assert paths({(("a", 1),): 1}, {(("a", 2),): 1})


def test_every_difference_is_named_once():
    saved = {"a": 1, "b": {"c": [1, 2, 3], "d": 4}, "e": {"f": {"g": 1, "h": [1]}}, "same": 1}
    current = {"a": 2, "b": {"c": [1, 5, 3, 6], "d": 4}, "same": 1, "i": {"j": {"k": 1}}}
    found = differences(signature_of(saved), signature_of(current))
    assert [(one.field, one.saved, one.current) for one in found] == [
        ("config.a", "1", "2"),
        ("config.b.c[1]", "2", "5"),
        ("config.e", "mapping", "missing"),
        ("config.b.c[3]", "missing", "6"),
        ("config.i", "missing", "mapping"),
    ]
    assert all("config." in str(one) and "training was started" in one.remedy for one in found)


def test_of_what_became_something_else_its_inside_is_not_named():
    assert paths({"optimizer": {"lr": 1, "x": {"y": 2}}}, {"optimizer": None}) == ["config.optimizer"]
    assert paths({"optimizer": None}, {"optimizer": {"lr": 1}}) == ["config.optimizer"]
    assert paths({"x": [1, 2]}, {"x": (1, 3)}) == ["config.x", "config.x[1]"], "but what is there in both"
    assert paths([], {"a": 1}) == ["config"]


def test_a_name_that_begins_another():
    assert paths({"a": 1, "ab": 2, "a.b": 3}, {}) == ["config.a", "config.ab", "config['a.b']"]
    assert paths({"a": {"b": 1}, "a.b": 1}, {"a.b": 1}) == ["config.a"]


def test_many_differences():
    saved = {f"a{number}": {"x": [number]} for number in range(1000)}
    current = {f"b{number}": {"x": [number]} for number in range(1000)}
    assert len(paths(saved, current)) == 2000


def test_keys_that_are_told_apart_by_their_addresses_alone():
    signature = signature_of({Empty(): [1], Empty(): [2], Empty(): 3})
    assert [text for path, text in signature.items() if path != "config"] == ["list", "1", "list", "2", "3"]


# Generators

GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one)),
    "python": (lambda: random.Random(1), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda one: one.random()),
    "numpy's older": (lambda: np.random.RandomState(1), lambda one: one.random()),
    "numpy's older, half a pair": (lambda: np.random.RandomState(1), lambda one: one.standard_normal()),
    "a bit generator": (lambda: np.random.SFC64(1), lambda one: one.random_raw()),
    "another": (lambda: np.random.MT19937(1), lambda one: one.random_raw()),
    "philox": (lambda: np.random.Philox(1), lambda one: one.random_raw()),
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("inside", [dict, Plain, lambda **entries: [entries]])
def test_generators(name, inside):
    make, draw = GENERATORS[name]
    advanced = make()
    draw(advanced)
    saved, fresh, moved = (signature_of({"data": inside(generator=one)}) for one in (make(), make(), advanced))
    assert saved == fresh
    (found,) = differences(saved, moved)
    assert found.field.endswith(".generator")
    assert "pass a fresh one" in found.remedy
    (found,) = differences(moved, saved)
    assert "pass a fresh one" in str(found)
    (found,) = differences(saved, signature_of({"data": inside(generator=None)}))
    assert "fresh" not in found.remedy


def test_a_generator_is_not_moved():
    for make, draw in GENERATORS.values():
        one, other = make(), make()
        signature_of({"generator": one})
        assert draw(one) == draw(other)


def test_the_systems_generator_has_no_state():
    assert signature_of([random.SystemRandom()]) == signature_of([random.SystemRandom()])


def test_a_sampler_with_a_generator():
    def of(drawn):
        generator = torch.Generator().manual_seed(1)
        torch.rand(drawn, generator=generator)
        return signature_of({"sampler": torch.utils.data.RandomSampler(range(5), generator=generator)})

    assert of(0) == of(0)
    (found,) = differences(of(0), of(1))
    assert found.field == "config.sampler.generator"


# What is large, endless or hides something


def test_cycles():
    def endless(number):
        made = {"a": number}
        made["self"] = made
        made["list"] = [made, [made]]
        return made

    assert signature_of(endless(1)) == signature_of(endless(1))
    assert paths(endless(1), endless(2)) == ["config.a"]
    knot = Plain(a=1)
    knot.me = [knot]
    assert signature_of(knot)["config.me[0]"] != "1"
    one = {"x": {"y": None}}
    one["x"]["y"] = one
    other = {"x": {"y": None}}
    other["x"]["y"] = other["x"]
    assert paths(one, other) == ["config.x.y"]


def test_what_is_there_twice_is_no_cycle():
    shared = {"a": 1}
    assert signature_of([shared, shared]) == signature_of([{"a": 1}, {"a": 1}])


def test_large_lists_are_held_as_a_hash():
    numbers = list(range(50_000))
    signature = signature_of({"x": numbers, "y": [numbers[:201]] * 3})
    assert len(signature) < 10
    assert signature["config.x"].startswith("list of 50000 ")
    assert paths({"x": numbers}, {"x": [*numbers[:-1], 0]}) == ["config.x"]
    assert paths({"x": numbers}, {"x": tuple(numbers)}) == ["config.x"]
    assert len(signature_of(list(range(200)))) == 201
    assert signature_of(list(range(201))).keys() == {"config"}


def test_objects_in_objects_end():
    class Chained:
        def __init__(self):
            self.public = 1

        @property
        def next(self):
            raise AssertionError("not an attribute")

    first, last = Chained(), Chained()
    first.other = [last]
    last.other = first
    found = signature_of(first)
    assert list(found) == [
        "config",
        "config.public",
        "config.other",
        *(f"config.other[0]{end}" for end in ("", ".public", ".other")),
    ]
    assert found["config.other[0].other"] == "the one 3 levels above"
    for _ in range(5):
        last.other = Chained()
        last = last.other
    deepest = "config.other[0].other.other.other"
    assert [path for path in signature_of(first) if path.startswith(deepest)] == [deepest]


@pytest.mark.parametrize("value", [Empty, os, function, len, Plain.__init__], ids=lambda one: one.__name__)
def test_what_holds_nothing_that_is_compared_is_refused(value):
    with pytest.raises(TypeError, match=r"config must hold its entries in .*, got"):
        signature_of(value)
    assert signature_of({"x": value})


def test_the_signature_is_taken_then():
    config = {"a": [1], "t": torch.zeros(2), "g": torch.Generator().manual_seed(1)}
    signature = signature_of(config)
    kept = dict(signature)
    config["a"].append(2)
    config["t"].fill_(1)
    torch.rand(1, generator=config["g"])
    assert signature == kept
    assert paths(config, config) == []
    assert [one.field for one in differences(signature, signature_of(config))] == ["config.t", "config.g", "config.a[1]"]


# Another process

IN_ANOTHER = """
    import collections, datetime, enum, functools, hashlib, json, pathlib, random
    import numpy as np, torch
    from stateful_pipes.training.config import signature_of

    class Own:
        def __init__(self):
            self.names = {"x", "y", "z"}
            self.handle = object()
            self.call = lambda: 1

    config = {
        "set": {"a", "b", "c", "d", "e", ("f", 1), frozenset({"g", "h", "i"}), None, 1.5},
        "keys": {frozenset({"a", "b", "c"}): 1},
        "values": {"a": {"p", "q", "r"}}.values(),
        "own": Own(), "object": object(), "objects": np.array([object(), {"s", "t", "u"}]),
        "many": [{"v", "w", "x"}] * 300, "partial": functools.partial(print, {"y", "z", "k"}),
        "generators": [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator().manual_seed(1)],
        "tensor": torch.arange(5.0), "function": len, "class": Own, "path": pathlib.Path("a"), "time": datetime.timedelta(1),
        "module": torch.nn.Linear(2, 2), "counter": collections.Counter("hello")
    }
    print(json.dumps(list(signature_of(config).items())))
"""


def test_another_process_finds_the_same():
    command = [sys.executable, "-c", textwrap.dedent(IN_ANOTHER)]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "12"]
    both = [subprocess.Popen(command, env=one, stdout=subprocess.PIPE, text=True) for one in environments]
    found = {one.communicate()[0] for one in both}
    assert [one.returncode for one in both] == [0, 0]
    assert len(found) == 1
    assert "0x" not in found.pop()

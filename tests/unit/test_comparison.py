"""What two nested values differ in, and where: nothing that differs is overlooked, and no copy raises a false alarm."""

from __future__ import annotations

import array
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import pathlib
import random
import re
import threading
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import cpu_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:.*itertools:DeprecationWarning"),
]

Pair = namedtuple("Pair", ["one", "two"])
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


class Thing:
    def __init__(self, *values, **attributes):
        if values:
            self.value = values[0]
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__private", "public")

    def __init__(self, private, public=0):
        self.__private = private
        self.public = public


class SlotsBelow(Slotted):
    __slots__ = ("one",)  # left empty in some


@dataclasses.dataclass(frozen=True)
class Record:
    one: object
    two: object = dataclasses.field(default=0, compare=False)


class Kind(enum.Enum):
    A = 1
    B = 2


class Tagged(torch.Tensor):
    def new_empty(self, *args, **kwargs):
        return super().new_empty(*args, **kwargs).as_subclass(Tagged)


class Stubborn(torch.Tensor):
    """Of which torch's functions give something else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "nothing that can be compared"


class Two(torch.Tensor):
    """Whose content is in two others."""

    @staticmethod
    def __new__(cls, one, two):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one, two):
        self.one, self.two = one, two

    def __repr__(self):
        return f"Two({self.one}, {self.two})"

    def __tensor_flatten__(self):
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Two(inner["one"], inner["two"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        one, two = ([getattr(arg, name) if isinstance(arg, Two) else arg for arg in args] for name in ("one", "two"))
        return Two(function(*one, **kwargs or {}), function(*two, **kwargs or {}))


class Broken:
    __hash__ = None

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __eq__(self, other):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


class BrokenKey:
    def __repr__(self):
        raise RuntimeError("no")


class Vague:
    """Equal to whatever it is compared with."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class Fresh(Sequence):
    """Whose items are made when they are looked at."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return [[self.value]][index]


def tagged(value, tag):
    made = torch.full((2,), float(value)).as_subclass(Tagged)
    made.tag = tag
    return made


def nan(payload):
    return torch.tensor([payload], dtype=torch.int32).view(torch.float32)


def looked_at(value, *looks):
    for look in looks:
        look(value)
    return value


def moved(iterator, steps):
    for _ in range(steps):
        next(iterator)
    return iterator


def gaussian(generator, draw):
    """One that has the second of a pair of numbers still to give."""
    getattr(generator, draw)(0.0, 1.0)
    return generator


def objects(*items):
    made = np.empty(len(items), dtype=object)
    made[:] = items
    return made


def records(*items):
    return np.array(list(items), dtype=[("name", object), ("size", "i4")])


def quantized(scale, zero=0):
    return torch.quantize_per_tensor(torch.arange(3) * scale, scale, zero, torch.qint8)


def per_channel(scale):
    return torch.quantize_per_channel(
        torch.ones(2, 2) * scale, torch.tensor([scale, 1]), torch.zeros(2, dtype=torch.long), 0, torch.qint8
    )


def sparse(value, row=0):
    return torch.sparse_coo_tensor([[row], [1]], [float(value)], (10**6, 10**6), check_invariants=True)


def tied(value, times):
    return [value] * times


def cycle(value):
    made = {"value": value}
    made["self"] = [made]
    return made


def trained(momentum=0.0):
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    return {parameter: torch.full((2,), momentum * number) for number, parameter in enumerate(parameters)}


ONE = Thing(1)
MATRIX = torch.arange(6.0).reshape(2, 3)
COMPLEX = torch.tensor([1 + 2j, 3 - 4j])

# Made once, a copy of it, and one made anew are all equal; one made with the other arguments differs at the path.
KINDS = {
    "int": (int, (1,), (2,), ""),
    "float": (float, (0.0,), (-0.0,), ""),
    "complex": (complex, (0.0, 0.0), (0.0, -0.0), ""),
    "str": (str, ("a",), ("b",), ""),
    "bytes": (bytes, (b"a",), (b"b",), ""),
    "bytearray": (bytearray, (b"a",), (b"b",), ""),
    "range": (range, (3,), (4,), ""),
    "slice": (slice, (3,), (4,), ""),
    "enum": (Kind, (1,), (2,), ""),
    "datetime": (datetime.datetime, (2020, 1, 1), (2020, 1, 2), ""),
    "decimal": (decimal.Decimal, ("nan",), ("1",), ""),
    "decimal of other digits": (decimal.Decimal, ("1.0",), ("1",), ".__reduce__()[1][0]"),
    "pattern": (re.compile, ("a",), ("b",), ""),
    "path": (pathlib.PurePosixPath, ("a",), ("b",), ""),
    "device": (torch.device, ("cpu",), ("cpu", 1), ""),
    "size": (torch.Size, ([1, 2],), ([1, 3],), "[1]"),
    "exception": (ValueError, ("a",), ("b",), ".__reduce__()[1][0]"),
    "list": (lambda *items: list(items), (1, [2]), (1, [3]), "[1][0]"),
    "a longer list": (lambda *items: list(items), (1, 2), (1, 2, 3), ""),
    "tuple": (lambda *items: items, (1, (2,)), (1, (3,)), "[1][0]"),
    "named tuple": (Pair, (1, [2]), (1, [3]), ".two[0]"),
    "deque": (deque, ([1, 2], 4), ([1, 3], 4), "[1]"),
    "deque of another bound": (deque, ([1], 4), ([1], 5), ".maxlen"),
    "dict": (dict, ({"a": [1]},), ({"a": [2]},), "['a'][0]"),
    "dict with another key": (dict, ({"a": 1},), ({"b": 1},), "['a']"),
    "dict with one more key": (dict, ({"a": 1},), ({"a": 1, "b": 1},), "['b']"),
    "dict with a key of another type": (dict, ({1: "a"},), ({True: "a"},), ("[1]", "[True]")),
    "dict with the key None": (dict, ({None: 1},), ({None: 2},), "[None]"),
    "dict by dtypes": (dict, ({torch.int8: 1},), ({torch.int8: 2},), "[torch.int8]"),
    "dict by tensors that look alike": (trained, (), (1.0,), "[key 1]"),
    "dict by objects": (lambda *all: {Thing(one): one for one in all}, (1, 2), (1, 3), "[key 1] itself.value"),
    "dict by keys that cannot be shown": (lambda value: {BrokenKey(): value}, (1,), (2,), "[key 0]"),
    "ordered dict": (OrderedDict, ({"a": 1, "b": 2},), ({"a": 1, "b": 3},), "['b']"),
    "ordered dict in another order": (OrderedDict, ({"a": 1, "b": 2},), ({"b": 2, "a": 1},), ""),
    "defaultdict": (defaultdict, (int, {"a": 1}), (int, {"a": 2}), "['a']"),
    "defaultdict of another default": (defaultdict, (int,), (list,), ".default_factory"),
    "counter": (Counter, ("aab",), ("abb",), "['a']"),
    "UserDict": (UserDict, ({"a": 1},), ({"a": 2},), "['a']"),
    "UserList": (UserList, ([1],), ([2],), ".data[0]"),
    "UserString": (UserString, ("a",), ("b",), ".data"),
    "sequence that makes its items": (lambda *all: [Fresh(one) for one in all], (1, 1, 1), (1, 1, 2), "[2].value"),
    "set": (set, ([1, "a"],), ([1, "b"],), ""),
    "frozenset": (frozenset, ([1, (2, 3)],), ([1, (2, 4)],), ""),
    "set of another type": (set, ([1],), ([True],), ""),
    "set of another zero": (set, ([0.0],), ([-0.0],), ""),
    "set of NaN": (lambda *all: {float(one) for one in all}, ("nan",), ("nan", "nan"), ""),
    "set of objects": (lambda *all: set(map(Thing, all)), (1, 1, 2), (1, 2, 2), ""),
    "set of records": (lambda *all: {Record(one) for one in all}, (1, 2), (1, 3), ""),
    "set in itself": (lambda value: tied_set(value), (1,), (2,), ""),
    "object": (Thing, ([1],), ([2],), ".value[0]"),
    "object with one attribute more": (Thing, (1,), (), ".value"),
    "slots": (Slotted, (1, [2]), (1, [3]), ".public[0]"),
    "private slots": (Slotted, (1,), (2,), "._Slotted__private"),
    "slots of the class above": (SlotsBelow, (1,), (2,), "._Slotted__private"),
    "dataclass": (Record, ([1],), ([2],), ".one[0]"),
    "dataclass, not compared by its ==": (Record, (1, 2), (1, 3), ".two"),
    "broken": (lambda *all: Broken(**dict.fromkeys(all, 1)), (), ("a",), ".a"),
    "broken with a value": (lambda value: Broken(a=value), (1,), (2,), ".a"),
    "equal to everything": (Vague, (1,), (2,), ".value"),
    "dict with attributes": (lambda value: OrderedDictWith(value), (1,), (2,), "._metadata"),
    "cycle": (cycle, (1,), (2,), "['value']"),
    "twice the same": (tied, (ONE, 2), (Thing(2), 2), "[0].value"),
    "bound method": (lambda value: Thing(value).__eq__.__self__.__init__, (1,), (2,), ".__self__.value"),
    "partial": (functools.partial, (print, 1), (print, 2), ".__reduce__()[2][1][0]"),
    "weak reference": (lambda value: weakref.ref(KEPT[value]), (1,), (2,), "().value"),
    "class": (lambda one: one, (int,), (float,), ""),
    "function": (lambda one: one, (cycle,), (tied,), ""),
    "built-in function": (lambda one: one, (torch.relu,), (torch.tanh,), ""),
    "lambda": (lambda one: [lambda: 1, lambda: 2][one], (0,), (1,), ""),
    "attribute of a function": (lambda value: function_with(value), (1,), (2,), ".calls"),
    "random.Random": (random.Random, (1,), (2,), ".getstate()[1][1]"),
    "its Gaussian": (
        lambda *draw: moved_by(random.Random(1), *draw),
        ("gauss", "normalvariate"),
        ("gauss",),
        ".getstate()[1][624]",
    ),
    "RandomState": (np.random.RandomState, (1,), (2,), ".get_state()['state']['key']"),
    "numpy's Generator": (np.random.default_rng, (1,), (2,), ".bit_generator.state['state']['state']"),
    "BitGenerator": (np.random.Philox, (1,), (2,), ".state['state']['key']"),
    "SeedSequence": (np.random.SeedSequence, (1,), (2,), ".__reduce__()[2][0]"),
    "torch's Generator": (lambda seed: torch.Generator().manual_seed(seed), (1,), (2,), ".get_state()"),
    "count": (itertools.count, (1,), (2,), ".__reduce__()[1][0]"),
    "iterator": (lambda steps: moved(iter([1, 2, 3]), steps), (1,), (2,), ".__reduce__()[2]"),
    "array.array": (array.array, ("d", [0.0]), ("d", [1.0]), ""),
    "array of another zero": (array.array, ("d", [0.0]), ("d", [-0.0]), ".__reduce__()[1][3]"),
    "tensor": (torch.tensor, ([1, 2],), ([1, 3],), ""),
    "tensor without dimensions": (torch.tensor, (1.0,), (2.0,), ""),
    "tensor without elements": (torch.zeros, (0, 2), (0, 3), ""),
    "tensor of another shape": (torch.zeros, (2, 3), (3, 2), ""),
    "parameter": (lambda value: torch.nn.Parameter(torch.tensor(value)), (1.0,), (2.0,), ""),
    "attribute of a tensor": (tagged, (1, "a"), (1, "b"), ".tag"),
    "tensor of another class": (tagged, (1, "a"), (2, "a"), ""),
    "tensor of two": (lambda value: Two(torch.zeros(2), torch.full((2,), value)), (1.0,), (2.0,), ".two"),
    "NaN": (nan, (0x7FC00000,), (0x7FC00001,), ""),
    "tensor of another zero": (torch.tensor, ([0.0],), ([-0.0],), ""),
    "conjugate": (lambda conj: COMPLEX.conj() if conj else COMPLEX, (True,), (False,), ""),
    "negative": (lambda conj: (COMPLEX.conj() if conj else COMPLEX).imag, (True,), (False,), ""),
    "one element of a column": (lambda row: MATRIX.T[:, row : row + 1][1:2], (0,), (1,), ""),
    "sparse": (sparse, (1,), (2,), "._values()"),
    "sparse elsewhere": (sparse, (1,), (1, 5), "._indices()"),
    "sparse in another layout": (lambda kind: MATRIX.to_sparse(layout=kind), (torch.sparse_csr,), (torch.sparse_coo,), ".layout"),
    "sparse rows": (lambda value: (MATRIX + value).to_sparse_csr(), (1,), (2,), ".values()"),
    "sparse columns": (lambda value: (MATRIX + value).to_sparse_csc(), (1,), (2,), ".values()"),
    "quantized": (quantized, (0.5,), (0.25,), ".q_scale()"),
    "quantized with another zero": (quantized, (0.5, 0), (0.5, 1), ".int_repr()"),
    "quantized by channel": (per_channel, (0.5,), (0.25,), ".q_per_channel_scales()"),
    "meta": (lambda *shape: torch.zeros(shape, device="meta"), (2,), (3,), ".shape[0]"),
    "module": (lambda value: seeded(value, torch.nn.Linear, 1, 1), (1,), (2,), "._parameters['weight']"),
    "array": (np.array, ([1, 2],), ([1, 3],), ""),
    "array of another order": (np.array, ([1], ">i4"), ([1], "<i4"), ""),
    "array without dimensions": (np.array, (1.0,), (2.0,), ""),
    "array without elements": (np.zeros, ((0, 2),), ((0, 3),), ""),
    "array of strings": (np.array, (["a", "b"],), (["a", "c"],), ""),
    "array of times": (np.array, (["2020-01-01"], "M8[D]"), (["NaT"], "M8[D]"), ""),
    "array of objects": (objects, ([1], "a", None), ([2], "a", None), "[0][0]"),
    "array of one object": (lambda value: np.array(Thing(value), dtype=object), (1,), (2,), "[].value"),
    "array of records": (records, (("a", 1), ([2], 2)), (("a", 1), ([3], 2)), "[1]['name'][0]"),
    "array of plain records": (np.array, ([(1, 2.0)], "i4, f8"), ([(1, -2.0)], "i4, f8"), ""),
    "scalar of an array": (np.float32, (0.0,), (-0.0,), ""),
    "masked array": (lambda mask: np.ma.array([1, 2], mask=mask), ([0, 1],), ([1, 0],), ""),
}
KEPT = {1: Thing(1), 2: Thing(2)}


class OrderedDictWith(OrderedDict):
    def __init__(self, metadata=None):
        super().__init__({"a": 1})
        self._metadata = metadata


def tied_set(value):
    made = Thing(value)
    made.all = {made}
    return made.all


def function_with(value):
    def function():
        pass

    function.calls = value
    return function


def moved_by(generator, *draws):
    for draw in draws:
        getattr(generator, draw)(0.0, 1.0)
    return generator


def seeded(seed, make, *args):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return make(*args)


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_is_equal(name):
    make, args, *_ = KINDS[name]
    made = make(*args)
    assert first_mismatch(cpu_state(made), cpu_state(made)) is None
    assert first_mismatch(made, make(*args)) is None, "one made anew is equal"


@pytest.mark.parametrize("name", KINDS)
def test_a_difference_is_found(name):
    make, args, others, path = KINDS[name]
    paths = path if isinstance(path, tuple) else (path,)
    one, other = make(*args), make(*others)
    for expected, found in ((one, other), (other, one)):
        for step in ("", "['state'][1].inner"):
            wrapped = [{"state": [0, Thing(inner=value)]} if step else value for value in (expected, found)]
            mismatch = first_mismatch(*wrapped)
            assert mismatch is not None
            assert mismatch.expected != mismatch.found or name == "NaN"
            assert {*paths, "['b']"} >= {mismatch.path.removeprefix(step)}, mismatch
            assert mismatch.path.startswith(step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype(dtype):
    size = torch.zeros((), dtype=dtype).element_size()
    for bit in range(8 * size if dtype is not torch.bool else 1):
        plain = torch.zeros(2, 3 * size, dtype=torch.uint8)
        changed = plain.clone()
        changed[1, 2 * size + bit // 8] = 1 << bit % 8
        one, other = plain.view(dtype), changed.view(dtype)
        assert first_mismatch(one, one.clone()) is None
        assert first_mismatch(other, other.clone()) is None
        mismatch = first_mismatch({"a": one}, {"a": other})
        assert mismatch.path == "['a']"
        assert mismatch.expected.endswith("at [1, 2], the first of 1 of 6 that differ")


def test_values_of_other_types_differ():
    values = [1, True, 1.0, 1 + 0j, "1", b"1", np.float64(1), np.int64(1), np.array(1), torch.tensor(1), decimal.Decimal(1)]
    values += [
        [1],
        (1,),
        deque([1]),
        {1},
        frozenset([1]),
        {0: 1},
        OrderedDict({0: 1}),
        None,
        Thing(1),
        torch.nn.Parameter(torch.ones(1)),
    ]
    for one, other in itertools.permutations(values, 2):
        mismatch = first_mismatch([one], [other])
        assert mismatch is not None
        assert mismatch.path == "[0]"


@pytest.mark.parametrize("one", [torch.zeros(2), np.zeros(2), np.float32(0)])
def test_a_dtype_of_the_same_bytes_differs(one):
    other = one.view(torch.int32) if isinstance(one, torch.Tensor) else one.view({4: np.int32, 8: np.int64}[one.itemsize])
    assert first_mismatch(one, other) is not None


@pytest.mark.parametrize(
    "make", [object, threading.Lock, Thing, Broken, lambda: lambda: 1], ids=["object", "lock", "empty", "broken", "lambda"]
)
def test_what_holds_nothing_is_equal(make):
    """Which is all that can be said of an object without attributes that another one is to stand for."""
    assert first_mismatch([make()], [make()]) is None


def test_places_are_in_each_tensors_own_order():
    column = MATRIX.T[1:]
    changed = column.clone()
    changed[0, 1] = -1
    assert "at [0, 1]" in str(first_mismatch(column, changed))
    assert first_mismatch(column, column.contiguous()) is None, "strides are no content"


def test_what_torch_functions_do_to_a_subclass_does_not_matter():
    one, same, other = (torch.full((2,), value).as_subclass(Stubborn) for value in (1, 1, 2))
    assert first_mismatch([one], [same]) is None
    assert str(first_mismatch([one], [other])) == "[0]: expected 1 at [0], the first of 2 of 2 that differ, found 2"


def test_gradients_of_no_matter_are_left_alone():
    one = torch.ones(2, requires_grad=True)
    assert first_mismatch(one * 2, torch.tensor([2.0, 2.0])) is None
    assert first_mismatch(one * 2, one * 3) is not None


@pytest.mark.parametrize("draw", ["gauss", "standard_normal"])
def test_a_gaussian_still_to_be_given_is_a_difference(draw):
    """The words are the same with it and without."""
    if draw == "gauss":
        one, other = gaussian(random.Random(1), "gauss"), gaussian(random.Random(1), "gauss")
        other.gauss_next = None
    else:
        one, other = moved_normal(), moved_normal()
        other.set_state(other.get_state()[:3])
    assert first_mismatch({"rng": one}, {"rng": other}).path.startswith("['rng'].get")


def moved_normal():
    made = np.random.RandomState(1)
    made.standard_normal()
    return made


def test_an_attribute_of_a_generators_subclass_is_seen():
    class Own(random.Random):
        pass

    one, other = Own(1), Own(1)
    other.calls = 1
    assert first_mismatch(one, other).path == ".calls"
    assert first_mismatch(random.SystemRandom(), random.SystemRandom()) is None


def test_the_order_of_a_set_is_none_of_its_content():
    one = {Record(number) for number in range(50)}
    other = {Record(number) for number in reversed(range(50))}
    assert first_mismatch(one, other) is None
    assert first_mismatch({9, 1}, {1, 9}) is None
    assert first_mismatch(set(map(str, range(10**4))), set(map(str, reversed(range(10**4))))) is None


def test_the_item_that_a_set_lacks_is_named():
    everything = set(range(1000))
    assert first_mismatch(everything, everything - {765})[1:] == ("765", "nothing")
    assert first_mismatch(everything - {765}, everything)[1:] == ("nothing more", "765")


def test_the_first_key_out_of_order_is_named():
    keys = list("abcd")
    mismatch = first_mismatch({"state": OrderedDict.fromkeys(keys)}, {"state": OrderedDict.fromkeys("acbd")})
    assert tuple(mismatch) == ("['state']", "['b'] as key 1", "['c']")
    assert first_mismatch(dict.fromkeys(keys), dict.fromkeys("acbd")) is None, "a plain dict's order is none of its content"


def test_the_order_of_attributes_is_none():
    one, other = OrderedDictWith(), OrderedDictWith()
    one.a, one.b = 1, 2
    other.b, other.a = 2, 1
    assert first_mismatch(one, other) is None


def test_an_order_that_differs_hides_no_difference():
    assert first_mismatch(OrderedDict(a=1, b=2), OrderedDict(b=3, a=1)).path == "['b']"


def test_what_stands_at_two_places_is_compared_with_both():
    shared = Thing(1)
    assert first_mismatch([shared, shared], [Thing(1), Thing(2)]).path == "[1].value"
    assert first_mismatch([Thing(1), Thing(2)], [shared, shared]).path == "[1].value"


def test_cycles_of_other_lengths_end():
    one = [1]
    one.append(one)
    other = [1, [1]]
    other[1].append(other)
    assert first_mismatch(one, other) is None
    other[1][0] = 2
    assert first_mismatch(one, other).path == "[1][0]"


def test_a_mismatch_is_one_short_line():
    mismatch = first_mismatch({"a": "x\n" * 500}, {"a": Broken()})
    assert str(mismatch).startswith("['a']: expected 'x\\nx")
    assert str(mismatch).endswith("..., found a value of type Broken")
    assert len(str(mismatch)) < 300
    assert "\n" not in str(first_mismatch(torch.nn.Linear(1, 1), 1))
    assert str(first_mismatch([1], [2])) == "[0]: expected 1, found 2"
    assert str(first_mismatch(torch.zeros(2), torch.zeros(3))) == (
        ": expected Tensor of torch.float32, shape (2,), found Tensor of torch.float32, shape (3,)"
    )


def test_what_a_path_has_cached_is_none_of_its_content():
    assert first_mismatch(looked_at(pathlib.PurePosixPath("a/b"), str, hash), pathlib.PurePosixPath("a/b")) is None


def test_comparing_changes_nothing():
    for make, args, *_ in KINDS.values():
        one, other, before = make(*args), make(*args), cpu_state(make(*args))
        first_mismatch(one, other)
        assert first_mismatch(before, cpu_state(one)) is None


# Random nested states.

few = settings(max_examples=settings.default.max_examples // 3)

NUMBERS = (
    st.integers() | st.floats() | st.complex_numbers() | st.booleans() | st.none() | st.text(max_size=3) | st.binary(max_size=3)
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    count = int(np.prod(shape)) if shape else 1
    size = torch.zeros((), dtype=dtype).element_size()
    data = draw(st.binary(min_size=count * size, max_size=count * size))
    if not data:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    flat = flat % 2 if dtype is torch.bool else flat
    made = flat.view(dtype).view(shape)
    return made.numpy() if draw(st.booleans()) and dtype in (torch.float32, torch.int64, torch.bool) else made


@st.composite
def containers(draw, inner):
    kind = draw(st.sampled_from(["list", "tuple", "deque", "dict", "ordered", "pair", "thing", "record"]))
    if kind == "pair":
        return Pair(draw(inner), draw(inner))
    if kind == "record":
        return Record(draw(inner), draw(inner))
    if kind in ("dict", "ordered", "thing"):
        keys = st.sampled_from("abc") if kind == "thing" else st.text(max_size=2) | st.integers(0, 9) | st.just((1, "a"))
        items = draw(st.dictionaries(keys, inner, max_size=3))
        return Thing(**items) if kind == "thing" else items if kind == "dict" else OrderedDict(items)
    return {"list": list, "tuple": tuple, "deque": deque}[kind](draw(st.lists(inner, max_size=3)))


STATES = st.recursive(NUMBERS | tensors(), containers, max_leaves=12)


def parts(state):
    """Its steps and what is there; None for a leaf."""
    if isinstance(state, (Thing, Record)):
        return {f".{name}": one for name, one in vars(state).items()}
    if isinstance(state, Pair):
        return {f".{name}": one for name, one in zip(state._fields, state, strict=True)}
    if isinstance(state, dict):
        return {f"[{key!r}]": one for key, one in state.items()}
    if isinstance(state, (list, tuple, deque)):
        return {f"[{number}]": one for number, one in enumerate(state)}
    return None


def leaves(state, path=""):
    inner = parts(state)
    return [path] if inner is None else [leaf for step, one in inner.items() for leaf in leaves(one, path + step)]


def changed(state, path, draw, here=""):
    """Another one, in which the leaf at the path is another."""
    inner = parts(state)
    if inner is None:
        return other_leaf(state, draw) if here == path else state
    items = [changed(one, path, draw, here + step) for step, one in inner.items()]
    if isinstance(state, (Pair, Record)):
        return type(state)(*items)
    if isinstance(state, Thing):
        return Thing(**dict(zip(vars(state), items, strict=True)))
    return type(state)(zip(state, items, strict=True) if isinstance(state, dict) else items)


def other_leaf(leaf, draw):
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return other_block(leaf, draw)
    if isinstance(leaf, float):
        return float(np.uint64(np.float64(leaf).view(np.uint64) ^ np.uint64(1 << draw(st.integers(0, 50)))).view(np.float64))
    if isinstance(leaf, (bool, type(None))):
        return {True: False, False: True, None: 0}[leaf]
    if isinstance(leaf, complex):
        return complex(other_leaf(leaf.real, draw), leaf.imag)
    return leaf + {int: 1, str: "a", bytes: b"a"}[type(leaf)]


def other_block(leaf, draw):
    made = leaf.clone() if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf.copy())
    if made.numel() == 0:
        made = made.new_empty([*made.shape, 1])
    else:
        flat = made.view(-1).view(torch.uint8)
        flat[draw(st.integers(0, len(flat) - 1))] ^= 1
    return made if isinstance(leaf, torch.Tensor) else made.numpy()


@few
@given(STATES)
def test_a_random_state_equals_its_copy(state):
    assert first_mismatch(state, cpu_state(state)) is None
    assert first_mismatch(cpu_state(state), copy.deepcopy(state)) is None


@few
@given(STATES.filter(leaves), st.data())
def test_the_leaf_that_was_changed_is_the_one_that_is_named(state, data):
    path = data.draw(st.sampled_from(leaves(state)))
    other = changed(state, path, data.draw)
    assert first_mismatch(cpu_state(state), other).path == path
    assert first_mismatch(other, cpu_state(state)).path == path

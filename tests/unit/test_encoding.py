"""A foreign node's state as JSON text: what goes in comes out, in value, type and bytes; what cannot is refused by name."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import struct

import numpy as np
import pytest
import torch

from stateful_pipes.encoding import decode, encode
from stateful_pipes.errors import StateEncodingError
from tests.streams import same

STRUCTURED = np.dtype([("id", "<i8"), ("box", "<f4", (2, 2)), ("tag", [("name", "S3"), ("u", "<U2")])])


def bits(value):
    return struct.pack("<d", value)


def round_trip(value):
    text = encode(value, "node")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return decode(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**100),
        "",
        "\x00 ü \ud800 \u2028",
        [],
        {},
        (),
        [1, [2, [3, []]]],
        (1, (2, (3, ())), [(4,)]),
        {"a": (1, 2), "b": [3, {"c": None}]},
        {1: "int", "1": "str", (1, "a"): "tuple", None: 0, 1.5: 0, b"k": 0},
        {True: 1, 2: 2},
        {"__stateful_pipes__": "tuple", "value": [1]},
        {"a": {"__stateful_pipes__": 3}},
        b"",
        b"\x00\xff",
        bytearray(b"\x00\xff"),
        random.Random(3).getstate(),
        np.random.PCG64(3).state,
        [None, True, 1, 1.0, "1"],
    ],
    ids=repr,
)
def test_plain_values(value):
    assert same(round_trip(value), value)


def test_order_of_keys():
    value = {"b": 1, "a": {2: 0, 1: 0}, "c": 3}
    assert list(round_trip(value)) == ["b", "a", "c"]
    assert list(round_trip(value)["a"]) == [2, 1]


@pytest.mark.parametrize("value", [0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan])
def test_floats_to_the_last_bit(value):
    found = round_trip([value])[0]
    assert type(found) is float
    assert bits(found) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-3],
        np.array([[math.nan, -0.0, math.inf]]),
        np.array(3, dtype=">u4"),
        np.zeros(0),
        np.zeros((0, 3), dtype=np.float16),
        np.zeros((2, 0)),
        np.array(["", "añb"]),
        np.array([b"a\x00b"]),
        np.array(["2020-01-01T00:00"], dtype="datetime64[ns]"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array([(b"abc", 1)], dtype=[("raw", "V3"), ("n", "u1")]),
        np.zeros((2, 1), dtype=STRUCTURED),
        np.zeros(0, dtype=STRUCTURED),
        np.zeros(2, dtype=np.dtype({"names": ["a", "b"], "formats": ["i1", "<f8"]}, align=True)),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_arrays(value):
    found = round_trip({"x": value})["x"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(math.nan),
        np.int64(-1),
        np.bool_(True),
        np.str_("añb"),
        np.bytes_(b"a\x00b"),
        np.datetime64("2020-01-01"),
        np.complex64(1 + 2j),
        np.zeros(1, dtype=STRUCTURED)[0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_scalars(value):
    found = round_trip((value,))[0]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b""), np.zeros(2, dtype="V0")], ids=repr)
def test_numpy_values_without_bytes(value):
    """A type of width 0 has no bytes at all to tell from."""
    found = round_trip(value)
    assert type(found) is type(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)


@pytest.mark.parametrize("state", [np.random.RandomState(3).get_state(), np.random.RandomState(3).get_state(legacy=False)])
def test_numpy_generator_state(state):
    assert same(round_trip(state), state)
    np.random.RandomState(0).set_state(round_trip(state))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.5, -0.0, math.nan], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0], dtype=torch.float8_e5m2),
        torch.tensor(3.0),
        torch.tensor(True),
        torch.zeros(0, 3, dtype=torch.int16),
        torch.zeros(2, 0, 5, dtype=torch.bfloat16),
        torch.tensor([]),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(10)[3::3],
        torch.arange(4.0).expand(3, 4),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.get_rng_state(),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_tensors(value):
    found = round_trip([value])[0]
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.is_contiguous()
    dense = [one.resolve_conj().resolve_neg().contiguous() for one in (found, value)]
    raw = [one.as_strided((one.numel(),), (1,)).view(torch.uint8) for one in dense if one.numel()]
    assert not raw or torch.equal(*raw)


def test_a_tensor_is_saved_without_the_rest_of_its_storage():
    assert len(encode(torch.zeros(10**6)[:1], "node")) < 200


def test_what_is_decoded_shares_nothing():
    value = {"x": [torch.zeros(2), np.zeros(2)]}
    text = encode(value, "node")
    first = decode(text)
    first["x"][0] += 1
    first["x"][1] += 1
    first["x"].append(0)
    assert same(decode(text), {"x": [torch.zeros(2), np.zeros(2)]})
    assert same(value, {"x": [torch.zeros(2), np.zeros(2)]})


def test_the_text_is_the_same_for_the_same_state():
    make = lambda: {"a": (1, torch.ones(2)), 2: np.ones(3)}  # noqa: E731
    assert encode(make(), "node") == encode(make(), "node")


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "one other")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        1j,
        range(3),
        object(),
        print,
        Colour.RED,
        Pair(1, 2),
        Text("a"),
        memoryview(b"a"),
        torch.Size([1]),
        torch.float32,
        torch.nn.Parameter(torch.ones(1)),
        torch.zeros(2).to_sparse(),
        np.zeros(2, dtype=object),
        np.zeros(2, dtype=[("a", object)]),
        torch.zeros(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_node_and_place(value):
    """Also a subclass, which would come back as something else."""
    with pytest.raises(StateEncodingError) as caught:
        encode({"a": [0, (value,)]}, "my_node")
    assert caught.value.node == "my_node"
    assert "state['a'][1][0]" in str(caught.value)
    assert type(value).__qualname__ in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
        np.ma.array([1, 2], mask=[0, 1]),
        type("Bytes", (bytes,), {})(b"a"),
        type("Array", (np.ndarray,), {})(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_never_comes_back_as_something_else(value):
    try:
        text = encode(value, "node")
    except StateEncodingError:
        return
    assert type(decode(text)) is type(value)


def test_a_key_that_json_cannot_hold_is_refused():
    with pytest.raises(StateEncodingError, match=r"key of state\['a'\] is a builtins\.frozenset"):
        encode({"a": {frozenset(): 1}}, "node")

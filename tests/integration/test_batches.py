"""What workers hand over is what `num_workers=0` gives: in value and type, writable, and the caller's for good."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from stateful_pipes import StatefulDataLoader
from tests.unit.test_slots import SIZE, maps_dev_shm, shrink


class Pair(NamedTuple):
    image: torch.Tensor
    label: Any


@dataclass
class Sample:
    image: torch.Tensor
    boxes: list[np.ndarray]
    name: str


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.empty(shape, dtype=dtype).random_(0, 2 if dtype is torch.bool else 100, generator=generator)


def structured() -> np.ndarray:
    made = np.zeros(5, dtype=[("id", "<i4"), ("box", "<f4", (2, 2)), ("name", "<U3")])
    made["id"], made["name"] = np.arange(5), "äbc"
    return made


BATCHES: dict[str, Any] = {
    "20 MB": lambda: numbers(5, 2**20),
    "just inside a packet": lambda: torch.arange(15_000, dtype=torch.uint8),
    "just outside a packet": lambda: torch.arange(17_000, dtype=torch.uint8),
    "2,000 small tensors": lambda: [numbers(i % 7 + 1) for i in range(2_000)],
    "3,000 empty tensors and arrays": lambda: [torch.empty(0), np.empty((0, 2))] * 1_500,
    "big and small": lambda: {"big": numbers(300, 300), "small": [numbers(2), numbers(1)]},
    "bfloat16": lambda: numbers(3, 4, dtype=torch.bfloat16),
    "float8": lambda: numbers(3, 4).to(torch.float8_e4m3fn),
    "bool": lambda: numbers(3, 4, dtype=torch.bool),
    "uint16": lambda: torch.arange(5).to(torch.uint16),
    "complex": lambda: torch.complex(numbers(3), numbers(3) + 1),
    "conjugate": lambda: torch.complex(numbers(3), numbers(3) + 1).conj(),
    "0-dim": lambda: [torch.tensor(3), torch.tensor(True), torch.tensor(2.5, dtype=torch.bfloat16)],
    "empty": lambda: [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.bool)],
    "transposed": lambda: numbers(4, 5).t(),
    "strided": lambda: numbers(4, 10)[:, ::3],
    "expanded": lambda: numbers(4, 1).expand(4, 1000),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a slice of something large": lambda: numbers(1000, 1000)[3, :5],
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(numbers(3), 0.1, 0, torch.quint8),
    "nested tensor": lambda: torch.nested.nested_tensor([numbers(2), numbers(3)]),
    "needs a gradient": lambda: numbers(3).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(numbers(3)),
    "one tensor twice": lambda: [numbers(3)] * 2,
    "strings and bytes": lambda: ["wörd\n", "\0", "", b"\0\xff", bytearray(b"abc"), "x" * 100_000, b"y" * 100_000],
    "numbers": lambda: [1, -(2**70), 2.5, float("inf"), 1 + 2j, True, None, ..., range(3), {1, 2}, frozenset({3})],
    "nested": lambda: {"a": [(numbers(2), {"b": (numbers(3), "c")})], ("key", 1): OrderedDict(x=numbers(1), y=None)},
    "namedtuple": lambda: Pair(numbers(2, 2), Pair(numbers(1), 3)),
    "dataclass": lambda: [Sample(numbers(2), [np.arange(3)], "first"), Sample(numbers(0), [], "second")],
    "arrays": lambda: [np.arange(6.0).reshape(2, 3), np.array(3), np.empty((0, 3)), np.float32(2.5), np.bool_(True)],
    "array orders": lambda: [np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(10)[::2], np.arange(6).reshape(2, 3).T],
    "array kinds": lambda: [
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([None, "a"]),
        np.arange(3, dtype=">i4"),
    ],
    "structured array": structured,
    "record array": lambda: structured().view(np.recarray),
    "read-only array": lambda: np.frombuffer(b"abcdefgh", dtype=np.uint8),
    "big array": lambda: np.arange(10**6).reshape(1000, 1000),
}


class Indices:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(make: Any, workers: int = 1, length: int = 1) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Indices(length), num_workers=workers, collate_fn=lambda indices: make())


def identical(one: Any, other: Any) -> bool:
    """Equal bit for bit and alike in every type within."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return alike(one, other) and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:
            return identical(one.tolist(), other.tolist())
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return all(identical(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("dtype", "layout", "device", "requires_grad", "is_nested"))


def bits(tensor: torch.Tensor) -> Any:
    """Shape and content of any kind of tensor, comparable with ==."""
    if tensor.is_nested:
        return [bits(part) for part in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        return tensor.shape, bits(tensor.coalesce().indices()), bits(tensor.coalesce().values())
    if tensor.layout is torch.sparse_csr:
        return tensor.shape, bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values())
    if tensor.is_quantized:
        return tensor.q_scale(), tensor.q_zero_point(), bits(tensor.int_repr())
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning", "ignore:Sparse CSR tensor support:UserWarning"
)
@pytest.mark.filterwarnings("ignore:.*(TypedStorage|quantiz).*", "ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_what_it_is_inline(kind):
    inline = next(iter(loader_of(BATCHES[kind], 0)))
    loader = loader_of(BATCHES[kind])
    found = next(iter(loader))
    loader.close()
    assert identical(found, inline)


def test_the_memory_format_is_kept():
    """A convolution over channels-last images would otherwise take another path, and longer."""
    loader = loader_of(BATCHES["channels last"])
    assert next(iter(loader)).is_contiguous(memory_format=torch.channels_last)
    loader.close()


def test_one_tensor_twice_is_still_one():
    loader = loader_of(BATCHES["one tensor twice"])
    one, other = next(iter(loader))
    assert one is other
    loader.close()


@pytest.mark.parametrize("size", [10, 100_000])
def test_batches_can_be_written_to_and_do_not_touch_each_other(size):
    loader = loader_of(lambda: (torch.zeros(size), np.zeros(size), {"a": torch.zeros(size)}), length=4)
    kept = list(loader)
    for number, (tensor, array, nested) in enumerate(kept, 1):
        tensor += number
        array += number
        nested["a"].fill_(number)
    for number, (tensor, array, nested) in enumerate(kept, 1):
        for part in (tensor, array, nested["a"]):
            assert (part == number).all()
    loader.close()


@pytest.mark.parametrize("size", [10, 5 * 2**20])
def test_batches_outlive_the_workers_and_the_loader(size):
    loader = StatefulDataLoader(Indices(6), num_workers=2, collate_fn=lambda indices: torch.full((size,), indices[0]))
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    kept.append(kept[0][3:7])
    loader.close()
    assert all((batch == index).all() for index, batch in enumerate(kept[:3]))
    del loader, iterator
    first = kept.pop(0)
    del first
    assert all((batch == index).all() for index, batch in enumerate(kept[:2], 1))
    assert (kept[2] == 0).all()


def test_a_saved_batch_takes_no_more_room_than_its_own():
    loader = loader_of(lambda: [torch.zeros(1000) for _ in range(50)])
    (batch,) = loader
    saved = io.BytesIO()
    torch.save(batch[0], saved)
    assert saved.tell() < 8000
    assert batch[0].untyped_storage().nbytes() == 4000
    loader.close()


def test_default_collate_gives_the_same_with_workers():
    def sample(index):
        return {"image": torch.full((3, 4), index), "label": index, "name": f"n{index}", "pair": (np.float32(index), [index])}

    class Samples(Indices):
        def __getitem__(self, index):
            return sample(index)

    inline = list(StatefulDataLoader(Samples(5), batch_size=2))
    loader = StatefulDataLoader(Samples(5), batch_size=2, num_workers=2)
    assert identical(list(loader), inline)
    loader.close()


class Chosen(Mapping):
    """A mapping of the user's own, which collate rebuilds by calling its class."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)

    def __eq__(self, other):
        return type(other) is Chosen and identical(self.items_, other.items_)


class Labelled(torch.Tensor):
    pass


def tensors_of(dtype, size):
    raw = torch.arange(size * dtype.itemsize).to(torch.uint8)
    return (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
# The sizes: in the packet, just above what is small, and above what a packet holds.
SCALES = (3, 5_000, 20_000)
SIZED: dict[str, Any] = {
    **{str(dtype): functools.partial(tensors_of, dtype) for dtype in DTYPES},
    "arrays": lambda n: [np.arange(n).astype(code) for code in "?bhilBHILefdFD"],
    "array kinds": lambda n: [
        *(np.zeros(n, dtype=[("a", "<i4"), ("b", "S3")]), np.array(["ab", "c"] * n), np.array([b"x"] * n)),
        *(np.array([None, "x"] * n), np.arange(n).astype("M8[s]"), np.arange(n).astype("m8[ms]")),
    ],
    "array forms": lambda n: [
        *(np.asfortranarray(np.arange(2 * n).reshape(2, n)), np.arange(2 * n)[::2], np.arange(2 * n).reshape(2, n).T),
        *(np.array(n), np.zeros((0, n)), np.zeros((n, 0)), np.broadcast_to(np.arange(n), (2, n))),
    ],
    "arrays that torch refuses": lambda n: [np.arange(n)[::-1], np.arange(n).astype(">i4")],
    "read-only": lambda n: [np.frombuffer(bytes(n), np.uint8), np.broadcast_to(np.float32(n), n)],
    "array subclasses": lambda n: [np.zeros(n, dtype=[("a", "<i4")]).view(np.recarray), np.ma.masked_less(np.arange(n), 2)],
    "tensor forms": lambda n: [
        *(torch.arange(2 * n)[::2], torch.arange(2 * n).view(2, n).T, torch.arange(n).expand(2, n)),
        *(torch.zeros(0, n), torch.zeros(n, 0), torch.tensor(n), torch.arange(n)[1:], torch.arange(n).view(1, 1, n, 1)),
        torch.arange(24 * n).view(2, 3, 4, n).to(memory_format=torch.channels_last),
        torch.arange(12 * n).view(2, 3, 1, 2, n).to(memory_format=torch.channels_last_3d),
    ],
    "gradients": lambda n: [torch.ones(n).requires_grad_(), torch.nn.Parameter(torch.ones(n)), torch.ones(n)],
    "lazy bits": lambda n: [torch.full((n,), 1 + 2j).conj(), torch.full((n,), 1 + 2j).conj().imag],
    "subclass": lambda n: torch.ones(n).as_subclass(Labelled),
    "sparse": lambda n: [torch.eye(min(n, 99)).to_sparse(), torch.eye(min(n, 99)).to_sparse_csr()],
    "mappings": lambda n: [
        *(OrderedDict(b=torch.arange(n), a="x"), defaultdict(list, {"k": [torch.arange(n)]}), Chosen({"x": torch.arange(n)})),
        {1: {"a": {None: (torch.arange(n), [])}}, (2, "b"): {}},
    ],
    "sequences": lambda n: [Pair(torch.arange(n), Pair([np.arange(n)], None)), (), [], ((torch.arange(n),),)],
    "dataclass": lambda n: Sample(torch.arange(n), [np.arange(n), np.arange(3)], "name"),
    "plain": lambda n: ["ä" * n, b"\0\xff" * n, bytearray(n), list(range(n)), None, True, -(2**80), 2.5, 1 + 2j, float("inf")],
    "one within another": lambda n: (lambda x: [x, x, x[1:], x.view(1, -1)])(torch.arange(n)),
    "many": lambda n: [torch.full((max(1, n // 50),), i) for i in range(200)],
}


class Sized:
    """Each kind in each size, as a batch that the data set has ready."""

    def __len__(self):
        return len(SIZED) * len(SCALES)

    def __getitem__(self, index):
        kind, scale = list(SIZED)[index // len(SCALES)], SCALES[index % len(SCALES)]
        return SIZED[kind](scale)


class Doubled(Sized):
    """The same kinds as samples for torch's collate, as far as it takes them; lists of the others."""

    def __len__(self):
        return 2 * super().__len__()

    def __getitem__(self, index):
        return super().__getitem__(index // 2)


def untouched(batch):
    return batch


def collated_or_not(samples):
    try:
        return default_collate(samples)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return samples, type(error).__name__


def layouts(value):
    """How each tensor and array in a structure lies in memory, as far as a copy can keep it."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return []
        dense = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
        steps = [stride for stride, size in dense]
        expected = [int(np.prod([size for _, size in dense[:i]])) for i in range(len(dense))]
        if value.numel() and steps != expected:
            return ["not dense"]
        return [
            tuple(stride if size > 1 and value.numel() else 0 for stride, size in zip(value.stride(), value.shape, strict=True))
        ]
    if isinstance(value, np.ndarray):
        flags = value.flags
        return [(flags.writeable, flags.f_contiguous, flags.c_contiguous)] if flags.forc else ["not dense"]
    if is_dataclass(value):
        return [one for field in fields(value) for one in layouts(getattr(value, field.name))]
    if isinstance(value, Mapping):
        return [one for part in value.values() for one in layouts(part)]
    return [one for part in value for one in layouts(part)] if isinstance(value, (list, tuple)) else []


def as_inline(one, other):
    """Identical, and wherever the inline tensor or array is dense, in the same memory format."""
    pairs = list(zip(layouts(one), layouts(other), strict=True))
    return identical(one, other) and all(x == y for x, y in pairs if y != "not dense")


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:The given NumPy array is not writable", "ignore:ComplexHalf"
)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    "settings_",
    [
        {"dataset": Sized(), "batch_size": None, "collate_fn": untouched},
        {"dataset": Doubled(), "batch_size": 2, "collate_fn": collated_or_not},
    ],
    ids=["ready", "collated"],
)
def test_every_structure_in_every_size(method, settings_):
    inline = StatefulDataLoader(**settings_)
    loader = StatefulDataLoader(**settings_, num_workers=2, multiprocessing_context=method)
    kinds = [(kind, scale) for kind in SIZED for scale in SCALES]
    # None is held: with all slots taken, the batches would be made without one.
    same = [as_inline(one, other) for one, other in zip(loader, inline, strict=True)]
    loader.close()
    assert [kind for kind, is_same in zip(kinds, same, strict=True) if not is_same] == []


LEAVES = st.one_of(
    st.tuples(
        st.sampled_from(["tensor", "array", "bytes"]),
        st.sampled_from(
            [0, 1, 1000, 4095, 4096, 4097, 8191, 16_000, 16_400, SIZE // 2, SIZE - 64, SIZE - 1, SIZE, SIZE + 1, 100_000]
        ),
        st.sampled_from([torch.uint8, torch.float32, torch.int64, torch.bfloat16]),
    ),
    st.tuples(st.sampled_from(["text", "number", "none"]), st.integers(0, 99), st.none()),
)
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, max_size=4), st.none()),
        st.tuples(st.just("dict"), st.dictionaries(st.text(max_size=3), inner, max_size=4), st.none()),
        st.tuples(st.just("pair"), st.tuples(inner, inner), st.none()),
    ),
    max_leaves=12,
)


def built(structure, salt):
    kind, value, dtype = structure
    if kind in ("tensor", "array", "bytes"):
        raw = np.arange(salt, salt + value, dtype=np.uint32).astype(np.uint8)
        if kind == "bytes":
            return raw.tobytes()
        if kind == "array":
            return raw
        raw = raw[: value // dtype.itemsize * dtype.itemsize]
        return torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
    if kind == "list":
        return [built(part, salt + 1) for part in value]
    if kind == "dict":
        return {key: built(part, salt + 1) for key, part in value.items()}
    if kind == "pair":
        return Pair(*(built(part, salt + 1) for part in value))
    return {"text": str(value), "number": value, "none": None}[kind]


class Built:
    def __init__(self, structures):
        self.structures = structures

    def __len__(self):
        return 2 * len(self.structures)

    def __getitem__(self, index):
        return built(self.structures[index // 2], index)


@given(structures=st.lists(STRUCTURES, min_size=30, max_size=60), held=st.integers(0, 10))
@settings(max_examples=max(5, settings().max_examples // 40))
def test_random_structures_around_every_threshold(structures, held):
    dataset = Built(structures)
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        inline = StatefulDataLoader(dataset, batch_size=2, collate_fn=collated_or_not)
        loader = StatefulDataLoader(
            dataset, batch_size=2, collate_fn=collated_or_not, num_workers=2, multiprocessing_context="fork"
        )
        kept = []
        for one, other in zip(loader, inline, strict=True):
            kept = [*kept, (one, other)][-held - 1 :]
            assert all(as_inline(one, other) for one, other in kept)
        loader.close()
        assert all(as_inline(one, other) for one, other in kept)


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|quantiz).*")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_is_larger_than_a_slot(monkeypatch, batch):
    shrink(monkeypatch)
    makes = (lambda index: torch.full((SIZE,), index), lambda index: [torch.full((SIZE // 16,), index)] * 5)
    for make in makes:
        loader = StatefulDataLoader(Made(make, 12), batch, num_workers=2, multiprocessing_context="fork")
        assert identical(list(loader), list(StatefulDataLoader(Made(make, 12), batch)))
        loader.close()


@pytest.mark.full
def test_a_batch_of_more_than_a_gigabyte():
    loader = StatefulDataLoader(Made(lambda index: torch.full((2**29 + 100,), index, dtype=torch.uint8), 4), 2, num_workers=1)
    for number, batch in enumerate(loader):
        assert batch.shape == (2, 2**29 + 100)
        for more, row in enumerate(batch):
            assert row.min() == row.max() == 2 * number + more
        del batch, row
    loader.close()


class Made(Indices):
    """What `make` makes of each index."""

    def __init__(self, make, length):
        super().__init__(length)
        self.make = make

    def __getitem__(self, index):
        return self.make(index)


def rows(index):
    return torch.full((3000,), float(index))


def batch_of(number):
    return torch.stack([rows(2 * number), rows(2 * number + 1)])


def rows_loader(length, **settings_):
    options = {"num_workers": 2, "multiprocessing_context": "fork", **settings_}
    return StatefulDataLoader(Made(rows, 2 * length), 2, **options)


@pytest.mark.parametrize(
    "hold",
    [
        lambda batch: batch,
        lambda batch: batch[1],
        lambda batch: batch[0, 5:9],
        lambda batch: batch.numpy(),
        lambda batch: batch.T.numpy()[7:11],
        lambda batch: batch.untyped_storage(),
        lambda batch: batch.view(torch.uint8),
        lambda batch: torch.utils.dlpack.from_dlpack(batch),
        lambda batch: memoryview(batch.numpy()),
        lambda batch: batch.unbind(),
        lambda batch: torch.nn.Parameter(batch),
    ],
    ids=["batch", "row", "part", "array", "part of it", "storage", "bytes", "dlpack", "memoryview", "rows", "parameter"],
)
def test_what_is_held_of_a_batch_stays_as_it_is(hold):
    def content(held):
        return [bytes(part.detach().contiguous().view(torch.uint8).numpy()) if isinstance(part, torch.Tensor) else bytes(part)
                for part in (held if isinstance(held, tuple) else (held,))]  # fmt: skip

    loader = rows_loader(110)
    iterator = iter(loader)
    held = [hold(next(iterator)) for _ in range(3)]
    expected = [content(hold(batch_of(number))) for number in range(3)]
    for batch in iterator:
        batch.fill_(-1)
    assert [content(one) for one in held] == expected
    loader.close()
    assert [content(one) for one in held] == expected
    del loader, iterator, batch
    gc.collect()
    again = rows_loader(20)
    assert len(list(again)) == 20
    again.close()
    assert [content(one) for one in held] == expected


def test_thirty_batches_at_once():
    loader = rows_loader(60)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(30)]
    rest = list(iterator)
    loader.close()
    assert identical([*held, *rest], [batch_of(number) for number in range(60)])


def test_writing_into_a_batch_changes_nothing_else():
    dataset = Made(functools.partial(torch.Tensor.__getitem__, torch.arange(60.0).repeat_interleave(3000).view(60, 3000)), 60)
    before = [dataset[index].clone() for index in range(60)]
    for _ in range(2):
        loader = StatefulDataLoader(dataset, 2, num_workers=2, multiprocessing_context="fork")
        kept = []
        for number, batch in enumerate(loader):
            assert identical(batch, batch_of(number))
            batch.neg_()
            kept.append(batch)
        assert identical(kept, [-batch_of(number) for number in range(30)])
        loader.close()
    assert identical([dataset[index] for index in range(60)], before)


@pytest.mark.parametrize(
    "work",
    [
        lambda batch: batch.share_memory_(),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        copy.deepcopy,
        copy.copy,
        lambda batch: torch.from_numpy(batch.numpy().copy()),
        lambda batch: torch.load(saved(batch)),
        lambda batch: batch.clone().detach_(),
        lambda batch: batch.detach_(),
        lambda batch: batch.requires_grad_().mul(2).detach() / 2,
        lambda batch: batch.double().float(),
        lambda batch: batch.add_(1).sub_(1),
        lambda batch: torch.from_dlpack(batch),
        lambda batch: batch.t_().t_(),
    ],
)
def test_a_batch_does_what_any_tensor_does(work):
    loader = rows_loader(30)
    found = []
    for batch in loader:
        found.append(work(batch))
        del batch
    loader.close()
    assert identical(found, [batch_of(number) for number in range(30)])


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_saved_tensor_of_a_collated_batch_is_that_tensor_alone():
    loader = StatefulDataLoader(Made(lambda index: {"x": rows(index), "y": rows(index), "z": index}, 2), 2, num_workers=1)
    (batch,) = loader
    loader.close()
    assert all(len(saved(part).getvalue()) < part.nbytes + 2500 for part in batch.values())


def add_one(received, answers):
    answers.put((received.get() + 1).numpy())  # a tensor would need this process for longer


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_batch_can_be_sent_to_another_process(method):
    loader = rows_loader(20)
    iterator = iter(loader)
    batch = next(iterator)
    context = torch.multiprocessing.get_context(method)
    to, back = context.Queue(), context.Queue()
    process = context.Process(target=add_one, args=(to, back))
    process.start()
    to.put(batch)
    answer = torch.from_numpy(back.get())
    process.join()
    rest = list(iterator)
    loader.close()
    assert identical(answer, batch_of(0) + 1)
    assert identical([batch, *rest], [batch_of(number) for number in range(20)])


class Cache:
    """A collate function that keeps every batch and hands it out again in the next epoch."""

    def __init__(self, way):
        self.way, self.kept = way, {}

    def __call__(self, samples):
        key = float(samples[0][0])
        if key not in self.kept:
            batch = default_collate(samples)
            self.kept[key] = self.way(batch)
            return batch, 0
        kept = self.kept[key]
        return (torch.from_numpy(kept) if isinstance(kept, np.ndarray) else kept), 1


@pytest.mark.parametrize("way", [lambda batch: batch, lambda batch: batch.numpy(), lambda batch: batch.view(2, 3000)])
def test_a_batch_that_the_worker_keeps_is_safe_on_both_sides(way):
    loader = StatefulDataLoader(Made(rows, 24), 2, collate_fn=Cache(way), num_workers=1, multiprocessing_context="fork")
    for epoch in range(3):
        for number, (batch, cached) in enumerate(loader):
            assert cached == (epoch > 0)
            assert identical(batch, batch_of(number))
            batch.fill_(-1)
    loader.close()


PREVIOUS: list[Any] = []


@functools.lru_cache(maxsize=3)
def remembered(number):
    return default_collate([rows(2 * number), rows(2 * number + 1)])


def of_two(samples):
    """A batch and the one before it, which a global list still holds."""
    PREVIOUS.append(default_collate(samples))
    return PREVIOUS[-2:], remembered(int(samples[0][0]) // 2)


def test_a_batch_in_a_global_list_and_in_an_lru_cache():
    loader = StatefulDataLoader(Made(rows, 60), 2, collate_fn=of_two, num_workers=1, multiprocessing_context="fork")
    for number, (last, again) in enumerate(loader):
        assert identical(last, [batch_of(one) for one in (number - 1, number) if one >= 0])
        assert identical(again, batch_of(number))
        for part in (*last, again):
            part.fill_(-1)
    loader.close()


class Threads:
    """A collate function with a thread beside it, which collates whatever it is given and keeps it a while."""

    def __init__(self):
        self.lock, self.kept, self.wrong = threading.Lock(), [], []

    def beside(self, number):
        try:
            batch = default_collate([rows(number), rows(number + 1)])
            with self.lock:
                self.kept = [*self.kept[-2:], (number, batch)]
                for one, batch in self.kept:
                    if not identical(batch, torch.stack([rows(one), rows(one + 1)])):
                        self.wrong.append(one)
        except BaseException as error:
            self.wrong.append(repr(error))

    def __call__(self, samples):
        number = int(samples[0][0])
        threads = [threading.Thread(target=self.beside, args=(number + more,)) for more in range(3)]
        for thread in threads[:2]:
            thread.start()
        batch = default_collate(samples)
        for thread in threads[:2]:
            thread.join()
        threads[2].start()  # and this one is left to itself
        with self.lock:
            return batch, list(self.wrong)


def test_threads_that_collate_and_keep():
    loader = StatefulDataLoader(Made(rows, 120), 2, collate_fn=Threads(), num_workers=2, multiprocessing_context="fork")
    for number, (batch, wrong) in enumerate(loader):
        assert identical(batch, batch_of(number))
        assert wrong == []
    loader.close()


COLLATES = {
    "twice": lambda samples: [default_collate(samples), default_collate(samples)],
    "of batches": lambda samples: default_collate([default_collate(samples), default_collate(samples[::-1])]),
    "of slices": lambda samples: [default_collate([sample[:1500] for sample in samples]), default_collate(samples)[:, 1500:]],
    "one twice": lambda samples: [default_collate(samples)] * 2,
    "a view of it": lambda samples: (lambda batch: [batch, batch.view(-1), batch[0], batch[:, ::2], batch.T])(
        default_collate(samples)
    ),
    "arrays": lambda samples: default_collate(samples).numpy(),
    "of arrays": lambda samples: default_collate([sample.numpy() for sample in samples]),
    "changed": lambda samples: default_collate(samples).add_(1).mul_(2),
    "concatenated": lambda samples: torch.cat([default_collate(samples), torch.zeros(1, 3000)]),
    "swapped": lambda samples: {"a": default_collate(samples).flip(0), "b": default_collate(samples[:1])},
    "collated and dropped": lambda samples: (default_collate(samples), default_collate(samples))[1],
    "a sample itself": lambda samples: samples[0],
    "the samples": lambda samples: samples,
    "without torch": lambda samples: np.stack([sample.numpy() for sample in samples]),
}


@pytest.mark.parametrize("kind", COLLATES)
def test_collate_functions_that_call_torch_s(kind):
    inline = list(StatefulDataLoader(Made(rows, 40), 2, collate_fn=COLLATES[kind]))
    loader = StatefulDataLoader(Made(rows, 40), 2, collate_fn=COLLATES[kind], num_workers=2, multiprocessing_context="fork")
    found = list(loader)
    loader.close()
    assert all(as_inline(one, other) for one, other in zip(found, inline, strict=True))


def test_samples_from_mapped_files_and_shared_memory(tmp_path):
    array = np.memmap(tmp_path / "data", np.float32, "w+", shape=(40, 3000))
    array[:] = np.arange(40, dtype=np.float32)[:, None]
    shared = torch.from_numpy(np.array(array)).share_memory_()
    for collate_fn in (None, COLLATES["a sample itself"]):
        make = lambda index: [torch.from_numpy(array[index]), shared[index], array[index]]  # noqa: E731
        inline = list(StatefulDataLoader(Made(make, 40), 2, collate_fn=collate_fn))
        loader = StatefulDataLoader(Made(make, 40), 2, collate_fn=collate_fn, num_workers=2, multiprocessing_context="fork")
        found = list(loader)
        for batch in found:
            for part in batch:
                part[:] = -1
        loader.close()
        assert len(found) == 20
        assert (shared[:, 0] == torch.arange(40)).all()  # written to by nobody
        assert (array[:, 0] == np.arange(40)).all()
        loader = StatefulDataLoader(Made(make, 40), 2, collate_fn=collate_fn, num_workers=2, multiprocessing_context="fork")
        assert identical(list(loader), inline)
        loader.close()


def padded(batch, *, collate_fn_map=None):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


def test_the_user_s_own_entry_in_torch_s_table_counts_in_workers(monkeypatch):
    monkeypatch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, padded)
    dataset = Made(lambda index: torch.full((index + 1,), index), 12)
    loader = StatefulDataLoader(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert identical(list(loader), list(StatefulDataLoader(dataset, 3)))
    loader.close()


@pytest.mark.parametrize("kind", ["twice", "of arrays", "of batches"])
def test_collating_puts_nothing_into_dev_shm(kind):
    def watched(samples):
        made = COLLATES[kind](samples)
        return made, maps_dev_shm()

    before = maps_dev_shm()
    loader = rows_loader(40, collate_fn=watched)
    held = list(loader)
    assert all(mapped <= before for _, mapped in held)
    assert maps_dev_shm() <= before
    loader.close()


def limited(what, limit):
    """200 batches, all held, in a process of its own under a limit; 0 if each is right."""
    resource.setrlimit(what, (limit, limit))
    loader = rows_loader(200)
    held = list(loader)
    right = identical(held, [batch_of(number) for number in range(200)])
    loader.close()
    os._exit(0 if right and identical(held, [batch_of(number) for number in range(200)]) else 3)


@pytest.mark.parametrize(
    ("what", "limit"),
    [("RLIMIT_NOFILE", 64), ("RLIMIT_AS", 40 * 2**30), ("RLIMIT_FSIZE", 2**25)],
    ids=["descriptors", "address space", "file size"],
)
def test_under_a_limit(what, limit):
    script = f"import resource; from tests.integration.test_batches import limited; limited(resource.{what}, {limit})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_torch_s_own_loader_in_the_same_process_is_left_alone():
    """The hook is in our workers' table only."""
    loader = rows_loader(4)
    found = list(loader)
    theirs = list(DataLoader(Made(rows, 8), 2, num_workers=1, multiprocessing_context="fork"))
    loader.close()
    assert torch_collate.default_collate_fn_map[torch.Tensor] is torch_collate.collate_tensor_fn
    assert identical(found, theirs)

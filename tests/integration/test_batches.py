"""What workers hand over is what `num_workers=0` gives: in value and type, writable, and the caller's for good."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stateful_pipes import StatefulDataLoader


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

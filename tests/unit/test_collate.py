"""Torch's collate in a worker gives what it gives inline; what is large lies in the slot."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import default_collate

from stateful_pipes.prefetch import collate
from stateful_pipes.prefetch.slots import Arena
from tests.streams import same
from tests.unit.test_slots import maps_dev_shm


@pytest.fixture
def slot():
    arena = Arena(1)
    yield arena.open(arena.borrow())
    arena.close()


@pytest.fixture
def restored(monkeypatch):
    """Puts back what a worker does to its process for good."""
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", dict(torch_collate.default_collate_fn_map))
    # Torch's own collate looks whether it runs in a worker.
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", SimpleNamespace(id=0, num_workers=1))
    yield
    collate.into(None)


@pytest.fixture
def hooked(restored, slot):
    collate.install()
    collate.into(slot)
    return slot


class Subclass(torch.Tensor):
    pass


class Boxes:
    def __init__(self, tensor):
        self.tensor = tensor


class Pair(NamedTuple):
    image: Any
    label: Any


def inference(*shape):
    with torch.inference_mode():
        return torch.ones(shape)


N = 3000
SAMPLES = {
    "plain": lambda: [torch.arange(N), torch.arange(N) + 1],
    "images": lambda: [torch.ones(3, 40, 40), torch.zeros(3, 40, 40)],
    "channels last": lambda: [torch.ones(2, 3, 40, 41).to(memory_format=torch.channels_last)] * 2,
    "channels last of one pixel": lambda: [torch.ones(2, 2048, 1, 1).to(memory_format=torch.channels_last)] * 2,
    "channels last 3d": lambda: [torch.ones(2, 3, 10, 20, 21).to(memory_format=torch.channels_last_3d)] * 2,
    "one of two channels last": lambda: [
        torch.ones(2, 3, 40, 41),
        torch.ones(2, 3, 40, 41).to(memory_format=torch.channels_last),
    ],
    "height, width, channels turned": lambda: [torch.arange(4800).view(40, 40, 3).permute(2, 0, 1)] * 2,
    "transposed": lambda: [torch.arange(6000).view(60, 100).T] * 3,
    "strided": lambda: [torch.arange(9000)[::2]] * 2,
    "expanded": lambda: [torch.ones(1).expand(N), torch.ones(1).expand(N)],
    "conjugate": lambda: [torch.full((N,), 1 + 2j).conj(), torch.full((N,), 3j)],
    "negative": lambda: [torch.full((N,), 1 + 2j).conj().imag] * 2,
    "mixed types": lambda: [torch.ones(N, dtype=torch.int64), torch.ones(N, dtype=torch.float16)],
    "bool": lambda: [torch.ones(2 * N, dtype=torch.bool)] * 2,
    "bfloat16": lambda: [torch.ones(N, dtype=torch.bfloat16)] * 2,
    "float8": lambda: [torch.ones(2 * N).to(torch.float8_e4m3fn)] * 2,
    "complex": lambda: [torch.ones(N, dtype=torch.complex128)] * 2,
    "uint64": lambda: [torch.ones(N).to(torch.uint64)] * 2,
    "zero-size": lambda: [torch.ones(0, N)] * 2,
    "subclass": lambda: [torch.ones(N).as_subclass(Subclass)] * 2,
    "subclass second": lambda: [torch.ones(N), torch.ones(N).as_subclass(Subclass)],
    "inference": lambda: [inference(N), inference(N)],
    "gradients": lambda: [torch.ones(N, requires_grad=True), torch.zeros(N)],
    "parameters": lambda: [torch.nn.Parameter(torch.ones(N))] * 2,
    "meta": lambda: [torch.ones(N, device="meta")] * 2,
    "quantized": lambda: [torch.quantize_per_tensor(torch.ones(N), 0.1, 0, torch.quint8)] * 2,
    "arrays": lambda: [np.arange(N), np.arange(N)],
    "read-only memory": lambda: [torch.from_numpy(np.arange(N)), torch.arange(N)],
    "shared memory": lambda: [torch.arange(N).share_memory_()] * 2,
    "one sample": lambda: [torch.arange(N)],
    "numbers": lambda: list(range(N)),
    "nested": lambda: [{"a": Pair(torch.arange(N), 1), "b": [torch.ones(3), "x"], "c": (np.float32(1), b"y")}] * 2,
}


def parts(value):
    if isinstance(value, dict):
        return [part for one in value.values() for part in parts(one)]
    return [part for one in value for part in parts(one)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|quantiz).*")
@pytest.mark.parametrize("kind", SAMPLES)
def test_it_gives_what_torch_gives_inline(kind, restored, slot, monkeypatch):
    with monkeypatch.context() as inline:
        inline.setattr(torch.utils.data._utils.worker, "_worker_info", None)
        expected = default_collate(SAMPLES[kind]())
    collate.install()
    collate.into(slot)
    found = default_collate(SAMPLES[kind]())
    for one, other in zip(parts(found), parts(expected), strict=True):
        assert type(one) is type(other)
        if not isinstance(one, torch.Tensor):
            assert same(one, other)
            continue
        for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_quantized"):
            assert getattr(one, name) == getattr(other, name), name
        # A dimension of one has no stride that matters.
        assert one.squeeze().stride() == other.squeeze().stride()
        assert one.is_conj() == other.is_conj()
        if one.device.type == "cpu" and not one.is_quantized:
            raw = (
                [part.detach().contiguous().view(-1).view(torch.uint8) for part in (one, other)] if one.numel() else [one, other]
            )
            assert torch.equal(*raw)
        elif one.is_quantized:
            assert torch.equal(one.int_repr(), other.int_repr())


@pytest.mark.parametrize(
    "samples",
    [
        lambda: [torch.ones(N), torch.ones(N + 1)],
        lambda: [torch.ones(N), torch.ones(1)],
        lambda: [torch.ones(N), torch.ones(1, N)],
        lambda: [torch.ones(N), torch.ones(N, device="meta")],
        lambda: [torch.eye(60), torch.eye(60).to_sparse()],
        lambda: [torch.eye(60).to_sparse()] * 2,
        lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])] * 2,
    ],
    ids=["shapes", "one", "dimensions", "devices", "layouts", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_torch_refuses_is_refused_in_its_words(samples, restored, slot, monkeypatch):
    with monkeypatch.context() as inline:
        inline.setattr(torch.utils.data._utils.worker, "_worker_info", None)
        with pytest.raises(Exception, match=r".") as expected:
            default_collate(samples())
    collate.install()
    collate.into(slot)
    with pytest.raises(type(expected.value)) as found:
        default_collate(samples())
    assert str(found.value) == str(expected.value)


def test_what_is_large_lies_in_the_slot(hooked):
    batch = default_collate([{"x": torch.arange(N), "y": (torch.ones(2), np.arange(N))}] * 4)
    assert hooked.offset_of(batch["x"].data_ptr()) == 0
    assert hooked.offset_of(batch["y"][1].data_ptr()) > 0
    assert hooked.offset_of(batch["y"][0].data_ptr()) == -1


def test_without_a_slot_it_lies_elsewhere(hooked):
    collate.into(None)
    assert hooked.offset_of(default_collate([torch.arange(N)] * 2).data_ptr()) == -1


def test_when_the_slot_is_full_it_lies_elsewhere(hooked, monkeypatch):
    monkeypatch.setattr(type(hooked), "_reserve", lambda self, size: (-1, None))
    batch = default_collate([torch.arange(N)] * 2)
    assert hooked.offset_of(batch.data_ptr()) == -1
    assert same(batch, torch.stack([torch.arange(N)] * 2))


def test_nothing_is_in_dev_shm(hooked):
    before = maps_dev_shm()
    held = [default_collate([torch.arange(size)] * 2) for size in (3, N)]
    held.append(default_collate([torch.ones(N), torch.ones(N, dtype=torch.float64)]))
    collate.into(None)
    held.append(default_collate([torch.arange(N)] * 2))
    assert maps_dev_shm() <= before
    assert len(held) == 4


def test_batches_within_a_batch_and_twice_and_of_slices(hooked):
    once = default_collate([torch.arange(N)] * 2)
    twice = default_collate([once, once + 1])
    part = default_collate([once[0, 1:], once[1, :-1]])
    expected = torch.stack([torch.arange(N)] * 2)
    assert same(once, expected)
    assert same(twice, torch.stack([expected, expected + 1]))
    assert same(part, torch.stack([torch.arange(1, N), torch.arange(N - 1)]))


def test_threads_collate_into_one_slot_side_by_side(hooked):
    start = threading.Barrier(4)
    found: dict[int, list[torch.Tensor]] = {}

    def run(number):
        start.wait()
        found[number] = [default_collate([torch.full((N,), 100 * number + turn)] * 2) for turn in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [batch.unique().tolist() for batch in found[number]] == [[100 * number + turn] for turn in range(20)]
    assert all(hooked.offset_of(batch.data_ptr()) >= 0 for batches in found.values() for batch in batches)


def test_a_function_for_a_type_of_the_user_s_own(hooked):
    def boxes(batch, *, collate_fn_map=None):
        return torch_collate.collate([box.tensor for box in batch], collate_fn_map=collate_fn_map)

    torch_collate.default_collate_fn_map[Boxes] = boxes
    batch = default_collate([Boxes(torch.arange(N))] * 2)
    assert hooked.offset_of(batch.data_ptr()) == 0
    assert same(batch, torch.stack([torch.arange(N)] * 2))


@pytest.mark.usefixtures("restored")
def test_the_user_s_own_function_for_tensors_is_kept(slot):
    """Or batches would differ from those made inline, without a word."""

    def padded(batch, *, collate_fn_map=None):
        return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)

    torch_collate.default_collate_fn_map[torch.Tensor] = padded
    collate.install()
    collate.into(slot)
    assert default_collate([torch.ones(2), torch.ones(3)]).tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.usefixtures("hooked")
def test_with_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        assert same(default_collate([torch.ones(N)] * 2), torch.ones(2, N))
    finally:
        torch.use_deterministic_algorithms(False)


def test_samples_that_are_not_contiguous_import_no_compiler():
    """Seconds in each worker; in a process that has not imported it yet."""
    script = textwrap.dedent("""
        import sys, torch
        from stateful_pipes import StatefulDataLoader
        class Crops:
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.zeros(48, 48, 3)[4:44, 4:44], int("sympy" in sys.modules)
        with StatefulDataLoader(Crops(), 2, num_workers=1, multiprocessing_context="fork") as loader:
            print(sum(int(imported.sum()) for _, imported in loader))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"

"""Messages between processes: any object whole, large or small, and no descriptor or memory left behind."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import socket

import numpy as np
import pytest
import torch

from stateful_pipes.prefetch import channel
from stateful_pipes.prefetch.channel import open_channel, pack, receive, send
from tests.streams import same


@pytest.fixture
def ends():
    one, other = open_channel()
    with one, other:
        yield one, other


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:stateful_pipes" in line for line in file)


def through(ends, value):
    send(ends[0], pack(value))
    return receive(ends[1])


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and self.x == other.x


TENSORS = [
    torch.arange(6).reshape(2, 3),
    torch.tensor(3.0),
    torch.zeros(0),
    torch.zeros(0, 3, dtype=torch.int16),
    torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1.0, 2.0], dtype=torch.float8_e5m2),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j, 0]).conj().imag,
    torch.arange(12).reshape(3, 4).T,
    torch.arange(10)[3::3],
    torch.arange(4.0).expand(3, 4),
    torch.rand(3, 10)[:1, 0],
    torch.rand(9, 5)[::9, :1],
    torch.arange(50_000.0),
    torch.arange(50_000.0).reshape(100, 500)[:, ::3],
]


@pytest.mark.parametrize("value", TENSORS, ids=lambda value: f"{value.dtype}{list(value.shape)}{value.stride()}")
def test_tensors(ends, value):
    found = through(ends, {"x": (value, 1)})["x"][0]
    assert same(found, value.resolve_conj().resolve_neg())
    found.fill_(1)  # what arrives is the receiver's own
    assert found.untyped_storage().nbytes() == found.numel() * found.element_size()


def test_a_received_tensor_is_saved_without_its_neighbours(ends):
    tensors = through(ends, [torch.zeros(4), torch.zeros(5000), torch.zeros(4)])
    for tensor in (tensors[0], tensors[2]):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < 5000


@pytest.mark.parametrize("size", [1, 20_000])
def test_arrays(ends, size):
    structured = np.zeros(size, dtype=[("a", "<i4"), ("b", "S3")])
    value = [np.arange(size), np.asfortranarray(np.ones((size, 2))), np.zeros((0, size)), structured, np.array(["x", None])]
    found = through(ends, value)
    assert same(found[:4], value[:4])
    assert found[4].tolist() == ["x", None]
    found[0][:] = 1


def test_alignment(ends):
    for length in range(1, 40, 7):
        found = through(ends, [torch.zeros(length, dtype=torch.uint8), torch.zeros(3, dtype=torch.float64), np.zeros(3)])
        assert found[1].data_ptr() % 8 == 0
        assert found[2].ctypes.data % 8 == 0


@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        {"a": [1, "x", b"y", 2.5]},
        Point([torch.ones(2)][0].tolist()),
        b"x" * 100_000,
        "y" * 1_000_000,
        list(range(30_000)),
        (0, (0, (0, 64, 1), b"\0" * 512, 2**64 - 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_objects(ends, value):
    assert same(through(ends, value), value)


def test_special_tensors(ends):
    tracked = torch.ones(2, requires_grad=True)
    found = through(ends, [tracked, torch.nn.Parameter(torch.ones(3)), torch.eye(3).to_sparse()])
    assert found[0].requires_grad
    assert torch.equal(found[0], tracked)
    assert type(found[1]) is torch.nn.Parameter
    assert torch.equal(found[2].to_dense(), torch.eye(3))


def test_one_object_twice_stays_one(ends):
    tensor, array = torch.ones(3), np.ones(3)
    found = through(ends, [tensor, tensor, array, array])
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_a_read_only_array_stays_read_only(ends):
    array = np.arange(3)
    array.flags.writeable = False
    assert not through(ends, array).flags.writeable


@pytest.mark.parametrize("around", range(-300, 301, 20))
def test_around_the_largest_packet(ends, around):
    value = b"x" * (channel._PACKET + around)
    assert through(ends, value) == value


@pytest.mark.parametrize("count", [100, 255, 256, 257, 600, 3000])
def test_many_small_tensors(ends, count):
    value = [torch.tensor([number]) for number in range(count)]
    assert same(through(ends, value), value)
    assert same(through(ends, [torch.zeros(0)] * count), [torch.zeros(0)] * count)


def test_messages_keep_their_order_and_their_borders(ends):
    values = [number if number % 5 else b"x" * 40_000 for number in range(30)]
    for value in values:
        send(ends[0], pack(value))
    assert [receive(ends[1]) for _ in values] == values


def test_both_ways(ends):
    send(ends[1], pack("back"))
    assert through(ends, "forth") == "forth"
    assert receive(ends[0]) == "back"


def fill(end, value):
    """Sends until the channel takes no more; returns how often."""
    for sent in itertools.count():
        try:
            send(end, pack((sent, value)), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return sent


@pytest.mark.parametrize("value", ["small", b"x" * 100_000])
def test_a_full_channel_takes_nothing_and_loses_nothing(ends, value):
    before = descriptors()
    sent = fill(ends[0], value)
    assert sent > 5
    assert descriptors() == before
    assert [receive(ends[1], socket.MSG_DONTWAIT)[0] for _ in range(sent)] == list(range(sent))
    with pytest.raises(BlockingIOError):
        receive(ends[1], socket.MSG_DONTWAIT)
    assert through(ends, "again") == "again"


def test_nothing_there_yet(ends):
    with pytest.raises(BlockingIOError):
        receive(ends[1], socket.MSG_DONTWAIT)


def test_a_closed_channel_ends_both_sides():
    one, other = open_channel()
    one.close()
    with pytest.raises(EOFError, match="closed"):
        receive(other)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        send(other, pack(1))
    other.close()


def test_shutdown_ends_a_wait_on_any_copy(ends):
    copy = ends[1].dup()
    ends[0].shutdown(socket.SHUT_RDWR)
    for end in (ends[1], copy):
        with pytest.raises(EOFError):
            receive(end)
    copy.close()


def test_no_descriptor_and_no_mapping_stays(ends):
    through(ends, torch.zeros(400_000))
    files, maps = descriptors(), mappings()
    held = [through(ends, [torch.zeros(400_000), np.zeros(200_000)]) for _ in range(5)]
    assert descriptors() == files  # not even while the tensors live
    assert mappings() == maps + 5
    tensor = held[0][0]
    del held
    assert mappings() == maps + 1  # one message's last tensor keeps that message only
    assert tensor.sum() == 0
    del tensor
    assert mappings() == maps


def test_small_memory_files_are_not_mapped(ends):
    """Their number has a bound in the system."""
    maps = mappings()
    held = [through(ends, torch.full((50_000,), float(number))) for number in range(5)]
    assert mappings() == maps
    assert [tensor[-1] for tensor in held] == list(range(5))


def test_received_tensors_outlive_the_channel():
    one, other = open_channel()
    found = [through((one, other), torch.arange(number)) for number in (3, 100_000)]
    one.close()
    other.close()
    assert [int(tensor.sum()) for tensor in found] == [3, 4_999_950_000]


@pytest.mark.parametrize("value", [lambda: 0, open(os.devnull), [1, {"a": (x for x in ())}]], ids=lambda v: type(v).__name__)  # noqa: SIM115
def test_what_pickle_cannot_take_is_refused_before_anything_is_sent(ends, value):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        send(ends[0], pack(value))
    assert through(ends, "next") == "next"

"""Messages between processes: any object whole, large or small, and no descriptor or memory left behind."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import os
import pickle
import resource
import socket

import numpy as np
import pytest
import torch

from stateful_pipes.prefetch import channel
from stateful_pipes.prefetch.channel import open_channel, pack, receive, send
from stateful_pipes.prefetch.slots import SMALL_BYTES
from tests.streams import same
from tests.unit.test_slots import SIZE, look, taken


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
    return receive(ends[1]).open()


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
    assert not found._is_view()  # or detach_() were refused
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
    assert [receive(ends[1]).open() for _ in values] == values


def test_both_ways(ends):
    send(ends[1], pack("back"))
    assert through(ends, "forth") == "forth"
    assert receive(ends[0]).open() == "back"


def fill(end, value):
    """Sends until the channel takes no more; returns how often."""
    for sent in itertools.count():
        try:
            send(end, pack((sent, value)))
        except BlockingIOError:
            return sent


@pytest.mark.parametrize("value", ["small", b"x" * 100_000])
def test_a_full_channel_takes_nothing_and_loses_nothing(ends, value):
    before = descriptors()
    sent = fill(ends[0], value)
    assert sent > 5
    assert descriptors() == before
    assert [receive(ends[1]).open()[0] for _ in range(sent)] == list(range(sent))
    with pytest.raises(BlockingIOError):
        receive(ends[1])
    assert through(ends, "again") == "again"


def test_nothing_there_yet(ends):
    with pytest.raises(BlockingIOError):
        receive(ends[1])


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


def by_slot(ends, arena, make):
    """Through the channel and a slot, as a worker sends what it has made in it."""
    slot = arena.open(arena.borrow())
    send(ends[0], pack(make(slot), slot), number=slot.number)
    assert slot.let_go()
    return receive(ends[1]).open(arena)


def lies_in(arena, tensor):
    """The number of the slot that a tensor lies in, or None."""
    where = tensor.data_ptr() - np.frombuffer(arena._file.memory, np.uint8).ctypes.data
    return where // SIZE if 0 <= where < len(arena._file.memory) else None


def made_in(slot, count, value=1):
    return slot.tensor((count,), torch.float32).fill_(value)


class TestWithASlot:
    def test_what_is_large_lies_there_and_what_is_small_does_not(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: [made_in(slot, 2000), torch.ones(2000), torch.ones(3), np.ones(3000)])
        assert [lies_in(arena, part) for part in found[:3]] == [0, 0, None]
        assert lies_in(arena, torch.from_numpy(found[3])) == 0
        assert same(found, [torch.ones(2000), torch.ones(2000), torch.ones(3), np.ones(3000)])

    def test_what_lies_in_the_slot_already_is_not_copied(self, ends, arena):
        slot = arena.open(arena.borrow())
        tensors = [made_in(slot, 2000, number) for number in range(3)]
        used = slot._used
        message = pack([*tensors, tensors[0][64:], tensors[1].view(2, -1), tensors[2][:10]], slot)
        assert slot._used == used
        assert not message.spilled
        send(ends[0], message, number=slot.number)
        del message
        found = receive(ends[1]).open(arena)
        assert same(found, [*tensors, tensors[0][64:], tensors[1].view(2, -1), tensors[2][:10]])

    def test_another_memory_format_needs_no_copy_either(self, ends, arena):
        slot = arena.open(arena.borrow())
        image = slot.tensor((2, 20, 20, 3), torch.float32).fill_(2).permute(0, 3, 1, 2)
        used = slot._used
        send(ends[0], pack(image, slot), number=slot.number)
        assert slot._used == used
        found = receive(ends[1]).open(arena)
        assert found.stride() == image.stride()
        assert same(found, image)

    @pytest.mark.parametrize("part", [lambda x: x[::2], lambda x: x.view(40, 50).T[3:5], lambda x: x[:1].expand(2000)])
    def test_a_part_with_gaps_is_copied(self, ends, arena, part):
        found = by_slot(ends, arena, lambda slot: part(made_in(slot, 2000)))
        assert same(found, part(torch.ones(2000)).contiguous())
        assert found.untyped_storage().nbytes() == found.numel() * 4

    @pytest.mark.parametrize("size", [SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1])
    def test_around_what_is_small(self, ends, arena, size):
        found = by_slot(ends, arena, lambda slot: torch.ones(size, dtype=torch.uint8))
        assert (lies_in(arena, found) is None) == (size <= SMALL_BYTES)
        assert found.sum() == size

    @pytest.mark.parametrize("size", [SIZE - 64, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 40 * SIZE])
    def test_what_does_not_fit_travels_beside_it(self, ends, arena, size):
        value = [torch.ones(5000), torch.full((size,), 3, dtype=torch.uint8), torch.ones(6000), np.ones(SIZE)]
        found = by_slot(ends, arena, lambda slot: value)
        assert [lies_in(arena, part) for part in found[:3]] == [0, None, 0]
        assert same(found, value)
        del found
        assert taken(arena) == []

    def test_a_slot_can_be_filled_to_its_end(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: torch.full((SIZE,), 3, dtype=torch.uint8))
        assert lies_in(arena, found) == 0
        assert set(look(arena, 0)) == {3}
        assert set(look(arena, 1)) == {0}

    @pytest.mark.parametrize(
        "make", [lambda: list(range(6000)), lambda: [torch.ones(900)] * 2 + [np.ones(500) for _ in range(9)]]
    )
    def test_a_body_too_large_for_a_packet(self, ends, arena, make):
        """It is read from the slot, and the slot is free at once: nothing views it."""
        found = by_slot(ends, arena, lambda slot: make())
        assert taken(arena) == []
        look(arena, 0)[:] = b"x" * SIZE
        assert same(found, make())

    def test_a_body_too_large_for_the_slot_too(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: [made_in(slot, 2000), list(range(60_000))])
        assert lies_in(arena, found[0]) == 0
        assert found[1] == list(range(60_000))

    def test_it_is_freed_with_the_last_view(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: [made_in(slot, 2000), np.ones(2000), torch.ones(2)])
        assert taken(arena) == [0]
        small, part = found[2], found[0][5:9]
        del found
        assert taken(arena) == [0]
        array = part.numpy()
        del part
        assert taken(arena) == [0]
        assert array.tolist() == [1] * 4
        del array
        assert taken(arena) == []
        assert small.tolist() == [1, 1]

    def test_it_is_free_at_once_when_nothing_lies_there(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: {"label": torch.tensor(3), "x": [np.ones(4), "y"]})
        assert taken(arena) == []
        assert found["label"] == 3

    def test_tasks_may_have_no_slot(self, ends, arena):
        send(ends[0], pack(torch.ones(5000)))
        found = receive(ends[1]).open(arena)
        assert lies_in(arena, found) is None
        assert taken(arena) == []

    def test_it_is_free_after_an_error_in_unpickling(self, ends, arena):
        with pytest.raises(ValueError, match="invalid literal"):
            by_slot(ends, arena, lambda slot: [made_in(slot, 2000), Broken()])
        gc.collect()  # the error's traceback
        assert taken(arena) == []

    def test_what_pickle_cannot_take_leaves_the_slot_usable(self, ends, arena):
        slot = arena.open(arena.borrow())
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pack([made_in(slot, 2000), lambda: 0], slot)
        gc.collect()  # the error's traceback
        send(ends[0], pack("told", slot), number=slot.number)
        assert slot.let_go()
        assert receive(ends[1]).open(arena) == "told"
        assert taken(arena) == []

    def test_it_is_free_when_no_descriptor_is_left_for_the_rest(self, ends, arena):
        slot = arena.open(arena.borrow())
        send(ends[0], pack([made_in(slot, 2000), torch.ones(SIZE)], slot), number=slot.number)
        assert slot.let_go()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(OSError, match="too many open files") as caught:
                receive(ends[1]).open(arena)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caught.value.errno == errno.EMFILE
        del caught
        gc.collect()
        assert taken(arena) == []
        assert by_slot(ends, arena, lambda slot: "next") == "next"

    def test_what_is_received_is_the_receivers_own(self, ends, arena):
        first, second = (by_slot(ends, arena, lambda slot: [made_in(slot, 2000, 0), torch.zeros(2000)]) for _ in range(2))
        for number, part in enumerate([*first, *second]):
            part.fill_(number)
        assert [part.unique().tolist() for part in [*first, *second]] == [[0], [1], [2], [3]]
        assert {lies_in(arena, part) for part in first} != {lies_in(arena, part) for part in second}

    def test_one_tensor_is_saved_alone(self, ends, arena):
        found = by_slot(ends, arena, lambda slot: [made_in(slot, 2000), made_in(slot, 3000), torch.ones(2500)])
        for tensor in found:
            file = io.BytesIO()
            torch.save(tensor, file)
            assert file.tell() < 4 * len(tensor) + 2500
            assert tensor.untyped_storage().nbytes() == 4 * len(tensor)

    def test_one_tensor_twice_stays_one(self, ends, arena):
        def make(slot):
            tensor = made_in(slot, 2000)
            return [tensor, tensor, tensor.view(2, -1)]

        found = by_slot(ends, arena, make)
        assert found[0] is found[1]
        assert same(found[2], torch.ones(2, 1000))

    def test_many_rounds_lose_no_slot_and_leave_no_mapping(self, ends, arena):
        maps, files = mappings(), descriptors()
        held = []
        for turn in range(60):
            if arena._shelf.free:
                held.append((turn, by_slot(ends, arena, lambda slot: made_in(slot, 2000, turn))))  # noqa: B023
            assert all((tensor == number).all() for number, tensor in held)
            if turn % 4 == 3:
                del held[turn % len(held)]
        held.clear()
        assert sorted(arena._shelf.free) == [0, 1, 2]
        assert (mappings(), descriptors()) == (maps, files)


class Broken:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return int, ("x",)

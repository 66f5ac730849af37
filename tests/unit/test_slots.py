"""Slots of shared memory: each one writer's at a time, free again with the last view, and never two things in one place."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stateful_pipes.prefetch import slots
from stateful_pipes.prefetch.memory_files import MemoryFile
from stateful_pipes.prefetch.slots import SMALL_BYTES, Arena

SIZE = 64 * 1024
"""Of a slot, in tests that fill it."""


def shrink(monkeypatch):
    """Makes the slots of this process, and of what it forks, small enough to overflow."""
    monkeypatch.setattr(slots, "SLOT_BYTES", SIZE)
    monkeypatch.setattr(slots, "_Memory", slots._memory_type(SIZE))


@pytest.fixture
def slot(arena):
    return arena.open(arena.borrow())


def twin(arena):
    """The arena as another process has it: the same memory, and no part in what is borrowed."""
    other = Arena.__new__(Arena)
    file = MemoryFile.__new__(MemoryFile)
    file.__setstate__((SimpleNamespace(detach=lambda: os.dup(arena._file.descriptor)), len(arena._file.memory)))
    other.__setstate__(file)
    return other


def look(arena, number):
    return arena._file.memory[number * slots.SLOT_BYTES : (number + 1) * slots.SLOT_BYTES]


def taken(arena, count=3):
    return sorted(set(range(count)) - set(arena._shelf.free))


def mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:stateful_pipes" in line for line in file)


def maps_dev_shm():
    """The files of /dev/shm that this process has mapped, be they unlinked already; other processes may make and delete some."""
    with open("/proc/self/maps") as file:
        return {line.split()[4] for line in file if "/dev/shm" in line}


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident(descriptor):
    return os.fstat(descriptor).st_blocks * 512


class TestBorrowing:
    def test_each_once_until_none_is_left(self, arena):
        assert [arena.borrow() for _ in range(5)] == [0, 1, 2, -1, -1]

    def test_the_last_freed_is_the_first_used(self, arena):
        for _ in range(3):
            arena.borrow()
        arena.give_back(2)
        arena.give_back(0)
        assert [arena.borrow(), arena.borrow()] == [0, 2]

    def test_giving_back_none_is_nothing(self, arena):
        arena.give_back(-1)
        assert [arena.borrow() for _ in range(4)] == [0, 1, 2, -1]

    @pytest.mark.parametrize(
        "hold",
        [
            lambda view: view,
            lambda view: view[100:200],
            lambda view: torch.frombuffer(view, dtype=torch.float32),
            lambda view: torch.frombuffer(view, dtype=torch.float32).view(2, -1)[1, 3:5],
            lambda view: torch.frombuffer(view, dtype=torch.float32).numpy()[::7],
            lambda view: torch.frombuffer(view, dtype=torch.float32).untyped_storage(),
            lambda view: np.frombuffer(view)[3:],
            lambda view: np.from_dlpack(torch.frombuffer(view, dtype=torch.float32)),
        ],
        ids=["view", "part", "tensor", "part of a tensor", "tensor's array", "storage", "array", "dlpack"],
    )
    def test_a_viewed_slot_is_free_again_with_the_last_view(self, arena, hold):
        number = arena.borrow()
        held = hold(arena.view(number))
        assert taken(arena) == [number]
        assert arena.borrow() != number
        arena.give_back(1)
        del held
        assert taken(arena) == []

    def test_a_view_that_nobody_holds_frees_at_once(self, arena):
        arena.view(arena.borrow())
        assert taken(arena) == []

    def test_it_can_be_viewed_again_and_again(self, arena):
        for _ in range(100):
            number = arena.borrow()
            held = arena.view(number)[:3]
            assert taken(arena) == [number]
            del held
        assert taken(arena) == []

    def test_a_view_writes_and_reads_its_own_slot_only(self, arena):
        views = [arena.view(arena.borrow()) for _ in range(3)]
        for number, view in enumerate(views):
            assert len(view) == SIZE
            view[:] = bytes([number + 1]) * SIZE
        assert [bytes(look(arena, number)) for number in range(3)] == [bytes([number + 1]) * SIZE for number in range(3)]

    def test_no_slots_at_all(self):
        arena = Arena(0)
        assert arena.borrow() == -1
        arena.close()


class TestMemory:
    def test_a_slot_costs_what_was_written_to_it(self):
        arena = Arena(8)
        assert len(look(arena, 7)) == slots.SLOT_BYTES
        assert resident(arena._file.descriptor) == 0
        look(arena, 7)[:100_000] = b"x" * 100_000
        assert 100_000 <= resident(arena._file.descriptor) < 300_000
        arena.close()

    def test_nothing_is_in_dev_shm(self):
        before = maps_dev_shm()
        arena = Arena(2)
        look(arena, 0)[:5] = b"12345"
        assert maps_dev_shm() <= before
        tensor = torch.zeros(5).share_memory_()
        assert not maps_dev_shm() <= before  # so it would be seen
        assert tensor.is_shared()
        arena.close()

    def test_one_descriptor_until_it_is_closed_and_none_after(self):
        before = descriptors()
        arena = Arena(2)
        assert descriptors() == before + 1
        arena.close()
        arena.close()
        assert descriptors() == before

    def test_dropping_it_closes_it_without_the_garbage_collector(self):
        before = descriptors(), mappings()
        gc.disable()
        try:
            arena = Arena(2)
            held = arena.view(arena.borrow())
            del arena
            assert descriptors() == before[0]
            assert mappings() == before[1] + 1
            held[:3] = b"abc"
            del held
            assert mappings() == before[1]
        finally:
            gc.enable()

    def test_views_outlive_the_closing(self, arena):
        number = arena.borrow()
        look(arena, number)[:3] = b"abc"
        held = arena.view(number)[:3]
        arena.close()
        assert bytes(held) == b"abc"
        held[:] = b"xyz"
        assert bytes(held) == b"xyz"

    def test_after_closing_a_held_batch_keeps_its_own_memory_only(self):
        """One small tensor kept from a closed loader must not keep what all slots have grown to."""
        arena = Arena(3)
        descriptor = os.dup(arena._file.descriptor)
        for number in range(3):
            look(arena, number)[: 2**20] = b"x" * 2**20
        one, other, _ = (arena.view(arena.borrow())[:10] for _ in range(3))
        arena.close()
        del other, _
        assert bytes(one) == b"x" * 10
        assert resident(descriptor) <= 2**20
        os.close(descriptor)


def borrow_under(limit, size):
    resource.setrlimit(limit, (size, size))
    os._exit(7 if Arena(64).borrow() == -1 else 8)


def in_a_fork(act):
    """Forks; returns a function that lets the child act and waits for its end."""
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(wait, 1)
            act()
        finally:
            os._exit(0)

    def run():
        os.write(go, b"x")
        os.waitpid(pid, 0)
        os.close(wait)
        os.close(go)

    return run


class TestForks:
    """What a fork closes or drops is its own copy; the memory is shared with this process, which goes on using it."""

    def test_closing_it_there_empties_no_slot_here(self, arena):
        close = in_a_fork(arena.close)
        look(arena, 0)[:] = b"x" * SIZE
        held = arena.view(arena.borrow())  # a slot that was free when the process forked
        close()
        assert bytes(held) == b"x" * SIZE

    @pytest.mark.parametrize("closed_before", [True, False])
    def test_dropping_a_batch_there_leaves_it_here(self, arena, closed_before):
        look(arena, 0)[:] = b"x" * SIZE
        held = [arena.view(arena.borrow())]
        if closed_before:
            arena.close()

        def drop():
            arena.close()
            held.clear()

        in_a_fork(drop)()
        assert bytes(held[0]) == b"x" * SIZE


@pytest.mark.parametrize(
    ("limit", "size"),
    [(resource.RLIMIT_AS, 500 * 2**30), (resource.RLIMIT_FSIZE, 64 * 2**20)],
    ids=["address space", "file size"],
)
def test_under_a_limit_that_holds_few_slots_there_is_none(limit, size):
    process = multiprocessing.get_context("fork").Process(target=borrow_under, args=(limit, size))
    process.start()
    process.join()
    assert process.exitcode == 7


def test_more_slots_than_there_is_address_space_for_are_not_made():
    arena = Arena(2**18)  # a prefetch_factor of 65,536 for each of 2 workers asks for as many
    assert arena.borrow() >= -1
    arena.close()


def fill(arena, number, value):
    arena.open(number).tensor((8192,), torch.uint8).fill_(value)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_writes_what_this_one_views(method):
    arena = Arena(2)
    number = arena.borrow()
    process = multiprocessing.get_context(method).Process(target=fill, args=(arena, number, 7))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert set(arena.view(number)[:8192]) == {7}
    assert set(look(arena, 1)[:8192]) == {0}
    arena.close()


class TestSlot:
    def test_what_is_small_is_not_for_it(self, slot):
        assert slot.tensor((SMALL_BYTES,), torch.uint8) is None
        assert slot.tensor((SMALL_BYTES // 4,), torch.float32) is None
        assert slot.tensor((0, 10**9), torch.float32) is None
        assert slot.tensor((SMALL_BYTES + 1,), torch.uint8) is not None

    def test_what_does_not_fit_is_not_for_it_and_takes_no_room(self, slot):
        assert slot.tensor((SIZE + 1,), torch.uint8) is None
        assert slot.tensor((2**62, 4), torch.float64) is None
        assert slot.put(memoryview(bytes(SIZE + 1))) == -1
        held = slot.tensor((SIZE,), torch.uint8)
        assert held is not None
        assert slot.put(memoryview(b"x")) == -1
        assert slot.tensor((SIZE,), torch.uint8) is None

    def test_what_was_dropped_again_takes_no_room(self, slot):
        """As what a sample collates on its way."""
        first = slot.tensor((SIZE // 4,), torch.uint8)
        first.fill_(1)
        for _ in range(20):
            between = [slot.tensor((SIZE // 4,), torch.uint8).fill_(7) for _ in range(2)]
            assert between[0].data_ptr() == first.data_ptr() + len(first)
            del between
        last = slot.tensor((3 * SIZE // 4,), torch.uint8)
        assert last.data_ptr() == first.data_ptr() + len(first)
        assert first.eq(1).all()

    def test_what_was_put_stays(self, slot):
        offset = slot.put(memoryview(b"x" * 5000))
        assert slot.tensor((5000,), torch.uint8).data_ptr() - slot._start >= offset + 5000

    def test_what_is_below_a_living_piece_is_not_used_again(self, slot):
        dropped, held = (slot.tensor((5000,), torch.uint8) for _ in range(2))
        held.fill_(3)
        del dropped
        slot.tensor((5000,), torch.uint8).fill_(4)
        assert held.eq(3).all()

    @pytest.mark.parametrize("part", [lambda x: x.numpy(), lambda x: x[7:9], lambda x: x.untyped_storage(), lambda x: x.detach()])
    def test_a_part_keeps_the_whole_piece(self, slot, part):
        held = part(slot.tensor((5000,), torch.uint8))
        start = slot._used
        slot.tensor((5000,), torch.uint8)
        assert slot._used >= start + 5000
        assert not slot.let_go()
        del held
        assert slot.let_go()

    def test_a_tensor_is_no_view(self, slot):
        slot.tensor((100, 100), torch.float32).detach_()

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.uint16], ids=str
    )
    def test_tensors_are_as_asked_for(self, slot, dtype):
        tensor = slot.tensor((7, 5, 300), dtype)
        if tensor is None:  # 16 bytes each are more than the slot
            tensor = slot.tensor((7, 300), dtype)
        assert tensor.dtype is dtype
        assert tensor.shape[0] == 7
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize

    def test_each_has_a_place_and_a_storage_of_its_own(self, slot, arena):
        tensors = [slot.tensor((4097 + number,), torch.uint8).fill_(number) for number in range(5)]
        offsets = [slot.offset_of(tensor.data_ptr()) for tensor in tensors]
        put = slot.put(memoryview(b"between"))
        last = slot.tensor((5000,), torch.uint8).fill_(9)
        assert all(offset % 64 == 0 for offset in (*offsets, put, slot.offset_of(last.data_ptr())))
        assert all((tensor == number).all() for number, tensor in enumerate(tensors))
        for number, (offset, tensor) in enumerate(zip(offsets, tensors, strict=True)):
            assert bytes(look(arena, 0)[offset : offset + len(tensor)]) == bytes([number]) * len(tensor)
        assert bytes(look(arena, 0)[put : put + 7]) == b"between"
        assert (last == 9).all()

    def test_put_takes_any_kind_of_buffer(self, slot, arena):
        array = np.arange(30, dtype="<i4").reshape(5, 6)
        offset = slot.put(memoryview(array))
        assert bytes(look(arena, 0)[offset : offset + array.nbytes]) == array.tobytes()

    def test_where_a_tensor_lies(self, slot, arena):
        first, second = slot.tensor((5000,), torch.uint8), slot.tensor((5000,), torch.uint8)
        assert slot.offset_of(first.data_ptr()) == 0
        assert slot.offset_of(second[64:].data_ptr()) == slot.offset_of(second.data_ptr()) + 64
        assert slot.offset_of(torch.zeros(5000).data_ptr()) == -1
        assert slot.offset_of(torch.zeros(0).data_ptr()) == -1
        neighbour = arena.open(arena.borrow())
        assert slot.offset_of(neighbour.tensor((5000,), torch.uint8).data_ptr()) == -1
        assert neighbour.offset_of(first.data_ptr()) == -1

    def test_threads_get_places_of_their_own(self):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        arena = Arena(1)
        slot = arena.open(0)
        found: list[int] = []
        start = threading.Barrier(4)

        def reserve():
            start.wait()
            found.extend([slot.put(memoryview(b"x" * 65)) for _ in range(300)])

        threads = [threading.Thread(target=reserve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert sorted(found) == list(range(0, 1200 * 128, 128))
        arena.close()


class TestLettingGo:
    def test_untouched_or_only_put_into(self, arena):
        for number in range(2):
            slot = arena.open(arena.borrow())
            if number:
                slot.put(memoryview(b"x" * 5000))
            assert slot.let_go()

    def test_tensors_that_are_gone(self, slot):
        slot.tensor((5000,), torch.uint8).fill_(1)
        assert slot.let_go()

    @pytest.mark.parametrize(
        "keep",
        [
            lambda tensor: tensor,
            lambda tensor: tensor[3:5],
            lambda tensor: tensor.view(2, -1),
            lambda tensor: tensor.numpy(),
            lambda tensor: tensor.numpy()[1:],
            lambda tensor: tensor.untyped_storage(),
            lambda tensor: tensor.view(torch.int16).detach(),
            lambda tensor: memoryview(tensor.numpy()),
            lambda tensor: np.from_dlpack(tensor),
        ],
        ids=["it", "slice", "view", "array", "part of its array", "storage", "other type", "memoryview", "dlpack"],
    )
    def test_whatever_is_kept_of_a_tensor(self, slot, keep):
        kept = keep(slot.tensor((5000,), torch.uint8))
        assert not slot.let_go()
        del kept

    def test_a_cycle_that_nobody_holds_is_no_reason(self, slot):
        cycle: list[object] = [slot.tensor((5000,), torch.uint8)]
        cycle.append(cycle)
        del cycle
        assert slot.let_go()

    def test_a_thread_that_comes_too_late_gets_nothing(self, slot):
        """A thread of the user's may have looked up the slot and be about to collate, when its task is over."""
        assert slot.let_go()
        assert slot.tensor((5000,), torch.uint8) is None

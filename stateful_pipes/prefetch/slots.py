"""Reusable slots of shared memory: a worker writes a batch into one, the main process hands out tensors that view it.

All slots lie in one anonymous memory file (memfd). It is sparse, so a slot costs what has been written to it; nothing is
in /dev/shm; it is one descriptor, which fork inherits and spawn is handed.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import threading
import weakref
from multiprocessing.reduction import DupFd
from typing import Any, cast

import torch

__all__ = ["SLOT_BYTES", "SMALL_BYTES", "Arena", "Slot", "map_file"]

SLOT_BYTES = 2**30
"""Address space of a slot. What does not fit travels in a memory file of its own."""

SMALL_BYTES = 4096
"""What is no larger does not lie in a slot: it travels in the message, so that a kept label holds no slot."""

_ALIGN = 64
_Memory = ctypes.c_ubyte * SLOT_BYTES


class Arena:
    """A fixed number of slots. One is borrowed for a task, and is free again when nothing views it any more.

    Args:
        slots: How many. None where the process's address space is limited, which would hold few of them and nothing else.
    """

    def __init__(self, slots: int) -> None:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            slots = 0
        descriptor = os.memfd_create("stateful_pipes")
        self._open(descriptor, slots * SLOT_BYTES)
        # Last freed, first used: its pages are there, and some still in the caches.
        self._free = list(range(slots - 1, -1, -1))
        self._viewed: dict[int, weakref.ref[Any]] = {}

    def _open(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self._memory = map_file(descriptor)

    def borrow(self) -> int:
        """The number of a free slot, or -1 if there is none."""
        return self._free.pop() if self._free else -1

    def give_back(self, number: int) -> None:
        """Frees a borrowed slot that nothing views; does nothing for -1."""
        if number >= 0:
            self._free.append(number)

    def open(self, number: int) -> Slot:
        """A slot to write to."""
        return Slot(number, _Memory.from_buffer(self._memory, number * SLOT_BYTES))

    def look(self, number: int) -> memoryview:
        """The bytes of a slot, whoever has it."""
        return self._memory[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]

    def view(self, number: int) -> memoryview:
        """The bytes of a borrowed slot, which is freed when the last view of them is gone."""
        held = _Memory.from_buffer(self._memory, number * SLOT_BYTES)
        free, viewed = self._free, self._viewed

        def gone(_: object) -> None:
            del viewed[number]
            free.append(number)

        viewed[number] = weakref.ref(held, gone)
        return memoryview(held).cast("B")

    def close(self) -> None:
        """Gives up the descriptor; what is mapped stays for as long as something views it."""
        self._finalizer()

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor), len(self._memory)

    def __setstate__(self, state: Any) -> None:
        descriptor, size = state
        self._open(descriptor.detach(), size)
        self._free, self._viewed = [], {}  # borrowing is the main process's


class Slot:
    """A slot that a task fills from its start on. Tensors made in it need no copying when they are sent.

    Args:
        number: Which of the arena's.
        memory: Its bytes.
    """

    def __init__(self, number: int, memory: ctypes.Array[Any]) -> None:
        self.number = number
        self._memory = memory
        self._bytes = memoryview(memory).cast("B")
        self._start = ctypes.addressof(memory)
        self._used = 0
        # The user's code may collate in threads of its own.
        self._lock = threading.Lock()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised tensor in the slot; None if it is small or does not fit."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        offset = self._reserve(size) if size > SMALL_BYTES else -1
        if offset < 0:
            return None
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def put(self, data: memoryview) -> int:
        """Copies bytes into the slot; returns their offset, or -1 if they do not fit."""
        offset = self._reserve(data.nbytes)
        if offset >= 0:
            self._bytes[offset : offset + data.nbytes] = data.cast("B")
        return offset

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where in the slot a contiguous tensor lies; -1 if it is elsewhere."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset < self._used else -1

    def let_go(self) -> bool:
        """Gives up the slot; returns whether nothing else in this process holds a tensor in it."""
        held = weakref.ref(self._memory)
        del self._memory, self._bytes
        if held() is not None:
            gc.collect()  # a cycle that nobody holds is no reason
        return held() is None

    def _reserve(self, size: int) -> int:
        with self._lock:
            offset = self._used
            if size > SLOT_BYTES - offset:
                return -1
            self._used += -(-size // _ALIGN) * _ALIGN
            return offset


def map_file(descriptor: int) -> memoryview:
    """A whole memory file, mapped for as long as something views it. It keeps no descriptor, as mmap.mmap would."""
    size = os.fstat(descriptor).st_size
    mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    return memoryview(cast(Any, mapped.numpy()))

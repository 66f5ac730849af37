"""Reusable slots of shared memory: a worker writes a batch into one, the main process hands out tensors that view it.

All slots lie in one memory file. It is sparse, so a slot costs what has been written to it, and it is one descriptor,
which fork inherits and spawn is handed.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.prefetch.memory_files import MemoryFile
from stateful_pipes.prefetch.tensors import as_tensor

__all__ = ["SLOT_BYTES", "SMALL_BYTES", "Arena", "Slot", "aligned"]

SLOT_BYTES = 2**30
"""Address space of a slot. What does not fit travels in a memory file of its own."""

SMALL_BYTES = 4096
"""What is no larger does not lie in a slot: it travels in the message, so that a kept label holds no slot."""

_ALIGN = 64
# From mman.h: frees the pages, in the file too.
_MADV_REMOVE = 9


class _Shelf:
    """Which slots are free, and which are viewed. It outlives the arena for as long as one is."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        # Last freed, first used: its pages are there, and some still in the caches.
        self.free = list(range(slots - 1, -1, -1))
        self.viewed: set[int] = set()
        self._closed_in = 0

    def put(self, memory: Any) -> None:
        """Frees a slot that nothing views any more."""
        self.viewed.discard(memory.number)
        self.free.append(memory.number)
        if self._closed_in == os.getpid():  # in a fork's child, the slot may still be the parent's
            _empty(memory)

    def close(self, memory: memoryview) -> None:
        """From now on, what is not viewed costs no memory."""
        self._closed_in = os.getpid()
        for number in {*range(self.slots)} - self.viewed:
            _empty(_Memory.from_buffer(memory, number * SLOT_BYTES))


def _memory_type(size: int) -> Any:
    class Memory(ctypes.c_ubyte * size):  # type: ignore[misc]  # made here
        """A slot's bytes; the slot is put on the shelf, if there is one, when the last view is gone."""

        number = -1
        shelf: _Shelf | None = None

        def __del__(self) -> None:
            if self.shelf is not None:
                self.shelf.put(self)

    return Memory


_Memory = _memory_type(SLOT_BYTES)
_madvise = getattr(ctypes.CDLL(None), "madvise", None)  # a C library may be without it


def _empty(memory: Any) -> None:
    if _madvise is not None:
        _madvise(ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_size_t(len(memory)), _MADV_REMOVE)


class Arena:
    """A fixed number of slots. One is borrowed for a task, and is free again when nothing views it any more.

    Args:
        slots: How many. There are none where the process's address space or the size of its files is limited, or has no
            room for them.
    """

    def __init__(self, slots: int) -> None:
        # A limited address space would hold few slots, and nothing else.
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            slots = 0
        self._pid = os.getpid()
        try:
            self._file = MemoryFile(slots * SLOT_BYTES)
        except (OSError, RuntimeError):
            slots = 0
            self._file = MemoryFile(0)
        self._shelf = _Shelf(slots)
        self._slots: dict[int, Slot] = {}

    def borrow(self) -> int:
        """The number of a free slot, or -1 if there is none."""
        return self._shelf.free.pop() if self._shelf.free else -1

    def give_back(self, number: int) -> None:
        """Frees a borrowed slot that nothing views; does nothing for -1."""
        if number >= 0:
            self._shelf.free.append(number)

    def open(self, number: int) -> Slot:
        """A slot to write to."""
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot(number, self._file.memory[number * SLOT_BYTES : (number + 1) * SLOT_BYTES])
        slot.open()
        return slot

    def view(self, number: int) -> memoryview:
        """The bytes of a borrowed slot, which is freed when the last view of them is gone."""
        memory = _Memory.from_buffer(self._file.memory, number * SLOT_BYTES)
        memory.number, memory.shelf = number, self._shelf
        self._shelf.viewed.add(number)
        return memoryview(memory).cast("B")

    def close(self) -> None:
        """Gives up the descriptor and the memory of all slots but those that are viewed, which stay for as long as they are."""
        if self._file.close() and os.getpid() == self._pid:
            self._shelf.close(self._file.memory)

    def __getstate__(self) -> MemoryFile:
        return self._file

    def __setstate__(self, file: MemoryFile) -> None:
        self._pid = 0  # the memory is the main process's to free
        self._file = file
        self._shelf = _Shelf(0)
        self._slots = {}


class Slot:
    """A slot that a task fills from its start on. Tensors made in it need no copying when they are sent.

    Args:
        number: Which of the arena's.
        memory: Its bytes.
    """

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self._memory = memory
        self._start = _address(memory)
        # The user's code may collate in threads of its own.
        self._lock = threading.Lock()
        self._is_open = False
        self._used = 0
        # What lies there: the offset, and what lives as long as it is held; None for what stays.
        self._pieces: list[tuple[int, weakref.ref[Any] | None]] = []

    def open(self) -> None:
        """Empties it, for a task."""
        self._pieces.clear()
        self._used = 0
        self._is_open = True

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised tensor in the slot; None if it is small or does not fit."""
        size = math.prod(shape) * dtype.itemsize
        _, piece = self._reserve(size) if size > SMALL_BYTES else (-1, None)
        return None if piece is None else as_tensor(piece, dtype, shape)

    def put(self, data: memoryview) -> int:
        """Copies bytes into the slot, unless they lie there; returns their offset, or -1 if they do not fit."""
        offset = self.offset_of(_address(data))
        if offset >= 0:
            return offset
        offset, piece = self._reserve(data.nbytes, to_stay=True)
        if piece is not None:
            piece[:] = np.frombuffer(data, np.uint8)
        return offset

    def offset_of(self, address: int) -> int:
        """Where in the slot an address lies; -1 if it is elsewhere."""
        offset = address - self._start
        return offset if 0 <= offset < self._used else -1

    @property
    def is_used(self) -> bool:
        """Whether anything lies in it."""
        return self._used > 0

    def let_go(self) -> bool:
        """Gives up the slot; returns whether nothing else in this process holds a tensor in it."""
        with self._lock:
            self._is_open = False
        for generation in (1, 2):  # a cycle that nobody holds is no reason; it is young, as a rule
            if not self._is_held():
                return True
            gc.collect(generation)
        return not self._is_held()

    def _is_held(self) -> bool:
        return any(piece is not None and piece() is not None for _, piece in self._pieces)

    def _reserve(self, size: int, to_stay: bool = False) -> tuple[int, npt.NDArray[np.uint8] | None]:
        """Room for so many bytes, and its offset; -1 if there is none."""
        with self._lock:
            # What a sample has collated and dropped again.
            while self._pieces and (last := self._pieces[-1][1]) is not None and last() is None:
                self._used, _ = self._pieces.pop()
            offset = self._used
            if not self._is_open or size > SLOT_BYTES - offset:
                return -1, None
            piece = np.frombuffer(self._memory, np.uint8, size, offset)
            self._pieces.append((offset, None if to_stay else weakref.ref(piece)))
            self._used += aligned(size)
            return offset, piece


def _address(data: memoryview) -> int:
    if not data.readonly:  # else a sixth of NumPy's time
        return ctypes.addressof(ctypes.c_byte.from_buffer(data))
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def aligned(size: int) -> int:
    """The next offset at which a buffer may begin."""
    return -(-size // _ALIGN) * _ALIGN

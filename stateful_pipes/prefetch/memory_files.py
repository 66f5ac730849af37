"""Anonymous memory files (memfd): shared memory that is in no file system, so that a small /dev/shm does not matter."""

from __future__ import annotations

import io
import os
import weakref
from multiprocessing.reduction import DupFd
from typing import Any, cast

import torch

__all__ = ["MemoryFile", "create", "map_whole", "take_in", "write"]

# A mapping costs more than it saves below this, and their number is bounded (vm.max_map_count).
_MAPPED = 1024 * 1024
_IOV_MAX = 1024


class MemoryFile:
    """One that is mapped by several processes for good: fork inherits the mapping, spawn is handed the descriptor.

    Attributes:
        descriptor: Of the file, until `close`.
        memory: All of it.

    Args:
        size: In bytes.

    Raises:
        OSError, RuntimeError: the system has no room for it.
    """

    def __init__(self, size: int) -> None:
        self._open(create(), size)

    def close(self) -> bool:
        """Closes the descriptor, and returns whether that was still to do; the mapping stays while something views it."""
        was_open = self._finalizer.alive
        self._finalizer()
        return was_open

    def _open(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        try:
            os.ftruncate(descriptor, size)
            self.memory = map_whole(descriptor)
        except BaseException:
            self._finalizer()
            raise

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor), len(self.memory)

    def __setstate__(self, state: Any) -> None:
        descriptor, size = state
        self._open(descriptor.detach(), size)


def create() -> int:
    """The descriptor of a new, empty one."""
    return os.memfd_create("stateful_pipes")


def map_whole(descriptor: int) -> memoryview:
    """All of it, mapped for as long as something views it. That keeps no descriptor, as mmap.mmap would."""
    size = os.fstat(descriptor).st_size
    mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    return memoryview(cast(Any, mapped.numpy()))


def take_in(descriptor: int) -> memoryview:
    """Its content, mapped if it is large; the descriptor is closed."""
    with io.FileIO(descriptor) as file:
        size = os.fstat(descriptor).st_size
        return map_whole(descriptor) if size > _MAPPED else memoryview(bytearray(file.readall()))


def write(descriptor: int, segments: list[Any]) -> None:
    """Writes buffers one after another, and goes back to the start, for the receiver's descriptor shares the position."""
    left = [memoryview(segment).cast("B") for segment in segments if memoryview(segment).nbytes]
    while left:
        written = os.writev(descriptor, left[:_IOV_MAX])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    os.lseek(descriptor, 0, os.SEEK_SET)

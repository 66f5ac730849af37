"""Python objects over a SEQPACKET socket: one atomic packet each, so that any number of processes may share an end.

A message is a body and large buffers. The body is a pickle (protocol 5) with its small buffers and a directory that gives
each buffer's place: in the body, in the task's slot, or, what does not fit, in an anonymous memory file whose descriptor the
packet carries. What is small travels in the packet, so that a kept label holds no slot; what is large is viewed where it
lies, by the receiver's tensors and arrays, and lives as long as the last of them.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
from array import array
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from stateful_pipes.prefetch.slots import SMALL_BYTES, Arena, Slot, map_file

__all__ = ["Message", "open_channel", "pack", "receive", "send"]

# Larger packets would fill the socket's buffer, and a worker would have to wait for the main process.
_PACKET = 16 * 1024
# A mapping costs more than it saves below this, and their number is bounded (vm.max_map_count).
_MAPPED = 1024 * 1024
_ALIGN = 64
_IOV_MAX = 1024
# Plain integers: the enumeration's own arithmetic takes microseconds.
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
# The slot's number, whether anything lies there and in a file; the body's memory, offset and length; in the body, the
# number of buffers, and offset and length of the pickle.
_HEAD = struct.Struct("<q??qqqqqq")
# A buffer's memory, offset and length.
_ENTRY = struct.Struct("<qqq")
_HERE, _SLOT, _FILE = range(3)
_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))


class Message(NamedTuple):
    """What `pack` makes and `send` sends."""

    head: bytes
    body: bytes
    spilled: list[Any]


def open_channel() -> tuple[socket.socket, socket.socket]:
    """A connected pair of ends. `shutdown` on either ends every process's wait on the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, flags: int = 0) -> None:
    """Sends what `pack` made.

    Raises:
        BlockingIOError: with MSG_DONTWAIT, the buffer is full.
        OSError: the other end is gone.
    """
    head, body, spilled = message
    if not spilled:
        end.sendmsg((head, body), (), flags)
        return
    descriptor = os.memfd_create("stateful_pipes")
    try:
        _write(descriptor, spilled)
        end.sendmsg((head, body), [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))], flags)
    finally:
        os.close(descriptor)


def receive(end: socket.socket, flags: int = 0, arena: Arena | None = None) -> Any:
    """The next object. Its slot in `arena`, if it has one, is free again when the last view of it is gone.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: with MSG_DONTWAIT, there is none yet.
    """
    packet, ancillary, _, _ = end.recvmsg(_PACKET, _FD_SPACE, flags | _CLOSE_ON_EXEC)
    if not packet:
        raise EOFError("the channel is closed")
    return _unpack(packet, _take_in(ancillary[0][2]) if ancillary else None, arena)


def pack(value: object, slot: Slot | None = None) -> Message:
    """Makes a message, with the large buffers in the slot as far as they fit.

    Raises:
        Exception: whatever pickle raises for an object that it cannot take.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    body: bytes = stream.getvalue()
    size, start = len(body), 0
    stored = _Stored(slot)
    if buffers:
        body, start = _with_buffers(body, buffers, stored)
    memory, offset, length = _HERE, 0, len(body)
    if length > _PACKET - _HEAD.size:
        (memory, offset), body = stored.add(memoryview(body)), b""
    number, is_used = (-1, False) if slot is None else (slot.number, slot.is_used)
    head = _HEAD.pack(number, is_used, bool(stored.spilled), memory, offset, length, len(buffers), start, size)
    return Message(head, body, stored.spilled)


def _with_buffers(pickled: bytes, buffers: list[pickle.PickleBuffer], stored: _Stored) -> tuple[bytes, int]:
    """The body: the directory, the pickle and the small buffers, each aligned; and where the pickle begins."""
    start = here = _aligned(len(buffers) * _ENTRY.size)
    parts: list[Any] = [pickled]
    entries = []
    here += _aligned(len(pickled))
    for data in (buffer.raw() for buffer in buffers):
        size = data.nbytes
        if size > SMALL_BYTES:
            entries.append(_ENTRY.pack(*stored.add(data), size))
            continue
        entries.append(_ENTRY.pack(_HERE, here, size))
        parts.append(data)
        here += _aligned(size)
    out: list[Any] = []
    for part in (b"".join(entries), *parts):
        out += (part, bytes(-len(part) % _ALIGN))
    return b"".join(out), start


class _Stored:
    """Where large data goes: into the slot as far as it fits, else into a memory file, of which these are the segments."""

    def __init__(self, slot: Slot | None) -> None:
        self.spilled: list[Any] = []
        self._slot = slot
        self._size = 0

    def add(self, data: memoryview) -> tuple[int, int]:
        """The memory that has it now, and where."""
        offset = -1 if self._slot is None else self._slot.put(data)
        if offset >= 0:
            return _SLOT, offset
        offset, self._size = self._size, self._size + _aligned(data.nbytes)
        self.spilled += (data, bytes(-data.nbytes % _ALIGN))
        return _FILE, offset


def _unpack(packet: bytes, file: memoryview | None, arena: Arena | None) -> Any:
    number, is_used, has_file, memory, offset, length, count, start, size = _HEAD.unpack_from(packet)
    slot = None
    if arena is not None:
        if is_used:
            slot = arena.view(number)
        else:
            arena.give_back(number)
    if has_file and file is None:
        raise OSError(errno.EMFILE, "too many open files to take in a batch")
    memories: list[Any] = [memoryview(packet)[_HEAD.size :], slot, file]
    body = memories[memory][offset : offset + length]
    if count:
        # Copied to its exact size: the tensors that view it may be written to, and keep it alive.
        memories[_HERE] = body = memoryview(bytearray(body))
    entries = _ENTRY.iter_unpack(body[: count * _ENTRY.size])
    buffers = [memories[memory][offset : offset + length] for memory, offset, length in entries]
    return pickle.loads(body[start : start + size], buffers=buffers)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _take_in(descriptors: bytes) -> memoryview:
    """The memory file that came with a packet."""
    (descriptor,) = struct.unpack("i", descriptors[: struct.calcsize("i")])
    with io.FileIO(descriptor) as file:
        size = os.fstat(descriptor).st_size
        return map_file(descriptor) if size > _MAPPED else memoryview(bytearray(file.readall()))


def _write(descriptor: int, segments: list[Any]) -> None:
    left = [memoryview(segment).cast("B") for segment in segments if memoryview(segment).nbytes]
    while left:
        written = os.writev(descriptor, left[:_IOV_MAX])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    os.lseek(descriptor, 0, os.SEEK_SET)  # the receiver's descriptor shares the position


class _Pickler(pickle.Pickler):
    """Plain tensors as out-of-band buffers; torch's own reduction would copy them into the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        if (code := _CODES.get(value.dtype)) is not None:
            with suppress(RuntimeError, TypeError):  # gradients, lazy conjugates, other devices and layouts
                array: Any = value.numpy()
                if array.flags.c_contiguous:
                    return _rebuild_tensor, (pickle.PickleBuffer(array), code, array.shape, None)
        if (
            value.layout is torch.strided
            and value.device.type == "cpu"
            and not value.requires_grad
            and not value.is_quantized
            and not value.is_nested
        ):
            value = value.resolve_conj().resolve_neg()
            # Another memory format, such as channels last, is kept, if there are no gaps.
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            strides = value.stride() if value.permute(order).is_contiguous() else None
            dense = value.contiguous() if strides is None else value.permute(order)
            # A single element may have any stride and still be called contiguous.
            flat = dense.as_strided((dense.numel(),), (1,))
            data: Any = flat.view(torch.uint8).numpy() if dense.numel() else b""
            return _rebuild_tensor, (pickle.PickleBuffer(data), value.dtype, tuple(value.shape), strides)
        return NotImplemented


def _rebuild_tensor(data: Any, dtype: int | torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> torch.Tensor:
    # A storage of exactly this tensor's size: torch.save writes whole storages.
    if isinstance(dtype, int):
        return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], data))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    # Not a view, which could not be detached in place.
    return flat.set_(flat.untyped_storage(), 0, shape, strides or torch.empty(shape, device="meta").stride())


# The types that NumPy has as well go by number and through it: that takes a third of the time.
_NUMPY = [np.dtype(code) for code in "?bhilBHILefdFD"]
_CODES = {torch.from_numpy(np.empty(0, dtype)).dtype: code for code, dtype in enumerate(_NUMPY)}

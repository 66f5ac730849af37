"""Python objects over a SEQPACKET socket: one atomic packet each, so that any number of processes may share an end.

A message is a body and large buffers. The body is a pickle (protocol 5) with its small buffers, and before it a directory
that gives each large one's place: in the task's slot, or, what does not fit, in a memory file whose descriptor the packet
carries. What is small travels in the packet, so that a kept label holds no slot, but itself alone; what is large is viewed
where it lies, by the receiver's tensors and arrays, and lives as long as the last of them.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
from array import array
from typing import Any, NamedTuple

from stateful_pipes.prefetch import memory_files
from stateful_pipes.prefetch.slots import SMALL_BYTES, Arena, Slot, aligned
from stateful_pipes.prefetch.tensors import TensorPickler

__all__ = ["Message", "Parcel", "open_channel", "pack", "receive", "send"]

# Larger packets would fill the socket's buffer, and a worker would have to wait for the main process.
_PACKET = 16 * 1024
# Plain integers: the enumerations' own arithmetic takes microseconds.
_DONTWAIT = int(socket.MSG_DONTWAIT)
_RECEIVING = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
# Task, slot and whether anything lies there; the body's memory, offset and length; the number of large buffers.
_HEAD = struct.Struct("<qq?qqqq")
# A buffer's memory, offset and length.
_ENTRY = struct.Struct("<qqq")
_HERE, _SLOT, _FILE = range(3)
_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))


def open_channel() -> tuple[socket.socket, socket.socket]:
    """A connected pair of ends. `shutdown` on either ends every process's wait on the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Message(NamedTuple):
    """What `pack` makes and `send` sends.

    Attributes:
        layout: Whether anything lies in the slot; the body's memory, offset and length; the number of large buffers.
        body: The pickle with what travels beside it, unless that lies elsewhere.
        spilled: What goes into a memory file, in pieces.
        size: Bytes of the pickle and all buffers, wherever they lie.
    """

    layout: tuple[bool, int, int, int, int]
    body: bytes
    spilled: list[Any]
    size: int


def pack(value: object, slot: Slot | None = None) -> Message:
    """Makes a message.

    Args:
        value: What to send.
        slot: Where large buffers go as far as they fit.

    Raises:
        Exception: whatever pickle raises for an object that it cannot take.
    """
    stream = io.BytesIO()
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.nbytes > SMALL_BYTES:
            large.append(data)
            return False
        return True  # which leaves it to the pickle

    TensorPickler(stream, protocol=5, buffer_callback=is_small).dump(value)
    body: bytes = stream.getvalue()
    size = len(body)
    stored = _Stored(slot)
    if large:
        size += sum([data.nbytes for data in large])
        body = b"".join([_ENTRY.pack(*stored.add(data), data.nbytes) for data in large]) + body
    memory, offset, length = _HERE, 0, len(body)
    if length > _PACKET - _HEAD.size:
        (memory, offset), body = stored.add(memoryview(body)), b""
    is_used = slot is not None and slot.is_used
    return Message((is_used, memory, offset, length, len(large)), body, stored.spilled, size)


def send(end: socket.socket, message: Message, task: int = -1, number: int = -1) -> None:
    """Sends what `pack` made, without waiting.

    Args:
        end: Of a channel.
        message: What to send.
        task: To be read before the rest.
        number: The slot that the message lies in, or that the receiver is to use; -1 for none.

    Raises:
        BlockingIOError: the buffer is full.
        OSError: the other end is gone, or the system is short of something.
    """
    layout, body, spilled, _ = message
    head = _HEAD.pack(task, number, *layout)
    if not spilled:
        end.sendmsg((head, body), (), _DONTWAIT)
        return
    descriptor = memory_files.create()
    try:
        memory_files.write(descriptor, spilled)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
        end.sendmsg((head, body), [rights], _DONTWAIT)
    finally:
        os.close(descriptor)


class Parcel(NamedTuple):
    """A received message, still closed.

    Attributes:
        task: As the sender gave it.
        number: The slot's.
        is_used: Whether anything lies there.
    """

    task: int
    number: int
    is_used: bool
    layout: tuple[int, ...]
    packet: bytes
    file: memoryview | Exception | None

    def open(self, arena: Arena | None = None) -> Any:
        """What was sent; once. Its slot in `arena`, if it has one, is free again when the last view of it is gone.

        Raises:
            Exception: it cannot be rebuilt.
        """
        slot = None
        if arena is not None:
            if self.is_used:
                slot = arena.view(self.number)
            else:
                arena.give_back(self.number)
        if isinstance(self.file, Exception):
            raise self.file
        memory, offset, length, count = self.layout
        memories: tuple[Any, ...] = (memoryview(self.packet)[_HEAD.size :], slot, self.file)
        body = memories[memory][offset : offset + length]
        if not count:
            return pickle.loads(body)
        entries = _ENTRY.iter_unpack(body[: count * _ENTRY.size])
        buffers = [memories[memory][offset : offset + length] for memory, offset, length in entries]
        return pickle.loads(body[count * _ENTRY.size :], buffers=buffers)


def receive(end: socket.socket) -> Parcel:
    """The next message, without waiting.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: there is none yet.
    """
    packet, ancillary, flags, _ = end.recvmsg(_PACKET, _FD_SPACE, _RECEIVING)
    if not packet:
        raise EOFError("the channel is closed")
    file: memoryview | Exception | None = None
    if ancillary or flags & _TRUNCATED:
        file = _file_of(ancillary)
    task, number, is_used, *layout = _HEAD.unpack_from(packet)
    return Parcel(task, number, is_used, tuple(layout), packet, file)


def _file_of(ancillary: list[tuple[int, int, bytes]]) -> memoryview | Exception:
    """The memory file that came with a packet; what is wrong with it is told when the parcel is opened."""
    if not ancillary:
        return OSError(errno.EMFILE, "too many open files to take in a batch")
    (descriptor,) = struct.unpack("i", ancillary[0][2][: struct.calcsize("i")])
    try:
        return memory_files.take_in(descriptor)
    except (OSError, RuntimeError) as error:
        return error.with_traceback(None)


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
        offset, self._size = self._size, self._size + aligned(data.nbytes)
        self.spilled += (data, bytes(aligned(data.nbytes) - data.nbytes))
        return _FILE, offset

"""Python objects over a SEQPACKET socket: one atomic packet each, so that any number of processes may share an end.

A packet holds a pickle (protocol 5) and its out-of-band buffers. A large one goes into an anonymous memory file instead
(memfd: nothing in /dev/shm), of which the packet carries the descriptor; the receiver maps it, and the tensors and arrays
that it unpickles are views of that mapping, which lives as long as the last of them.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
from array import array
from typing import Any, cast

import torch

__all__ = ["open_channel", "pack", "receive", "send"]

# Larger packets would fill the socket's buffer, and a worker would have to wait for the main process.
_INLINE = 16 * 1024
_ALIGN = 64
_IOV_MAX = 1024
_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))


def open_channel() -> tuple[socket.socket, socket.socket]:
    """A connected pair of ends. `shutdown` on either ends every process's wait on the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, segments: list[Any], flags: int = 0) -> None:
    """Sends what `pack` made.

    Raises:
        BlockingIOError: with MSG_DONTWAIT, the buffer is full.
        OSError: the other end is gone.
    """
    if sum(memoryview(segment).nbytes for segment in segments) <= _INLINE:
        end.sendmsg([b"I", *segments], (), flags)
        return
    fd = os.memfd_create("stateful_pipes")
    try:
        _write(fd, segments)
        end.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))], flags)
    finally:
        os.close(fd)


def receive(end: socket.socket, flags: int = 0) -> Any:
    """The next object.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: with MSG_DONTWAIT, there is none yet.
    """
    # With room for the segments' headers and padding of the largest inline packet.
    packet = bytearray(_INLINE + 1)
    size, ancillary, _, _ = end.recvmsg_into([packet], _FD_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
    if size == 0:
        raise EOFError("the channel is closed")
    if packet[:1] == b"I":
        # Copied to its exact size: the tensors that view it keep it alive.
        return _unpack(memoryview(bytearray(memoryview(packet)[1:size])))
    if not ancillary:
        raise OSError(errno.EMFILE, "too many open files to take in a batch")
    (fd,) = struct.unpack("i", ancillary[0][2][: struct.calcsize("i")])
    try:
        # Not mmap.mmap, which keeps a descriptor for each mapping.
        mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=os.fstat(fd).st_size, dtype=torch.uint8)
    finally:
        os.close(fd)
    return _unpack(memoryview(cast(Any, mapped.numpy())))


def pack(value: object) -> list[Any]:
    """The segments of a packet: a header with their sizes, the pickle, and each buffer, padded so that it is aligned.

    Raises:
        Exception: whatever pickle raises for an object that it cannot take.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts: list[Any] = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    header = struct.pack(f"<q{len(sizes)}q", len(sizes), *sizes)
    segments: list[Any] = []
    offset = 0
    for part in (memoryview(header), *parts):
        segments.append(part)
        offset += part.nbytes
        if offset % _ALIGN:
            segments.append(bytes(_ALIGN - offset % _ALIGN))
            offset += len(segments[-1])
    return segments


def _unpack(packet: memoryview) -> Any:
    (count,) = struct.unpack_from("<q", packet)
    sizes = struct.unpack_from(f"<{count}q", packet, 8)
    offset = _aligned(8 * (count + 1))
    parts = []
    for size in sizes:
        parts.append(packet[offset : offset + size])
        offset = _aligned(offset + size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _write(fd: int, segments: list[Any]) -> None:
    left = [memoryview(segment).cast("B") for segment in segments if memoryview(segment).nbytes]
    while left:
        written = os.writev(fd, left[:_IOV_MAX])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


class _Pickler(pickle.Pickler):
    """Plain tensors as out-of-band buffers; torch's own reduction would copy them into the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is torch.Tensor
            and value.layout is torch.strided
            and value.device.type == "cpu"
            and not value.requires_grad
            and not value.is_quantized
            and not value.is_nested
        ):
            value = value.resolve_conj().resolve_neg()
            order = _dimensions(value)
            dense = value.contiguous() if order is None else value.permute(order)
            # A single element may have any stride and still be called contiguous.
            flat = dense.as_strided((dense.numel(),), (1,))
            data = flat.view(torch.uint8).numpy() if dense.numel() else b""
            return _rebuild_tensor, (pickle.PickleBuffer(cast(Any, data)), value.dtype, tuple(dense.shape), order)
        return NotImplemented


def _dimensions(value: torch.Tensor) -> tuple[int, ...] | None:
    """For a dense tensor in another memory format, such as channels last, its dimensions from the slowest to the fastest."""
    if value.is_contiguous():
        return None
    order = tuple(sorted(range(value.dim()), key=value.stride, reverse=True))
    return order if value.permute(order).is_contiguous() else None


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None) -> torch.Tensor:
    # A storage of exactly this tensor's size: torch.save writes whole storages.
    dense = torch.empty(shape, dtype=dtype) if 0 in shape else torch.frombuffer(data, dtype=dtype).reshape(shape)
    return dense if order is None else dense.permute(sorted(range(len(order)), key=order.__getitem__))

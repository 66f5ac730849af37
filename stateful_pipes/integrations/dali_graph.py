"""What a DALI pipeline is, read from its own serialization: a fingerprint, and what cannot be resumed in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from stateful_pipes.errors import ResumableModeRequiredError

__all__ = ["check_resumable", "fingerprint"]

# Fields of DALI's PipelineDef: where and how fast a pipeline runs, which may be another after a resume.
_NUM_THREADS, _DEVICE_ID, _EXECUTOR, _EXECUTOR_FLAGS, _QUEUE_CPU, _QUEUE_GPU, _BYTES_HINT = 1, 8, 11, 12, 13, 14, 15
_PLACE = frozenset({_NUM_THREADS, _DEVICE_ID, _EXECUTOR, _EXECUTOR_FLAGS, _QUEUE_CPU, _QUEUE_GPU, _BYTES_HINT})
_OPERATOR, _ENABLE_CHECKPOINTING = 5, 10
# Fields of its OpDef, and of Argument.
_SCHEMA, _ARGUMENT, _INSTANCE, _ARGUMENT_NAME = 1, 4, 5, 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fingerprint(serialized: bytes) -> str:
    """A hash of what `Pipeline.serialize()` gives: graph, arguments, batch size and seed.

    Left out are the numbers of threads, queue depths, the executor and the device; and the lines of source code in which
    operators were made, which DALI writes down beside their arguments.
    """
    found = hashlib.sha256()
    for number, value in _fields(serialized):
        if number == _OPERATOR:
            for part, inner in _fields(value):
                if part != _ARGUMENT or not _is_place(dict(_fields(inner))[_ARGUMENT_NAME]):
                    found.update(repr((number, part, inner)).encode())
        elif number not in _PLACE:
            found.update(repr((number, value)).encode())
    return found.hexdigest()


def check_resumable(serialized: bytes, pipeline: Any) -> None:
    """Refuses a pipeline whose checkpoints would not lead back to where it stood.

    Raises:
        ResumableModeRequiredError: checkpointing is off, or something is fed to it that DALI does not capture.
    """
    fields = list(_fields(serialized))
    if (_ENABLE_CHECKPOINTING, 1) not in fields:
        raise ResumableModeRequiredError(
            "the pipeline keeps no checkpoints",
            expected="enable_checkpointing=True",
            found="enable_checkpointing=False",
            remedy="Let the factory build with enable_checkpointing=True and the checkpoint that it is given",
        )
    operators = [dict(_fields(value)) for number, value in fields if number == _OPERATOR]
    captured = {
        instance.name for group in pipeline._input_callbacks or () if group.source_desc.has_inputs for instance in group.instances
    }
    for operator in operators:
        name = operator.get(_INSTANCE, b"").decode()
        if operator[_SCHEMA] == b"ExternalSource" and name not in captured:
            raise ResumableModeRequiredError(
                f"DALI does not capture what is fed to its external_source {name!r}",
                remedy="Give it a callable of one argument (SampleInfo, BatchInfo or the batch's index) as its source, which "
                "is no generator, or read with one of DALI's readers",
            )


def _is_place(argument: bytes) -> bool:
    """Whether an argument says where an operator was made, how far it reads ahead, or that it shares memory (if parallel)."""
    return argument.startswith(b"_origin_stack") or argument in (b"prefetch_queue_depth", b"no_copy")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message, in order: (number, int or bytes)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind, 0)
            if kind == _BYTES:
                size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        else:
            raise ValueError(f"not a serialized DALI pipeline: a field of wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

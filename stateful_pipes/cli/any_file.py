"""Any file that holds a loader's state: what is in it, in words; nothing in it is executed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stateful_pipes.caught import brief
from stateful_pipes.checkpoint import held_in
from stateful_pipes.encoding import decode
from stateful_pipes.errors import CheckpointFileError
from stateful_pipes.progress import is_state
from stateful_pipes.sealed_file import read_sealed, why_unreadable
from stateful_pipes.training.checkpoint import TRAINING_STATE
from stateful_pipes.wording import counted, short_repr, shortened

__all__ = [
    "NOTHING",
    "AnyFile",
    "Digits",
    "inner",
    "opened",
    "reading",
    "say",
    "shown",
    "shown_name",
    "step",
    "unreadable",
]

_LONGEST: Final = 60
_MOST_DIGITS: Final = 4300
"""Of an integer that Python reads from text."""
_SEAL_WORDS: Final = b"stateful_pipes sha256"

NOTHING: Final = object()
"""Stands for what is not there."""


class Digits(str):
    """An integer of more digits than Python reads from text."""


class AnyFile(NamedTuple):
    """What was read from a file.

    Attributes:
        path: Of the file.
        kind: What it is, in words.
        size: In bytes.
        checksum: "right", "wrong" or, where it has none, "".
        value: What it holds: of a checkpoint, the state; else all of it.
        user: The caller's own entry of a checkpoint; `NOTHING` where there is none.
    """

    path: str
    kind: str
    size: int
    checksum: str
    value: Any
    user: Any = NOTHING

    @property
    def title(self) -> str:
        """The file in one line."""
        checksum = {"right": "checksum right", "wrong": "checksum WRONG: the content was changed", "": "no checksum"}
        return f"{shown_name(self.path)}: {self.kind}, {counted(self.size, 'byte')}, {checksum[self.checksum]}"


def opened(path: str) -> AnyFile:
    """Reads a checkpoint of a loader or of several, a file of a `CheckpointManager` or of `stateful_pipes.training`, or a state
    in JSON or as `torch.save` writes it.

    Tensors of a file of `torch.save` stay on disk until they are looked at.

    Raises:
        OSError: it cannot be read.
        CheckpointFileError: it is damaged, or none of these.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
    if not head:
        raise CheckpointFileError("the file is empty")
    if head.startswith((b"PK", b"\x80")):
        return _of_torch(path, size, is_archive=head.startswith(b"PK"))
    if head.lstrip()[:1] in (b"{", b"["):
        return _of_json(path, size)
    raise CheckpointFileError("neither a JSON object nor a file of torch.save")


def unreadable(path: str, error: Exception) -> str:
    """Why a file could not be read, in a line."""
    why = str(error) if isinstance(error, CheckpointFileError) else brief(error)
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    return f"{shown_name(path)}: {' '.join(why.split())}"


def _of_json(path: str, size: int) -> AnyFile:
    data = Path(path).read_bytes()
    try:
        body = json.loads(data, parse_int=lambda text: int(text) if len(text) <= _MOST_DIGITS else Digits(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(f"it begins like JSON, but {brief(error)}") from error
    if not isinstance(body, dict) or not {"sha256", "state"} <= body.keys():
        return AnyFile(path, f"JSON{_holding(body)}", size, "", body)
    try:
        held_in(data)
        checksum = "right"
    except CheckpointFileError:
        checksum = "wrong"
    several = isinstance(body["state"], dict) and "pipelines" in body["state"]
    kind = f"checkpoint of a {'MultiPipelineLoader' if several else 'StatefulDataLoader'}"
    return AnyFile(path, kind, size, checksum, body["state"], body.get("user", NOTHING))


def _of_torch(path: str, size: int, *, is_archive: bool) -> AnyFile:
    try:
        # Legacy files cannot be mapped.
        value, is_sealed = _loaded(path, size, {"map_location": "cpu", "mmap": True} if is_archive else {"map_location": "cpu"})
    except (OSError, MemoryError, CheckpointFileError):
        raise
    except Exception as error:  # whatever torch and pickle make of other bytes
        raise CheckpointFileError(f"torch.load(weights_only=True) cannot read it: {why_unreadable(error)}") from error
    if isinstance(value, Mapping) and TRAINING_STATE in value:
        kind = "paused training of stateful_pipes.training"
    else:
        kind = "checkpoint of a CheckpointManager" if is_sealed else f"file of torch.save{_holding(value)}"
    return AnyFile(path, kind, size, "right" if is_sealed else "", value)


def _loaded(path: str, size: int, load: dict[str, Any]) -> tuple[Any, bool]:
    """What the file holds, and whether it is sealed."""
    try:
        return read_sealed(path, **load), True
    except CheckpointFileError:
        with open(path, "rb") as file:
            file.seek(max(0, size - 2 * len(_SEAL_WORDS) - 64))
            if _SEAL_WORDS in file.read():  # whole or cut off, it does not fit
                raise
    return read_sealed(path, unsealed=True, **load), False


def _holding(value: object) -> str:
    return " with a loader's state" if is_state(value) else ""


# What is in it.


def inner(node: Mapping[Any, Any], key: object) -> Any:
    """A field of a node's entry; of a node of another library, its own state as that gave it."""
    value = node[key]
    if key == "state" and isinstance(value, str):
        with suppress(Exception):  # then it is a text like any other
            return decode(value)
    return value


# In words.


def step(key: object) -> str:
    """A key within a path: .name, [0], ['other text']."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() and key.isprintable() else f"[{shown(key)}]"


def reading(path: tuple[object, ...]) -> str:
    """Keys one after the other, as a path."""
    return "".join(map(step, path)).removeprefix(".")


def shown_name(name: object) -> str:
    """A name as it stands if a terminal shows it as it is."""
    text = name if isinstance(name, str) and name and name.isprintable() and name == name.strip() else shown(name)
    return shortened(text, 2 * _LONGEST)


def shown(value: object) -> str:
    """A value in a few words: a tensor's type, shape and size, a container's length, a long text's beginning."""
    if isinstance(value, torch.Tensor):
        size = value.numel() * value.element_size()
        return f"tensor {str(value.dtype).removeprefix('torch.')} {_shape(value.shape)}, {counted(size, 'byte')}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {_shape(value.shape)}, {counted(value.nbytes, 'byte')}"
    if isinstance(value, Digits):
        return f"integer of {counted(len(value.lstrip('-')), 'digit')}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"integer of {counted(value.bit_length(), 'bit')}"
    if isinstance(value, (str, bytes, bytearray)) and len(value) > _LONGEST:
        unit = "character" if isinstance(value, str) else "byte"
        return f"{value[:_LONGEST]!r}... ({counted(len(value), unit)})"
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"{type(value).__name__} of {len(value):,}" if value else f"empty {type(value).__name__}"
    return short_repr(value, 2 * _LONGEST)


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def say(lines: Iterator[str] | list[str]) -> None:
    """Prints, whatever the terminal's encoding is; a reader such as `head` may go before it has read all."""
    encoding = sys.stdout.encoding or "utf-8"
    text = "".join(f"{line}\n" for line in lines).encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # So that Python, which flushes at its end once more, meets no error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

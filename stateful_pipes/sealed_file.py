"""Files of `torch.save` with a SHA-256 after their end, which `torch.load` reads as well."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, BinaryIO, Final

import torch

from stateful_pipes.caught import brief
from stateful_pipes.errors import CheckpointFileError

__all__ = ["read_sealed", "why_unreadable", "write_sealed"]

_SEAL: Final = b"\nstateful_pipes sha256 "
_SEAL_BYTES: Final = len(_SEAL) + 64
_CHUNK: Final = 2**20


def write_sealed(file: BinaryIO, state: Mapping[str, Any]) -> None:
    """Saves a state in an empty file that has a name, and seals it.

    Raises:
        OSError: it could not be written.
        ValueError: the state holds what `torch.load(weights_only=True)` refuses; it names the place.
    """
    sealing = _Sealing(file)
    try:
        torch.save(state, sealing)  # type: ignore[arg-type]  # it needs no more than this
        file.flush()
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
    except Exception as error:
        if sealing.error is not None:  # which torch has met with an error of its own
            raise sealing.error from None
        if isinstance(error, (OSError, MemoryError)):
            raise
        raise ValueError(f"this state cannot be saved: {_culprit(state) or error}") from error
    if refused:
        found = _culprit(state) or ", ".join(refused)
        raise ValueError(
            f"torch.load(weights_only=True) would refuse this state: {found}; use tensors, numbers, strings, lists, dicts"
        )
    file.write(_SEAL + sealing.digest.hexdigest().encode())


def read_sealed(path: str | PathLike[str], *, unsealed: bool = False, **load: Any) -> Any:
    """The state again.

    Args:
        path: Of the file.
        unsealed: Whether a file without a seal will do, as `torch.save` writes it.
        load: For `torch.load`; `weights_only` is always True, so no code in the file is run.

    Raises:
        OSError: it cannot be read.
        CheckpointFileError: it is damaged.
        Exception: what `torch.load` raises for one that is whole, such as a device that is not there.
    """
    remedy = "Go back to an older checkpoint"
    with open(path, "rb") as file:  # once, but for mmap: another may take its place meanwhile
        size = os.fstat(file.fileno()).st_size - _SEAL_BYTES
        digest = hashlib.sha256()
        for chunk in _chunks(file, size):
            digest.update(chunk)
        seal = file.read()
        is_sealed = seal.startswith(_SEAL) or not unsealed
        if is_sealed and seal != _SEAL + digest.hexdigest().encode():
            raise CheckpointFileError("the checksum does not fit the content", remedy=remedy)
        file.seek(0)
        try:
            return torch.load(path if load.get("mmap") else file, **{**load, "weights_only": True})
        except OSError as error:  # a seek to where nothing is
            raise CheckpointFileError(f"torch cannot read it: {error}", remedy=remedy) from error


def why_unreadable(error: Exception) -> str:
    """What torch.load(weights_only=True) found, of its long text; the rest advises to run the code in the file."""
    told = re.search(r"Unpickler error: ([^\n]*)", str(error))
    return told[1] if told else brief(error).partition(". ")[0]


def _culprit(state: Any, path: str = "state") -> str:
    """The first part that torch.load(weights_only=True) refuses, with its path; empty if each is taken on its own."""
    kind = type(state)
    if kind is torch.Tensor:
        return ""
    if kind in (dict, OrderedDict):
        inner = [(f"{path}[{key!r}]", one) for key, one in state.items()] + [(f"a key of {path}", one) for one in state]
    elif kind in (list, tuple):
        inner = [(f"{path}[{number}]", one) for number, one in enumerate(state)]
    else:
        try:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:
            return f"{path} is a {kind.__module__}.{kind.__qualname__}"
        return ""
    return next((found for place, one in inner if (found := _culprit(one, place))), "")


class _Sealing:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        size -= len(chunk)
        yield chunk

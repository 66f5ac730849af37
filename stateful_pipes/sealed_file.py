"""Files of `torch.save` with a SHA-256 after their end, which `torch.load` reads as well."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from stateful_pipes.errors import CheckpointFileError

__all__ = ["read_sealed", "write_sealed"]

_SEAL: Final = b"\nstateful_pipes sha256 "
_SEAL_BYTES: Final = len(_SEAL) + 64
_CHUNK: Final = 2**20


def write_sealed(file: BinaryIO, state: Mapping[str, Any]) -> None:
    """Saves a state and seals it.

    Raises:
        OSError: it could not be written.
        ValueError: the state holds what `torch.load(weights_only=True)` refuses; torch's `add_safe_globals` admits it.
    """
    sealing = _Sealing(file)
    try:
        torch.save(state, sealing)  # type: ignore[arg-type]  # it needs no more than this
    except RuntimeError:
        if sealing.error is not None:  # which torch has met with an error of its own
            raise sealing.error from None
        raise
    file.flush()
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
        raise ValueError(f"torch.load(weights_only=True) would refuse this state: it holds {', '.join(refused)}")
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
    size = Path(path).stat().st_size - _SEAL_BYTES
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in _chunks(file, size):
            digest.update(chunk)
        seal = file.read()
    is_sealed = seal.startswith(_SEAL) or not unsealed
    if is_sealed and seal != _SEAL + digest.hexdigest().encode():
        raise CheckpointFileError("the checksum does not fit the content", remedy="Go back to an older checkpoint")
    return torch.load(path, **{**load, "weights_only": True})


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

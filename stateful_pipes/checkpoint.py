"""A loader's state as bytes with a checksum, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stateful_pipes.errors import CheckpointFileError

__all__ = ["Held", "dumps", "held_in", "loads", "read", "write_atomically"]

logger = logging.getLogger("stateful_pipes")
_LONGEST_NAME = 255
"""Bytes, on all file systems in common use."""


class Held(NamedTuple):
    """What a checkpoint holds: a loader's state, and what its caller put beside it."""

    state: dict[str, Any]
    user: Any


def dumps(state: Mapping[str, Any], user: object = None) -> bytes:
    """The state, and the caller's own entry if there is one, as canonical JSON beside the SHA-256 of that JSON."""
    body = {"state": state} if user is None else {"state": state, "user": user}
    return _canonical({"sha256": _digest(body), **body})


def loads(data: bytes) -> dict[str, Any]:
    """The state again; it is not yet compared with a pipeline.

    Raises:
        CheckpointFileError: the bytes are truncated, changed, or something else altogether.
    """
    return _held(data).state


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The state in a file that `write_atomically` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointFileError: it is not a whole checkpoint.
    """
    return held_in(path).state


def held_in(checkpoint: bytes | str | PathLike[str] | Mapping[str, Any]) -> Held:
    """What it holds, however it is given: as a state, as bytes, or as the path of a file."""
    if isinstance(checkpoint, Mapping):
        return Held(dict(checkpoint), None)
    if isinstance(checkpoint, bytes):
        return _held(checkpoint)
    try:
        return _held(Path(checkpoint).read_bytes())
    except CheckpointFileError as error:
        error.add_note(f"in file {os.fspath(checkpoint)}")
        raise


def _held(data: bytes) -> Held:
    remedy = "Go back to an older checkpoint"
    try:
        body = json.loads(data)
        digest, state, user = body.pop("sha256"), body["state"], body.get("user")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointFileError("not JSON with a checksum and a state", remedy=remedy) from error
    found = _digest(body)
    if not isinstance(state, dict) or digest != found or _canonical({"sha256": digest, **body}) != data:
        raise CheckpointFileError("the checksum does not fit the content", expected=digest, found=found, remedy=remedy)
    return Held(state, user)


def write_atomically(path: str | PathLike[str], data: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file so that after a crash at any moment either the old content is there or the new one, whole.

    A file beside the target is written and synced, then takes its place, and the folder is synced; where that cannot be
    done, it is logged.

    Args:
        path: The target.
        data: Its content, or what writes that to a file that it is given.

    Raises:
        OSError: the disk is full, the folder cannot be written to...; the old content is still there.
    """
    target = Path(os.path.realpath(path))  # of a link, where it leads
    # As much of the name as leaves room for the token, which is its own guard against other writers.
    beginning = os.fsdecode(os.fsencode(target.name)[: _LONGEST_NAME - 18])
    name = target.with_name(f".{beginning}.{secrets.token_hex(8)}")
    # "x" and not tempfile.mkstemp, whose files are for their owner alone; those that the old file is for may read the new one.
    try:
        with open(name, "xb") as file:
            with suppress(OSError):
                os.chmod(name, stat.S_IMODE(os.stat(target).st_mode))
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """As far as it can be done: Windows opens no folder, and some network file systems sync none."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.warning("%s cannot be synced: after a crash of the system the old file may be back (%s)", folder, error)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body if "user" in body else body["state"])).hexdigest()

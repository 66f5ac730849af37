"""A worker's exception as plain data, and back as the exception that it was."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

__all__ = ["RemoteError", "capture", "restore"]


class RemoteError(NamedTuple):
    """An exception that can be pickled whatever it holds.

    Attributes:
        pickled: The exception itself, else (class, args, attributes); empty where neither can be pickled.
        shown: Type and text.
        trace: The worker's traceback, causes included.
        notes: The exception's notes.
        parts: Those of a group, which is then (class, message, attributes) in `pickled`.
    """

    pickled: bytes
    shown: str
    trace: str
    notes: tuple[str, ...]
    parts: tuple[RemoteError, ...] = ()


class WorkerTraceback(Exception):
    """Stands as the cause of an exception that comes from a worker; its text is the traceback there."""

    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0] if self.args else ''}"


def capture(error: BaseException) -> RemoteError:
    """The exception as data."""
    trace = "".join(traceback.format_exception(error))
    shown = "".join(traceback.format_exception_only(type(error), error)).strip()
    attributes = {key: value for key, value in error.__dict__.items() if key != "__notes__"}
    notes = tuple(map(str, getattr(error, "__notes__", ())))
    if isinstance(error, BaseExceptionGroup):
        parts = tuple(map(capture, error.exceptions))
        return RemoteError(_dumps((type(error), error.message, _picklable(attributes))), shown, trace, notes, parts)
    # First pickle's own way, since Python's errors keep fields outside of args and attributes.
    for form in (error, (type(error), error.args, attributes), (type(error), error.args, _picklable(attributes))):
        try:
            pickled = pickle.dumps(form)
            rebuilt = _rebuild(pickled)
            faithful = type(rebuilt) is type(error) and _text(rebuilt) == _text(error)
        except Exception:
            continue
        if faithful:
            return RemoteError(pickled, shown, trace, notes)
    return RemoteError(b"", shown, trace, notes)


def restore(remote: RemoteError) -> BaseException:
    """The exception again: its own type, arguments, attributes and notes; RuntimeError where that cannot be."""
    error = _restored(remote)
    error.__cause__ = WorkerTraceback(remote.trace)
    return error


def _restored(remote: RemoteError) -> BaseException:
    parts = list(map(_restored, remote.parts))
    try:
        error = _regroup(remote.pickled, parts) if parts else _rebuild(remote.pickled)
    except Exception:
        error = BaseExceptionGroup(remote.shown, parts) if parts else RuntimeError(remote.shown)
    error.__dict__.pop("__notes__", None)
    for note in remote.notes:
        error.add_note(note)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"str() fails: {broken!r}"


def _rebuild(pickled: bytes) -> BaseException:
    form = pickle.loads(pickled)
    if isinstance(form, BaseException):
        return form
    kind, args, attributes = form
    # Not kind(*args): a constructor may take other arguments than it hands to BaseException.
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _regroup(pickled: bytes, parts: list[BaseException]) -> BaseException:
    kind, message, attributes = pickle.loads(pickled)
    error: BaseException = kind.__new__(kind, message, parts)
    error.__dict__.update(attributes)
    return error


def _dumps(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # a class that is local
        return b""


def _picklable(attributes: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in attributes.items():
        try:
            pickle.dumps(value)
        except Exception:
            continue
        kept[key] = value
    return kept

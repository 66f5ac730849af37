"""A worker's exception as plain data, and back as the exception that it was."""

from __future__ import annotations

import pickle
import re
import traceback
from typing import NamedTuple

from stateful_pipes.caught import add_note

__all__ = ["RemoteError", "capture", "restore"]


class RemoteError(NamedTuple):
    """An exception that can be pickled whatever it holds.

    Attributes:
        pickled: The exception itself, else (class, args, attributes); empty where neither can be pickled.
        shown: Type and text.
        trace: The worker's traceback, causes included.
        notes: The exception's notes.
        parts: Those of a group.
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
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    parts = tuple(map(capture, inner))
    args = (error.message,) if isinstance(error, BaseExceptionGroup) else error.args
    safe = (type(error), tuple(map(_safe, args)), {key: value for key, value in attributes.items() if _can_be_pickled(value)})
    # First pickle's own way, since Python's errors keep fields outside of args and attributes.
    forms = [(type(error), args, attributes), safe] if parts else [error, (type(error), args, attributes), safe]
    best = b""
    for form in forms:
        try:
            pickled = pickle.dumps(form)
            rebuilt = _rebuild(pickled, list(inner))
            is_same = type(rebuilt) is type(error) and _text(rebuilt) == _text(error)
        except Exception:
            continue
        if type(rebuilt) is type(error):
            best = pickled if is_same else best or pickled  # rather another text than another type
        if is_same:
            break
    return RemoteError(best, shown, trace, notes, parts)


def restore(remote: RemoteError) -> BaseException:
    """The exception again: its own type, arguments, attributes and notes; RuntimeError where that cannot be."""
    error = _restored(remote)
    object.__setattr__(error, "__cause__", WorkerTraceback(remote.trace))  # a frozen dataclass refuses the plain way
    return error


def _restored(remote: RemoteError) -> BaseException:
    parts = list(map(_restored, remote.parts))
    try:
        error = _rebuild(remote.pickled, parts)
    except Exception:
        error = BaseExceptionGroup(remote.shown, parts) if parts else RuntimeError(remote.shown)
    error.__dict__.pop("__notes__", None)
    for note in remote.notes:
        add_note(error, note)
    return error


def _rebuild(pickled: bytes, parts: list[BaseException]) -> BaseException:
    form = pickle.loads(pickled)
    if isinstance(form, BaseException):
        return form
    kind, args, attributes = form
    args = (*args, parts) if parts else args
    # Not kind(*args): a constructor may take other arguments than it hands to BaseException.
    try:
        error: BaseException = kind.__new__(kind, *args)
    except Exception:
        error = next(base for base in kind.__mro__ if base.__module__ == "builtins").__new__(kind, *args)
    if not parts:
        object.__setattr__(error, "args", args)
    error.__dict__.update(attributes)
    return error


def _text(error: BaseException) -> str:
    """Without addresses, which differ from process to process."""
    try:
        return re.sub("0x[0-9a-f]+", "0x", str(error))
    except Exception as broken:
        return f"str() fails: {broken!r}"


def _safe(value: object) -> object:
    return value if _can_be_pickled(value) else repr(value)


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True

"""What may be done with any exception that was caught, whatever its class does."""

from __future__ import annotations

import traceback

__all__ = ["add_note", "brief"]


def add_note(error: BaseException, note: str) -> None:
    """Adds a note also to an error that lets no attribute be set, as a frozen dataclass."""
    try:
        error.add_note(note)
    except Exception:
        error.__dict__.setdefault("__notes__", []).append(note)


def brief(error: BaseException) -> str:
    """Type and text of an error, whatever its own methods do."""
    return traceback.format_exception_only(error)[0].strip()

"""A disk that is full at a chosen moment."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FAULTS = ["write", "flush", "fsync", "replace"]


class _File:
    """A binary file whose writes or flushes go through a check."""

    def __init__(self, file: Any, check: Callable[[str], None]) -> None:
        self._file, self._check = file, check

    def write(self, data: Any) -> int:
        self._check("write")
        return int(self._file.write(data))

    def flush(self) -> None:
        self._check("flush")
        self._file.flush()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, fault: str, at: int) -> Iterator[Callable[[], bool]]:
    """Raises ENOSPC at the `at`-th write, flush, fsync or replace; gives what says whether it came to that."""
    left = at
    failed = False

    def check(kind: str) -> None:
        nonlocal left, failed
        if kind == fault:
            left -= 1
            if left < 0:
                failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def checked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            check(kind)
            return function(*arguments)

        return call

    opened = builtins.open

    def open_checked(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = opened(path, mode, *arguments, **options)
        return _File(file, check) if "x" in mode or "w" in mode else file

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", open_checked)
        patched.setattr(os, "fsync", checked("fsync", os.fsync))
        patched.setattr(os, "replace", checked("replace", os.replace))
        yield lambda: failed

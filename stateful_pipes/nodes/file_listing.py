"""The files that a reader reads, and their labels, found by DALI's rules."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from stateful_pipes.integers import as_integer

__all__ = ["FILE_FILTERS", "Files", "Listing", "list_files"]

Files = str | os.PathLike[str]

FILE_FILTERS: Final = (
    *("*.jpg", "*.jpeg", "*.png", "*.bmp", "*.tif", "*.tiff", "*.pnm", "*.ppm", "*.pgm", "*.pbm"),
    *("*.jp2", "*.webp", "*.flac", "*.ogg", "*.wav"),
)
"""The files that DALI's readers take by default."""

# The C library's own, as DALI uses it: Python's fnmatch knows no escapes, no [^x] and no [[:alpha:]].
_fnmatch = ctypes.CDLL(None).fnmatch
_fnmatch.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
_IGNORE_CASE: Final = 1 << 4

_DIGITS = re.compile(rb"[0-9]+")


class Listing(NamedTuple):
    """Files in their order.

    Attributes:
        root: What the paths are relative to; absolute.
        paths: One for each file.
        labels: int32, one for each file.
    """

    root: str
    paths: list[str]
    labels: bytes

    def digest(self) -> str:
        """A hash of paths and labels; it is the same where the root lies elsewhere."""
        paths = b"\0".join(map(os.fsencode, self.paths))
        return hashlib.sha256(paths + b"\0\0" + self.labels).hexdigest()[:16]


def list_files(
    file_root: Files | None,
    files: Files | Sequence[Files] | None,
    labels: int | Sequence[int] | None,
    file_list: Files | None,
    file_filters: str | Sequence[str],
    dir_filters: str | Sequence[str] | None,
    case_sensitive: bool,
) -> Listing:
    """The files that the arguments of a `FileReader` name.

    Raises:
        ValueError: arguments exclude each other or are empty, a line of the list has no label, or no file is found.
        OSError: a folder or the list cannot be read.
    """
    if file_root is None and files is None and file_list is None:
        raise ValueError("file_root is needed where neither files nor file_list is given")
    if files is not None and file_list is not None:
        raise ValueError("files and file_list exclude each other")
    if labels is not None and files is None:
        raise ValueError("labels belong to files, which are not given")
    root = "" if file_root is None else os.fspath(file_root)
    file_globs = _globs("file_filters", file_filters)
    dir_globs = None if dir_filters is None else _globs("dir_filters", dir_filters)
    if files is not None:
        found = _numbered(files, labels)
    elif file_list is not None:
        root = os.path.dirname(os.fspath(file_list)) if file_root is None else root
        found = _listed(os.fspath(file_list))
    else:
        found = _discovered(root, file_globs, dir_globs, 0 if case_sensitive else _IGNORE_CASE)
    if not found:
        raise ValueError(f"no files found in {os.fspath(file_list) if file_list is not None else root!r}")
    # A process that changes its folder later still finds them.
    absolute = os.path.join(os.getcwd(), root)
    return Listing(absolute, [path for path, _ in found], array("i", [label for _, label in found]).tobytes())


def _numbered(files: Files | Sequence[Files], labels: int | Sequence[int] | None) -> list[tuple[str, int]]:
    for name, given in (("files", files), ("labels", labels)):
        if isinstance(given, (set, frozenset)):
            raise TypeError(f"{name} must be in an order, got a {type(given).__name__}")
    paths = [os.fspath(one) for one in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    if not paths:
        raise ValueError("files is an empty list")
    if labels is None:
        return [(path, number) for number, path in enumerate(paths)]
    listed = list(labels) if isinstance(labels, Sequence) or hasattr(labels, "__iter__") else [labels]
    if len(listed) != len(paths):
        raise ValueError(f"{len(listed)} labels for {len(paths)} files")
    return [(path, _as_label("labels", label)) for path, label in zip(paths, listed, strict=True)]


def _as_label(name: str, label: object) -> int:
    return as_integer(name, label, -(2**31), 2**31 - 1, "2**31 - 1")


def _listed(path: str) -> list[tuple[str, int]]:
    """A file's lines, each a path and a label; the path may hold spaces."""
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file.read().split(b"\n"), 1):
            parts = line.rsplit(maxsplit=1)
            if not parts:
                continue
            if len(parts) == 1:
                raise ValueError(f"line {number} of {path!r} should be a file name and a label, got {os.fsdecode(line)!r}")
            name, label = parts
            if not _DIGITS.fullmatch(label):
                raise ValueError(f"the label in line {number} of {path!r} should be digits, got {os.fsdecode(label)!r}")
            found.append((os.fsdecode(name), _as_label(f"the label in line {number} of {path!r}", int(label))))
    return found


def _discovered(root: str, file_globs: list[bytes], dir_globs: list[bytes] | None, flags: int) -> list[tuple[str, int]]:
    """The files in the folders of `root`, in byte order, labelled by the folder's number among those that match."""
    with os.scandir(root) as entries:
        # Links to folders are folders, as DALI has it. One that leads nowhere raises: without it, labels would be others.
        names = [entry.name for entry in entries if stat.S_ISDIR(entry.stat().st_mode)]
    folders = sorted((name for name in names if dir_globs is None or _matches(name, dir_globs, flags)), key=os.fsencode)
    found = []
    for label, folder in enumerate(folders):
        with os.scandir(os.path.join(root, folder)) as entries:
            names = [entry.name for entry in entries if entry.is_symlink() or entry.is_file(follow_symlinks=False)]
        matching = sorted((name for name in names if _matches(name, file_globs, flags)), key=os.fsencode)
        found += [(os.path.join(folder, name), label) for name in matching]
    return found


def _matches(name: str, globs: list[bytes], flags: int) -> bool:
    encoded = os.fsencode(name)
    return any(_fnmatch(glob, encoded, flags) == 0 for glob in globs)


def _globs(name: str, given: str | Sequence[str]) -> list[bytes]:
    globs = [given] if isinstance(given, str) else list(given)
    if not globs:
        raise ValueError(f"{name} is an empty list")
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{name} must be strings, got {given!r}")
    return [os.fsencode(glob) for glob in globs]

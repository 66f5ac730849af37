"""What the subcommands' arguments have in common."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

__all__ = ["AtLeast", "Commands", "Formatter", "add_factory", "factory_of"]


class Commands(Protocol):
    """What argparse's `add_subparsers` gives."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser: ...


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and keeps the description's lines."""


class AtLeast:
    """Reads an integer within bounds."""

    def __init__(self, least: int, *, below: int | None = None) -> None:
        self.least, self.below = least, below

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < self.least or (self.below is not None and value >= self.below):
            bound = f"at least {self.least}" + (f" and below {self.below}" if self.below is not None else "")
            raise argparse.ArgumentTypeError(f"must be {bound}, got {value}")
        return value


def add_factory(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that says what makes the pipeline."""
    parser.add_argument(
        "factory", type=factory_of, metavar="module:factory", help="what makes the pipeline; also path/to/file.py:factory"
    )


def factory_of(text: str) -> Callable[[], Any]:
    """Reads `module:factory` or `path/to/file.py:factory`, where `factory` may be dotted, and imports it.

    The current folder, or the file's, comes first among those that are looked through, in worker processes too.

    Raises:
        argparse.ArgumentTypeError: there is no such thing, or importing it fails; argparse then ends with exit code 2.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise argparse.ArgumentTypeError(f"must be module:factory or path/to/file.py:factory, got {text!r}")
    try:
        found: Any = _imported(where)
    except argparse.ArgumentTypeError:
        raise
    except (Exception, SystemExit) as error:
        raise argparse.ArgumentTypeError(f"importing {where!r} raised {type(error).__name__}: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise argparse.ArgumentTypeError(f"{where!r} has no {name!r}") from None
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{text!r} must be a function without arguments, and is of type {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _imported(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix != ".py":
        _look_first_in(os.getcwd())
        return importlib.import_module(where)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {where!r}")
    _look_first_in(str(path.resolve().parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise argparse.ArgumentTypeError(f"{where!r} has the name of another module, {module.__file__}; rename it")
    return module


def _look_first_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)

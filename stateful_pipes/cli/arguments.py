"""What the subcommands' arguments have in common."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

__all__ = ["AtLeast", "Commands", "Formatter"]


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

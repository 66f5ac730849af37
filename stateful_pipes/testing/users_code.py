"""What is the user's own code, and what a library's; by where it stands, for a module of the user's may have any name."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any, Final

import numpy as np
import torch
import torchdata

__all__ = ["is_users_file", "is_users_object"]

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB: Final = sysconfig.get_path("stdlib")
_LIBRARIES: Final = tuple(
    f"{folder}{os.sep}" for folder in (_HERE, sysconfig.get_path("scripts"), *np.__path__, *torch.__path__, *torchdata.__path__)
)


def is_users_file(file: str) -> bool:
    """Whether code in this file is the user's, or of a library that is to be named as if it were."""
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return not file.startswith(f"{_STDLIB}{os.sep}") or f"{os.sep}site-packages{os.sep}" in file


def is_users_object(value: Any) -> bool:
    """Whether an object's class or function is from there."""
    name = str(getattr(value, "__module__", ""))
    return name == "__main__" or is_users_file(str(getattr(sys.modules.get(name), "__file__", None) or "<built in>"))

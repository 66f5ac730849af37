"""Stand-ins for what Python code asks the system: entropy, the time, what is in a directory, who it is.

Each function gives pairs of what is real and what stands in for it, and remembers the user's lines that called it.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch

from stateful_pipes.testing.users_code import is_users_file

__all__ = ["callers", "clocks", "entropy", "listings", "process", "seeding", "shifted_clock"]

Pairs = Iterator[tuple[Any, Any]]
_ANOTHER_DAY: Final = 437 * 86_400 + 12_345
"""From one clock to the other, in seconds: another year, month, day, hour, minute and second."""
_CALLERS: dict[str, dict[str, None]] = {}


def callers(what: str) -> list[str]:
    """The places in the user's code that asked for "entropy", "clock", "listing" or "process", in order; "" if not known."""
    return list(_CALLERS.get(what, ()))


def _noted(what: str, real: Any, fake: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """The pair, with a fake that remembers who called it."""

    def called(*arguments: Any, **options: Any) -> Any:
        _note(what)
        return fake(*arguments, **options)

    return real, called


def _note(what: str) -> None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            _CALLERS.setdefault(what, {})[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
            return
        frame = frame.f_back
    _CALLERS.setdefault(what, {})[""] = None


# Entropy.


class _Entropy:
    """Bytes that depend on nothing but a value and how often they were asked for."""

    def __init__(self, value: int) -> None:
        self._value, self._asked = value, 0

    def draw(self, size: int, *_: Any) -> bytes:
        self._asked += 1
        return hashlib.shake_256(struct.pack("qq", self._value, self._asked)).digest(size)

    def number(self) -> int:
        return int.from_bytes(self.draw(8), "little") >> 1


def entropy(value: int) -> Pairs:
    """What the system gives as random, made of a value."""
    source = _Entropy(value)

    class Generator(torch.Generator, metaclass=_standing_in_for(torch.Generator)):  # type: ignore[metaclass]
        __module__ = "torch"  # as errors and causes name it

        def seed(self) -> int:
            _note("entropy")
            self.manual_seed(found := source.number())
            return found

    def seed_torch() -> int:
        torch.default_generator.manual_seed(found := source.number())
        return found

    instance: Any = getattr(random.seed, "__self__", None)
    seed = seeding(value)
    if isinstance(instance, random.Random):
        yield random.seed, lambda a=None, version=2: seed(instance, a, version)
    yield torch.Generator, Generator
    yield _noted("entropy", torch.seed, seed_torch)
    yield _noted("entropy", os.urandom, source.draw)
    if hasattr(os, "getrandom"):
        yield _noted("entropy", os.getrandom, source.draw)


def seeding(value: int) -> Callable[..., None]:
    """`random.Random.seed`, which without a seed asks the system from within C."""
    real, source = random.Random.seed, _Entropy(-1 - value)

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _note("entropy")
            a = source.number()
        real(self, a, version)

    return seed


# Time.


class _Ticks:
    """Clocks that show how often they were read."""

    def __init__(self, start: float) -> None:
        self.now = float(start)

    def wall(self) -> float:
        self.now += 0.0625
        return self.now

    monotonic = wall
    is_virtual = True


class _Shifted:
    """The real clocks, the wall clock on another day."""

    is_virtual = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._real, self.monotonic = time.time, time.monotonic

    def wall(self) -> float:
        return self._real() + self._seconds


def clocks(value: int) -> Pairs:
    """Clocks that begin on one day or another, and move on by 1/16 s whenever they are read."""
    return _clock(_Ticks(1_600_000_000 + value * _ANOTHER_DAY))


def shifted_clock() -> Pairs:
    """A wall clock of another day that goes as it does."""
    return _clock(_Shifted(_ANOTHER_DAY))


def _clock(clock: _Ticks | _Shifted) -> Pairs:
    real_datetime: Any = datetime.datetime
    real_date: Any = datetime.date
    localtime, gmtime, ctime, strftime = time.localtime, time.gmtime, time.ctime, time.strftime

    class Datetime(real_datetime, metaclass=_standing_in_for(real_datetime)):  # type: ignore[misc, metaclass]
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return real_datetime(*arguments, **options)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            _note("clock")
            return real_datetime.fromtimestamp(clock.wall(), tz)

        @classmethod
        def today(cls) -> Any:
            _note("clock")
            return real_datetime.fromtimestamp(clock.wall())

        @classmethod
        def utcnow(cls) -> Any:
            _note("clock")
            return real_datetime.fromtimestamp(clock.wall(), datetime.UTC).replace(tzinfo=None)

    class Date(real_date, metaclass=_standing_in_for(real_date)):  # type: ignore[misc, metaclass]
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return real_date(*arguments, **options)

        @classmethod
        def today(cls) -> Any:
            _note("clock")
            return real_date.fromtimestamp(clock.wall())

    def or_now(function: Callable[[float], Any]) -> Callable[..., Any]:
        return lambda seconds=None: function(clock.wall() if seconds is None else seconds)

    yield real_datetime, Datetime
    yield real_date, Date
    yield _noted("clock", time.time, clock.wall)
    yield _noted("clock", time.time_ns, lambda: int(clock.wall() * 10**9))
    yield _noted("clock", localtime, or_now(localtime))
    yield _noted("clock", gmtime, or_now(gmtime))
    yield _noted("clock", ctime, or_now(ctime))
    yield _noted(
        "clock", strftime, lambda form, moment=None: strftime(form, localtime(clock.wall()) if moment is None else moment)
    )
    if clock.is_virtual:
        for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
            yield _noted("clock", getattr(time, name), clock.monotonic)
            yield _noted("clock", getattr(time, f"{name}_ns"), lambda: int(clock.monotonic() * 10**9))


def _standing_in_for(real: Any) -> Any:
    """A metaclass for a class whose instances are those of `real`."""

    class Meta(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    return Meta


# The process.


def process(value: int) -> Pairs:
    """The process's number; and with 1 it seems to be a worker."""
    worker = SimpleNamespace(id=value, num_workers=2, seed=value, dataset=None) if value else None
    yield _noted("process", os.getpid, lambda: 4_000_000 + value)
    yield _noted("process", torch.utils.data.get_worker_info, lambda: worker)


# Directories.


class _Scan:
    """What `os.scandir` gives, in an order of its own."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(list(entries))

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


def listings(order: str) -> Pairs:
    """What is in a directory, "sorted", sorted and "reversed", or "turned" round as it comes."""
    listdir, scandir = os.listdir, os.scandir

    def ordered(found: Iterable[Any], key: Callable[[Any], Any]) -> list[Any]:
        return list(found)[::-1] if order == "turned" else sorted(found, key=key, reverse=order == "reversed")

    def scan(*path: Any) -> _Scan:
        with scandir(*path) as entries:
            return _Scan(ordered(entries, lambda entry: entry.name))

    yield _noted("listing", listdir, lambda *path: ordered(listdir(*path), lambda name: name))
    yield _noted("listing", scandir, scan)

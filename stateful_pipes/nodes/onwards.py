"""What can be read only onwards: there is no way back to where it stood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat, starmap
from typing import Any

__all__ = ["Onwards", "Pass", "takes_an_argument"]


class Pass:
    """One walk at a time through an iterable. Each begins with its first item and not before."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._items: Iterator[Any] | None = None

    def begin(self) -> None:
        """The next item is the first of another walk; of an iterator, which has but one, that where it is."""
        self._items = None

    def read(self, count: int) -> list[Any]:
        """The next items of this walk, fewer at its end, and then none."""
        if self._items is None:
            self._items = self._opened()
        found = list(islice(self._items, count))
        if len(found) < count:
            self._items = iter(())  # some iterators go on after their end, with what is for the next epoch
        return found

    def _opened(self) -> Iterator[Any]:
        return iter(self.source)


class Onwards(Pass):
    """The same of a generator function or a function of no argument too. What had an error does not look as if it had ended."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._makes_generators = _any_of(source, inspect.isgeneratorfunction)
        self._is_function = callable(source) and not (self._makes_generators or isinstance(source, Iterable))
        self.is_repeatable = self._makes_generators or not (self._is_function or isinstance(source, Iterator))
        """Whether an epoch can be begun anew."""
        self._error: Exception | None = None

    def begin(self) -> None:
        super().begin()
        if self.is_repeatable:
            self._error = None

    def read(self, count: int) -> list[Any]:
        """As a `Pass`; an error again and again, since it ends a generator."""
        if self._error is not None:
            raise self._error
        try:
            return super().read(count)
        except BaseException as error:
            if not self._is_function:
                self._error = self._remembered(error)
            raise

    def _opened(self) -> Iterator[Any]:
        if self._is_function:
            return starmap(self.source, repeat(()))  # no generator: that would end with an error or an interrupt
        return iter(self.source() if self._makes_generators else self.source)

    def _remembered(self, error: BaseException) -> Exception | None:
        if isinstance(error, Exception):
            return error
        if inspect.isgenerator(self._items) and self._items.gi_frame is None:
            return RuntimeError("the generator was interrupted, which ended it before its end")
        return None


def takes_an_argument(source: object) -> bool:
    """Whether it is a function of where it is, and not to be read onwards; TypeError if it is nothing that can be read."""
    if not callable(source):
        if not isinstance(source, Iterable):
            hint = "; of a dataset, give its __getitem__" if hasattr(source, "__getitem__") else ""
            raise TypeError(f"source must be callable or iterable, got {source!r:.80}{hint}")
        return False
    if _any_of(source, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        raise TypeError(f"source must not be async, got {source!r}")
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):  # one in C that does not tell
        return True
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is one.empty]
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters):
        raise TypeError(f"source must take one argument or none, got {source!r}")
    takes = bool(places) or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if takes and _any_of(source, inspect.isgeneratorfunction):
        raise TypeError(f"a generator function takes no argument, got {source!r}")
    return takes


def _any_of(source: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Whether it is a function of one of these kinds, or an object that is called as one."""
    while isinstance(source, partial):
        source = source.func
    called = (source, type(source).__call__) if callable(source) else ()
    return any(kind(one) for one in called for kind in kinds)

"""An exception out of a worker arrives as what it was: type, text, fields, notes, traceback."""

from __future__ import annotations

import errno
import json
import pickle
import threading

import numpy as np
import pytest
import torch

from stateful_pipes import errors
from stateful_pipes.caught import add_note
from stateful_pipes.errors import Difference, StateMismatchError
from stateful_pipes.prefetch.remote_error import RemoteError, capture, restore


class TwoArguments(Exception):
    """Its constructor takes other arguments than it hands on."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.path = path
        self.line = line


class Decorating(Exception):
    """Its constructor would add to the text a second time."""

    def __init__(self, text):
        super().__init__(f"broken: {text}")


class KeywordOnly(ValueError):
    def __init__(self, *, index):
        super().__init__()
        self.index = index

    def __str__(self):
        return f"sample {self.index} is bad"


class Unpicklable(Exception):
    """Holds something that cannot be sent, and something that can."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.text = text


class RefusesToBeBuilt(Exception):
    def __new__(cls, *args):
        if len(args) != 2:
            raise TypeError("two")
        return super().__new__(cls, *args)

    def __init__(self, one, other):
        super().__init__(one)


class BadText(Exception):
    def __str__(self):
        raise ValueError("no text")


def raised(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def throw(error):
    raise error


def passed_on(error):
    """There and back as the pool does it."""
    remote = capture(error)
    assert isinstance(remote, RemoteError)
    return restore(pickle.loads(pickle.dumps(remote)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ValueError(),
        KeyError("key"),
        TwoArguments("a.png", 3),
        Decorating("a.png"),
        KeywordOnly(index=3),
        OSError("no errno"),
        RuntimeError("two", "arguments"),
        np.exceptions.AxisError(3, 2),
        torch.OutOfMemoryError("memory"),
        KeyboardInterrupt("^C"),
        *(getattr(errors, name)("detail") for name in errors.__all__ if name.endswith("Error")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_text_arguments_and_attributes(error):
    found = passed_on(raised(throw, error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.args == error.args
    assert {key: value for key, value in found.__dict__.items() if key != "__notes__"} == error.__dict__


FIELDS = {
    "missing file": (lambda: open("/nonexistent/x.png"), ["errno", "strerror", "filename"]),  # noqa: SIM115
    "two files": (lambda: throw(OSError(errno.EXDEV, "cross", "a", None, "b")), ["errno", "filename", "filename2"]),
    "bad bytes": (lambda: b"\xff".decode(), ["encoding", "object", "start", "end", "reason"]),
    "bad text": (lambda: "\ud800".encode(), ["encoding", "object", "start", "end", "reason"]),
    "import": (lambda: __import__("no_such_module"), ["name", "msg"]),
    "syntax": (lambda: compile("1 +", "f.py", "exec"), ["msg", "filename", "lineno", "text"]),
    "json": (lambda: json.loads("{"), ["msg", "doc", "pos"]),
}


@pytest.mark.parametrize(("function", "names"), FIELDS.values(), ids=FIELDS)
def test_fields_that_are_no_attributes(function, names):
    """Python's own errors keep these outside of args and __dict__; the file's name is the one that a user needs most."""
    error = raised(function)
    found = passed_on(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert [getattr(found, name) for name in names] == [getattr(error, name) for name in names]


def test_details_of_our_own():
    error = StateMismatchError("why", differences=(Difference("mapper", "rng", "''", "'torch'", "set it"),))
    assert passed_on(error).differences == error.differences


def test_unpicklable_attributes_are_left_out():
    found = passed_on(raised(throw, Unpicklable("bad")))
    assert type(found) is Unpicklable
    assert str(found) == found.text == "bad"
    assert not hasattr(found, "lock")


@pytest.mark.parametrize("args", [(lambda: 0,), (threading.Lock(), 1)], ids=["function", "lock"])
def test_unpicklable_arguments_leave_type_and_text(args):
    found = passed_on(raised(throw, ValueError(*args)))
    assert type(found) is ValueError
    assert found.args == tuple(arg if type(arg) is int else repr(arg) for arg in args)


class Frozen(Exception):
    """Lets no attribute be set, as a frozen dataclass."""

    def __setattr__(self, name, value):
        raise AttributeError(f"cannot assign to {name}")


class Missing(OSError):
    """With a constructor of its own."""

    def __init__(self, path):
        super().__init__(errno.ENOENT, "no such shard", path)


class Plain:
    """Shown by its address."""


@pytest.mark.parametrize(
    "error", [Frozen("x"), Missing("a.tar"), ValueError(Plain()), KeyError(("a", 1))], ids=lambda error: type(error).__name__
)
def test_the_type_stays_whatever_the_text(error):
    found = passed_on(error)
    assert type(found) is type(error)
    assert isinstance(found.__cause__, Exception)


def test_notes_of_an_error_that_lets_no_attribute_be_set():
    error = Frozen("x")
    add_note(error, "one")
    add_note(error, "two")
    assert passed_on(error).__notes__ == ["one", "two"]


def test_a_local_class_leaves_type_and_text():
    class Local(Exception):
        pass

    found = passed_on(raised(throw, Local("what happened")))
    assert type(found) is RuntimeError
    assert "Local" in str(found)
    assert "what happened" in str(found)


def test_a_class_that_cannot_be_built_leaves_type_and_text():
    found = passed_on(raised(throw, RefusesToBeBuilt("one", "other")))
    assert isinstance(found, (RuntimeError, RefusesToBeBuilt))
    assert "one" in str(found)


def test_a_broken_str_does_not_hide_the_error():
    found = passed_on(raised(throw, BadText("x")))
    assert type(found) is BadText
    assert found.args == ("x",)


def test_groups():
    error = ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError("x"), TwoArguments("a", 2)])])
    found = passed_on(raised(throw, error))
    assert "several" in str(found)
    assert "a:2" in str(found.__cause__)
    simple = passed_on(raised(throw, ExceptionGroup("several", [ValueError(1), KeyError("x")])))
    assert type(simple) is ExceptionGroup
    assert [repr(one) for one in simple.exceptions] == ["ValueError(1)", "KeyError('x')"]
    assert simple.subgroup(KeyError).exceptions[0].args == ("x",)


class Labelled(ExceptionGroup):
    """A group of a class of its own, with an attribute."""

    def __new__(cls, message, errors, label):
        group = super().__new__(cls, message, errors)
        group.label = label
        return group


def test_a_group_of_errors_that_cannot_be_pickled_as_they_are():
    inner = ExceptionGroup("inner", [Unpicklable("a"), RefusesToBeBuilt(1, 2)])
    inner.add_note("note of the inner one")
    group = restore(pickle.loads(pickle.dumps(capture(ExceptionGroup("outer", [TwoArguments("x", 3), inner])))))
    assert type(group) is ExceptionGroup
    assert group.message == "outer"
    two, found = group.exceptions
    assert (type(two), two.path, two.line) == (TwoArguments, "x", 3)
    assert (type(found), found.message, found.__notes__) == (ExceptionGroup, "inner", ["note of the inner one"])
    assert (type(found.exceptions[0]), found.exceptions[0].text) == (Unpicklable, "a")
    assert type(found.exceptions[1]) is RefusesToBeBuilt


def test_a_group_whose_class_cannot_be_built_is_still_a_group():
    group = restore(capture(Labelled("outer", [ValueError(1)], "label")))
    assert isinstance(group, ExceptionGroup)
    assert [repr(error) for error in group.exceptions] == ["ValueError(1)"]
    ending = restore(capture(BaseExceptionGroup("outer", [KeyboardInterrupt(), ValueError(1)])))
    assert type(ending) is BaseExceptionGroup


def test_notes_stay_in_order():
    error = ValueError("x")
    error.add_note("first")
    error.add_note("second")
    assert passed_on(error).__notes__ == ["first", "second"]
    assert not getattr(passed_on(ValueError("x")), "__notes__", [])


def test_notes_stay_also_where_the_type_does_not():
    error = ValueError(lambda: 0)
    error.add_note("index 7")
    assert passed_on(error).__notes__ == ["index 7"]


def decode_sample():
    try:
        raise KeyError("inner")
    except KeyError as inner:
        raise ValueError("outer") from inner


def test_the_cause_shows_the_worker_s_traceback():
    found = passed_on(raised(decode_sample))
    shown = str(found.__cause__)
    assert shown.startswith("in a worker:\n")
    for part in ("decode_sample", "test_remote_error.py", "KeyError: 'inner'", "ValueError: outer", "direct cause"):
        assert part in shown


def test_a_damaged_pickle_still_tells():
    remote = capture(ValueError("x"))._replace(pickled=b"damaged")
    found = restore(remote)
    assert type(found) is RuntimeError
    assert str(found) == "ValueError: x"

"""An error of the user's own function keeps its type and says where it happened."""

from __future__ import annotations

import pytest

from stateful_pipes.nodes.user_error import raise_noted


def function():
    raise KeyError("missing")


def test_the_same_object_is_raised_with_its_traceback_and_a_note():
    with pytest.raises(KeyError) as original:
        function()
    with pytest.raises(KeyError) as caught:
        raise_noted(original.value, function, "at position 3")
    assert caught.value is original.value
    assert caught.value.__notes__ == ["at position 3"]
    assert "function" in [entry.name for entry in caught.traceback]


def test_notes_add_up():
    error = ValueError("x")
    for note in ("lower", "upper"):
        with pytest.raises(ValueError, match="x"):
            raise_noted(error, function, note)
    assert error.__notes__ == ["lower", "upper"]


def test_a_stop_iteration_is_turned_into_an_error():
    stop = StopIteration(3)
    with pytest.raises(RuntimeError, match=r"<function function at .*> raised StopIteration") as caught:
        raise_noted(stop, function, "at position 3")
    assert caught.value.__cause__ is stop
    assert caught.value.__notes__ == ["at position 3"]

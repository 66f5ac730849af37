"""An arena whose slots are small enough to overflow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stateful_pipes.prefetch.slots import Arena
from tests.unit.test_slots import shrink


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Of three slots, or a module's `SLOTS`."""
    shrink(monkeypatch)
    made = Arena(getattr(request.module, "SLOTS", 3))
    yield made
    made.close()

"""Hypothesis profiles: "ci", and "full" with ten times the examples for `pytest -m full` or HYPOTHESIS_PROFILE=full."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

_CI_EXAMPLES = 120


class _TorchGenerator:
    """Lets Hypothesis reset torch's generator too, so that an example draws the same seeds whatever ran before it."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


_TORCH = _TorchGenerator()
register_random(_TORCH)

_COMMON: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=_CI_EXAMPLES, **_COMMON)
settings.register_profile("full", max_examples=10 * _CI_EXAMPLES, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """A shell has SIGINT ignored in what it runs in the background, and Python then leaves it at that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: a fraction of the profile's examples is taken where a test is defined.
    if _is_full(config):
        settings.load_profile("full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = _is_full(config)
    for item in items:
        if full and "property" in item.path.parts:
            item.add_marker("full")  # with this many examples they are long variants
        elif not full and item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a long variant: pytest -m full"))


def _is_full(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "full" or os.environ.get("HYPOTHESIS_PROFILE") == "full"

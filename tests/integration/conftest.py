"""No test leaves a worker behind."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.pipelines import worker_pids

_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def no_workers_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if worker_pids():
        gc.collect()  # torchdata's Loader and its iterator refer to each other
    left = worker_pids()
    for process in multiprocessing.active_children():
        if process.pid in left:
            process.kill()
            process.join()
    # The traceback of a test that failed holds its loaders.
    assert not left or not request.node.stash.get(_PASSED, False), f"workers {left} were left running"

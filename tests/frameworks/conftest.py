"""No test leaves a worker behind, as in `integration/`."""

from tests.integration.conftest import no_workers_left, pytest_runtest_makereport

__all__ = ["no_workers_left", "pytest_runtest_makereport"]

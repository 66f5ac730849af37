"""No test leaves a worker behind, as in `integration/`; and files that import a framework are for a process of their own."""

from tests.integration.conftest import no_workers_left, pytest_runtest_makereport

__all__ = ["no_workers_left", "pytest_runtest_makereport"]

collect_ignore_glob = ["with_*.py"]  # but for one that is named on the command line

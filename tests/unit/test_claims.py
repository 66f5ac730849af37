"""What a worker has in hand can be read by another process, whatever became of the worker."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from stateful_pipes.prefetch.claims import STARTING, Claims


def write_and_die(claims):
    claims.write(1, 12345678901234)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_it_outlives_the_process_that_wrote_it(method):
    claims = Claims(3)
    for worker_id in range(3):
        claims.write(worker_id, STARTING)
    process = multiprocessing.get_context(method).Process(target=write_and_die, args=(claims,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [claims.read(worker_id).task for worker_id in range(3)] == [STARTING, 12345678901234, STARTING]
    assert 0 <= claims.read(1).seconds <= claims.read(0).seconds < 60
    claims.close()
    assert claims.read(1).task == 12345678901234

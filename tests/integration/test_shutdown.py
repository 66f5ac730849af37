"""Whatever ends a program or a loop, nothing is left; and closing takes a bounded time, however many workers are busy."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stateful_pipes import StatefulDataLoader

# Asserted at three times what is promised: 1 s for close(), 2 s for an interpreter with busy workers.
CLOSE_S, EXIT_S = 3, 6


class Stuck:
    """Samples of which all but the first never come."""

    def __init__(self):
        self.never = os.pipe()

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the hardest case: only SIGKILL helps
            os.read(self.never[0], 1)
        return index


def worker_processes():
    return [child for child in multiprocessing.active_children() if child.name.startswith("stateful_pipes")]


def held():
    """Descriptors, threads, children, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(worker_processes()), maps.count("memfd:stateful_pipes")


@pytest.mark.parametrize("workers", [1, 8])
def test_close_takes_a_bounded_time_however_many_workers_are_busy_and_deaf(workers):
    dataset = Stuck()
    loader = StatefulDataLoader(dataset, num_workers=workers, collate_fn=list)
    assert next(iter(loader)) == [0]
    state = loader.state_dict()
    pids = [worker.pid for worker in worker_processes()]
    assert len(pids) == workers
    os.kill(pids[-1], signal.SIGSTOP)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < CLOSE_S
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert loader.state_dict() == state
    for end in dataset.never:
        os.close(end)


def test_the_state_is_still_there_when_the_workers_are_gone():
    loader = StatefulDataLoader(list(range(20)), 2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for worker in worker_processes():
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    assert loader.state_dict() == state
    loader.close()
    assert loader.state_dict() == state


@pytest.mark.parametrize("leave", ["break", "raise", "drop", "close"])
def test_twenty_rounds_of_one_batch_leave_nothing(leave):
    def round_():
        loader = StatefulDataLoader(list(range(100)), 2, num_workers=2, prefetch_factor=4)
        with suppress(ZeroDivisionError):
            for _ in loader:
                if leave == "raise":
                    raise ZeroDivisionError
                if leave == "close":
                    loader.close()
                break

    round_()
    gc.collect()
    before = held()
    gc.disable()
    try:
        for _ in range(20):
            round_()
    finally:
        gc.enable()
    assert held() == before


SCRIPT = """
    import os, signal, sys, threading
    from stateful_pipes import StatefulDataLoader

    pipe = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in what it runs in the background

    class Stuck:
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            if index > 7:
                os.write(pipe, b"x")
                while True:
                    pass
            return index

    loader = StatefulDataLoader(Stuck(), num_workers={workers}, collate_fn=list)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    ready = lambda: os.write(pipe, b"r")
"""


class Program:
    """A script in a session of its own, whose workers say on a pipe that they are busy, and hold it open."""

    def __init__(self, text, tmp_path, workers=2):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(SCRIPT.format(workers=workers)) + textwrap.dedent(text))
        self.hear, tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", path, str(tell)],
            pass_fds=[tell],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(tell)
        said = b"".join(os.read(self.hear, 1) for _ in range(workers + 1))
        assert sorted(said) == sorted(b"r" + workers * b"x")

    def end(self):
        """Waits until the program and all its workers are gone; returns its exit code and what it said on stderr."""
        try:
            _, said = self.process.communicate(timeout=60)
            while select.select([self.hear], [], [], 60)[0]:
                if not os.read(self.hear, 100):
                    return self.process.returncode, said
            raise AssertionError("workers are still there")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            os.close(self.hear)


def test_an_interpreter_with_eight_busy_workers_exits_at_once(tmp_path):
    program = Program("ready()", tmp_path, workers=8)
    start = time.monotonic()
    assert program.end()[0] == 0
    assert time.monotonic() - start < EXIT_S


def test_ctrl_c_in_the_terminal(tmp_path):
    program = Program("ready(), next(iterator)", tmp_path)
    os.killpg(program.process.pid, signal.SIGINT)
    code, said = program.end()
    assert code == -signal.SIGINT
    assert said.count("KeyboardInterrupt") == 1, "one traceback, the program's own"


def test_sigterm_to_the_group(tmp_path):
    program = Program("ready(), next(iterator)", tmp_path)
    os.killpg(program.process.pid, signal.SIGTERM)
    assert program.end() == (-signal.SIGTERM, "")


def test_sigterm_to_the_group_of_a_program_that_saves_and_ends(tmp_path):
    """Its workers are gone by then; that is no fault of theirs, and the state is there."""
    text = """
        def save(*_):
            print(loader.position.consumed, file=sys.stderr)
            sys.exit(3)
        signal.signal(signal.SIGTERM, save)
        ready()
        next(iterator)
    """
    program = Program(text, tmp_path)
    os.killpg(program.process.pid, signal.SIGTERM)
    code, said = program.end()
    assert (code, said.splitlines()[-1]) == (3, "8")


def test_an_exception_in_the_training_loop(tmp_path):
    program = Program("ready()\nraise RuntimeError('loss is nan')", tmp_path)
    code, said = program.end()
    assert code == 1
    assert said.splitlines()[-1] == "RuntimeError: loss is nan"


def test_os_exit_in_the_main_process(tmp_path):
    assert Program("ready()\nos._exit(5)", tmp_path).end() == (5, "")


def shared():
    """What torch or multiprocessing would leave there; other programs have files of their own."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "sem.", "pym-"))}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nothing_is_left_in_dev_shm_and_no_semaphore(method, tmp_path):
    before = shared()
    with StatefulDataLoader(list(range(10)), 2, num_workers=1, multiprocessing_context=method) as loader:
        assert len(list(loader)) == 5
    assert shared() <= before

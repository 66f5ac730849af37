"""Killed at each write, fsync and replace of a pause: the old file is there, or the new one, and goes on bit for bit."""

from __future__ import annotations

import builtins
import itertools
import multiprocessing
import os
import signal

import pytest
import torch

from tests.unit.trainers import Trainer, paused, run

OLD, NEW, STEPS = 3, 5, 9
FORK = multiprocessing.get_context("fork")


class Killing:
    """A file that kills the process in the middle of a write."""

    def __init__(self, file, count):
        self._file, self._count = file, count

    def write(self, data):
        if self._count("write"):
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            kill()
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def pause_and_die(path, kind, at, is_done):
    """In a process of its own: the next pause, killed at the `at`-th write, fsync or replace; if there is none, it ends well."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    trainer = Trainer()
    trainer.resume(path)
    run(trainer, NEW - OLD)
    left = itertools.count(at, -1)

    def count(what):
        return what == kind and next(left) == 0

    def checked(what, function):
        def call(*arguments):
            if count(what):
                if is_done:
                    function(*arguments)
                kill()
            return function(*arguments)

        return call

    opened = builtins.open

    def open_killing(path, mode="r", *arguments, **options):
        file = opened(path, mode, *arguments, **options)
        return Killing(file, count) if "x" in mode else file

    builtins.open = open_killing
    os.fsync, os.replace = checked("fsync", os.fsync), checked("replace", os.replace)
    trainer.pause(path)


@pytest.fixture(scope="module")
def truth():
    return run(Trainer(), STEPS)


@pytest.mark.parametrize(
    ("kind", "is_done", "kills"),
    [("write", True, 20), ("fsync", False, 2), ("fsync", True, 2), ("replace", False, 1), ("replace", True, 1)],
)
def test_a_pause_that_is_killed(tmp_path, truth, kind, is_done, kills):
    path = tmp_path / "file"
    paused(path, OLD)
    old = path.read_bytes()
    for at in itertools.count():
        path.write_bytes(old)  # what the dead ones left beside it is in nobody's way
        process = FORK.Process(target=pause_and_die, args=(path, kind, at, is_done))
        process.start()
        process.join()
        # The folder is synced after the replace.
        steps = NEW if process.exitcode == 0 or (kind, at) == ("fsync", 1) or (kind, is_done) == ("replace", True) else OLD
        assert (path.read_bytes() == old) is (steps == OLD)
        resumed = Trainer()
        resumed.resume(path)
        assert run(resumed, STEPS - steps) == truth[steps:], f"killed at {kind} {at}"
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert at >= kills if kind == "write" else at == kills

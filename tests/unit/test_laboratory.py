"""Processes to try something out in: what they see, what comes back, and how they end."""

from __future__ import annotations

import datetime
import glob
import multiprocessing
import os
import random
import secrets
import time
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from stateful_pipes.testing import laboratory
from stateful_pipes.testing.fakes import callers
from stateful_pipes.testing.laboratory import ExperimentFailed, clean_processes_kept, hash_seeds, in_fork
from stateful_pipes.testing.surroundings import Surroundings, arranged, places

AS_IT_IS = Surroundings()


def entropy():
    instance = random.Random()
    drawn = [np.random.default_rng().random(), np.random.RandomState().rand(), instance.random(), secrets.token_hex(4)]
    generator = torch.Generator()
    drawn += [uuid.uuid4().hex, random.SystemRandom().random(), generator.seed(), os.urandom(3)]
    random.seed()
    np.random.seed()
    torch.seed()
    return [*drawn, random.random(), np.random.random(), torch.rand(()).item()]


def clock():
    return [
        *(time.time(), time.time_ns(), time.monotonic(), time.perf_counter_ns(), time.localtime()[:3], time.ctime()),
        *(datetime.datetime.now(), datetime.date.today(), datetime.datetime.now(datetime.UTC), time.strftime("%j")),
    ]


def wall_clock():
    return time.strftime("%Y-%m-%d"), datetime.date.today().isoformat(), datetime.datetime.now().date().isoformat()


def listing(folder):
    with os.scandir(folder) as entries:
        scanned = [entry.name for entry in entries]
    walked = [names for _, _, names in os.walk(folder)]
    return [
        os.listdir(folder),
        scanned,
        walked[0],
        [path.name for path in Path(folder).iterdir()],
        glob.glob("*", root_dir=folder),
    ]


def process():
    return os.getpid(), getattr(torch.utils.data.get_worker_info(), "id", None)


@pytest.mark.parametrize(("what", "task"), [("entropy", entropy), ("clock", clock), ("process", process)])
def test_what_is_set_is_the_same_each_time_and_another_for_another_value(what, task):
    first, again, other = (in_fork(task, Surroundings(**{what: value}), 60) for value in (0, 0, 1))
    assert first == again
    assert [one == another for one, another in zip(first, other, strict=True)] == [False] * len(first)
    if what == "entropy":
        natural = in_fork(task, AS_IT_IS, 60), in_fork(task, AS_IT_IS, 60)
        assert not any(one == another for one, another in zip(*natural, strict=True))  # the test sees what is not set


def test_listings_are_sorted_reversed_or_turned(tmp_path):
    for name in "cadb":
        (tmp_path / name).touch()
    task = partial(listing, tmp_path)
    assert in_fork(task, Surroundings(listing=0), 60) == [list("abcd")] * 5
    assert in_fork(task, Surroundings(listing=1), 60) == [list("dcba")] * 5
    natural = listing(tmp_path)
    assert in_fork(task, Surroundings(is_elsewhere=True), 60) == [names[::-1] for names in natural]


def test_elsewhere_it_is_another_day():
    here, there = wall_clock(), in_fork(wall_clock, Surroundings(is_elsewhere=True), 60)
    assert len(set(there)) == 1
    assert not set(here) & set(there)


def test_clock_moves_on_so_that_a_wait_ends():
    def wait():
        end = time.monotonic() + 100
        while time.monotonic() < end:
            pass
        return "over"

    assert in_fork(wait, Surroundings(clock=0), 60) == "over"


def test_classes_that_stand_in_know_the_real_instances():
    real, day = torch.default_generator, datetime.date(2020, 1, 2)
    with arranged(Surroundings(entropy=0, clock=0)):
        assert isinstance(real, torch.Generator)
        assert isinstance(day, datetime.date)
        assert not isinstance(day, datetime.datetime)
        assert isinstance(datetime.datetime(2020, 1, 2), datetime.datetime)


def test_all_is_put_back():
    def seen():
        return [(name, id(held[name])) for found in places().values() for held, name in found] + [id(random.Random.seed)]

    before = seen()
    with arranged(Surroundings(0, 0, 0, 0)):
        during = [time.time, os.urandom, os.listdir, os.getpid, torch.Generator, datetime.datetime]
    assert seen() == before
    assert not {id(one) for one in during} & {number for _, number in before[:-1]}


def test_who_asked_is_remembered():
    def ask():
        np.random.default_rng()
        return callers("entropy"), callers("clock")

    (place,), clocks = in_fork(ask, Surroundings(entropy=0), 60)
    assert place.startswith(f"{__file__}:")
    assert clocks == []


def test_error_comes_back_as_text():
    with pytest.raises(ExperimentFailed, match="ZeroDivisionError: division by zero"):
        in_fork(lambda: 1 / 0, AS_IT_IS, 60)


@pytest.mark.parametrize(
    ("task", "message"),
    [(lambda: os._exit(3), "the process died"), (lambda: os.kill(os.getpid(), 9), "died"), (lambda: lambda: 0, "pickle")],
)
def test_process_that_gives_nothing(task, message):
    with pytest.raises(ExperimentFailed, match=message):
        in_fork(task, AS_IT_IS, 60)


def test_process_that_hangs_is_ended(monkeypatch):
    reader, writer = multiprocessing.Pipe(duplex=False)
    started = []
    monkeypatch.setattr(laboratory, "_fork", lambda: started.append(os.fork()) or started[-1])
    with pytest.raises(ExperimentFailed, match="no answer within 0 s"):
        in_fork(reader.recv, AS_IT_IS, 0.01)
    writer.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)


def test_clean_process_is_one_of_its_own_and_runs_each_task_afresh(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "import os\nCALLS = []\n\ndef call():\n    CALLS.append(1)\n    return len(CALLS), os.environ['HERE']"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HERE", "told")
    monkeypatch.chdir(tmp_path)
    import only_here

    only_here.call()
    environment = dict(os.environ)
    with clean_processes_kept() as clean:
        assert clean(1) is clean(1)
        assert [clean(1).run(only_here.call, AS_IT_IS, 60) for _ in range(2)] == [(1, "told")] * 2
        assert clean(1).run(os.getcwd, AS_IT_IS, 60) == str(tmp_path)
        assert clean(1).run(partial(hash, "text"), AS_IT_IS, 60) == clean(1).run(partial(hash, "text"), AS_IT_IS, 60)
        assert clean(1).run(multiprocessing.get_start_method, AS_IT_IS, 60) == multiprocessing.get_start_method()
        with pytest.raises(ExperimentFailed, match="factory cannot be pickled"):
            clean(1).run(lambda: 0, AS_IT_IS, 60)
        with pytest.raises(ExperimentFailed, match="the process died"):
            clean(1).run(partial(os._exit, 1), AS_IT_IS, 60)
        assert clean(1).run(partial(int, "3"), AS_IT_IS, 60) == 3
        process = clean(1)._process
        with clean_processes_kept() as inner:
            assert inner(1)._process is process
        assert process.is_alive()
    assert not process.is_alive()
    assert dict(os.environ) == environment


@pytest.mark.parametrize(("own", "others"), [("1", [2, 3, 4]), ("3", [1, 2, 4]), ("0", [1, 2, 3]), ("random", [1, 2, 3])])
def test_hash_seeds_are_others_than_this_processs(own, others, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", own)
    assert hash_seeds() == others

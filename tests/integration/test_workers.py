"""What user code sees in a worker, and what becomes of the stream when a worker fails."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info
from torchdata.nodes import IterableWrapper

from stateful_pipes import ProcessPrefetcher, SamplerNode, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.errors import (
    ConcurrentUseError,
    IteratorInvalidError,
    LoaderFailedError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from stateful_pipes.prefetch.processes import WorkerProcesses
from tests.integration.pipelines import take, worker_pids
from tests.streams import DrawingDataset, drawing_collate, generator_states, place_of, same


class Calling:
    """A dataset of what a function gives in the process that reads the sample."""

    def __init__(self, length: int, function: Any) -> None:
        self.length, self.function = length, function

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def as_read(samples):
    return samples


def loader_of(function, length=8, workers=1, **options):
    """Batches of one."""
    return StatefulDataLoader(Calling(length, function), num_workers=workers, collate_fn=as_read, **options)


def read_all(loader):
    return [sample for batch in loader for sample in batch]


def read_to_error(stream):
    """What comes before the error that ends a stream, and the error."""
    read = []
    try:
        for batch in stream:
            read += batch if isinstance(batch, list) else [batch]
    except Exception as error:
        return read, error
    raise AssertionError(f"no error after {read}")


# What user code sees.


def what_a_worker_sees(index):
    info = get_worker_info()
    name = multiprocessing.current_process().name
    return (
        info.id,
        info.num_workers,
        type(info.dataset).__name__,
        len(info.dataset),
        info.seed,
        torch.get_num_threads(),
        os.getpid(),
        name,
    )


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_worker_info(method, workers):
    loader = loader_of(what_a_worker_sees, workers=workers, multiprocessing_context=method)
    seen = set(read_all(loader))
    pids = worker_pids()
    loader.close()
    assert seen
    assert {one[0] for one in seen} <= set(range(workers))
    assert {one[1:4] for one in seen} == {(workers, "Calling", 8)}
    assert all(0 <= one[4] < 2**63 for one in seen)
    assert {one[5] for one in seen} == {1}
    assert {one[6] for one in seen} <= pids
    assert all(one[7] == f"stateful_pipes worker {one[0]}" for one in seen)
    assert len(seen) == len({one[0] for one in seen})


def test_there_is_no_worker_info_inline():
    threads = torch.get_num_threads()
    assert read_all(loader_of(lambda index: (get_worker_info(), torch.get_num_threads() == threads), 2, 0)) == [(None, True)] * 2


def test_worker_info_shows_the_dataset_of_a_composed_pipeline():
    dataset = Calling(8, lambda index: len(get_worker_info().dataset))
    node = ProcessPrefetcher(SeededMapper(SamplerNode(SequentialSampler(8)), dataset.__getitem__), 1)
    loader = StatefulDataLoader(node)
    assert list(loader) == [8] * 8
    loader.close()


def test_a_map_function_in_c():
    """Its `__self__` is no dataset but the module that it is from, which cannot be pickled."""
    node = SeededMapper(SamplerNode(SequentialSampler(3)), math.sqrt)
    loader = StatefulDataLoader(ProcessPrefetcher(node, 1, multiprocessing_context="spawn"))
    assert list(loader) == [0.0, 1.0, math.sqrt(2)]
    loader.close()


def test_worker_init_fn():
    """It runs once in each worker, on the main thread, before any sample, with the worker info set and generators seeded."""
    seen = []

    def prepare(worker_id):
        on_main = threading.current_thread() is threading.main_thread()
        seen.append((worker_id, get_worker_info().id, on_main, random.random(), np.random.random(), torch.rand(()).item()))

    loader = loader_of(lambda index: tuple(seen), 20, 2, worker_init_fn=prepare)
    found = set(read_all(loader)) | set(read_all(loader))
    assert all(len(calls) == 1 for calls in found)
    assert all(calls[0][0] == calls[0][1] and calls[0][2] for calls in found)
    assert len({calls[0][3:] for calls in found}) == len(found)
    assert not seen
    loader.close()


def test_worker_init_fn_does_not_change_the_stream():
    def disturb_all(worker_id):
        random.seed(worker_id)
        np.random.seed(worker_id)
        torch.manual_seed(worker_id)

    plain = StatefulDataLoader(DrawingDataset(7), 2, num_workers=2, collate_fn=drawing_collate, seed=1)
    disturbed = StatefulDataLoader(
        DrawingDataset(7), 2, num_workers=2, collate_fn=drawing_collate, seed=1, worker_init_fn=disturb_all
    )
    assert same(list(plain), list(disturbed))
    plain.close()
    disturbed.close()


def test_workers_leave_the_callers_generators_alone():
    loader = StatefulDataLoader(DrawingDataset(7), 2, num_workers=2, collate_fn=drawing_collate, seed=1)
    before = generator_states()
    list(loader)
    loader.load_state_dict(loader.state_dict())
    take(iter(loader), 1)
    loader.close()
    assert generator_states() == before


def test_a_workers_handler_of_sigterm_is_not_the_main_processes():
    """A handler that saves a checkpoint must not run in the workers too when the whole group is told to end."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(writer, b"handler"))
    try:
        loader = loader_of(lambda index: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        assert all(read_all(loader))
        loader.close()
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(writer)
    assert os.read(reader, 10) == b""
    os.close(reader)


# The start of workers.


def run_script(script):
    return subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_the_main_guard_is_told_so(method, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(f"""
            from stateful_pipes import StatefulDataLoader
            from stateful_pipes.errors import WorkerDiedError

            try:
                list(StatefulDataLoader(list(range(4)), num_workers=1, multiprocessing_context="{method}"))
            except WorkerDiedError as error:
                print(error)
        """)
    )
    done = run_script(script)
    assert 'if __name__ == "__main__":' in done.stdout
    assert "worker 0" in done.stdout
    assert "exit code 1" in done.stdout


def test_a_script_with_the_main_guard_runs(tmp_path):
    script = tmp_path / "guarded.py"
    script.write_text(
        textwrap.dedent("""
            from stateful_pipes import StatefulDataLoader

            class Squares:
                def __len__(self):
                    return 4
                def __getitem__(self, index):
                    return index * index

            if __name__ == "__main__":
                with StatefulDataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn") as loader:
                    print([batch.tolist() for batch in loader])
        """)
    )
    done = run_script(script)
    assert done.stdout == "[[0, 1], [4, 9]]\n"
    assert done.stderr == ""


def test_what_cannot_be_pickled_for_a_spawned_worker_says_so():
    with pytest.raises(TypeError, match=r"mapper\.map_fn\.__self__\.function: .*lambda"):
        loader_of(lambda index: index, multiprocessing_context="spawn")


def test_a_worker_init_fn_that_raises():
    def refuse(worker_id):
        raise ValueError(f"no worker {worker_id} today")

    loader = loader_of(lambda index: index, worker_init_fn=refuse)
    with pytest.raises(ValueError, match="no worker 0 today"):
        next(iter(loader))
    with pytest.raises(LoaderFailedError):
        iter(loader)
    loader.close()


# Errors in a worker.


class OddError(Exception):
    """Its constructor takes other arguments than it hands on, so plain pickling loses it."""

    def __init__(self, place: str, number: int) -> None:
        super().__init__(f"{place}: {number}")
        self.number = number


def failing(index):
    if index == 3:
        raise OddError("here", 17)
    return index


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_that_raises(workers):
    """The error has its type, attributes, traceback and place; what was before it is still handed out."""
    loader = loader_of(failing, workers=workers)
    iterator = iter(loader)
    read, error = read_to_error(iterator)
    assert read == [0, 1, 2]
    assert type(error) is OddError
    assert str(error) == "here: 17"
    assert error.number == 17
    assert any("epoch 0, position 3, index 3" in note for note in error.__notes__)
    assert workers == 0 or "in failing" in str(error.__cause__)
    for _ in range(2):
        with pytest.raises(LoaderFailedError):
            next(iterator)
        with pytest.raises(LoaderFailedError):
            iter(loader)
    assert place_of(loader) == (0, 3)
    loader.close()
    with pytest.raises(OddError):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("clear", ["close", "load"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_from_the_last_consumed_batch(workers, clear):
    broken = multiprocessing.Value("i", 1)

    def fails_at_first(index):
        if index == 3 and broken.value:
            raise OSError("the file server is away")
        return index

    loader = loader_of(fails_at_first, workers=workers)
    with pytest.raises(OSError, match="file server"):
        read_all(loader)
    broken.value = 0
    loader.close() if clear == "close" else loader.load_state_dict(loader.state_dict())
    assert read_all(loader) == [3, 4, 5, 6, 7]
    loader.close()


@pytest.mark.parametrize("error", [KeyError("key"), StopIteration(3), EOFError("e"), BlockingIOError("b")])
@pytest.mark.parametrize("place", ["sample", "collate"])
@pytest.mark.parametrize("workers", [0, 1])
def test_no_error_of_user_code_is_taken_for_something_else(error, place, workers):
    """Not for the end of an epoch, nor for a closed channel, nor for an empty one."""

    def fail(item):
        if item in (3, [3]):
            raise error
        return item

    if place == "sample":
        loader = loader_of(fail, workers=workers)
    else:
        loader = StatefulDataLoader(list(range(8)), num_workers=workers, collate_fn=fail)
    read, raised = read_to_error(loader)
    assert type(raised) is (RuntimeError if isinstance(error, StopIteration) else type(error))
    assert read == [0, 1, 2]
    loader.close()


def test_an_error_that_cannot_be_pickled():
    """What can be is kept; a class that the main process cannot import comes as a RuntimeError with its text."""

    class LocalError(Exception):
        pass

    def fail(index):
        error = LocalError("local") if index else OddError("here", 17)
        error.lock = threading.Lock()
        raise error

    loader = loader_of(fail)
    with pytest.raises(OddError, match="here: 17") as caught:
        next(iter(loader))
    assert caught.value.number == 17
    loader.close()
    loader = StatefulDataLoader(Calling(1, lambda index: fail(1)), num_workers=1)
    with pytest.raises(RuntimeError, match="LocalError: local"):
        next(iter(loader))
    loader.close()


def test_a_result_that_cannot_be_pickled():
    loader = loader_of(lambda index: (one for one in [index]))
    with pytest.raises(TypeError, match="generator"):
        next(iter(loader))
    loader.close()


def test_a_ticket_that_cannot_be_pickled_is_told_when_its_turn_comes():
    """The items before it are still good, inline as with workers."""
    items = [0, 1, 2, lambda: 3, 4]
    loader = StatefulDataLoader(ProcessPrefetcher(SeededMapper(IterableWrapper(items), as_read, rng=()), 1, prefetch_factor=4))
    read, error = read_to_error(loader)
    assert "pickle" in str(error)
    assert read == [0, 1, 2]
    loader.close()


# Death and time.


def dies_by_exit(index):
    if index == 3:
        os._exit(7)
    return index


def dies_by_signal(index):
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def leaves(index):
    if index == 3:
        sys.exit(5)
    return index


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("function", "said"), [(dies_by_exit, "exit code 7"), (dies_by_signal, "SIGKILL"), (leaves, "exit code 5")]
)
def test_a_worker_that_dies(function, said, workers):
    loader = loader_of(function, workers=workers)
    read, error = read_to_error(loader)
    assert read == [0, 1, 2]
    assert type(error) is WorkerDiedError
    assert said in str(error)
    assert "pid" in str(error)
    with pytest.raises(LoaderFailedError):
        iter(loader)
    loader.close()
    assert not worker_pids()


@pytest.mark.parametrize("clear", ["close", "load"])
def test_after_a_death_it_goes_on_with_new_workers(clear):
    alive = multiprocessing.Value("i", 0)

    def dies_once(index):
        if index == 3 and not alive.value:
            alive.value = 1
            os._exit(1)
        return index

    loader = loader_of(dies_once, workers=2, max_restarts=0)
    with pytest.raises(WorkerDiedError):
        read_all(loader)
    loader.close() if clear == "close" else loader.load_state_dict(loader.state_dict())
    assert read_all(loader) == [3, 4, 5, 6, 7]
    assert len(worker_pids()) == 2
    loader.close()


@pytest.mark.parametrize("clear", ["close", "load"])
def test_a_worker_that_takes_too_long(clear):
    """It waits for a byte that is written only afterwards."""
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) if index == 1 else index, 4, timeout=0.2)
    iterator = iter(loader)
    assert next(iterator) == [0]
    with pytest.raises(WorkerTimeoutError):
        next(iterator)
    os.write(writer, b"xx")
    loader.close() if clear == "close" else loader.load_state_dict(loader.state_dict())
    assert read_all(loader) == [b"x", 2, 3]
    loader.close()
    os.close(reader)
    os.close(writer)


def test_closing_does_not_wait_for_a_worker_that_is_stuck():
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) if index else index, 4, workers=2)
    assert next(iter(loader)) == [0]
    pids = worker_pids()
    loader.close()
    assert len(pids) == 2
    assert not worker_pids()
    os.close(reader)
    os.close(writer)


# Other threads and processes.


def waiting_thread(iterator, loader):
    """A thread that waits for a batch whose sample waits for a byte; and what came of it."""
    outcome = []

    def wait_for_one():
        try:
            outcome.append(next(iterator))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait_for_one, daemon=True)
    thread.start()
    while not loader.pipeline.stream._inside and thread.is_alive():
        pass
    return thread, outcome


def test_closing_while_another_thread_waits_for_a_batch():
    """That thread's iterator is no longer valid; nothing has failed."""
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) if index == 1 else index, 4)
    iterator = iter(loader)
    assert next(iterator) == [0]
    thread, outcome = waiting_thread(iterator, loader)
    loader.close()
    thread.join(20)
    assert [type(error) for error in outcome] == [IteratorInvalidError]
    os.write(writer, b"x")
    assert read_all(loader) == [b"x", 2, 3]
    loader.close()
    os.close(reader)
    os.close(writer)


def test_a_second_thread_is_refused_while_the_first_waits():
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) if index == 1 else index, 4)
    iterator = iter(loader)
    assert next(iterator) == [0]
    thread, outcome = waiting_thread(iterator, loader)
    with pytest.raises(ConcurrentUseError):
        next(iterator)
    assert place_of(loader) == (0, 1)
    os.write(writer, b"x")
    thread.join(20)
    assert outcome == [[b"x"]]
    assert read_all(loader) == [2, 3]
    loader.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("change", ["load", "set_epoch", "close"])
def test_a_change_while_a_batch_is_made_is_refused_or_done(change):
    """From inside a sample here, or from another thread: it must not be undone when the batch is ready."""
    changed = []

    def change_once(index):
        if index == 3 and not changed:
            try:
                if change == "load":
                    loader.load_state_dict(start)
                elif change == "set_epoch":
                    loader.set_epoch(5)
                else:
                    loader.close()
                changed.append(True)
            except ConcurrentUseError:
                changed.append(False)
        return index

    loader = loader_of(change_once, 6, 0)
    start = loader.state_dict()
    iterator = iter(loader)
    assert take(iterator, 3) == [[0], [1], [2]]
    if not is_invalidated(iterator):
        assert changed == [False]
        assert read_all(loader) == [4, 5]
    else:
        assert place_of(loader) == {"load": (0, 0), "set_epoch": (5, 0), "close": (0, 3)}[change]
        assert read_all(loader) == ([3, 4, 5] if change == "close" else [0, 1, 2, 3, 4, 5])


def is_invalidated(iterator):
    try:
        next(iterator)
    except IteratorInvalidError:
        return True
    return False


@pytest.mark.parametrize("use", ["next", "close", "load", "drop"])
def test_a_fork_of_the_main_process_leaves_its_workers_alone(use):
    """What the child does with its copy must not take tasks away from the parent."""
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) and index if index == 3 else index, 20, prefetch_factor=6)
    iterator = iter(loader)
    assert take(iterator, 3) == [[0], [1], [2]]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if use == "next":
                try:
                    next(iterator)
                except ConcurrentUseError:
                    code = 0
            elif use == "close":
                loader.close()
                code = 0
            elif use == "load":
                loader.load_state_dict(loader.state_dict())
                code = 0
            else:
                del loader, iterator
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    os.write(writer, b"x")
    # With the tasks gone this would wait for ever, and not for so long.
    loader.pipeline.timeout = 20
    assert [sample for batch in iterator for sample in batch] == list(range(3, 20))
    loader.close()
    os.close(reader)
    os.close(writer)


def test_an_interrupt_at_the_worst_moment_leaves_the_stream_free():
    """Right after the stream was entered, and before it can be left again."""

    class Interrupted(dict):
        def setdefault(self, key, value):
            if key in self:
                return self[key]
            self[key] = value
            raise KeyboardInterrupt

    loader = loader_of(lambda index: index, 4)
    iterator = iter(loader)
    assert next(iterator) == [0]
    loader.pipeline.stream._inside = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [next(iterator), next(iterator)] == [[1], [2]]
    assert read_all(loader) == [3]
    loader.close()


def test_an_interrupt_while_closing_leaves_no_worker(monkeypatch):
    """The second Ctrl-C of somebody who waits for the first one's effect."""
    reader, writer = os.pipe()
    loader = loader_of(lambda index: os.read(reader, 1) if index else index, 4, workers=2)
    assert next(iter(loader)) == [0]
    join = WorkerProcesses._join

    def interrupted(processes):
        monkeypatch.setattr(WorkerProcesses, "_join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcesses, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    loader.close()
    assert not worker_pids()
    os.close(reader)
    os.close(writer)


def test_an_interrupt_while_waiting_changes_nothing():
    """Ctrl-C reaches the main process and, from a terminal, its workers too."""
    reader, writer = os.pipe()

    def interrupts(index):
        if index == 3 and os.read(reader, 1) == b"i":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getppid(), signal.SIGINT)
            os.read(reader, 1)
        return index

    loader = loader_of(interrupts, workers=2)
    iterator = iter(loader)
    assert take(iterator, 3) == [[0], [1], [2]]

    def ask_for_one():
        os.write(writer, b"i")
        next(iterator)

    with pytest.raises(KeyboardInterrupt):
        ask_for_one()
    assert place_of(loader) == (0, 3)
    os.write(writer, b"xx")
    assert read_all(loader) == [3, 4, 5, 6, 7]
    assert len(worker_pids()) == 2
    loader.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_loader_cannot_be_copied(copied):
    """It says so, and does not make a copy without a stream."""
    loader = StatefulDataLoader(list(range(4)), batch_size=2)
    with pytest.raises(TypeError, match="StatefulDataLoader"):
        copied(loader)


# The end of the main process.


def ends_of(script, tmp_path):
    """Runs a script whose workers hold the other end of a pipe; returns its exit code and what they wrote until all are gone."""
    reader, writer = os.pipe()
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(path), str(writer)], pass_fds=[writer], start_new_session=True
    )
    os.close(writer)
    said = b""
    try:
        # The limit is for a failure only: without one a worker that stays would keep the test, too.
        while select.select([reader], [], [], 60)[0]:
            chunk = os.read(reader, 100)
            if not chunk:
                return process.wait(60), said
            said += chunk
        raise AssertionError(f"workers are still there, having written {said!r}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reader)


BUSY = """
    import os, signal, sys
    from stateful_pipes import StatefulDataLoader

    pipe = int(sys.argv[1])
    never, _ = os.pipe()

    class Stuck:
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if index == 2:
                os.write(pipe, b"x")
            if index > {busy}:
                os.read(never, 1)
            return bytes({size})

    loader = StatefulDataLoader(Stuck(), num_workers=2, prefetch_factor=20, collate_fn=list)
    iterator = iter(loader)
    next(iterator), next(iterator), next(iterator)
"""


@pytest.mark.parametrize("size", [1, 15_000, 100_000])
def test_workers_end_when_the_main_process_is_killed(size, tmp_path):
    """Idle, or with results that nobody takes any more."""
    script = BUSY.format(busy=100, size=size) + "    os.kill(os.getpid(), signal.SIGKILL)\n"
    assert ends_of(script, tmp_path) == (-signal.SIGKILL, b"x")


def test_workers_end_with_the_interpreter_however_busy_they_are(tmp_path):
    assert ends_of(BUSY.format(busy=2, size=1), tmp_path) == (0, b"x")

"""The pool: tasks to whichever worker is free, results by number, and an end that leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import weakref
from multiprocessing import forkserver

import pytest
import torch
from torch.utils.data import default_collate

from stateful_pipes.errors import ConcurrentUseError, WorkerDiedError, WorkerTimeoutError
from stateful_pipes.prefetch import memory_files, processes
from stateful_pipes.prefetch.channel import pack
from stateful_pipes.prefetch.claims import IDLE, TAKING
from stateful_pipes.prefetch.pool import WorkerPool
from stateful_pipes.prefetch.slots import SLOT_BYTES
from stateful_pipes.ticket import Samples
from tests.streams import same


class Unbuildable:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self):
        return int, ("x",)


class Runner:
    """Does what the ticket says."""

    def __init__(self):
        self.state = "as it was at the start"

    def run(self, ticket):
        what, value = ticket
        if what == "square":
            return [value * value]
        if what == "pid":
            return [os.getpid()]
        if what == "raise":
            raise value
        if what == "exit":
            os._exit(value)
        if what == "kill":
            os.kill(os.getpid(), value)
        if what == "lives":
            with self.lives.get_lock():
                self.lives.value -= 1
                left = self.lives.value
            if left >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return ["survived"]
        if what == "wait":  # for a byte in the pipe
            os.read(value, 1)
            return ["waited"]
        if what == "signals":
            return [signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        if what == "state":
            return [self.state]
        if what == "tensor":
            return [torch.full((value,), 3.0)]
        if what == "collate":
            return [default_collate([torch.full((5000,), value)] * 2)]
        if what == "unpicklable":
            return [default_collate([torch.ones(5000)] * 2), lambda: 0]
        if what == "cannot be rebuilt":
            return [default_collate([torch.ones(5000)] * 2), Unbuildable()]
        raise AssertionError(what)

    def samples(self, ticket):
        return Samples(4, [7, 8], [ticket[0], "another"])


def submit(pool, ticket):
    return pool.submit(ticket, pack(ticket))


def result(pool, number, timeout=0):
    """The items of a task that leaves nothing out."""
    items, skips = pool.result(number, timeout)
    assert not skips
    return items


@pytest.fixture
def pipe():
    """A read end that keeps a worker busy until something is written; inherited over fork."""
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


@pytest.fixture
def make():
    pools = []

    def start(num_workers=2, runner=None, method="fork", **kwargs):
        settings = {"slots": 8, "max_restarts": 3, "worker_init_fn": None, "dataset": None, "seed": 7} | kwargs
        pools.append(
            weakref.ref(pool := WorkerPool(runner or Runner(), num_workers, multiprocessing.get_context(method), **settings))
        )
        return pool

    yield start
    for pool in pools:
        if pool() is not None:
            pool().close()


def children():
    return [child for child in multiprocessing.active_children() if "stateful_pipes" in child.name]


def test_results_by_number_in_any_order(make):
    pool = make()
    tasks = [submit(pool, ("square", value)) for value in range(20)]
    assert tasks == list(range(tasks[0], tasks[0] + 20))
    assert [result(pool, task) for task in reversed(tasks)] == [[value * value] for value in reversed(range(20))]
    assert pool.outstanding == 0


def test_large_results(make):
    pool = make()
    tasks = [submit(pool, ("tensor", size)) for size in (0, 1, 200_000)]
    for task, size in zip(tasks, (0, 1, 200_000), strict=True):
        assert same(result(pool, task), [torch.full((size,), 3.0)])


def test_large_tickets(make):
    pool = make(1)
    assert result(pool, submit(pool, ("square", torch.ones(100_000))))[0].sum() == 100_000


def test_more_tasks_than_the_channel_holds(make):
    pool = make(1)
    tasks = [submit(pool, ("square", value)) for value in range(3000)]
    assert pool.outstanding == 3000
    assert [result(pool, task)[0] for task in tasks] == [value * value for value in range(3000)]


def test_a_free_worker_takes_the_next_task(make, pipe):
    """One is held up; the other does all the rest."""
    pool = make(2)
    held = submit(pool, ("wait", pipe[0]))
    others = {result(pool, submit(pool, ("pid", None)))[0] for _ in range(10)}
    assert len(others) == 1
    os.write(pipe[1], b"x")
    assert result(pool, held) == ["waited"]


def test_workers_are_named_children_of_this_process(make):
    pool = make(3)
    pids = {result(pool, submit(pool, ("pid", None)))[0] for _ in range(30)}
    mine = children()
    assert len(mine) == 3
    assert pids <= {child.pid for child in mine}
    assert all(child.daemon for child in mine)
    pool.close()
    assert children() == []


def test_close_is_idempotent_and_ends_busy_and_stopped_workers(make, pipe):
    pool = make(3)
    submit(pool, ("wait", pipe[0]))
    result(pool, submit(pool, ("pid", None)))
    processes = [child.pid for child in children()]
    os.kill(processes[-1], signal.SIGSTOP)  # deaf to everything but SIGKILL
    pool.close()
    pool.close()
    assert children() == []
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_descriptor_is_left(make):
    make().close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pool = make(3)
    result(pool, submit(pool, ("tensor", 100_000)))
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropping_it_ends_it_without_the_garbage_collector(make):
    gc.disable()
    try:
        pool = make()
        result(pool, submit(pool, ("pid", None)))
        del pool
        assert children() == []
    finally:
        gc.enable()


def test_an_error_comes_with_its_own_result(make):
    pool = make()
    bad = submit(pool, ("raise", KeyError("sample")))
    good = submit(pool, ("square", 3))
    assert result(pool, good) == [9]
    with pytest.raises(KeyError, match="sample") as caught:
        result(pool, bad)
    assert "in run" in str(caught.value.__cause__)
    assert not pool.is_broken
    assert result(pool, submit(pool, ("square", 4))) == [16]


@pytest.mark.parametrize(
    ("ticket", "words", "remedy"),
    [
        (("exit", 3), "ended with exit code 3", ""),
        (("exit", 0), "ended with exit code 0", ""),
        (("kill", signal.SIGKILL), "was killed by SIGKILL", "out of memory"),
        (("kill", signal.SIGTERM), "was killed by SIGTERM", ""),
        (("kill", signal.SIGSEGV), "was killed by SIGSEGV", ""),
        (("kill", signal.SIGRTMIN + 1), "was killed by signal", ""),
    ],
)
def test_a_task_whose_workers_die_is_given_up(make, ticket, words, remedy, caplog):
    pool = make(2, max_restarts=2)
    with pytest.raises(WorkerDiedError, match=rf"worker [01] \(pid \d+\) {words}") as caught:
        result(pool, submit(pool, ticket))
    error = caught.value
    assert remedy in error.remedy
    assert error.exit_code == (-ticket[1] if ticket[0] == "kill" else ticket[1])
    assert (error.epoch, error.positions, error.indices) == (4, [7, 8], [ticket[0], "another"])
    assert "epoch 4, positions 7, 8 (indices" in str(error)
    assert same(vars(pickle.loads(pickle.dumps(error))), vars(error))
    assert pool.restarts == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert not pool.is_broken
    assert result(pool, submit(pool, ("square", 3))) == [9]
    assert taken(pool) == set()
    pool.close()
    assert children() == []


def test_with_no_restart_allowed_the_first_death_is_the_last(make):
    pool = make(1, max_restarts=0)
    bad, good = submit(pool, ("exit", 1)), submit(pool, ("square", 3))
    with pytest.raises(WorkerDiedError):
        result(pool, bad)
    assert result(pool, good) == [9]
    assert pool.restarts == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_dead_worker_had_in_hand_is_run_again(make, method):
    pool = make(2, method=method)
    warm = [submit(pool, ("square", value)) for value in range(4)]
    assert [result(pool, task) for task in warm] == [[value * value] for value in range(4)]
    tasks = [submit(pool, ("square", value)) for value in range(30)]
    for child in children():
        os.kill(child.pid, signal.SIGKILL)
    assert [result(pool, task) for task in tasks] == [[value * value] for value in range(30)]
    while pool.restarts < 2:  # until both are missed
        result(pool, submit(pool, ("square", 1)))
    assert taken(pool) == set()


def test_a_death_is_noticed_although_there_is_something_to_hand_out(make):
    pool = make()
    tasks = [submit(pool, ("square", value)) for value in range(4)]
    result(pool, tasks[3])
    while not all(task in pool._done for task in tasks[:3]):
        pool._look(None)
    victim = children()[0]
    victim.kill()
    victim.join()
    assert [result(pool, task) for task in tasks[:3]] == [[0], [1], [4]]
    assert pool.restarts == 1


def test_a_task_may_kill_as_many_workers_as_there_may_be_restarts(make):
    runner = Runner()
    runner.lives = multiprocessing.Value("i", 3)
    pool = make(2, runner, max_restarts=3)
    task, other = submit(pool, ("lives", None)), submit(pool, ("square", 5))
    assert result(pool, task) == ["survived"]
    assert result(pool, other) == [25]
    assert pool.restarts == 3


def test_workers_killed_at_any_moment_change_nothing_and_lose_no_slot(make):
    pool = make(3, slots=12)
    draw = random.Random(1)
    kills = 0
    held = []
    for turn in range(150):
        tasks = [submit(pool, ("collate", value)) for value in range(draw.randint(1, 8))]
        if draw.random() < 0.5:
            os.kill(draw.choice(children()).pid, draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1]))
            kills += 1
        if draw.random() < 0.2:
            pool.forget()
            continue
        for value, task in enumerate(tasks):
            found = result(pool, task)
            assert same(found, [torch.full((2, 5000), value)]), turn
            held = [*held[-3:], found]
    finish(pool)
    assert 0 < pool.restarts <= kills
    del held, found
    assert sorted(pool._arena._shelf.free) == list(range(12))


def test_the_task_that_was_forgotten_with_its_dead_worker_is_not_run_again(make, pipe):
    pool = make(1)
    submit(pool, ("wait", pipe[0]))
    submit(pool, ("square", 2))
    pool.forget()
    (worker,) = children()
    os.kill(worker.pid, signal.SIGKILL)
    assert result(pool, submit(pool, ("square", 3))) == [9]
    assert pool.outstanding == 0
    assert taken(pool) == set()


def test_a_worker_that_ends_before_it_can_do_anything_is_not_replaced_for_ever(make):
    pool = make(1, worker_init_fn=lambda _: os._exit(0))
    with pytest.raises(WorkerDiedError, match="exit code 0"):
        result(pool, submit(pool, ("square", 2)))
    assert pool.is_broken
    assert pool.restarts == 0


def test_workers_that_are_killed_as_they_start_are_replaced_a_few_times(make):
    pool = make(1, worker_init_fn=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        result(pool, submit(pool, ("square", 2)))
    assert pool.restarts == 3


def test_a_worker_that_stands_still_between_taking_and_telling_is_killed(make, monkeypatch):
    """It may have the task or not: only when it is dead that is certain."""
    monkeypatch.setattr(processes, "_TAKING_S", 0.01)
    pool = make(2)
    assert result(pool, submit(pool, ("square", 1))) == [1]
    one, other = children()
    os.kill(one.pid, signal.SIGSTOP)
    os.kill(other.pid, signal.SIGSTOP)
    tasks = [submit(pool, ("square", value)) for value in range(5)]
    pool._claims.write(int(one.name[-1]), TAKING)
    os.kill(other.pid, signal.SIGKILL)
    assert [result(pool, task) for task in tasks] == [[value * value] for value in range(5)]
    assert pool.restarts == 2


def test_a_stopped_worker_alone_is_not_replaced_before_the_timeout_and_named_then(make):
    pool = make(1)
    assert result(pool, submit(pool, ("square", 1))) == [1]
    os.kill(children()[0].pid, signal.SIGSTOP)
    task = submit(pool, ("square", 2))
    with pytest.raises(WorkerTimeoutError, match=r"worker 0 \(pid \d+\) .* and is stopped"):
        result(pool, task, timeout=0.01)
    assert pool.is_broken


class Forking(Runner):
    """Has a child of its own, which lives until the pipe is closed, and holds whatever a fork inherits."""

    def run(self, ticket):
        if ticket[0] == "fork" and os.fork() == 0:
            os.read(ticket[1], 1)
            os._exit(0)
        return super().run(("pid", None) if ticket[0] == "fork" else ticket)


def test_the_death_of_a_worker_that_has_children_is_noticed(make, pipe):
    pool = make(1, Forking())
    (pid,) = result(pool, submit(pool, ("fork", pipe[0])))
    os.kill(pid, signal.SIGKILL)
    assert result(pool, submit(pool, ("square", 3))) == [9]
    os.write(pipe[1], b"x")
    assert pool.restarts == 1


def test_workers_outlive_the_server_that_forked_them(make):
    """And are not taken for dead: two would write to one slot."""
    pool = make(2, method="forkserver")
    assert result(pool, submit(pool, ("square", 3))) == [9]
    while {pool._claims.read(worker_id).task for worker_id in range(2)} != {IDLE}:
        pass
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    tasks = [submit(pool, ("square", value)) for value in range(20)]
    assert [result(pool, task) for task in tasks] == [[value * value] for value in range(20)]
    assert pool.restarts == 0
    os.kill(pool._processes._processes[0].pid, signal.SIGKILL)
    while pool.restarts < 1:
        assert result(pool, submit(pool, ("square", 4))) == [16]
    pool.close()


def test_workers_that_somebody_else_reaps_are_replaced(make):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pool = make(2)
        assert result(pool, submit(pool, ("square", 3))) == [9]
        os.kill(children()[0].pid, signal.SIGKILL)
        while pool.restarts < 1:
            assert result(pool, submit(pool, ("square", 4))) == [16]
        pool.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
    for child in children():
        multiprocessing.process._children.discard(child)  # which can no longer find out by itself


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_interrupts_are_left_to_the_main_process_which_answers_them_as_before(make, method):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pool = make(1, method=method)
    assert result(pool, submit(pool, ("signals", None))) == [signal.SIG_IGN, mask]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_an_interrupt_while_workers_are_started_leaves_none(make, monkeypatch):
    started = []
    start = processes.WorkerProcesses._start

    def interrupted(self, worker_id):
        """Right after it was started, and before that is noted."""
        start(self, worker_id)
        started.append(self._processes.pop())
        os.close(self._ends_of.pop())
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.WorkerProcesses, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(2)
    started[0].join()
    assert started[0].exitcode == 0  # by itself, for its channel is shut down


def interrupt_through_a_thread():
    """The system gives a process's signal to any thread that does not block it."""

    def interrupt():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    thread.join()


@pytest.mark.parametrize("interrupt", [lambda: signal.raise_signal(signal.SIGINT), interrupt_through_a_thread])
def test_an_interrupt_right_after_a_fork_waits_until_the_process_is_known(make, monkeypatch, interrupt):
    """Else nobody would end that process."""
    started = []
    start = multiprocessing.context.ForkProcess.start

    def interrupted(process):
        start(process)
        started.append(process)
        interrupt()

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            make()
    finally:
        signal.signal(signal.SIGINT, before)
    (first,) = started
    with pytest.raises(ValueError, match="closed"):
        first.is_alive()
    assert not children()


def test_in_a_daemonic_process_it_is_refused_with_a_remedy(make, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        make(1)
    gc.collect()


def test_timeout(make, pipe):
    pool = make(1)
    assert result(pool, submit(pool, ("square", 3)), timeout=60) == [9]
    task = submit(pool, ("wait", pipe[0]))
    doing = r"worker 0 \(pid \d+\) is busy with epoch 4, positions 7, 8 .* for 0\.\d s"
    with pytest.raises(WorkerTimeoutError, match=doing) as caught:
        result(pool, task, timeout=0.05)
    assert "timeout" in caught.value.remedy
    assert pool.is_broken
    pool.close()


def test_a_failing_init(make):
    def init(worker_id):
        raise ValueError("no license")

    pool = make(1, worker_init_fn=init)
    with pytest.raises(ValueError, match="no license"):
        result(pool, submit(pool, ("square", 1)))
    assert pool.is_broken


def test_forget_takes_back_what_no_worker_has_begun(make, pipe):
    pool = make(1)
    submit(pool, ("wait", pipe[0]))
    tasks = [submit(pool, ("square", value)) for value in range(500)]
    pool.forget()
    assert pool.outstanding <= 1  # what is running cannot be taken back
    fresh = submit(pool, ("square", 5))
    assert fresh > tasks[-1]
    os.write(pipe[1], b"x")
    assert result(pool, fresh) == [25]
    assert pool.outstanding == 0


def test_forget_drops_results_too(make):
    pool = make(1)
    tasks = [submit(pool, ("square", value)) for value in range(10)]
    result(pool, tasks[-1])
    pool.forget()
    assert result(pool, submit(pool, ("square", 7))) == [49]
    assert pool.outstanding == 0


def test_a_forgotten_error_is_forgotten(make):
    pool = make(1)
    submit(pool, ("raise", ValueError("old")))
    pool.forget()
    assert result(pool, submit(pool, ("square", 7))) == [49]


def test_the_runner_is_as_it_was_at_the_start(make):
    runner = Runner()
    pool = make(1, runner)
    runner.state = "changed"
    assert result(pool, submit(pool, ("state", None))) == ["as it was at the start"]


def test_a_ticket_that_cannot_be_sent_is_refused_at_once(make):
    pool = make(1)
    with pytest.raises(Exception, match="pickle"):
        submit(pool, ("square", lambda: 0))
    assert pool.outstanding == 0
    assert result(pool, submit(pool, ("square", 2))) == [4]


def test_a_forked_child_cannot_use_it_and_does_not_end_it(make):
    pool = make(1)
    result(pool, submit(pool, ("square", 2)))
    told, tell = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            found = []
            for use in (lambda: submit(pool, ("square", 2)), lambda: result(pool, 0)):
                try:
                    use()
                except ConcurrentUseError as error:
                    found.append(str(error))
            pool.close()
            tell.send("\n".join(found).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    lines = told.recv(4096).decode().splitlines()
    told.close()
    tell.close()
    assert len(lines) == 2
    assert all(f"belong to process {os.getpid()}" in line for line in lines)
    assert result(pool, submit(pool, ("square", 3))) == [9]


def test_a_worker_that_cannot_be_started_by_spawn_is_refused_at_once(make):
    """Its runner does not pickle: an error here, and no half-started pool stays behind."""

    class Local(Runner):
        pass

    with pytest.raises(Exception, match="pickle"):
        make(2, Local(), method="spawn")
    gc.collect()
    assert children() == []


def test_closing_while_another_thread_reaps_a_worker(make):
    """A thread that waits for a result sees the worker end, too; whoever comes second is told that there is no such child."""
    pool = make(1)
    (process,) = pool._processes._processes
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    pool.close()
    multiprocessing.process._children.discard(process)  # which can no longer find out by itself


def taken(pool):
    """The slots that are not free."""
    return set(range(8)) - set(pool._arena._shelf.free)


def lies_in_a_slot(pool, tensor):
    start = torch.frombuffer(pool._arena._file.memory, dtype=torch.uint8).data_ptr()
    return start <= tensor.data_ptr() < start + len(pool._arena._file.memory)


def finish(pool):
    """Until no task is under way, those forgotten included."""
    while pool.outstanding:
        result(pool, submit(pool, ("square", 1)))


def test_the_slots_are_as_many_as_was_said(make):
    pool = make(slots=8)
    assert sorted(pool._arena._shelf.free) == list(range(8))
    assert len(pool._arena._file.memory) == 8 * SLOT_BYTES


def test_while_the_caller_holds_more_than_there_are_slots_each_has_memory_of_its_own(make):
    pool = make(slots=8)
    held = [result(pool, submit(pool, ("collate", value)))[0] for value in range(30)]
    assert sum(lies_in_a_slot(pool, batch) for batch in held) == 8
    for turn in range(100):
        assert same(result(pool, submit(pool, ("collate", turn))), [torch.full((2, 5000), turn)])
    for value, batch in enumerate(held):
        assert same(batch, torch.full((2, 5000), value))
    del held, batch
    assert taken(pool) == set()
    assert lies_in_a_slot(pool, result(pool, submit(pool, ("collate", 1)))[0])


def test_a_held_result_keeps_its_slot_and_the_rest_go_round(make):
    pool = make(slots=8)
    (held,) = result(pool, submit(pool, ("collate", -1)))
    part = held[1, 7:9]
    del held
    for value in range(50):
        assert same(result(pool, submit(pool, ("collate", value))), [torch.full((2, 5000), value)])
    assert len(taken(pool)) == 1
    assert part.tolist() == [-1, -1]
    pool.close()
    del pool
    assert part.tolist() == [-1, -1]


def test_a_result_without_large_parts_holds_no_slot(make):
    pool = make()
    held = [result(pool, submit(pool, ("tensor", 100))) for _ in range(20)]
    assert taken(pool) == set()
    assert len(held) == 20


def test_forget_gives_slots_back(make, pipe):
    pool = make(1, slots=8)
    submit(pool, ("wait", pipe[0]))
    for value in range(3000):  # more than the channel holds, so some are not even sent
        submit(pool, ("collate", value))
    assert len(taken(pool)) == 8
    pool.forget()
    assert len(taken(pool)) <= 1  # what is running keeps its own
    os.write(pipe[1], b"x")
    finish(pool)
    assert taken(pool) == set()


def test_a_refused_ticket_takes_no_slot(make):
    pool = make(1)
    for _ in range(20):
        with pytest.raises(Exception, match="pickle"):
            submit(pool, ("square", lambda: 0))
    assert taken(pool) == set()


def test_no_slot_is_lost_over_many_rounds(make, pipe):
    pool = make(2, slots=8)
    draw = random.Random(5)
    kinds = [("collate", 2), ("tensor", 5000), ("tensor", 3), ("raise", ValueError("x")), ("unpicklable", None)]
    held = []
    for _ in range(60):
        tasks = [(submit(pool, kind), kind) for kind in draw.choices(kinds, k=draw.randint(1, 6))]
        for task, (what, value) in tasks[: draw.randint(0, 6)]:
            if what in ("raise", "unpicklable"):
                with pytest.raises(Exception, match=r"x|pickle"):
                    result(pool, task)
            else:
                found = result(pool, task)
                expected = torch.full((2, 5000), 2) if what == "collate" else torch.full((value,), 3.0)
                assert same(found, [expected])
                held = [*held[-4:], found]
        if draw.random() < 0.3:
            pool.forget()
        if draw.random() < 0.1:
            slow = submit(pool, ("wait", pipe[0]))
            with pytest.raises(WorkerTimeoutError):
                result(pool, slow, timeout=0.001)
            os.write(pipe[1], b"x")
            assert result(pool, slow) == ["waited"]
    pool.forget()
    finish(pool)
    del held, found
    gc.collect()  # tracebacks
    assert sorted(pool._arena._shelf.free) == list(range(8))


def test_what_cannot_be_rebuilt_is_told_when_its_own_turn_comes(make):
    pool = make(1)
    bad, good = submit(pool, ("cannot be rebuilt", None)), submit(pool, ("square", 3))
    assert result(pool, good) == [9]  # by when the other one has arrived
    with pytest.raises(ValueError, match="invalid literal"):
        result(pool, bad)
    assert not pool.is_broken
    assert taken(pool) == set()


def test_what_cannot_be_rebuilt_and_was_forgotten_is_not_told(make):
    pool = make(1)
    submit(pool, ("cannot be rebuilt", None))
    pool.forget()
    assert result(pool, submit(pool, ("square", 7))) == [49]
    assert taken(pool) == set()


def test_a_closed_pool_keeps_the_memory_of_held_batches_only(make):
    pool = make(1, slots=8)
    tasks = [submit(pool, ("collate", value)) for value in range(4)]
    held = result(pool, tasks[0])
    result(pool, tasks[3])  # dropped; the two between have been made, and are not asked for
    descriptor = os.dup(pool._arena._file.descriptor)
    assert os.fstat(descriptor).st_blocks * 512 > 3 * held[0].nbytes
    pool.close()
    assert os.fstat(descriptor).st_blocks * 512 < 2 * held[0].nbytes
    assert held[0].unique().tolist() == [0]
    os.close(descriptor)


def test_tasks_of_two_pools_have_no_number_in_common(make):
    one, other = make(1), make(1)
    assert submit(one, ("square", 1)) != submit(other, ("square", 1))


def test_a_ticket_for_which_there_is_no_descriptor_is_refused_and_leaves_nothing(make, monkeypatch):
    pool = make(1)

    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(memory_files, "create", refuse)
        with pytest.raises(OSError, match="Too many"):
            submit(pool, ("square", torch.ones(100_000)))
    assert pool.outstanding == 0
    assert taken(pool) == set()
    assert result(pool, submit(pool, ("square", 3))) == [9]


def test_too_many_descriptors_under_way_are_waited_for(make, monkeypatch):
    """Until a worker has taken some in."""
    pool = make(1)
    running = submit(pool, ("square", 2))
    create = memory_files.create
    refusals = [OSError(errno.ETOOMANYREFS, "Too many references")]

    def refuse_once():
        if refusals:
            raise refusals.pop()
        return create()

    monkeypatch.setattr(memory_files, "create", refuse_once)
    waiting = submit(pool, ("square", torch.ones(100_000)))
    assert result(pool, running) == [4]
    assert result(pool, waiting)[0].sum() == 100_000
    assert not refusals


LINES = {"submit", "put", "flush", "send", "forget", "take_back", "drop"}


def interrupted(at, call):
    """Calls it, with a KeyboardInterrupt at one line of these functions; returns whether it came to that line."""
    lines = itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_name not in LINES or "stateful_pipes" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("what", ["submit", "forget"])
def test_an_interrupt_at_any_line_leaves_the_pool_whole_or_known_to_be_broken(make, what):
    """No slot may be on the shelf that a worker still has, nor be lost, nor a task be waited for that nobody runs."""
    for at in itertools.count():
        pool = make(1, slots=8)
        tasks = [submit(pool, ("collate", value)) for value in range(3)]
        result(pool, tasks[0])
        call = pool.forget if what == "forget" else lambda pool=pool: submit(pool, ("collate", 9))
        came = interrupted(at, call)
        if not pool.is_broken:
            pool.forget()
            finish(pool)
            assert sorted(pool._arena._shelf.free) == list(range(8)), at
        pool.close()
        if not came:
            break
    assert at > 8

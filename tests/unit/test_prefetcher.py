"""Where the halves part: the stream is the same with any number of workers, and errors come where they belong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import get_worker_info

from stateful_pipes import (
    InfiniteRandomSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.contract import walk
from stateful_pipes.errors import IteratorInvalidError, LoaderFailedError, WorkerDiedError, WorkerTimeoutError
from stateful_pipes.prefetch.ahead import Ahead
from stateful_pipes.prefetch.pool import WorkerPool
from tests.streams import DrawingDataset, disturb, drawing_collate, generator_states, place_of, same


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    yield
    if children():
        gc.collect()  # an error that was caught may hold a pipeline in a cycle
    assert children() == []


def children():
    return [child for child in multiprocessing.active_children() if "stateful_pipes" in child.name]


def below(length=11, batch_size=2, map_fn=None, **kwargs):
    dataset = DrawingDataset(length)
    node = SeededMapper(SamplerNode(RandomSampler(length, seed=1)), map_fn or dataset.__getitem__, seed=2, **kwargs)
    return SeededBatcher(node, batch_size, collate_fn=drawing_collate, seed=3)


def loader_of(num_workers, node=None, **kwargs):
    method = {"multiprocessing_context": "fork"} if num_workers else {}
    return StatefulDataLoader(ProcessPrefetcher(below() if node is None else node, num_workers, **method, **kwargs))


def epochs(loader, count=2):
    return [list(loader) for _ in range(count)]


EXPECTED = epochs(loader_of(0), 3)


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_workers_do_not_show(num_workers, prefetch_factor):
    with loader_of(num_workers, prefetch_factor=prefetch_factor) as loader:
        assert same(epochs(loader), EXPECTED[:2])


@pytest.mark.parametrize("cut", [0, 1, 5, 6])
def test_a_state_of_a_running_pool_resumes_anywhere(cut):
    with loader_of(2) as loader:
        for _ in zip(range(cut), loader, strict=False):
            disturb()
        state = loader.state_dict()
        following = [EXPECTED[0][cut:], *EXPECTED[1:]] if cut < 6 else EXPECTED[1:]
        assert same(epochs(loader), following[:2])
        for num_workers in (0, 1):
            with loader_of(num_workers) as resumed:
                resumed.load_state_dict(state)
                assert same(list(resumed), following[0])


def test_workers_start_with_the_first_item_and_live_on():
    loader = loader_of(2)
    iterator = iter(loader)
    loader.state_dict()
    len(loader)
    assert children() == []
    next(iterator)
    first = {child.pid for child in children()}
    assert len(first) == 2
    state = loader.state_dict()
    epochs(loader)
    loader.load_state_dict(state)
    loader.set_epoch(5)
    next(iter(loader))
    loader.restart()
    next(iter(loader))
    assert {child.pid for child in children()} == first
    loader.close()
    assert children() == []
    assert len(list(loader)) == 5  # the first was consumed before
    assert {child.pid for child in children()}.isdisjoint(first)
    loader.close()


def test_prefetching_runs_on_into_the_next_epoch():
    with loader_of(1, prefetch_factor=4) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        assert place_of(loader) == (1, 0)
        assert loader.stats()["prefetched"] >= 3


def test_the_bound():
    node = SeededMapper(SamplerNode(SequentialSampler(100)), lambda index: index, seed=1)
    with loader_of(2, node, prefetch_factor=3) as loader:
        for _ in itertools.islice(loader, 10):
            assert loader.stats()["prefetched"] <= 6


def test_an_endless_order():
    def make(num_workers):
        return loader_of(num_workers, SeededMapper(SamplerNode(InfiniteRandomSampler(50, seed=1)), lambda index: index, seed=1))

    with make(2) as loader:
        assert list(itertools.islice(loader, 120)) == list(itertools.islice(make(0), 120))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_without_items_does_not_go_on_for_ever(num_workers):
    with loader_of(num_workers, tn.IterableWrapper([])) as loader:
        for epoch in range(3):
            assert list(loader) == []
            assert place_of(loader) == (epoch + 1, 0)


def test_a_foreign_source_is_pulled_here_and_mapped_there():
    def make(num_workers):
        node = SeededMapper(tn.IterableWrapper(range(7)), lambda item: (item, os.getpid(), float(torch.rand(()))), seed=1)
        return loader_of(num_workers, node)

    with make(2) as loader:
        found = epochs(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    plain = epochs(make(0), 3)
    strip = lambda items: [(item, draw) for item, _, draw in items]  # noqa: E731
    assert [strip(epoch) for epoch in found] == [strip(epoch) for epoch in plain[:2]]
    assert all(pid != os.getpid() for epoch in found for _, pid, _ in epoch)
    resumed = make(0)
    resumed.load_state_dict(state)
    assert strip(resumed) == strip(plain[2])[1:]


def test_nodes_above_it_run_here():
    node = SeededBatcher(ProcessPrefetcher(SamplerNode(SequentialSampler(10)), 2), 4, collate_fn=list, seed=1)
    node = SeededMapper(node, lambda batch: (batch, os.getpid()), seed=1, rng=())
    with StatefulDataLoader(node) as loader:
        assert epochs(loader) == [[(batch, os.getpid()) for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])]] * 2
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert place_of(loader) == (2, 4)
        assert [batch for batch, _ in iterator] == [[4, 5, 6, 7], [8, 9]]
        loader.load_state_dict(state)
        assert [batch for batch, _ in loader] == [[4, 5, 6, 7], [8, 9]]


def fails_once(flag, index):
    """Fails at 5 while the file is there: workers and the main process see the same."""
    if index == 5 and os.path.exists(flag):
        raise ValueError("bad sample")
    return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises(num_workers, tmp_path):
    flag = tmp_path / "fail"
    flag.touch()
    node = SeededMapper(SamplerNode(SequentialSampler(8)), lambda index: fails_once(flag, index), seed=1, name="decode")
    with loader_of(num_workers, node) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
        state = loader.state_dict()
        with pytest.raises(ValueError, match="bad sample") as caught:
            next(iterator)
        assert "in node 'decode' at epoch 0, position 5, index 5" in caught.value.__notes__
        shown = "".join(map(str, caught.traceback)) + str(caught.value.__cause__)
        assert "fails_once" in shown
        assert loader.state_dict() == state
        for again in (lambda: next(iterator), lambda: iter(loader)):
            with pytest.raises(LoaderFailedError, match="bad sample"):
                again()
        flag.unlink()
        loader.load_state_dict(state)
        assert list(loader) == [5, 6, 7]


def test_an_error_far_ahead_comes_when_its_turn_comes():
    def map_fn(index):
        if index == 4:
            raise KeyError("bad")
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(8)), map_fn, seed=1)
    with loader_of(2, node, prefetch_factor=4) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(KeyError, match="bad"):
            next(iterator)


def test_an_error_of_the_source_comes_when_its_turn_comes():
    class Source(tn.BaseNode):
        def reset(self, initial_state=None):
            super().reset(initial_state)
            self.at = 0 if initial_state is None else initial_state["at"]

        def next(self):
            if self.at == 3:
                raise OSError("shard is gone")
            self.at += 1
            return self.at

        def get_state(self):
            return {"at": self.at}

    with loader_of(2, Source(), prefetch_factor=4) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(OSError, match="shard is gone"):
            next(iterator)
        assert place_of(loader) == (0, 3)


def test_a_killed_worker_is_replaced_and_the_stream_is_the_same():
    with loader_of(1) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        (worker,) = children()
        os.kill(worker.pid, signal.SIGKILL)
        found.extend(iterator)
        assert same(found, EXPECTED[0])
        assert loader.stats()["restarts"] == 1
        loader.close()
        assert loader.stats()["restarts"] == 1


@pytest.mark.parametrize("clear", ["close", "load"])
def test_after_a_death_too_many_it_goes_on_from_the_last_item(clear):
    with loader_of(1, max_restarts=0) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        (worker,) = children()
        os.kill(worker.pid, signal.SIGKILL)
        with contextlib.suppress(WorkerDiedError):  # it may have been dead, or have been waiting, by then
            found.extend(iterator)
        loader.close() if clear == "close" else loader.load_state_dict(loader.state_dict())
        assert same([*found, *loader], EXPECTED[0])


def test_a_pool_is_not_started_by_a_thread_that_comes_after_the_close():
    with loader_of(1) as loader:
        next(iter(loader))
        loader.close()
        prefetcher = next(node for node in walk(loader.pipeline) if isinstance(node, ProcessPrefetcher))
        with pytest.raises(IteratorInvalidError):
            prefetcher.pull(1)
        assert children() == []
        assert same(list(loader), EXPECTED[0][1:])


@pytest.mark.parametrize("interrupted", ["_collect", "_look", "submit"])
def test_an_interrupt_while_waiting_loses_nothing(interrupted, monkeypatch):
    """Ctrl-C may come anywhere, and a message may be lost with it."""
    with loader_of(1, prefetch_factor=1) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            next(patch.setattr(WorkerPool, interrupted, _interrupt) or iterator)
        assert place_of(loader) == (0, 2)
        assert same([*found, *iterator], EXPECTED[0])


def _interrupt(*_):
    raise KeyboardInterrupt


def test_timeout(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hangs(index):
        with open(pipe):  # until someone opens the other end
            return index

    with loader_of(1, SeededMapper(SamplerNode(SequentialSampler(3)), hangs, seed=1), timeout=0.01) as loader:
        with pytest.raises(WorkerTimeoutError):
            next(iter(loader))
        with pytest.raises(LoaderFailedError, match="WorkerTimeoutError"):
            iter(loader)


def test_worker_info_and_init():
    class Dataset:
        def __getitem__(self, index):
            info = get_worker_info()
            return info.id, info.num_workers, type(info.dataset).__name__, torch.get_num_threads(), self.init

        init = None

    def init(worker_id):
        get_worker_info().dataset.init = worker_id

    node = SeededMapper(SamplerNode(SequentialSampler(20)), Dataset().__getitem__, seed=1)
    with loader_of(2, node, worker_init_fn=init) as loader:
        found = set(loader)
    assert found <= {(number, 2, "Dataset", 1, number) for number in range(2)}
    assert get_worker_info() is None


def test_a_failing_init_is_raised():
    def init(worker_id):
        raise ValueError("no license")

    with loader_of(1, worker_init_fn=init) as loader, pytest.raises(ValueError, match="no license"):
        next(iter(loader))


def test_a_dataset_changed_here_is_not_seen_there_until_close():
    class Dataset:
        value = 1

        def __getitem__(self, index):
            return self.value

    dataset = Dataset()
    with loader_of(1, SeededMapper(SamplerNode(SequentialSampler(2)), dataset.__getitem__, seed=1)) as loader:
        assert list(loader) == [1, 1]
        dataset.value = 2
        assert list(loader) == [1, 1]
        loader.close()
        assert list(loader) == [2, 2]


def test_the_caller_s_generators_are_untouched():
    with loader_of(2) as loader:
        before = generator_states()
        for _ in loader:
            loader.state_dict()
        assert generator_states() == before


def test_with_workers_any_thread_will_do():
    with loader_of(1) as loader:
        iterator = iter(loader)
        found = []
        thread = threading.Thread(target=lambda: found.append(next(iterator)))
        thread.start()
        thread.join()
        assert same([*found, *iterator], EXPECTED[0])


def test_a_held_iterator_keeps_the_workers_and_dropping_both_ends_them():
    gc.disable()
    try:
        iterator = iter(loader_of(2))
        assert same([next(iterator), next(iterator)], EXPECTED[0][:2])
        assert len(children()) == 2
        del iterator
        assert children() == []
    finally:
        gc.enable()


def test_it_has_no_state_of_its_own():
    inline, pooled = loader_of(0).state_dict(), loader_of(3, prefetch_factor=9).state_dict()
    assert inline == pooled
    assert list(inline["nodes"]) == ["sampler", "mapper", "batcher"]


def test_only_one_with_workers():
    inner = ProcessPrefetcher(SamplerNode(SequentialSampler(3)), 1)
    with pytest.raises(ValueError, match="stands below this one already"):
        ProcessPrefetcher(inner, 1)
    assert list(StatefulDataLoader(ProcessPrefetcher(inner, 0, name="inline"))) == [0, 1, 2]
    inner.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_context_by_name_or_as_an_object(method):
    source = SamplerNode(SequentialSampler(3))
    context = multiprocessing.get_context(method)
    assert ProcessPrefetcher(source, 1, multiprocessing_context=context).context is context
    del source
    named = ProcessPrefetcher(SamplerNode(SequentialSampler(3)), 1, multiprocessing_context=method)
    assert named.context.get_start_method() == method


def test_the_start_method_is_multiprocessing_s_own_by_default():
    node = ProcessPrefetcher(SamplerNode(SequentialSampler(3)), 1)
    assert node.context.get_start_method() == multiprocessing.get_start_method()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
        ({"num_workers": 1.0}, TypeError, r"num_workers must be an integer, got 1\.0"),
        ({"num_workers": None}, TypeError, "num_workers must be an integer, got None"),
        ({"num_workers": True}, TypeError, "num_workers must be an integer, got True"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1, got 0"),
        ({"prefetch_factor": "2"}, TypeError, "prefetch_factor must be an integer, got '2'"),
        ({"multiprocessing_context": "thread"}, ValueError, "multiprocessing_context must be one of .*fork.*, got 'thread'"),
        ({"multiprocessing_context": 3}, TypeError, "multiprocessing_context must be .*, got 3"),
        ({"timeout": -1}, ValueError, "timeout must .*got -1"),
        ({"timeout": "3"}, TypeError, "timeout"),
        ({"timeout": None}, TypeError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"worker_init_fn": 3}, TypeError, "worker_init_fn must be callable, got 3"),
        ({"name": ""}, TypeError, "name must be"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        ProcessPrefetcher(SamplerNode(SequentialSampler(3)), **{"num_workers": 1, **kwargs})


@pytest.mark.parametrize("timeout", [3, 0.5, np.int64(3), np.float32(0.5)], ids=repr)
def test_a_timeout_is_any_number_of_seconds(timeout):
    assert ProcessPrefetcher(SamplerNode(SequentialSampler(3)), 1, timeout=timeout).timeout == timeout


def test_a_source_is_a_node():
    with pytest.raises(TypeError, match="source must be a torchdata node, got list"):
        ProcessPrefetcher([1, 2], 0)


def test_strided_and_tracked_tensors_come_through():
    boxes = torch.rand(3, 10)

    def map_fn(index):
        return boxes[:1, index], boxes[index, ::4], boxes[:, index]

    node = SeededMapper(SamplerNode(SequentialSampler(3)), map_fn, seed=1)
    with loader_of(1, node) as loader:
        assert same(list(loader), [map_fn(index) for index in range(3)])


class Moved(ProcessPrefetcher):
    """With halves of its own."""

    pulls = 0

    def pull(self, count):
        self.pulls += 1
        return super().pull(count)

    def run(self, ticket):
        return [("moved", item) for item in super().run(ticket)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pull_and_a_run_of_ones_own_are_called(num_workers):
    node = Moved(SeededBatcher(SamplerNode(SequentialSampler(6)), 2, collate_fn=list), num_workers)
    with StatefulDataLoader(node) as loader:
        assert list(loader) == [("moved", [0, 1]), ("moved", [2, 3]), ("moved", [4, 5])]
    assert node.pulls >= 4
    node = ProcessPrefetcher(SamplerNode(SequentialSampler(3)), num_workers)
    run, node.run = node.run, lambda ticket: [-item for item in run(ticket)]
    with StatefulDataLoader(node) as loader:
        assert list(loader) == [0, -1, -2]


def test_a_close_while_another_thread_is_about_to_take_the_first_item(monkeypatch):
    with loader_of(1) as loader:
        iterator = iter(loader)
        fill = Ahead.fill

        def closed_meanwhile(ahead, pool, at_least=0):
            fill(ahead, pool, at_least)
            closer = threading.Thread(target=loader.close)
            closer.start()
            closer.join()

        monkeypatch.setattr(Ahead, "fill", closed_meanwhile)
        with pytest.raises(IteratorInvalidError):
            next(iterator)
        monkeypatch.undo()
        assert same(list(loader), EXPECTED[0])

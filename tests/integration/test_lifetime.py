"""Who keeps workers alive, and what ends them. The garbage collector is off: nothing may wait for it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import torch
import torchdata.nodes as tn
from torchdata.nodes import Batcher, Loader, Prefetcher

from stateful_pipes import ProcessPrefetcher, SamplerNode, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.errors import IteratorInvalidError
from tests.integration.pipelines import batches, epochs, take, worker_pids
from tests.streams import DrawingDataset, drawing_collate, same


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def from_dataset():
    return StatefulDataLoader(DrawingDataset(20), batch_size=2, num_workers=2, collate_fn=drawing_collate, seed=1)


def composed():
    return StatefulDataLoader(batches(2, 20))


def under_foreign():
    return StatefulDataLoader(Batcher(batches(2, 20), 2))


each_pipeline = pytest.mark.parametrize("make", [from_dataset, composed, under_foreign])


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_files():
    return sorted(
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    )


@each_pipeline
def test_a_held_iterator_keeps_stream_and_workers_when_the_loader_is_dropped(make):
    loader = make()
    whole = list(loader)
    loader.close()

    loader = make()
    iterator = iter(loader)
    read = take(iterator, 2)
    dropped = weakref.ref(loader)
    del loader
    assert dropped() is None
    pids = worker_pids()
    assert len(pids) == 2
    read += iterator
    assert same(read, whole)
    assert worker_pids() == pids
    del iterator
    assert not any(map(is_running, pids))


@each_pipeline
def test_a_held_loader_keeps_them_when_the_iterator_is_dropped(make):
    loader = make()
    take(iter(loader), 2)
    pids = worker_pids()
    take(iter(loader), 1)
    assert worker_pids() == pids
    assert len(pids) == 2
    del loader
    assert not any(map(is_running, pids))


@each_pipeline
def test_a_for_loop_left_in_the_middle_leaves_nothing(make):
    for _ in make():
        pids = worker_pids()
        break
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_node_by_itself():
    node = batches(2, 20)
    take(node, 2)
    pids = worker_pids()
    assert len(pids) == 2
    del node
    assert not any(map(is_running, pids))


def test_a_torchdata_node_over_ours():
    node = Batcher(batches(2, 20), 2)
    take(node, 2)
    pids = worker_pids()
    assert len(pids) == 2
    del node
    assert not any(map(is_running, pids))


def test_a_torchdata_thread_over_ours():
    loader = StatefulDataLoader(Prefetcher(batches(2, 20), 2))
    take(iter(loader), 2)
    pids = worker_pids()
    assert len(pids) == 2
    del loader
    assert not any(map(is_running, pids))


def test_torchdatas_loader():
    """It and its iterator refer to each other, so dropping both needs the collector; closing the node does not."""
    node = batches(2, 20)
    loader = Loader(node)
    iterator = iter(loader)
    take(iterator, 2)
    pids = worker_pids()
    assert len(pids) == 2
    node.close()
    assert not any(map(is_running, pids))

    loader = Loader(batches(2, 20))
    iterator = iter(loader)
    take(iterator, 2)
    del loader
    assert len(worker_pids()) == 2
    take(iterator, 1)
    del iterator
    gc.collect()
    assert not worker_pids()


@each_pipeline
def test_close_ends_everything_and_may_be_repeated(make):
    loader = make()
    loader.close()
    iterator = iter(loader)
    take(iterator, 2)
    pids = worker_pids()
    state = loader.state_dict()
    loader.close()
    assert not any(map(is_running, pids))
    loader.close()
    assert loader.state_dict() == state
    with pytest.raises(IteratorInvalidError):
        next(iterator)
    assert len(list(loader)) == (3 if make is under_foreign else 8)
    assert worker_pids().isdisjoint(pids)
    loader.close()


def test_a_node_that_was_closed_goes_on_with_what_comes_next():
    """Also where a user closes the node and not a loader: the item pulled ahead belongs to the workers that ended."""
    whole = epochs(StatefulDataLoader(batches(0, 20)), 1)[0]
    node = batches(2, 20)
    read = take(node, 3)
    node.close()
    read += take(node, 3)
    node.close()
    assert same(read, whole[:6])


@each_pipeline
def test_workers_live_on_over_epochs_and_loads(make):
    loader = make()
    state = loader.state_dict()
    take(iter(loader), 1)
    pids = worker_pids()
    assert len(pids) == 2
    for _ in range(2):
        list(loader)
        assert worker_pids() == pids
    loader.load_state_dict(state)
    take(iter(loader), 1)
    assert worker_pids() == pids
    if make is not under_foreign:
        loader.set_epoch(7)
        take(iter(loader), 1)
        loader.restart()
        take(iter(loader), 1)
        assert worker_pids() == pids
    loader.close()


def test_a_state_costs_no_worker():
    loader = from_dataset()
    loader.load_state_dict(loader.state_dict())
    loader.checkpoint()
    iter(loader)
    assert not worker_pids()


class Reported:
    """Tells the main process of each sample that a worker reads."""

    def __init__(self, length: int, pipe: int) -> None:
        self.length, self.pipe = length, pipe

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        os.write(self.pipe, bytes([index]))
        return index


def test_prefetching_runs_on_into_the_next_epoch():
    """With an epoch's last batch handed out the workers are asked for the next epoch's first ones, and no more than that."""
    reader, writer = os.pipe()
    node = SeededMapper(SamplerNode(SequentialSampler(4)), Reported(4, writer).__getitem__, rng=())
    loader = StatefulDataLoader(ProcessPrefetcher(node, 1, prefetch_factor=3))
    iterator = iter(loader)
    assert take(iterator, 4) == [0, 1, 2, 3]
    # Waits until the worker has read them: nothing else asks for samples meanwhile.
    read = b""
    while len(read) < 7:
        read += os.read(reader, 7 - len(read))
    assert list(read) == [0, 1, 2, 3, 0, 1, 2]
    assert list(iterator) == []
    assert next(iter(loader)) == 0
    loader.close()
    os.close(writer)
    assert os.read(reader, 100) in (b"", b"\3")
    os.close(reader)


@each_pipeline
def test_nothing_is_left_open_after_close(make):
    def cycle():
        loader = make()
        epochs(loader, 2)
        loader.load_state_dict(loader.state_dict())
        take(iter(loader), 1)
        loader.close()

    cycle()  # what the first use of multiprocessing opens for good
    before = open_files()
    for _ in range(3):
        cycle()
    assert open_files() == before


def test_nothing_is_left_open_after_dropping():
    def cycle():
        take(iter(from_dataset()), 2)

    cycle()
    before = open_files()
    for _ in range(3):
        cycle()
    assert open_files() == before


def test_a_batch_keeps_no_file_open():
    loader = StatefulDataLoader(Big(), batch_size=1, num_workers=1)
    list(loader)
    before = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 8
    loader.close()


class Big:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((100_000,), index)


def test_two_loaders_at_once_do_not_touch_each_other():
    one, other = from_dataset(), composed()
    alone = [epochs(from_dataset(), 1)[0], epochs(composed(), 1)[0]]
    pairs = list(zip(one, other, strict=True))
    assert same([list(side) for side in zip(*pairs, strict=True)], alone)
    assert len(worker_pids()) == 4
    one.close()
    assert len(worker_pids()) == 2
    assert same(list(other), epochs(composed(), 2)[1])
    other.close()


class FailsAtFour(tn.BaseNode):
    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.count = 0 if initial_state is None else initial_state["count"]

    def next(self):
        self.count += 1
        if self.count == 4:
            raise ValueError("the fourth")
        return self.count

    def get_state(self):
        return {"count": self.count}


def test_an_error_that_waits_for_its_turn_keeps_no_workers_alive():
    loader = StatefulDataLoader(ProcessPrefetcher(SeededMapper(FailsAtFour(), float), 1, prefetch_factor=4))
    assert take(iter(loader), 1) == [1.0]
    assert worker_pids()
    del loader
    assert not worker_pids()


def test_the_seed_of_a_worker_is_the_pipelines():
    """With rng=() its start is the only seeding, so it must not be the same for all pipelines."""

    def seed(loader_seed):
        loader = StatefulDataLoader(WorkerSeed(), num_workers=1, rng=(), seed=loader_seed)
        (found,) = next(iter(loader)).tolist()
        loader.close()
        return found

    assert seed(1) == seed(1) != seed(2)


class WorkerSeed:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info().seed

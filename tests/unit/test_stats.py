"""What a loader tells of the time: every tick of the clock is somebody's, and nothing else is changed by the counting."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import typing
import weakref

import pytest
import torchdata.nodes as tn

from stateful_pipes import (
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    Stats,
    iterator,
    stream,
)
from stateful_pipes.contract import walk
from stateful_pipes.prefetch import timings, worker
from stateful_pipes.prefetch.channel import pack
from stateful_pipes.prefetch.pool import WorkerPool
from stateful_pipes.prefetch.timings import TimedNode
from stateful_pipes.stats import seconds_here, seconds_in_workers, time_nodes
from tests.streams import DrawingDataset, drawing_collate, generator_states, same
from tests.unit.test_timings import Ticks

NAMES = ["sampler", "mapper", "batcher", "prefetcher"]
COUNTS = ("delivered", "prefetched", "workers", "restarts", "skipped")
READ, COLLATE = 1000, 30


@pytest.fixture
def ticks(monkeypatch):
    """Where time is looked at; a forked worker goes on with a copy."""
    made = Ticks()
    for module in (timings, worker, stream):
        monkeypatch.setattr(module, "monotonic_ns", made)
    return made


class Reading:
    """Takes READ ticks to read a sample, and kills the process that reads `kills` while there are lives left."""

    def __init__(self, ticks, length=6, kills=None, lives=0):
        self.ticks, self.length, self.kills = ticks, length, kills
        self.lives = multiprocessing.Value("i", lives)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.kills:
            with self.lives.get_lock():
                self.lives.value -= 1
                left = self.lives.value
            if left >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        self.ticks.pass_by(READ)
        return index

    def collate(self, samples):
        self.ticks.pass_by(COLLATE)
        return list(samples)


def batches_of(dataset):
    return SeededBatcher(
        SeededMapper(SamplerNode(SequentialSampler(len(dataset))), dataset.__getitem__, seed=1),
        2,
        collate_fn=dataset.collate,
        seed=2,
    )


def watch_of(node):
    return TimedNode.of(node).watch


def in_ticks(seconds):
    return {name: round(1e9 * spent) for name, spent in seconds.items() if spent}


def expected(batches):
    """Of batches of two: the two looks at the beginning and end of what a node calls count for the node."""
    return {"sampler": batches, "mapper": batches * (2 * READ + 2), "batcher": batches * (COLLATE + 2)}


def test_inline_each_node_has_its_own(ticks):
    loader = StatefulDataLoader(ProcessPrefetcher(batches_of(Reading(ticks)), 0))
    assert loader.stats()["nodes"] == dict.fromkeys(NAMES, 0.0)
    assert len(list(loader)) == 3
    # Of a source, `pull` counts too: three batches and the end of the epoch; of the prefetcher, the looks alone.
    assert in_ticks(loader.stats()["nodes"]) == {**expected(3), "sampler": 3 + 4, "prefetcher": 3 * 2}
    assert list(loader.stats()["nodes"]) == NAMES


def test_waiting_is_the_time_within_next(ticks, monkeypatch):
    monkeypatch.setattr(iterator, "time_nodes", lambda root: None)
    loader = StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(4)), Reading(ticks).__getitem__, seed=1))
    for read, _ in enumerate(loader, 1):
        ticks.pass_by(10**6)  # the training step
        assert round(1e9 * loader.stats()["waiting"]) == read * (READ + 1)
    assert loader.stats()["delivered"] == read == 4


def test_waiting_for_samples_that_are_left_out_counts_for_the_next(ticks, monkeypatch):
    monkeypatch.setattr(iterator, "time_nodes", lambda root: None)

    def read(index):
        ticks.pass_by(READ)
        if index < 2:
            raise ValueError(index)
        return index

    loader = StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(4)), read, seed=1, max_skipped=2))
    assert next(iter(loader)) == 2
    assert round(1e9 * loader.stats()["waiting"]) == 3 * READ + 3


def pool_of(node, dataset):
    settings = {"slots": 8, "max_restarts": 3, "worker_init_fn": None, "dataset": dataset, "seed": 7, "nodes": list(walk(node))}
    return WorkerPool(node, 2, multiprocessing.get_context("fork"), **settings)


@pytest.mark.parametrize("lives", [0, 1, 3])
def test_counts_are_exact_over_killed_workers(ticks, lives):
    """What a worker had added up is there after its death, and the batch that died with it counts once."""
    dataset = Reading(ticks, 40, kills=11, lives=lives)
    node = batches_of(dataset)
    pool = pool_of(node, dataset)
    tasks = [pool.submit(ticket, pack(ticket)) for ticket in (node.pull(1) for _ in range(20))]
    items = [pool.result(task)[0] for task in tasks]
    assert items == [[[2 * i, 2 * i + 1]] for i in range(20)]
    assert pool.restarts == lives
    usage = pool.timings.usage()
    pool.close()
    assert dict(zip(NAMES, usage.nodes, strict=False)) == expected(20)
    # Besides the nodes, a look before the outermost one and one after it.
    assert usage.busy == sum(expected(20).values()) + 20 * 2
    assert usage.bytes == sum(pack((item, None, [])).size for item in items)
    spans = [span for spans in pool.timings.spans() for span in spans]
    assert len(spans) == 20
    assert sum(ended - begun for begun, ended in spans) == usage.busy


def test_workers_seconds_go_on_over_loads_closes_and_another_loader(ticks):
    """What was prefetched and dropped counts as well, so how many batches there were shows only afterwards."""
    dataset = Reading(ticks, 8, kills=3, lives=1)
    root = ProcessPrefetcher(batches_of(dataset), 1, multiprocessing_context="fork")
    counted = 0
    for _ in range(2):
        with StatefulDataLoader(root) as loader:
            for _ in range(2):
                loader.set_epoch(loader.position.epoch + 1)
                assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
                loader.close()
                found = in_ticks(seconds_in_workers(root))
                assert found["sampler"] >= counted + 4
                counted = found["sampler"]
                assert found == expected(counted)
                stats = loader.stats()
                assert stats["nodes"]["mapper"] * 1e9 == pytest.approx(found["mapper"])
                assert 0 < stats["worker_use"] <= 1
                assert stats == loader.stats()
    assert (stats["delivered"], stats["restarts"], stats["prefetched"]) == (16, 1, 0)


def test_the_wait_for_workers_is_the_prefetcher_s():
    with StatefulDataLoader(DrawingDataset(8), batch_size=2, num_workers=1, multiprocessing_context="fork") as loader:
        for _ in loader:
            stats, here, there = loader.stats(), seconds_here(loader.pipeline), seconds_in_workers(loader.pipeline)
            assert here["prefetcher"] + here["sampler"] == pytest.approx(stats["waiting"])
            assert {name for name, spent in here.items() if spent} == {"prefetcher", "sampler"}
            assert list(there) == NAMES[:3]
            assert all(spent > 0 for spent in there.values())
            assert 0 < stats["worker_use"] <= 1


def test_nothing_is_counted_before_the_first_batch():
    for workers in (0, 1):
        with StatefulDataLoader(DrawingDataset(4), num_workers=workers) as loader:
            iter(loader)
            stats = loader.stats()
        assert set(stats) == set(typing.get_type_hints(Stats))
        assert stats == {
            **dict.fromkeys(COUNTS, 0),
            "workers": workers,
            "waiting": 0.0,
            "bytes": 0,
            "nodes": dict.fromkeys(NAMES, 0.0),
            "worker_use": 0.0,
        }


def test_counts():
    loader = StatefulDataLoader(DrawingDataset(5), batch_size=2)
    list(loader)
    next(iter(loader))
    assert [loader.stats()[name] for name in COUNTS] == [4, 0, 0, 0, 0]
    with StatefulDataLoader(DrawingDataset(5), batch_size=2, num_workers=2, multiprocessing_context="fork") as pooled:
        next(iter(pooled))
        stats = pooled.stats()
        assert (stats["delivered"], stats["workers"], stats["restarts"]) == (1, 2, 0)
        assert 0 < stats["prefetched"] <= 4


def stream_of(workers):
    """Every batch with the state after it, and the caller's generators, over two epochs and a load between."""
    node = SeededMapper(SamplerNode(RandomSampler(7, seed=1)), DrawingDataset(7).__getitem__, seed=2)
    batches = SeededBatcher(node, 2, collate_fn=drawing_collate, seed=3)
    with StatefulDataLoader(ProcessPrefetcher(batches, workers, multiprocessing_context="fork")) as loader:
        found = [(batch, loader.state_dict(), loader.checkpoint(), generator_states()) for batch in loader]
        loader.load_state_dict(found[1][1])
        found += [(batch, loader.state_dict(), loader.checkpoint(), generator_states()) for _ in range(2) for batch in loader]
        return found, any(TimedNode.of(node) for node in walk(loader.pipeline))


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_and_state_are_those_of_a_loader_that_counts_nothing(workers, monkeypatch):
    counted, is_timed = stream_of(workers)
    assert is_timed
    monkeypatch.setattr(TimedNode, "stand_in", lambda self, *names: None)
    uncounted, is_timed = stream_of(workers)
    assert not is_timed
    assert len(counted) == 10
    assert same(counted, uncounted)


def test_a_foreign_node_s_reading_is_its_pull(ticks):
    class Source:
        def __iter__(self):
            for index in range(3):
                ticks.pass_by(READ)
                yield index

    mapped = SeededMapper(tn.IterableWrapper(Source()), abs, seed=1, rng=())
    with StatefulDataLoader(ProcessPrefetcher(mapped, 1, multiprocessing_context="fork")) as loader:
        assert list(loader) == [0, 1, 2]
        # It may have been read on in the next epoch by now.
        assert in_ticks(seconds_here(loader.pipeline))["iterable_wrapper"] >= 3 * READ
        assert seconds_in_workers(loader.pipeline)["iterable_wrapper"] < READ * 1e-9


def test_a_pipeline_within_a_foreign_node_has_a_stopwatch_of_its_own(ticks):
    inner = SeededMapper(SamplerNode(SequentialSampler(4)), Reading(ticks).__getitem__, seed=1, name="inner")
    loader = StatefulDataLoader(SeededMapper(tn.Batcher(inner, 2), tuple, seed=2, rng=()))
    assert list(loader) == [(0, 1), (2, 3)]
    assert list(loader.stats()["nodes"]) == ["sampler", "inner", "batcher", "mapper"]
    assert round(1e9 * loader.stats()["nodes"]["inner"]) == 4 * (READ + 2)
    assert [len({watch_of(node) for node in walk(top)}) for top in (inner, loader.pipeline)] == [1, 1]
    assert watch_of(inner) is not watch_of(loader.pipeline)


def test_a_node_set_into_a_longer_pipeline_takes_its_time_along(ticks):
    node = SeededMapper(SamplerNode(SequentialSampler(4)), Reading(ticks).__getitem__, seed=1)
    short = StatefulDataLoader(node)
    next(iter(short))
    short.close()
    before = in_ticks(short.stats()["nodes"])["mapper"]
    assert before == READ + 2
    longer = StatefulDataLoader(SeededBatcher(node, 2, collate_fn=list, seed=2))
    assert list(next(iter(longer))) == [1, 2]
    assert in_ticks(longer.stats()["nodes"]) == {"sampler": 1 + 2 + 1 + 2, "mapper": before + 2 * READ + 2, "batcher": 2}


def test_iterating_again_changes_no_stopwatch():
    loader = StatefulDataLoader(DrawingDataset(4))
    iter(loader)
    watch = watch_of(loader.pipeline)
    next(iter(loader))
    assert watch_of(loader.pipeline) is watch


def test_a_loader_that_was_timed_is_freed_when_it_is_dropped():
    loader = StatefulDataLoader(DrawingDataset(4))
    next(iter(loader))
    gone = [weakref.ref(node) for node in walk(loader.pipeline)]
    gc.disable()
    try:
        del loader
        assert [node() for node in gone] == [None] * 4
    finally:
        gc.enable()


def test_nodes_that_were_timed_can_be_sent_to_workers():
    def make():
        return SeededMapper(SamplerNode(RandomSampler(7, seed=1)), DrawingDataset(7).__getitem__, seed=2)

    node, ticket = make(), make().pull(3)
    loader = StatefulDataLoader(node)
    next(iter(loader))
    loader.close()
    copied, (source, top) = pickle.loads(pickle.dumps((node, list(walk(node)))))
    assert (top, source) == (copied, copied.sources[0])
    assert same(copied.run(ticket), make().run(ticket))
    ProcessPrefetcher(node, 1, multiprocessing_context="spawn")  # which refuses what cannot be


def test_what_a_node_calls_by_keyword_is_called_so():
    class Doubled(SeededMapper):
        def run(self, ticket):
            return [2 * item for item in self.sources[0].run(ticket=ticket)]

    assert list(StatefulDataLoader(Doubled(SamplerNode(SequentialSampler(3)), abs, seed=1, rng=()))) == [0, 2, 4]


def test_what_was_part_of_another_pipeline_has_one_stopwatch_again():
    node = SeededMapper(SamplerNode(SequentialSampler(3)), abs, seed=1, rng=())

    def stopwatches(top):
        with StatefulDataLoader(top) as loader:
            next(iter(loader))
        return {method.__self__.watch for one in walk(node) for name, method in vars(one).items() if name in ("run", "pull")}

    before = stopwatches(node)
    assert len(before) == 1
    assert len(stopwatches(ProcessPrefetcher(node, 1, multiprocessing_context="fork"))) == 2  # the workers' part has the old one
    after = stopwatches(node)
    assert len(after) == 1
    assert after != before


def test_a_run_of_the_user_s_own_is_left_alone():
    node = SeededMapper(SamplerNode(SequentialSampler(3)), abs, seed=1, rng=())
    node.run = own = lambda ticket: ["own"]
    time_nodes(node)
    assert list(StatefulDataLoader(node)) == ["own"] * 3
    assert node.run is own


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_done_elsewhere_is_no_part_of_the_stream_s_times(workers):
    node = SeededBatcher(SeededMapper(SamplerNode(RandomSampler(50, seed=1)), str, seed=2), 2, collate_fn=list)
    with StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork")) as loader:
        next(iter(loader))
        before = seconds_here(loader.pipeline)
        assert before["sampler"] > 0
        loader.replay(0, 30)
        assert loader.skip(20) == 20
        assert seconds_here(loader.pipeline) == before

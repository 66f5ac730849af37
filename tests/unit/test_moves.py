"""Batches left out unread, and batches made again: the stream is otherwise what it would have been."""

from __future__ import annotations

import random

import pytest
import torch
import torchdata.nodes as tn

from stateful_pipes import (
    ClassBalancedBatchSampler,
    ExternalSource,
    FileReader,
    IndexFilter,
    Mixer,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import ConcurrentUseError, LoaderFailedError, NodeAttachedError, ResumableModeRequiredError
from tests.streams import DrawingDataset, drawing_collate, generator_states, same


def drawn(item):
    return item, random.random(), torch.rand(2)


def plain(folder):
    return SeededBatcher(
        SeededMapper(SamplerNode(RandomSampler(23, seed=1)), drawn, seed=2), 4, collate_fn=drawing_collate, seed=3
    )


def mixture(folder):
    sources = {
        "a": SeededMapper(SamplerNode(RandomSampler(9, seed=1)), drawn, seed=2),
        "b": SeededFlatMapper(SamplerNode(RandomSampler(5, seed=3)), lambda i: [(i, 0), (i, 1)], 2, seed=4),
    }
    return SeededBatcher(Mixer(sources, {"a": 0.6, "b": 0.4}, seed=5), 3, collate_fn=list, seed=6)


def filtered(folder):
    node = IndexFilter(SamplerNode(RandomSampler(40, seed=1)), lambda index: index % 3 > 0)
    return SeededBatcher(SeededMapper(node, drawn, seed=2), 4, collate_fn=list, seed=3)


def flat(folder):
    node = SeededFlatMapper(SamplerNode(RandomSampler(7, seed=1)), lambda i: [drawn(i) for _ in range(3)], 3, seed=2)
    return SeededBatcher(node, 4, collate_fn=list, seed=3)


class Labelled:
    targets = [0] * 9 + [1] * 5

    def __len__(self):
        return 14


def balanced(folder):
    sampler = ClassBalancedBatchSampler(Labelled(), 4, repeat=False, seed=1)
    return SeededBatcher(SeededMapper(SamplerNode(sampler), drawn, seed=2), None, collate_fn=list, seed=3)


def files(folder):
    for number in range(11):
        (folder / str(number % 2)).mkdir(exist_ok=True)
        (folder / str(number % 2) / f"{number}.jpg").write_bytes(bytes([number]))
    reader = FileReader(folder, random_shuffle=True, initial_fill=4, shard_id=1, num_shards=2, seed=7)
    return SeededBatcher(SeededMapper(reader, drawn, seed=2), 2, collate_fn=list, seed=3)


PIPELINES = [plain, mixture, filtered, flat, balanced, files]


def loader_over(pipeline, folder, workers):
    node = pipeline(folder)
    return StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork") if workers else node)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_batch_is_made_again_and_nothing_moves(pipeline, workers, tmp_path):
    with loader_over(pipeline, tmp_path, workers) as loader:
        seen = []
        for _ in range(2):
            before = loader.position
            for batch in loader:
                seen.append((before, batch))
                before = loader.position
        assert {before.epoch for before, _ in seen} == {0, 1}
        iterator = iter(loader)
        next(iterator)
        state, held, position = loader.state_dict(), generator_states(), loader.position
        for before, batch in seen:
            assert same(loader.replay(before.epoch, before.consumed), batch), before
        assert (loader.state_dict(), loader.position) == (state, position)
        assert same(generator_states(), held)
        with loader_over(pipeline, tmp_path, 0) as other:
            other.load_state_dict(state)
            assert same(list(iterator), list(other))  # also of what had been prefetched


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_is_skipped_is_what_would_have_been_read(pipeline, workers, tmp_path):
    with loader_over(pipeline, tmp_path, 0) as reference:
        first = [(batch, reference.state_dict()) for batch in reference]
        second = list(reference)
    total = len(first)
    with loader_over(pipeline, tmp_path, workers) as loader:
        start = loader.state_dict()
        for before, count in [(0, 0), (0, 1), (1, 2), (2, total - 3), (1, total - 1), (0, total), (1, total + 5)]:
            loader.load_state_dict(start)
            iterator = iter(loader)
            for _ in range(before):
                next(iterator)
            passed = min(count, total - before)
            assert loader.skip(count) == passed
            at = before + passed
            assert loader.state_dict() == (first[at - 1][1] if at else start)
            assert same(list(iterator), [batch for batch, _ in first[at:]])
            assert same(list(loader), second)


def test_a_batch_that_cannot_be_read_is_passed_over():
    def read(index):
        if index == 3:
            raise OSError("gone")
        return index

    loader = StatefulDataLoader(SeededBatcher(SeededMapper(SamplerNode(SequentialSampler(8)), read), 2))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(iterator)
    with pytest.raises(LoaderFailedError):
        next(iterator)
    with pytest.raises(OSError, match="gone"):
        loader.replay(0, 2)
    assert loader.skip(1) == 1
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]


def test_replay_begins_at_any_sample_and_shows_one_node_s():
    loader = StatefulDataLoader(plain(None))
    batches = [batch for _, batch in zip(range(5), loader, strict=False)]
    sample = loader.replay(0, 6, node="mapper")
    assert same(sample, batches[1]["samples"][2])
    assert loader.replay(0, 6, node="sampler") == sample[0]
    assert same(loader.replay(0, 6)["samples"], batches[1]["samples"][2:] + batches[2]["samples"][:2])


@pytest.mark.parametrize(("epoch", "position"), [(0, 23), (0, 24), (0, 10**9), (3, 23)])
@pytest.mark.parametrize("pipeline", [plain, flat, filtered])
def test_there_is_nothing_beyond_an_epoch(pipeline, epoch, position):
    loader = StatefulDataLoader(pipeline(None))
    position = max(position, loader.state_dict()["nodes"]["sampler"]["length"])
    with pytest.raises(ValueError, match=f"epoch {epoch} has nothing at position {position}"):
        loader.replay(epoch, position)
    assert loader.position.batch == 0
    assert next(iter(loader))


def test_wrong_arguments():
    loader = StatefulDataLoader(plain(None))
    with pytest.raises(ValueError, match="no node is named 'map'; there are 'sampler', 'mapper', 'batcher'"):
        loader.replay(0, 0, node="map")
    for epoch, position in [(-1, 0), (0, -1)]:
        with pytest.raises(ValueError, match="-1"):
            loader.replay(epoch, position)
    with pytest.raises(ValueError, match="count"):
        loader.skip(-1)
    with pytest.raises(TypeError, match="count"):
        loader.skip(1.5)


@pytest.mark.parametrize("act", [lambda loader: loader.skip(1), lambda loader: loader.replay(0, 0)])
def test_a_source_that_cannot_be_led_elsewhere_is_refused_and_goes_on(act):
    loader = StatefulDataLoader(tn.Batcher(tn.IterableWrapper(range(6)), 2))
    next(iter(loader))
    with pytest.raises(ResumableModeRequiredError):
        act(loader)
    assert list(loader) == [[2, 3], [4, 5]]


def test_a_source_whose_end_shows_only_in_reading_skips_nothing():
    def source(index):
        if index == 3:
            raise StopIteration
        return [index]

    loader = StatefulDataLoader(ExternalSource(source))
    with pytest.raises(ResumableModeRequiredError, match="Read on"):
        loader.skip(1)
    assert loader.replay(0, 2) == [2]
    assert list(loader) == [[0], [1], [2]]


def test_another_loader_and_another_thread_are_kept_out():
    node = plain(None)
    loader = StatefulDataLoader(node)
    loader.close()
    with StatefulDataLoader(node):
        for act in (lambda: loader.skip(1), lambda: loader.replay(0, 0)):
            with pytest.raises(NodeAttachedError):
                act()
    inside = []

    def read(index):
        with pytest.raises(ConcurrentUseError):
            inside[0].skip(1)
        with pytest.raises(ConcurrentUseError):
            inside[0].replay(0, 0)
        return index

    inside.append(StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(3)), read)))
    assert list(inside[0]) == [0, 1, 2]


def test_the_dataset_door_with_workers():
    with StatefulDataLoader(
        DrawingDataset(20), batch_size=4, shuffle=True, seed=1, num_workers=2, multiprocessing_context="fork"
    ) as loader:
        first = list(loader)
        assert same([loader.replay(0, consumed) for consumed in range(0, 20, 4)], first)
        loader.set_epoch(0)
        assert loader.skip(3) == 3
        assert same(list(loader), first[3:])

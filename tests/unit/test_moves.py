"""Batches left out unread, and batches made again: the stream is otherwise what it would have been."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
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


@pytest.mark.parametrize("act", [lambda loader: loader.skip(1), lambda loader: loader.replay(0, 0)])
@pytest.mark.parametrize("read", [0, 1])
def test_without_resume_it_is_refused_and_goes_on(act, read):
    loader = StatefulDataLoader(range(6), sampler=[5, 3, 1, 0, 2, 4], batch_size=2, resumable=False, collate_fn=list)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(read)]
    with pytest.raises(ResumableModeRequiredError, match=r"a list cannot be led back .*resumable=True"):
        act(loader)
    assert batches + list(iterator) == [[5, 3], [1, 0], [2, 4]]


def test_the_error_of_a_sample_that_was_left_out_is_shown():
    def read(index):
        if index in (3, 4, 5):
            raise OSError(f"{index} is gone")
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(8)), read, max_skipped=3)
    loader = StatefulDataLoader(SeededBatcher(node, 2, collate_fn=list))
    batches = list(loader)
    assert batches == [[0, 1], [2], [6, 7]]
    assert [loader.replay(0, 2 * number) for number in (0, 1, 3)] == batches
    for position, name, index in [(4, None, 4), (5, "mapper", 5), (3, "mapper", 3)]:
        with pytest.raises(OSError, match=f"{index} is gone") as raised:
            loader.replay(0, position, node=name)
        assert f"position {index}" in "".join(raised.value.__notes__)
    assert loader.stats()["skipped"] == 3


class Interrupted:
    """Calls something and raises KeyboardInterrupt at a line of it, as a second Ctrl-C within its `finally` does."""

    def __init__(self, at, call):
        self.left = at
        before = sys.gettrace()
        sys.settrace(self.trace)
        self.error = None
        try:
            call()
        except KeyboardInterrupt as error:
            self.error = error  # and with it the frames, as a notebook keeps them
        finally:
            sys.settrace(before)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("stream.py", "elsewhere.py", "moves.py", "prefetcher.py", "contextlib.py")):
            return None
        self.left -= 1
        if self.left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize("act", [lambda loader: loader.skip(1), lambda loader: loader.replay(1, 7)])
@pytest.mark.parametrize(("workers", "is_kept"), [(0, False), (1, True)])
def test_an_interrupt_at_any_line_leaves_the_stream_as_it_was_or_moved(act, workers, is_kept):
    with loader_over(plain, None, 0) as reference:
        start, batches, states = reference.state_dict(), [], [reference.state_dict()]
        for batch in reference:
            batches.append(batch)
            states.append(reference.state_dict())
    with loader_over(plain, None, workers) as loader:
        for at in range(10_000):
            loader.load_state_dict(start)
            iterator = iter(loader)
            next(iterator)
            interrupted = Interrupted(at, lambda: act(loader))
            if interrupted.error is None:
                break
            if not is_kept:
                interrupted.error = None
            consumed = states.index(loader.state_dict())
            try:
                rest = [next(iterator)]
            except ConcurrentUseError:  # the interrupt was in leaving, or its frames have not left yet
                loader.close()
                iterator, rest = iter(loader), []
            interrupted.error = None  # what is done when they are freed must not matter any more
            rest += iterator
            assert consumed in (1, 2), at
            assert same(rest, batches[consumed:]), at
            if workers:
                assert loader.position.prefetched == 2, at  # in this process no more
        assert at > 50


@pytest.mark.parametrize("workers", [0, 1])
def test_a_close_by_another_thread_meanwhile_costs_no_batch(workers):
    closes = []

    def read(index):
        for loader in closes:
            closes.clear()
            thread = threading.Thread(target=loader.close)
            thread.start()
            thread.join()
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(20)), read)
    loader = StatefulDataLoader(ProcessPrefetcher(node, workers, multiprocessing_context="fork"))
    with loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        closes.append(loader)
        assert loader.replay(0, 7) == 7
        assert not closes
        assert list(loader) == list(range(3, 20))


def test_a_source_whose_end_shows_only_in_reading_skips_nothing():
    def source(index):
        if index == 3:
            raise StopIteration
        return [index]

    loader = StatefulDataLoader(ExternalSource(source))
    with pytest.raises(ResumableModeRequiredError, match="Read on"):
        loader.skip(1)
    assert loader.replay(0, 2) == [2]
    with pytest.raises(ValueError, match="epoch 1 has nothing at position 3"):
        loader.replay(1, 3)
    assert list(loader) == [[0], [1], [2]]


@pytest.mark.filterwarnings("ignore:.*not captured in the state")
@pytest.mark.parametrize("act", [lambda loader: loader.skip(1), lambda loader: loader.replay(0, 0)])
@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("source", [lambda: iter(range(4)), lambda: lambda: (yield from range(4)), lambda: range(4)])
def test_a_source_that_can_be_read_only_onwards_is_refused_and_goes_on(act, read, source):
    loader = StatefulDataLoader(ExternalSource(source()))
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(read)]
    with pytest.raises(ResumableModeRequiredError, match="only onwards"):
        act(loader)
    assert batches + list(iterator) == [0, 1, 2, 3]


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


PENDING = {  # whose last block is given before it is known to be the last
    "filter": lambda: SeededBatcher(IndexFilter(SamplerNode(SequentialSampler(20)), np.arange(20) % 4 == 0), 2, collate_fn=list),
    "flat": lambda: SeededBatcher(
        SeededFlatMapper(SamplerNode(SequentialSampler(3)), lambda index: [index] * 3, 3, seed=1), 2, collate_fn=list
    ),
    "two batchers": lambda: SeededBatcher(
        SeededBatcher(SamplerNode(SequentialSampler(9)), 2, collate_fn=list), 3, collate_fn=list
    ),
}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("make", PENDING.values(), ids=PENDING)
def test_a_look_leaves_an_end_that_is_still_to_be_told(make, num_workers):
    def run(looks):
        with StatefulDataLoader(ProcessPrefetcher(make(), num_workers, prefetch_factor=1)) as loader:
            found = []
            for _ in range(3):
                for batch in loader:
                    if looks:
                        loader.replay(0, 0)
                    found.append((batch, loader.position.epoch, loader.position.batch, loader.position.consumed))
                found.append((loader.position.epoch, loader.position.batch))
            return found

    assert run(looks=True) == run(looks=False)

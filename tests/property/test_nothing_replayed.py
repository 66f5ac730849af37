"""After a resume no sample is read that was consumed before, and none further ahead than the prefetch bound."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from torchdata.nodes import IterableWrapper

from stateful_pipes import ProcessPrefetcher, RandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from tests.streams import place_of

BATCHES, BATCH_SIZE = 1000, 3
LENGTH = BATCHES * BATCH_SIZE
CUT = 500
SEED = 11


class Logging:
    """A map that appends each index it touches to a file, from whatever process: one atomic write for each."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        log = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, struct.pack("<q", index))
        os.close(log)
        return index


def touched(path):
    """The indices in the order in which they were touched. Read it after `close`, when no worker writes any more."""
    data = Path(path).read_bytes() if Path(path).exists() else b""
    return [index for (index,) in struct.iter_unpack("<q", data)]


def from_dataset(path, workers, prefetch):
    more = {"prefetch_factor": prefetch, "multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(Logging(path), BATCH_SIZE, shuffle=True, num_workers=workers, seed=SEED, **more)


def from_nodes(path, workers, prefetch):
    node = SeededMapper(SamplerNode(RandomSampler(LENGTH, seed=SEED)), Logging(path).__getitem__, seed=SEED)
    node = SeededBatcher(node, BATCH_SIZE, seed=SEED)
    return StatefulDataLoader(ProcessPrefetcher(node, workers, prefetch_factor=prefetch, multiprocessing_context="fork"))


def from_iterable(path, workers, prefetch):
    """torchdata's wrapper goes through its iterable again; the map above must not."""
    order = RandomSampler(LENGTH, seed=SEED).indices(0, range(LENGTH)).tolist()
    node = SeededBatcher(SeededMapper(IterableWrapper(order), Logging(path).__getitem__, seed=SEED), BATCH_SIZE, seed=SEED)
    return StatefulDataLoader(ProcessPrefetcher(node, workers, prefetch_factor=prefetch, multiprocessing_context="fork"))


def positions(path):
    """The touched positions within epoch 0."""
    where = {index: p for p, index in enumerate(RandomSampler(LENGTH, seed=SEED).indices(0, range(LENGTH)).tolist())}
    return [where[index] for index in touched(path)]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [from_dataset, from_nodes, from_iterable])
def test_nothing_is_replayed(make, workers, prefetch, tmp_path):
    with make(tmp_path / "before", workers, prefetch) as loader:
        batches = iter(loader)
        for _ in range(CUT):
            next(batches)
        state = loader.state_dict()
    bound = workers * prefetch
    before = positions(tmp_path / "before")
    assert sorted(before)[: CUT * BATCH_SIZE] == list(range(CUT * BATCH_SIZE))
    assert max(before) < (CUT + bound) * BATCH_SIZE

    for consumed in (0, 1, 20):
        log = tmp_path / f"after {consumed}"
        with make(log, workers, prefetch) as loader:
            loader.load_state_dict(state)
            batches = iter(loader)
            for _ in range(consumed):
                next(batches)
        after = positions(log)
        assert len(after) == len(set(after)), "a sample was read twice"
        assert set(after) >= set(range(CUT * BATCH_SIZE, (CUT + consumed) * BATCH_SIZE))
        assert not after or min(after) >= CUT * BATCH_SIZE
        assert not after or max(after) < (CUT + consumed + bound) * BATCH_SIZE


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_is_read_once(workers, tmp_path):
    """To the end of the epoch, and no further ahead into the next than the bound."""
    with from_dataset(tmp_path / "log", workers, 2) as loader:
        state = loader.state_dict()
        state["nodes"]["sampler"]["consumed"] = CUT * BATCH_SIZE
        loader.load_state_dict(state)
        assert sum(1 for _ in loader) == BATCHES - CUT
        assert place_of(loader) == (1, 0)
    counts = touched(tmp_path / "log")
    order = RandomSampler(LENGTH, seed=SEED)
    rest = order.indices(0, range(CUT * BATCH_SIZE, LENGTH)).tolist()
    ahead = set(order.indices(1, range(workers * 2 * BATCH_SIZE)).tolist())
    for index in rest:
        counts.remove(index)
    assert len(counts) == len(set(counts))
    assert set(counts) <= ahead

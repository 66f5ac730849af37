"""Chains of resumes with other numbers of ranks and other batch sizes: together the ranks read the stream of one."""

from __future__ import annotations

import json
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes.samplers.stop_criteria import StopCriteria

from stateful_pipes import (
    IndexFilter,
    InfiniteRandomSampler,
    Mixer,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    StatefulDataLoader,
    build_batch_sampler,
)


def draw(index):
    return index, random.random()


def pair(index):
    return [(index, random.random()), (index, random.random())]


class Pipeline:
    """How many items are one unit of dealing, and the pipeline of one rank."""

    unit = 1
    keeps_batches = False

    def __init__(self, length, seed, uneven):
        self.length, self.seed, self.uneven = length, seed, uneven

    def share(self, sampler, rank, world_size):
        return SamplerNode(sampler, rank=rank, world_size=world_size, uneven=self.uneven)

    def loader(self, rank, world_size, batch_size):
        node = SeededBatcher(self.nodes(rank, world_size), batch_size, collate_fn=list, seed=self.seed)
        return StatefulDataLoader(ProcessPrefetcher(node, 0))

    def nodes(self, rank, world_size):
        node = self.share(RandomSampler(self.length, seed=self.seed), rank, world_size)
        return SeededMapper(node, draw, seed=self.seed)


class Endless(Pipeline):
    def nodes(self, rank, world_size):
        node = self.share(InfiniteRandomSampler(self.length, seed=self.seed), rank, world_size)
        return SeededMapper(node, draw, seed=self.seed)


class Filtered(Pipeline):
    def nodes(self, rank, world_size):
        node = self.share(RandomSampler(2 * self.length, seed=self.seed), rank, world_size)
        keep = np.arange(2 * self.length) % 3 != 1
        return SeededMapper(IndexFilter(node, keep), draw, seed=self.seed)


class Doubled(Pipeline):
    unit = 2

    def nodes(self, rank, world_size):
        node = self.share(RandomSampler(self.length, seed=self.seed), rank, world_size)
        return SeededFlatMapper(node, pair, 2, seed=self.seed)


class Mixed(Pipeline):
    stop = StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED

    def nodes(self, rank, world_size):
        sources = [
            SeededMapper(self.share(RandomSampler(length, seed=self.seed), rank, world_size), draw, seed=self.seed, name=name)
            for name, length in (("a", max(5, self.length)), ("b", 5))  # a SamplerNode refuses to drop all
        ]
        return Mixer(sources, {0: [1, 2], 6: [3, 1]}, seed=self.seed, stop_criteria=self.stop)


class MixedToTheFirst(Mixed):
    stop = StopCriteria.FIRST_DATASET_EXHAUSTED


class MixedToTheLast(Mixed):
    stop = StopCriteria.ALL_DATASETS_EXHAUSTED


class Batches(Pipeline):
    keeps_batches = True
    target, repeat = "naive", False

    def nodes(self, rank, world_size):
        sampler = build_batch_sampler(
            self.target,
            range(self.length),
            1 + self.seed % 4,
            repeat=self.repeat,
            drop_last=bool(self.seed % 2) and self.length > 4,
            seed=self.seed,
            **self.balance(),
        )
        return SeededMapper(self.share(sampler, rank, world_size), draw, seed=self.seed)

    def balance(self):
        return {}

    def loader(self, rank, world_size, batch_size):
        return super().loader(rank, world_size, None)


class BalancedBatches(Batches):
    target = "balance"

    def balance(self):
        return {"labels": [self.seed // (index + 1) % 3 for index in range(self.length)]}


class ClassBalancedBatches(BalancedBatches):
    target = "class_balance"

    def balance(self):
        labels = super().balance()["labels"]
        ratio = {label: 1 + self.seed // (label + 2) % 4 for label in set(labels)}
        return {"labels": labels, "class_ratio": ratio, "domains": [index % 2 for index in range(self.length)]}


class EndlessClassBalancedBatches(ClassBalancedBatches):
    repeat = True


ONCE = [Pipeline, Filtered, Doubled, Mixed, MixedToTheFirst, MixedToTheLast, Batches, BalancedBatches, ClassBalancedBatches]
KINDS = [*ONCE, Endless, EndlessClassBalancedBatches]

stages = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)
chains = st.tuples(st.integers(3, 14), st.integers(0, 2**64 - 1), stages)


def units_of(pipeline, batch):
    """A batch as what is dealt out to the ranks: itself, or its items, or its pairs of items."""
    if pipeline.keeps_batches:
        return [batch]
    return [batch[start : start + pipeline.unit] for start in range(0, len(batch), pipeline.unit)]


def interleaved(shares):
    """What all ranks got in one round, in global order."""
    assert len({len(share) for share in shares}) == 1, "each rank gets as much as the others"
    return [unit for row in zip(*shares, strict=True) for unit in row]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings.default.max_examples // 2)
@given(chain=chains, uneven=st.sampled_from(["pad", "drop"]))
def test_the_ranks_read_the_stream_of_one(kind, chain, uneven):
    length, seed, parts = chain
    pipeline = kind(length, seed, "pad")
    truth = [unit for batch in islice(pipeline.loader(0, 1, 2), 200) for unit in units_of(pipeline, batch)]
    pipeline.uneven = uneven
    if kind in ONCE and uneven == "drop" and len(truth) < 5:
        return  # less than one for each rank
    state, done = None, 0
    for number, (world_size, size, rounds) in enumerate(parts):
        loaders = [pipeline.loader(rank, world_size, size * pipeline.unit) for rank in range(world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state, allow=("world_size",) if pipeline.keeps_batches else ("world_size", "batch_size"))
        iterators = [iter(loader) for loader in loaders]
        is_last = number == len(parts) - 1
        for _ in range(200 if is_last and kind in ONCE else rounds):
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * world_size, "all ranks end alike"
                assert len(truth) - done < (world_size if uneven == "drop" else 1)
                return
            got = interleaved([units_of(pipeline, batch) for batch in batches])
            inside = got[: max(0, len(truth) - done)]
            assert inside == truth[done : done + len(inside)]
            past = got[len(inside) :]
            assert len(past) < world_size
            assert uneven == "pad" or not past
            wrapped = [truth[i % len(truth)] for i in range(len(past))]
            assert [[index for index, _ in unit] for unit in past] == [[index for index, _ in unit] for unit in wrapped]
            done += len(got)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert all(one == states[0] for one in states), "the state of each rank is that of all"
        state = states[0]
        if kind in ONCE and len(truth) - done < (world_size if uneven == "drop" else 1):
            return  # the states read the next epoch

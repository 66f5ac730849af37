"""What a sample draws depends on seed, epoch and position, and on nothing else."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from stateful_pipes import InfiniteRandomSampler, SamplerNode, SeededMapper, StatefulDataLoader
from tests.property.pipelines import DATASET, ENDLESS, GENERATORS, INLINE, Case, Samples, build, play, uninterrupted
from tests.property.strategies import RNGS, SEEDS, engines

DRAWING = RNGS.filter(bool)


def samples_of(case, engine, seed, epochs):
    """The samples of each epoch, whatever the batches."""
    with build(case, engine, seed) as loader:
        read = [[*loader] if case.batch_size is None else [*chain.from_iterable(loader)] for _ in range(epochs)]
    return [[(sample["index"], *sample["draws"].tolist()) for sample in epoch] for epoch in read]


@settings(max_examples=settings.default.max_examples // 6)
@given(
    length=st.integers(1, 30),
    rng=DRAWING,
    seed=SEEDS,
    engine=engines((None, 0, 1, 2, 3)),
    batch_size=st.one_of(st.none(), st.integers(2, 9)),
    shape=st.sampled_from([DATASET, "nodes"]),
)
def test_samples_do_not_depend_on_workers_prefetch_or_batch_size(length, rng, seed, engine, batch_size, shape):
    unbatched = batch_size is None
    case = Case(shape, length, "random", batch_size, collate="default" if unbatched else "list", rng=rng)
    alone = Case(shape, length, "random", 1, collate="list", rng=rng)
    assert samples_of(case, engine, seed, 2) == samples_of(alone, INLINE, seed, 2)


@settings(max_examples=settings.default.max_examples // 6)
@given(length=st.integers(2, 30), rng=DRAWING, seed=SEEDS, orders=st.permutations(["sequential", "random", "user", *ENDLESS]))
def test_draws_do_not_depend_on_the_index(length, rng, seed, orders):
    """Another order puts other samples at the positions; the draws there stay."""

    def draws(order):
        node = SeededMapper(build_order(order, length), Samples(length, rng).__getitem__, seed=seed, rng=rng)
        return [sample["draws"].tolist() for sample in islice(node, length)]

    assert draws(orders[0]) == draws(orders[1])


def build_order(order, length):
    return build(Case("nodes", length, order), seed=1).pipeline.sources[0].sources[0]


@settings(max_examples=settings.default.max_examples // 6)
@given(length=st.integers(1, 20), rng=DRAWING, seed=SEEDS, order=st.sampled_from(["sequential", "random", "user"]))
def test_epochs_differ(length, rng, seed, order):
    first, second, third = samples_of(Case("nodes", length, order, 4, collate="list", rng=rng), INLINE, seed, 3)
    draws = [drawn for _, *drawn in first + second + third]
    assert len(set(map(tuple, draws))) == 3 * length
    if order == "random" and length > 8:
        assert len({tuple(index for index, *_ in epoch) for epoch in (first, second, third)}) == 3


@pytest.mark.parametrize("rng", [*((name,) for name in GENERATORS), "generator"])
@pytest.mark.parametrize("replacement", [True, False])
def test_an_index_drawn_twice_differs(rng, replacement):
    sampler = InfiniteRandomSampler(7, replacement=replacement, seed=0)
    node = SeededMapper(SamplerNode(sampler), Samples(7, rng).__getitem__, seed=0, rng=rng)
    samples = list(islice(node, 500))
    assert {sample["index"] for sample in samples} == set(range(7))
    assert len({tuple(sample["draws"].tolist()) for sample in samples}) == 500


class FirstDraws:
    """A sample is which worker read it and the first draw of each generator.

    A sample waits until all workers hold one, so each worker reads one of every `workers` successive samples.
    """

    def __init__(self, length, barrier):
        self.length, self.barrier = length, barrier

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()
        self.barrier.wait()
        return get_worker_info().id, *drawn


def test_first_draws_are_distinct():
    """Over 5 seeds, neighbours and extremes among them, 4 epochs, 100 positions and 4 workers."""
    workers = 4
    drawn, by_worker = [], Counter()
    for seed in (0, 1, 2, 2**32, 2**64 - 1):
        barrier = multiprocessing.get_context("fork").Barrier(workers, timeout=60)
        loader = StatefulDataLoader(
            FirstDraws(100, barrier), None, shuffle=True, num_workers=workers, multiprocessing_context="fork", seed=seed
        )
        with loader:
            for _ in range(4):
                for worker, *draws in loader:
                    by_worker[worker] += 1
                    drawn.append(draws)
            barrier.abort()  # what was read ahead waits no longer, so the workers can end
    assert len(drawn) == 2000
    assert by_worker == dict.fromkeys(range(workers), 500)
    for of_generator in zip(*drawn, strict=True):
        assert len(set(of_generator)) == 2000
    # Nor does one generator repeat another's.
    assert len({draw for draws in drawn for draw in draws}) == 6000


@settings(max_examples=settings.default.max_examples // 6)
@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    rng=DRAWING,
    seed=SEEDS,
    engine=engines((None, 0, 1, 2)),
    resumed=engines((None, 0, 1, 2)),
    data=st.data(),
)
def test_boxes_under_a_random_collate(length, batch_size, rng, seed, engine, resumed, data):
    """Images with varying numbers of boxes, padded and mixed by a collate function that draws for itself."""
    case = Case("nodes", length, "random", batch_size, collate="boxes", rng=rng)
    steps = uninterrupted(case, seed, 2)
    cut = data.draw(st.integers(0, -(-length // batch_size) - 1), label="cut")
    with build(case, engine, seed) as loader:
        play(loader, steps[:cut])
        state = loader.state_dict()
    with build(case, resumed, checkpoint=state) as loader:
        play(loader, steps[cut:])


def test_images_and_boxes_do_vary():
    """Else the test above would compare little."""
    case = Case("nodes", 40, "random", 4, collate="boxes")
    batches = [step for step in uninterrupted(case, 0, 1) if isinstance(step, dict)]
    assert len({batch["boxes"].shape for batch in batches}) > 1
    assert len({image.shape for batch in batches for image in batch["images"]}) > 1


def test_a_batch_draws_under_its_own_seed():
    """Collating the same samples in another batch, epoch or batch size draws anew; in the same place it does not."""

    def draws(batch_size, epochs=1):
        case = Case("nodes", 8, "sequential", batch_size, rng=())
        return [batch["draws"][0] for batch in uninterrupted(case, 0, epochs) if isinstance(batch, dict)]

    assert len(set(draws(2, 3))) == 12
    assert draws(2) == draws(2)
    assert draws(4)[0] == draws(2)[0]  # the seed is that of the first sample's position
    assert draws(4)[1] == draws(2)[2]


@pytest.mark.parametrize("rng", [("python",), "generator", ()])
def test_an_unbatched_collate_function_is_seeded_whatever_rng_is(rng):
    """`rng` says how samples are read; a collate_fn of the user's own is always seeded, and is never handed a generator."""
    case = Case(DATASET, 4, "sequential", None, collate="drawing", rng=rng)
    play(build(case, INLINE, 5), uninterrupted(case, 5, 1))

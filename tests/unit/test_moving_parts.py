"""What of a user's own objects has moved is found wherever it hangs, and nothing else is."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

from stateful_pipes import ExternalSource, SamplerNode, SeededBatcher, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.testing.moving_parts import moved, parts_of, put_back

COUNTS = {"here": 0}
GENERATOR = random.Random(0)


class Dataset:
    shared = 0

    def __init__(self, read):
        self.read = read
        self.rng = np.random.default_rng(3)
        self.cache = {}
        self.inner = [torch.Generator()]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.read(self)
        return index


def touch_global(dataset):
    COUNTS["here"] += 1


def touch_class(dataset):
    Dataset.shared += 1


def draw_globally(dataset):
    GENERATOR.random()


def after_a_batch(loader):
    before = parts_of(loader)
    next(iter(loader))
    return before, moved(before, parts_of(loader))


@pytest.mark.parametrize(
    ("read", "paths"),
    [
        (lambda dataset: None, []),
        (lambda dataset: dataset.rng.random(), ["mapper.rng"]),
        (lambda dataset: torch.rand((), generator=dataset.inner[0]), ["mapper.inner[0]"]),
        (
            lambda dataset: dataset.cache.update({len(dataset.cache): 1}),
            ["len(mapper.cache)", "mapper.cache[0]", "mapper.cache[1]"],
        ),
        (lambda dataset: setattr(dataset, "calls", getattr(dataset, "calls", 0) + 1), ["mapper.calls"]),
        (touch_global, [f"{__name__}.COUNTS['here']"]),
        (touch_class, ["Dataset.shared"]),
        (draw_globally, [f"{__name__}.GENERATOR"]),
    ],
)
def test_what_moves_is_named(read, paths):
    _, found = after_a_batch(StatefulDataLoader(Dataset(read), 2))
    assert [part.path for part in found] == paths


def test_parts_of_partials_closures_caches_and_collate():
    generators = [np.random.RandomState(n) for n in range(2)]

    @functools.lru_cache
    def cached(index):
        return index

    def collate(samples):
        generators[1].rand()
        return [cached(sample) for sample in samples]

    def draw(generator, index):
        generator.rand()
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(4)), functools.partial(draw, generators[0]))
    _, found = after_a_batch(StatefulDataLoader(SeededBatcher(node, 2, collate_fn=collate)))
    assert [part.path for part in found] == [
        "mapper.map_fn.args[0]",
        "batcher.collate_fn generators[1]",
        "batcher.collate_fn cached.cache_info()",
    ]
    assert [part.kind for part in found] == ["numpy.random.mtrand.RandomState", "numpy.random.mtrand.RandomState", ""]


def test_function_of_an_external_source():
    counted = [0]

    def source(index):
        counted[0] += 1
        return torch.tensor([index])

    _, found = after_a_batch(StatefulDataLoader(ExternalSource(source)))
    assert [part.path for part in found] == ["external_source.source counted[0]"]


@pytest.mark.parametrize(
    ("generator", "draw", "kind"),
    [
        (np.random.default_rng(1), lambda one: one.random(), "numpy.random.Generator"),
        (np.random.default_rng(), lambda one: one.random(), "numpy.random.Generator made without a seed"),
        (np.random.RandomState(1), lambda one: one.standard_normal(), "numpy.random.mtrand.RandomState"),
        (random.Random(1), lambda one: one.gauss(0, 1), "random.Random"),
        (torch.Generator(), lambda one: torch.rand((), generator=one).item(), "torch.Generator"),
    ],
)
def test_generators_are_led_back(generator, draw, kind):
    drawn = []
    loader = StatefulDataLoader(Dataset(lambda dataset: drawn.append(draw(generator))), 4)
    before, found = after_a_batch(loader)
    (part,) = [one for one in found if one.kind]
    assert part.kind.replace("torch._C.", "torch.") == kind
    put_back({path: one for path, one in before.items() if one.kind})
    next(iter(loader))
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) == 4

"""Transforms that own their generators, reseeded for each sample: the stream is the same in any process and after any resume."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal

import numpy as np
import pytest
import torch

from stateful_pipes import ProcessPrefetcher, RandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from tests.integration.pipelines import check_resumes, epochs
from tests.streams import same

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else the import asks the network
A = pytest.importorskip("albumentations")

LENGTH = 7


class Images:
    """Images that an albumentations pipeline augments."""

    def __init__(self):
        images = np.arange(LENGTH * 12 * 12 * 3) * 2654435761 % 251
        self.images = images.astype(np.uint8).reshape(LENGTH, 12, 12, 3)
        self.transform = A.Compose(
            [
                A.RandomCrop(8, 8),
                A.HorizontalFlip(p=0.5),
                A.OneOf([A.GaussNoise(p=1.0), A.CoarseDropout(p=1.0), A.RandomBrightnessContrast(p=1.0)], p=1.0),
                A.SomeOf([A.ShotNoise(p=1.0), A.HueSaturationValue(p=1.0), A.Affine(rotate=(-30, 30), p=1.0)], n=2, p=0.8),
                A.GridDropout(p=0.5),
            ]
        )

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, self.transform(image=self.images[index])["image"]


def reseed_albumentations(dataset, seed):
    dataset.transform.set_random_state(np.random.default_rng(seed), random.Random(seed))


class Numbers:
    """Numbers with a draw of torch's generator, NumPy's, and a transform's that remembers what it drew last."""

    def __init__(self):
        self.torch, self.numpy, self.walk = torch.Generator(), np.random.default_rng(), Walk()
        self.torch.seed()

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, torch.rand(3, generator=self.torch), self.numpy.random(2), self.walk(index)


class Walk:
    """A custom transform: each draw is a step from where the last one led."""

    def __init__(self):
        self.rng, self.place = random.Random(), 0.0

    def __call__(self, item):
        self.place += self.rng.random()
        return self.place

    def restart(self, seed):
        self.rng.seed(seed)
        self.place = 0.0


def reseed_numbers(dataset, seed):
    dataset.torch.manual_seed(seed)
    dataset.numpy = np.random.default_rng(seed)
    dataset.walk.restart(seed)


KINDS = {"albumentations": (Images, reseed_albumentations), "generators and a custom transform": (Numbers, reseed_numbers)}


def loader_of(kind, workers=0, *, has_hook=True, fate=None, **options):
    make, reseed = KINDS[kind]
    node = SamplerNode(RandomSampler(LENGTH, seed=1))
    node = SeededMapper(node, fate, rng=(), name="before") if fate else node
    node = SeededMapper(node, make().__getitem__, seed=2, reseed=reseed if has_hook else None)
    node = SeededMapper(node, fate, rng=(), name="after") if fate else node
    return StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, 2, seed=3), workers, **options))


@functools.cache
def stream(kind):
    """Three epochs, inline and uninterrupted."""
    return epochs(loader_of(kind), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_hook_the_draws_are_others_each_time(kind):
    """So that the rest of this file shows something."""
    assert not same(epochs(loader_of(kind, has_hook=False), 1), epochs(loader_of(kind, has_hook=False), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_of_each_epoch_is_drawn_anew(kind):
    drawn = {}
    for epoch in stream(kind):
        for ids, *draws in epoch:
            for i, index in enumerate(ids.tolist()):
                drawn.setdefault(index, set()).add(tuple(draw[i].numpy().tobytes() for draw in draws))
    assert [len(different) for different in drawn.values()] == [3] * LENGTH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 0), (1, 3)])
def test_a_resume_at_any_cut(kind, before, after):
    count = 3 if before == after == 0 else 2
    whole = check_resumes(lambda: loader_of(kind, before), count, lambda: loader_of(kind, after))
    assert same(whole, stream(kind)[:count])


def door(workers, **options):
    return StatefulDataLoader(
        Images(), batch_size=2, shuffle=True, num_workers=workers, seed=4, reseed=reseed_albumentations, **options
    )


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_the_dataset_door(before, after):
    check_resumes(lambda: door(before), 1, lambda: door(after))


def test_the_dataset_door_without_resume():
    with door(1, resumable=False, rng=()) as loader:
        assert same(epochs(loader, 2), epochs(door(0, resumable=False, rng=()), 2))


class Fate:
    """Passes items on, and kills the worker that has the one whose turn it is, once."""

    def __init__(self, *turns):
        self.turns, self.count = turns, multiprocessing.Value("i", 0)

    def __call__(self, item):
        with self.count.get_lock():
            self.count.value += 1
            turn = self.count.value
        if turn in self.turns:
            os.kill(os.getpid(), signal.SIGKILL)
        return item


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_are_killed(kind, workers):
    """Before and after a batch's samples are drawn; the next worker draws the same."""
    whole = epochs(loader_of(kind, fate=Fate()), 2)
    with loader_of(kind, workers, fate=Fate(2, 8, 17, 20), max_restarts=4) as loader:
        assert same(epochs(loader, 2), whole)
        assert loader.stats()["restarts"] == 4


def stepped(walk, item):
    return item, walk(item)


def step_from(walk, _, seed):
    walk.restart(seed)


def test_workers_that_are_spawned():
    """They get dataset, transforms and hooks as one pickle: a hook that holds a transform itself has the one that is called."""

    def make(workers, **options):
        walk = Walk()
        node = SeededMapper(
            SamplerNode(RandomSampler(LENGTH, seed=1)), Images().__getitem__, seed=2, reseed=reseed_albumentations
        )
        node = SeededMapper(node, functools.partial(stepped, walk), seed=2, reseed=functools.partial(step_from, walk))
        return StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, 2), workers, **options))

    whole = epochs(make(0), 1)
    with make(1, multiprocessing_context="spawn") as loader:
        assert same(epochs(loader, 1), whole)


def test_a_hook_that_cannot_be_pickled_is_named():
    node = SeededMapper(SamplerNode(RandomSampler(3, seed=1)), abs, name="augment", reseed=lambda *_: None)
    with pytest.raises(TypeError, match=r"augment\.reseed: .*lambda"):
        ProcessPrefetcher(node, 1, multiprocessing_context="spawn")


def test_albumentations_transforms_share_what_the_hook_sets():
    """With its `set_random_seed` each of them would draw the same numbers from a generator of its own."""
    dataset = Images()
    reseed_albumentations(dataset, 2**64 - 1)
    transforms = [dataset.transform, *dataset.transform.transforms]
    assert len({id(one.random_generator) for one in transforms}) == len({id(one.py_random) for one in transforms}) == 1

"""Pipelines with one fault each, as users have them; apart from the tests, so that a new process need not import pytest."""

from __future__ import annotations

import datetime
import functools
import glob
import os
import random
import secrets
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from torchdata.nodes import BaseNode, IterableWrapper

from stateful_pipes import ProcessPrefetcher, RandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from tests.streams import DrawingDataset

LENGTH = 7


class Reading:
    """Sample i is (i, what a function makes of it)."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, self.read(index)


def over(dataset, rng=("python", "numpy", "torch"), **options):
    return StatefulDataLoader(dataset, 3, shuffle=True, rng=rng, **options)


# Nothing is wrong with these.


def exact():
    return over(DrawingDataset(LENGTH))


def exact_with_workers(num_workers=0):
    return over(DrawingDataset(LENGTH), num_workers=num_workers)


def exact_nodes():
    node = SeededMapper(SamplerNode(RandomSampler(LENGTH)), lambda index, rng: index + rng.random(), rng="generator")
    return ProcessPrefetcher(SeededBatcher(node, 2), 1)


def exact_without_prefetcher():
    return SeededBatcher(SeededMapper(SamplerNode(RandomSampler(LENGTH)), lambda index: index + random.random()), 2)


# A generator that nothing seeds.


def new_generator_each_time():
    return over(Reading(lambda index: np.random.default_rng().random()))


def new_python_generator_each_time():
    return over(Reading(lambda index: random.Random().random()))


class OwnTorchGenerator(Reading):
    def __init__(self):
        self.generator = torch.Generator()
        self.generator.seed()

    def read(self, index):
        return torch.rand(2, generator=self.generator)


def torch_generator_of_its_own():
    return over(OwnTorchGenerator())


def from_the_system():
    return over(Reading(lambda index: secrets.randbelow(10**9)))


def named_by_uuid():
    return over(Reading(lambda index: uuid.uuid4().hex))


MODULE_RNG = np.random.default_rng()


def generator_of_the_module():
    return over(Reading(lambda index: MODULE_RNG.random()))


def shuffled_by_an_unseeded_generator():
    return over(np.random.default_rng().permutation(LENGTH * 100)[:LENGTH])


def unseeded_collate(samples):
    return samples, np.random.RandomState().rand()


def generator_in_collate():
    return over(DrawingDataset(LENGTH), collate_fn=unseeded_collate)


# One that the pipeline does not seed.


def global_generator_left_out():
    return over(Reading(lambda index: np.random.random()), rng=("python", "torch"))


def global_generator_beside_the_given_one():
    node = SeededMapper(SamplerNode(RandomSampler(LENGTH)), lambda index, rng: index + random.random(), rng="generator")
    return ProcessPrefetcher(SeededBatcher(node, 3), 0)


# A seeded one that moves along.


class OwnGenerator(Reading):
    def __init__(self, generator):
        self.generator = generator

    def read(self, index):
        return self.generator.random()


def seeded_numpy_generator():
    return over(OwnGenerator(np.random.default_rng(5)))


def seeded_python_generator():
    return over(OwnGenerator(random.Random(5)))


def jitter(generator, sample):
    return sample[0] + torch.rand((), generator=generator).item()


def seeded_torch_generator_in_a_partial():
    node = SeededMapper(SamplerNode(RandomSampler(LENGTH)), Reading(abs).__getitem__)
    node = SeededMapper(node, functools.partial(jitter, torch.Generator().manual_seed(3)))
    return ProcessPrefetcher(SeededBatcher(node, 3), 0)


# Counters and caches.

READ = 0


def count_globally(index):
    global READ
    READ += 1
    return READ


def global_counter():
    return over(Reading(count_globally))


class CountingClass(Reading):
    calls = 0

    def __init__(self):
        pass

    def read(self, index):
        CountingClass.calls += 1
        return CountingClass.calls


def counter_of_the_class():
    return over(CountingClass())


class Counting(Reading):
    def __init__(self):
        self.calls = 0

    def read(self, index):
        self.calls += 1
        return self.calls


def counter_of_the_dataset():
    return over(Counting())


class Remembering(Reading):
    def __init__(self):
        self.seen = []

    def read(self, index):
        self.seen.append(index)
        return self.seen[0]


def first_sample_remembered():
    return over(Remembering())


class Smoothing(BaseNode):
    """A foreign node whose state leaves out what it goes by."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.mean = 0.0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self):
        self.mean = 0.9 * self.mean + next(self.source)
        return self.mean

    def get_state(self):
        return {"source": self.source.state_dict()}


def node_with_half_a_state():
    return SeededBatcher(Smoothing(IterableWrapper(range(1, LENGTH))), 2)


# Time.


def stamped():
    return over(Reading(lambda index: time.time()))


def stamped_by_the_day():
    return over(Reading(lambda index: datetime.datetime.now().strftime("%Y-%m-%d")))


def seeded_by_the_date():
    return over(Reading(lambda index: np.random.default_rng(datetime.date.today().toordinal() + index).random()))


# Listings.

CLASSES = {f"class {number}" for number in range(40)}


def labelled_by_a_set():
    labels = {name: number for number, name in enumerate(CLASSES)}
    return over(Reading(lambda index: labels[f"class {index}"]))


def split_by_hash():
    return over(Reading(lambda index: hash(f"file {index}") % 1000))


def folder():
    return Path(os.environ["BROKEN_PIPELINES"])


def listed():
    names = os.listdir(folder())
    return over(Reading(lambda index: names[index]))


def globbed():
    names = glob.glob(f"{folder()}/*.txt")
    return over(Reading(lambda index: Path(names[index]).name))


def walked():
    names = [name for _, _, names in os.walk(folder()) for name in names]
    return over(Reading(lambda index: names[index]))


# Data that change.


def grown():
    """Something appends to the list whenever it is read."""
    path = folder() / "list.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "another"]))
    return over(lines)


def rewritten():
    """The file has other content whenever it is opened, of the same length."""
    path = folder() / "value.csv"
    value = int(path.read_text())
    path.write_text(str(value + 1))
    return over(Reading(lambda index: value * 10 + index))


def rewritten_once():
    """The file has other content from the second time on."""
    path = folder() / "value.csv"
    value = int(path.read_text())
    path.write_text("9")
    return over(Reading(lambda index: value * 10 + index))


def drawn_when_made():
    return over(torch.rand(LENGTH))


def other_fingerprint():
    path = folder() / "value.csv"
    value = path.read_text()
    path.write_text("9")
    return over(range(LENGTH), fingerprint=f"data of {value}")


# The process.


def marked_by_the_process():
    return over(Reading(lambda index: os.getpid()))


def marked_by_the_worker():
    return over(Reading(lambda index: getattr(torch.utils.data.get_worker_info(), "id", -1)))


# What no experiment reaches.


def read_from_a_device(index):
    with open("/dev/urandom", "rb") as device:
        return device.read(8).hex()


def from_a_device():
    return over(Reading(read_from_a_device))


def not_a_pipeline():
    return [1, 2, 3]


def without_resume():
    return over(range(LENGTH), resumable=False)


def raising():
    raise OSError("this one cannot be read")

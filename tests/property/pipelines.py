"""Pipelines to cut and resume: what shapes their stream, what must not, how each is built and read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, ParallelMapper, Unbatcher

from stateful_pipes import (
    ExternalSource,
    IndexFilter,
    InfiniteRandomSampler,
    Mixer,
    OrderSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    build_batch_sampler,
)
from tests.streams import disturb, drawing_collate, generator_states, same

GENERATORS = ("python", "numpy", "torch")


class Samples:
    """Sample i shows its index and a draw of each generator under which it is read, and touches no other.

    With `boxes` it holds an image that was flipped and cropped by those draws, and a drawn number of boxes.
    """

    def __init__(self, length, rng=GENERATORS, boxes=False):
        self.length, self.rng, self.boxes = length, rng, boxes
        self.broken = False

    def __len__(self):
        return self.length

    def __getitem__(self, index, generator=None):
        if self.broken:
            raise ValueError("broken sample")
        draws = self._draws(generator)
        sample = {"index": index, "draws": np.array(draws)}
        if self.boxes:
            count = int(sum(draws) * 1000 + index) % 4
            image = torch.arange(36, dtype=torch.float64).reshape(6, 6) + index
            flipped = image.flip(1) if int(sum(draws) * 100) % 2 else image
            sample["image"] = flipped[: 3 + count, count:] * (1 + sum(draws))
            sample["boxes"] = torch.full((count, 4), float(sum(draws)), dtype=torch.float64) + torch.arange(4)
        return sample

    def __getitems__(self, indices):
        assert not self.rng, "a block read at once cannot have a seed for each sample"
        return [self[index] for index in indices]

    def _draws(self, generator):
        if self.rng == "generator":
            return generator.random(2).tolist()
        draw = {"python": random.random, "numpy": np.random.random, "torch": lambda: torch.rand((), dtype=torch.float64).item()}
        return [float(draw[name]()) for name in self.rng]


def pad_boxes(samples):
    """Samples with different image sizes and numbers of boxes, in a drawn order, scale and number of fillings."""
    order = np.random.permutation(len(samples))
    scale = random.choice([0.5, 1.0, 2.0])
    width = max(len(sample["boxes"]) for sample in samples) + int(torch.randint(0, 3, ()))
    boxes = torch.rand((len(samples), width, 4), dtype=torch.float64)
    for row, i in enumerate(order.tolist()):
        boxes[row, : len(samples[i]["boxes"])] = samples[i]["boxes"] * scale
    return {
        "index": torch.tensor([samples[i]["index"] for i in order.tolist()]),
        "images": [samples[i]["image"] * scale for i in order.tolist()],
        "boxes": boxes,
        "draws": tuple(samples[i]["draws"] for i in order.tolist()),
    }


COLLATES = {"default": None, "drawing": drawing_collate, "boxes": pad_boxes, "list": list}


class Zigzag:
    """A user's order, from both ends in turn, begun elsewhere in each epoch."""

    def __init__(self, length, shift):
        self.length, self.shift = length, shift

    def __len__(self):
        return self.length

    def arguments(self):
        return {"shift": self.shift}

    def indices(self, seed, epoch, positions):
        moved = [(p + self.shift * epoch + seed) % self.length for p in positions]
        return [m // 2 if m % 2 == 0 else self.length - 1 - m // 2 for m in moved]


class Endless:
    """A user's order without end."""

    def __init__(self, length):
        self.length = length

    def indices(self, seed, epoch, positions):
        return np.array([(seed + 7 * epoch + p * p) % self.length for p in positions], dtype=np.int64)


class Keep(BaseNode):
    """A foreign node that passes on two items of three; its state is its source's and a count."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.seen = 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.seen = 0 if initial_state is None else initial_state["seen"]

    def next(self):
        while True:
            item = next(self.source)
            self.seen += 1
            if self.seen % 3 != 1:
                return item

    def get_state(self):
        return {"source": self.source.state_dict(), "seen": self.seen}


def mirror(length, index):
    return length - 1 - index


def jitter(sample):
    return {**sample, "jitter": random.random()}


def halves(sample):
    return [{**sample, "half": half, "jitter": random.random()} for half in range(2)]


def is_kept(index):
    return index % 3 < 2


def until(length, info):
    """Epochs of a length of their own, with an empty one among them."""
    if info.idx_in_epoch >= length * (3, 0, 2)[info.epoch_idx % 3] // 2:
        raise StopIteration
    return (info.idx_in_epoch * 7 + info.iteration + info.idx_in_batch) % length


DATASET = "dataset"
OUTER = 2  # inner batches in an outer one
FOREIGN_BELOW = ("iterable", "parallel", "filter")
OURS = (
    DATASET,
    "nodes",
    "two_mappers",
    "two_batchers",
    "prefetcher_in_the_middle",
    "batch_sampler",
    "mixture",
    "index_filter",
    "flat_mapper",
    "external",
)
INDIRECT = ("mixture", "index_filter", "flat_mapper", "external")  # the sampler's cursor is not simply the batches that were read
SHAPES = (*OURS, *FOREIGN_BELOW, "filter_over_sampler", "batcher_above", "unbatcher_above")
ORDERS = ("sequential", "random", "user", "infinite", "replacement", "endless")
ENDLESS = ("infinite", "replacement", "endless")


@dataclass(frozen=True)
class Case:
    """What shapes a stream, its seed apart."""

    shape: str = DATASET
    length: int = 10
    order: str = "random"
    batch_size: int | None = 3
    drop_last: bool = False
    collate: str = "drawing"
    rng: Any = GENERATORS
    epochs: int = 2

    @property
    def is_endless(self):
        return self.order in ENDLESS and self.shape not in (*FOREIGN_BELOW, "external")

    @property
    def is_foreign(self):
        return self.shape not in OURS

    @property
    def samples_a_batch(self):
        return (self.batch_size or 1) * (OUTER if self.shape == "two_batchers" else 1)


@dataclass(frozen=True)
class Engine:
    """What must not shape a stream. `workers=None` is inline without a ProcessPrefetcher, where the door allows it."""

    workers: int | None = None
    prefetch: int = 2
    method: str = "fork"


INLINE = Engine()


def make_order(case, seed):
    if case.order == "sequential":
        return SequentialSampler(case.length)
    if case.order == "random":
        return RandomSampler(case.length, seed=seed)
    if case.order == "user":
        return OrderSampler(Zigzag(case.length, 3), seed=seed)
    if case.order == "endless":
        return OrderSampler(Endless(case.length), seed=seed)
    return InfiniteRandomSampler(case.length, replacement=case.order == "replacement", seed=seed)


def make_batches(case, seed):
    labels = [index % 7 % 3 for index in range(case.length)]
    size, repeat = case.batch_size or 1, case.order in ENDLESS
    return build_batch_sampler(
        "class_balance", range(case.length), size, labels=labels, repeat=repeat, drop_last=case.drop_last, seed=seed
    )


def build(case, engine=INLINE, seed=None, **door):
    """A loader. Without a seed it draws its own, as one that is to be loaded may; `door` is what only a loader takes."""
    dataset = Samples(case.length, case.rng, boxes=case.collate == "boxes")
    if case.shape == DATASET:
        return _from_dataset(case, engine, seed, dataset, door)
    return StatefulDataLoader(_compose(case, engine, seed, dataset), **door)


def _from_dataset(case, engine, seed, dataset, door):
    workers = {}
    if engine.workers:
        workers = {"num_workers": engine.workers, "prefetch_factor": engine.prefetch, "multiprocessing_context": engine.method}
    plain = case.order in ("sequential", "random")
    return StatefulDataLoader(
        dataset,
        case.batch_size,
        shuffle=case.order == "random",
        sampler=None if plain else make_order(case, seed),
        drop_last=case.drop_last,
        collate_fn=COLLATES[case.collate],
        rng=case.rng,
        seed=seed,
        **workers,
        **door,
    )


def _compose(case, engine, seed, dataset):
    seeds = [None if seed is None else (seed + i) % 2**64 for i in range(4)]
    if case.shape in FOREIGN_BELOW:
        source = IterableWrapper(range(case.length))
        if case.shape == "parallel":
            source = ParallelMapper(source, partial(mirror, case.length), num_workers=0)
        elif case.shape == "filter":
            source = Keep(source)
    elif case.shape == "external":
        source = ExternalSource(partial(until, case.length), batch=False)
    else:
        source = SamplerNode(make_batches(case, seeds[0]) if case.shape == "batch_sampler" else make_order(case, seeds[0]))
        if case.shape == "filter_over_sampler":
            source = Keep(source)
        elif case.shape == "index_filter":
            source = IndexFilter(source, is_kept)
    node = SeededMapper(source, dataset.__getitem__, seed=seeds[1], rng=case.rng)
    if case.shape == "two_mappers":
        node = SeededMapper(node, jitter, seed=seeds[2], rng=("python",))
    elif case.shape == "flat_mapper":
        node = SeededFlatMapper(node, halves, 2, seed=seeds[2], rng=("python",))
    elif case.shape == "mixture":
        other = SeededMapper(
            SamplerNode(SequentialSampler(min(case.length, 5))), dataset.__getitem__, seed=seeds[2], rng=case.rng
        )
        node = Mixer([node, other], {0: [1, 2], 7: [0.5, 0.1]}, seed=seeds[2])

    def prefetcher(source):
        if engine.workers is None:
            return source
        method = engine.method if engine.workers else None
        return ProcessPrefetcher(source, engine.workers, prefetch_factor=engine.prefetch, multiprocessing_context=method)

    if case.shape == "batcher_above":
        return Batcher(prefetcher(node), case.batch_size or 1, drop_last=case.drop_last)
    if case.shape == "prefetcher_in_the_middle":
        node = prefetcher(node)
    if case.batch_size is not None:
        collate = COLLATES["list" if case.shape in ("unbatcher_above", "two_batchers") else case.collate]
        own = (None, False) if case.shape == "batch_sampler" else (case.batch_size, case.drop_last)
        node = SeededBatcher(node, own[0], drop_last=own[1], collate_fn=collate, seed=seeds[3])
        if case.shape == "two_batchers":
            node = SeededBatcher(node, OUTER, collate_fn=drawing_collate, seed=seeds[3])
    if case.shape == "prefetcher_in_the_middle":
        return node
    return Unbatcher(prefetcher(node)) if case.shape == "unbatcher_above" else prefetcher(node)


END = "end of the epoch"


def uninterrupted(case, seed, epochs):
    """The whole stream, from a loader that nothing disturbs: its batches in order, END after each epoch's last."""
    loader = build(case, INLINE, seed)
    if case.is_endless:
        return list(islice(loader, 10 * epochs))
    return [step for _ in range(epochs) for step in [*loader, END]]


def play(loader, steps):
    """Reads on, comparing each step, while the training loop draws for itself."""
    batches = iter(loader)
    for number, step in enumerate(steps):
        disturb()
        states = generator_states()
        found = next(batches, END)
        assert states == generator_states()
        assert same(found, step), f"step {number}: {found} instead of {step}"
        if step is END:
            batches = iter(loader)


def wander(loader, count):
    """Reads so many steps, whatever they are; returns the last iterator."""
    batches = iter(loader)
    for _ in range(count):
        if next(batches, END) is END:
            batches = iter(loader)
    return batches

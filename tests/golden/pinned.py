"""What the golden files hold, computed anew. `python -m tests.golden.pinned` writes those that are missing.

A file that is there is never written again: streams and states that people have saved depend on it. A later version of
the state gets a file of its own beside the old one.
"""

from __future__ import annotations

import hashlib
import json
import random
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torchdata.nodes as tn

from stateful_pipes import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    IndexFilter,
    InfiniteRandomSampler,
    Mixer,
    NaiveBatchSampler,
    OrderSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.permutation import permute
from stateful_pipes.rng import COLLATE, ORDER, SAMPLE, WORKER, derive, derive_each, mix64

FOLDER = Path(__file__).parent
EDGES = [0, 1, 2, 12345, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def seeds():
    words = [words for seed in EDGES for words in ((seed,), (seed, 2), (seed, 3, 1, 10**12), (5, seed))]
    return {
        "purposes": {"order": ORDER, "sample": SAMPLE, "collate": COLLATE, "worker": WORKER},
        "mix64": [[value, mix64(value)] for value in EDGES],
        "derive": [[one, derive(*one)] for one in words],
        "derive_each": [[key, EDGES, derive_each(key, EDGES)] for key in EDGES],
    }


def permutations():
    whole = [1, 2, 3, 5, 10, 300]
    sampled = [1000, 1023, 1024, 1025, 4097, 65536, 65537, 10**6, 10**9 + 7, 10**12, 2**62]
    found = []
    for key in (0, 1, 2**64 - 1):
        for length in whole + sampled:
            step = length // 20
            positions = list(range(length)) if length in whole else sorted({*range(10), *range(0, length, step), length - 1})
            found.append([key, length, positions, permute(key, length, np.array(positions)).tolist()])
    return found


def orders():
    made = {
        "SequentialSampler": SequentialSampler(7),
        "RandomSampler of 7": RandomSampler(7, seed=1),
        "RandomSampler of 5000": RandomSampler(5000, seed=2**64 - 1),
        "InfiniteRandomSampler": InfiniteRandomSampler(7, seed=1),
        "InfiniteRandomSampler, replacement": InfiniteRandomSampler(7, seed=1, replacement=True),
        "InfiniteRandomSampler of 5000": InfiniteRandomSampler(5000, seed=3),
    }
    asked = [(epoch, part) for epoch in (0, 1, 10**9) for part in (range(0, 7), range(3, 7, 2))]
    return {name: [[epoch, sampler.indices(epoch, part).tolist()] for epoch, part in asked] for name, sampler in made.items()}


def batches():
    """Two cycles of each batch sampler; of a class larger than those that are shuffled by hashes, a hash."""
    labels, domains = [i * i % 7 % 4 for i in range(23)], [i % 5 % 3 for i in range(23)]
    ratios = {"class_ratio": {0: 0.1, 1: 0.5, 2: 0.4}, "domain_ratio": {0: 1, 1: 1.5, 2: 3}}
    made = {
        "naive": NaiveBatchSampler(11, 4, seed=1),
        "naive, in order": NaiveBatchSampler(11, 4, shuffle=False, drop_last=False, seed=1),
        "classes": ClassBalancedBatchSampler(labels, 4, labels=labels, seed=2),
        "classes in order": ClassBalancedBatchSampler(labels, 4, labels=labels, shuffle=False, drop_last=False, seed=2),
        "ratios": ClassBalancedBatchSampler(labels, 5, labels=labels, domains=domains, **ratios, seed=2**64 - 1),
        "balanced": BalancedBatchSampler(labels, 5, labels=labels, domains=domains, seed=3),
        "balanced, in order": BalancedBatchSampler(labels, 5, labels=labels, shuffle=False, drop_last=False, seed=3),
    }
    found = {name: list(islice(sampler, 2 * len(sampler))) for name, sampler in made.items()}
    large = ClassBalancedBatchSampler(range(70_003), 1000, labels=[0] * 70_000 + [1] * 3, seed=4)
    cycle = np.concatenate([np.array(batch, dtype="<i8") for batch in islice(large, len(large))])
    return {**found, "large": [len(cycle), hashlib.sha256(cycle.tobytes()).hexdigest()]}


def draws_of(item):
    """Draws of each global generator; none that goes through a logarithm, whose last bit is the machine's own."""
    return [item, random.random(), float(np.random.random_sample()), int(np.random.randint(2**31)), float(torch.rand(()))]


def collated(samples):
    return {"samples": samples, "collate": draws_of(len(samples))}


def tiny():
    """Everything that draws, over a shuffled order: three global generators, a generator of one's own, a random collate."""
    node = SamplerNode(RandomSampler(7, seed=11))
    node = SeededMapper(node, draws_of, seed=12)
    node = SeededMapper(node, lambda item, rng: [*item, int(rng.bit_generator.random_raw())], seed=13, rng="generator")
    node = SeededBatcher(node, 3, collate_fn=collated, seed=14)
    return ProcessPrefetcher(node, 0)


def stream():
    loader = StatefulDataLoader(tiny())
    return [list(loader) for _ in range(2)]


def torch_door():
    dataset = _Drawing()
    loader = StatefulDataLoader(dataset, 3, shuffle=True, collate_fn=collated, seed=2**64 - 1)
    return [list(loader) for _ in range(2)]


class _Drawing:
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return draws_of(index)


class Evens:
    """A user's order with an argument."""

    def __init__(self, step):
        self.step = step

    def __len__(self):
        return 9

    def arguments(self):
        return {"step": self.step, "note": "ä", "share": 0.25, "flag": True}

    def indices(self, seed, epoch, positions):
        return [(p * self.step + epoch + seed) % 9 for p in positions]


class Shards(tn.BaseNode):
    """Somebody else's source, with everything in its state that can be encoded."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]
        self.seen = torch.zeros(2, dtype=torch.bfloat16) if initial_state is None else initial_state["seen"]
        self.rest = (b"\xff\x00", {1: np.arange(2)}, float("inf"), None) if initial_state is None else initial_state["rest"]

    def next(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        self.seen = self.seen + 1
        return [self.at, float(self.seen[0]), self.rest[0].hex(), self.rest[1][1].tolist(), repr(self.rest[2])]

    def get_state(self):
        return {"at": self.at, "seen": self.seen, "rest": self.rest}


def own_order():
    return SeededBatcher(SamplerNode(OrderSampler(Evens(2), seed=4)), 2, collate_fn=list, seed=5, drop_last=True)


PIPELINES = {
    "composed": tiny,
    "order of one's own": own_order,
    "endless": lambda: SeededMapper(SamplerNode(InfiniteRandomSampler(7, seed=6)), abs, rng=()),
    "foreign": lambda: SeededMapper(Shards(), lambda item: [*item, random.random()], seed=7),
    "ranks": lambda: SamplerNode(RandomSampler(10, seed=8), rank=1, world_size=3, uneven="drop"),
}


def mixture():
    flat = SeededFlatMapper(
        IndexFilter(SamplerNode(RandomSampler(9, seed=2)), lambda index: index % 3),
        lambda index: [index, random.random()],
        2,
        seed=3,
    )
    sources = {"flat": flat, "plain": SeededMapper(SamplerNode(RandomSampler(4, seed=4), name="other"), draws_of, seed=5)}
    return SeededBatcher(Mixer(sources, {0: [1, 0.3], 5: [1, 2.5]}, seed=6), 3, collate_fn=list, seed=7)


def balanced():
    sampler = ClassBalancedBatchSampler(range(9), 4, labels=[0, 0, 0, 0, 0, 0, 1, 1, 2], drop_last=False, repeat=False, seed=8)
    return SeededBatcher(SeededMapper(SamplerNode(sampler), draws_of, seed=9), None, collate_fn=collated, seed=10)


ORDERS = {"mixture": mixture, "balanced": balanced}


def states(pipelines=PIPELINES):
    """Each pipeline's state after some batches of its second epoch, and what follows."""
    found = {}
    for name, make in pipelines.items():
        loader = StatefulDataLoader(make())
        iterator = iter(loader)
        if name == "endless":
            [next(iterator) for _ in range(9)]
        else:
            list(iterator)
            next(iter(loader))
        state = loader.state_dict()
        following = iter(loader)
        found[name] = {"state": state, "following": [item for item, _ in zip(following, range(6), strict=False)]}
    return found


def sampler_states():
    sampler = RandomSampler(7, seed=1)
    sampler.advance(3)
    iterator = iter(sampler)
    list(iterator)
    endless = InfiniteRandomSampler(7, seed=1, replacement=True)
    endless.advance(30)
    return {
        "RandomSampler": sampler.state_dict(),
        "its iterator's end": iterator.state_dict(),
        "InfiniteRandomSampler": endless.state_dict(),
    }


def checkpoint():
    """The text of a checkpoint file, which is canonical JSON with its checksum."""
    loader = StatefulDataLoader(tiny())
    next(iter(loader))
    return loader.checkpoint().decode()


FILES = {
    "seeds.json": seeds,
    "permutations.json": permutations,
    "orders.json": orders,
    "batches.json": batches,
    "stream.json": stream,
    "torch_door.json": torch_door,
    "states_v1.json": states,
    "states_of_orders_v1.json": partial(states, ORDERS),
    "sampler_states_v1.json": sampler_states,
    "checkpoint_v1.json": checkpoint,
}


def read(name):
    return json.loads((FOLDER / name).read_text())


if __name__ == "__main__":
    for name, compute in FILES.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_text(json.dumps(compute(), separators=(",", ":")) + "\n")
            print("written:", name)

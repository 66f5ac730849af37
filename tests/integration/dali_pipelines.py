"""The DALI pipelines, and nodes over them, that the tests of DALI share."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher

from stateful_pipes import (
    Mixer,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    StatefulDataLoader,
)

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

from nvidia.dali import fn, pipeline_def

from stateful_pipes.integrations.dali import DALIPipelineNode

FILES, BATCH_SIZE = 5, 2
NAMES = ["image", "label", "number"]
READERS = {
    "plain": {},
    "random_shuffle": {"random_shuffle": True, "initial_fill": 3},
    "shuffle_after_epoch": {"shuffle_after_epoch": True},
}
UNCACHED = {"dont_use_mmap": True}
"""For files that change: DALI shares what it has mapped between its pipelines."""


def make_folder(found):
    """JPEGs of different sizes, the label in the name of the folder."""
    random = np.random.RandomState(0)
    for number in range(FILES):
        (found / str(number % 2)).mkdir(exist_ok=True)
        pixels = random.randint(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(found / str(number % 2) / f"{number}.jpg")
    return str(found)


@pipeline_def
def images(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)
    image = fn.resize(fn.decoders.image_random_crop(encoded, device=DEVICES["decoder"]), size=[8, 8])
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 1.0])


DEVICES = {"decoder": "cpu"}


def factory(folder, reader="plain", make=images, **options):
    arguments = {"batch_size": BATCH_SIZE, "num_threads": 2, "device_id": None, "seed": 7, "enable_checkpointing": True}
    return lambda checkpoint: make(folder, READERS.get(reader, UNCACHED), checkpoint=checkpoint, **{**arguments, **options})


def node(folder, reader="plain", make=images, last_batch_policy="PARTIAL", output_names=NAMES, **options):
    return DALIPipelineNode(
        factory(folder, reader, make, **options),
        output_names=output_names,
        reader_name="reader",
        last_batch_policy=last_batch_policy,
    )


def draw(batch):
    return {**batch, "drawn": torch.rand(2)}


def numbers(length=4):
    return SamplerNode(RandomSampler(length, seed=1))


ABOVE = {
    "loader": StatefulDataLoader,
    "mapper": lambda source: StatefulDataLoader(SeededMapper(source, draw, seed=1)),
    "batcher": lambda source: StatefulDataLoader(SeededBatcher(source, 2, collate_fn=list, seed=1)),
    "workers": lambda source: StatefulDataLoader(ProcessPrefetcher(SeededMapper(source, draw, seed=1), 1)),
    "mixture": lambda source: StatefulDataLoader(Mixer([source, numbers(2)], [2, 1], seed=3)),
    "mixture of the shorter": lambda source: StatefulDataLoader(
        Mixer([source, numbers()], [1, 4], seed=3, stop_criteria="FIRST_DATASET_EXHAUSTED")
    ),
    "torchdata's loader": Loader,
    "torchdata's prefetcher": lambda source: Loader(Prefetcher(source, prefetch_factor=2)),
    "torchdata's nodes": lambda source: Loader(Batcher(Mapper(source, draw_nothing), 2, drop_last=False)),
    "torchdata's prefetcher below ours": lambda source: StatefulDataLoader(SeededMapper(Prefetcher(source, 2), draw, seed=1)),
}


def draw_nothing(batch):
    return batch, len(batch["label"])


def digest(batches):
    """Of batches of tensors, in order."""
    found = hashlib.sha256()
    for batch in batches:
        for name, value in batch.items():
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def rest_digests(folder, paths):
    """For each checkpoint what is left of its epoch, and the epoch after that."""
    found = []
    for path in paths:
        loader = StatefulDataLoader(node(folder, "random_shuffle"), checkpoint=path)
        found.append([digest(loader), digest(loader)])
    return found

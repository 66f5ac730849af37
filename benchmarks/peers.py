"""The contestants: each a generator of a workload's batches, loaded by two workers, that ends them when it is closed.

The peers seed nothing. With `shuffle=False` a contestant reads in order, to be compared with another.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchdata.nodes
import torchdata.stateful_dataloader
from harness import Cost, measure, require
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate
from workloads import CROP, Held, Workload, photographs

from stateful_pipes import StatefulDataLoader
from stateful_pipes.prefetch.worker import keep_freed_memory

WORKERS = 2
WARMUP = 8
"""Batches, to be past those that gathered while the workers started: more than any contestant has under way."""

Batches = Generator[Any, None, None]
Contestant = Callable[..., Batches]


def ours(workload: Workload, shuffle: bool = True, **arguments: Any) -> Batches:
    """All three global generators seeded for each sample, unless `rng` says otherwise."""
    loader: StatefulDataLoader[Any]
    with StatefulDataLoader(workload.dataset, workload.batch_size, shuffle, num_workers=WORKERS, **arguments) as loader:
        yield from loader


def ours_unseeded(workload: Workload, shuffle: bool = True) -> Batches:
    """With `rng=()`: it seeds nothing, as the peers."""
    return ours(workload, shuffle, rng=())


def torch_loader(workload: Workload, shuffle: bool = True, **arguments: Any) -> Batches:
    yield from DataLoader(workload.dataset, workload.batch_size, shuffle, num_workers=WORKERS, **arguments)


def torch_loader_keeping(workload: Workload, shuffle: bool = True) -> Batches:
    """torch's with the allocator's settings in its workers."""
    return torch_loader(workload, shuffle, worker_init_fn=lambda _: keep_freed_memory())


def stateful_loader(workload: Workload, shuffle: bool = True) -> Batches:
    """torchdata's StatefulDataLoader."""
    make = torchdata.stateful_dataloader.StatefulDataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch has deprecated
        loader = make(workload.dataset, workload.batch_size, shuffle, num_workers=WORKERS)
    yield from loader


def mapper_per_sample(workload: Workload, shuffle: bool = True) -> Batches:
    """torchdata's nodes: a message a sample, collated in the main process."""
    samples = _parallel(_sampler(workload.dataset, shuffle), workload.dataset.__getitem__)
    batches = torchdata.nodes.Batcher(samples, workload.batch_size)
    return _nodes(torchdata.nodes.Mapper(batches, default_collate))


def mapper_per_batch(workload: Workload, shuffle: bool = True) -> Batches:
    """torchdata's nodes: a message a batch, read and collated in a worker."""
    indices = torchdata.nodes.Batcher(_sampler(workload.dataset, shuffle), workload.batch_size)
    return _nodes(_parallel(indices, ReadBatch(workload.dataset)))


class ReadBatch:
    """Indices to a batch."""

    def __init__(self, dataset: Held) -> None:
        self.dataset = dataset

    def __call__(self, indices: Sequence[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def grain(workload: Workload, shuffle: bool = True) -> Batches:
    """Grain's mp_prefetch over NumPy arrays, which are its way; a batch is handed out as tensors that view them.

    Without threads in its workers, as it recommends for data in memory, and as many batches ahead as torch's.
    """
    import grain

    source = grain.MapDataset.source(workload.arrays())
    samples = (source.shuffle(seed=0) if shuffle else source).batch(workload.batch_size)
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=2)
    with closing(iter(samples.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(workers))) as batches:
        for batch in batches:
            yield tuple(map(torch.from_numpy, batch)) if isinstance(batch, tuple) else torch.from_numpy(batch)


def dali(workload: Workload, shuffle: bool = True) -> Batches:
    """DALI on the CPU, with threads in place of workers: reads the photographs from files, and draws and resizes its own way.

    Importing it changes the process: run it in one of its own.
    """
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=workload.batch_size, num_threads=WORKERS, device_id=None)
    def pipeline() -> Any:
        jpeg, _ = fn.readers.file(files=paths, random_shuffle=shuffle, pad_last_batch=False)
        image = fn.decoders.image_random_crop(jpeg, device="cpu", random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3])
        return fn.transpose(fn.resize(image, size=[CROP, CROP]), perm=[2, 0, 1])

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{number}.jpg")) for number in range(2)]
        for path, jpeg in zip(paths, photographs(), strict=True):
            Path(path).write_bytes(jpeg)
        for (batch,) in DALIGenericIterator([pipeline()], ["image"]):
            yield batch["image"]


def installed(package: str) -> bool:
    """Whether a package can be imported; says so if not."""
    try:
        found = find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        print(f"{package} is not installed: left out")
    return found


def cost(contestant: Contestant, workload: Workload, share: float = 1) -> Cost:
    """What a batch of it costs, in `share` of the workload's batches."""
    with closing(contestant(workload)) as batches:
        found = measure(batches, max(4, round(workload.batches * share)), min(WARMUP, workload.batches))
    gc.collect()  # some peers leave their processes to it
    return found


def require_equal(contestants: dict[str, Contestant], workload: Workload) -> None:
    """Ends the benchmark unless all give in order the same batches as torch's DataLoader, in kind and in every byte."""
    repeatable = workload.repeatable()
    expected = _first(torch_loader, repeatable)
    for name, contestant in contestants.items():
        require(same(_first(contestant, repeatable), expected), f"{workload.name}: {name} gives other batches than DataLoader")


def alike(one: Any, other: Any) -> bool:
    """Whether two batches are of the same structure, shapes and types."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
    return len(one) == len(other) and all(map(alike, one, other))


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal, a tuple of tensors being like a list of them."""
    if isinstance(one, torch.Tensor):
        return alike(one, other) and torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


def _first(contestant: Contestant, workload: Workload) -> list[Any]:
    with closing(contestant(workload, shuffle=False)) as batches:
        found = [next(batches) for _ in range(3)]
    gc.collect()
    return found


def _sampler(dataset: Held, shuffle: bool) -> Any:
    return torchdata.nodes.SamplerWrapper(RandomSampler(dataset) if shuffle else SequentialSampler(dataset))


def _parallel(source: Any, function: Callable[[Any], Any]) -> Any:
    return torchdata.nodes.ParallelMapper(source, function, num_workers=WORKERS, method="process")


def _nodes(node: Any) -> Batches:
    batches: Iterator[Any] = iter(torchdata.nodes.Loader(node))
    try:
        yield from batches
    finally:
        # What is still under way fails in its threads, since the workers are gone.
        hook, threading.excepthook = threading.excepthook, lambda _: None
        del batches, node
        gc.collect()
        threading.excepthook = hook

"""The table of pipelines that test_matrix.py cuts and resumes: an entry for each node of the package, and its axes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from torchdata.nodes import Batcher, IterableWrapper, Mapper, Prefetcher

from stateful_pipes import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    ExternalSource,
    FileReader,
    IndexFilter,
    InfiniteRandomSampler,
    IterableDatasetReader,
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
    WeightedRandomSampler,
)
from stateful_pipes.nodes.pin_memory import PinnedMemory
from tests.property.pipelines import COLLATES, GENERATORS, Keep, Samples, Zigzag, is_kept
from tests.streams import drawing_collate

try:
    from nvidia.dali import fn, pipeline_def

    from stateful_pipes.integrations.dali import DALIPipelineNode
except ImportError:
    NO_DALI = "NVIDIA DALI is not installed (extra dali)"
else:
    NO_DALI = ""

NO_CUDA = "" if torch.cuda.is_available() else "torch sees no CUDA device"
LENGTH = 7


# The orders.

WEIGHTS = [1, 5, 2, 3, 1, 4, 2]
LABELS = [0, 1, 0, 1, 0, 0, 2]
ORDERS: dict[str, Callable[[int, int], Any]] = {
    "random": lambda length, seed: RandomSampler(length, seed=seed),
    "sequential": lambda length, seed: SequentialSampler(length),
    "user": lambda length, seed: OrderSampler(Zigzag(length, 3), seed=seed),
    "weighted": lambda length, seed: WeightedRandomSampler(WEIGHTS[:length], seed=seed),
    "weighted-once": lambda length, seed: WeightedRandomSampler(WEIGHTS[:length], replacement=False, seed=seed),
    "infinite": lambda length, seed: InfiniteRandomSampler(length, seed=seed),
    "infinite-drawn": lambda length, seed: InfiniteRandomSampler(length, replacement=True, seed=seed),
}
BATCH_ORDERS: dict[str, Callable[..., Any]] = {
    "naive": NaiveBatchSampler,
    "balanced": partial(BalancedBatchSampler, labels=LABELS),
    "class-balanced": partial(ClassBalancedBatchSampler, labels=LABELS),
}
BATCH_ORDERS |= {f"{name}-repeated": make for name, make in BATCH_ORDERS.items()}


def make_order(case, seed):
    name = case["order"]
    if name in ORDERS:
        return ORDERS[name](case.get("length", LENGTH), seed)
    repeat = name.endswith("-repeated")
    return BATCH_ORDERS[name](range(LENGTH), case["batch_size"] or 2, repeat=repeat, drop_last=case["drop_last"], seed=seed)


def is_endless(case):
    order = case.get("order", "")
    return order.startswith("infinite") or order.endswith("-repeated") or case.get("stop_criteria") == "CYCLE_FOREVER"


# The pipelines. Each node gets a seed of its own, and a loader that is to be loaded another one.


def sampled(case, seed):
    rank, world_size = case.get("share", (0, 1))
    return SamplerNode(make_order(case, seed), rank=rank, world_size=world_size, uneven=case.get("uneven", "pad"))


def drawn(case, node, seed, map_fn=None, rng=GENERATORS):
    """A draw of each generator for each sample, which shows its seed."""
    return SeededMapper(node, map_fn or show, seed=seed + 1, rng=rng)


def show(item):
    return item, random.random(), torch.rand(2)


def batched(case, node, seed, collate="drawing"):
    if case["batch_size"] is None:
        return node
    size = None if case["order"] in BATCH_ORDERS else case["batch_size"]
    drop_last = size is not None and case.get("drop_last", False)
    return SeededBatcher(node, size, drop_last=drop_last, collate_fn=COLLATES[collate], seed=seed + 2)


def over_sampler(case, seed, folder):
    return batched(case, sampled(case, seed), seed)


class Broken(Samples):
    """Sample 3 cannot be read."""

    def __getitem__(self, index, generator=None):
        sample = super().__getitem__(index, generator)
        if index == 3:
            raise ValueError("broken sample")
        return sample


def over_mapper(case, seed, folder):
    dataset = (Broken if case["is_broken"] else Samples)(LENGTH, case["rng"])
    read = dataset.__getitem__
    skipped = 100 if case["is_broken"] else 0
    node = SeededMapper(sampled(case, seed), read, seed=seed + 1, rng=case["rng"], max_skipped=skipped)
    return batched(case, node, seed)


def fanned(count, index):
    if index == 3 and count < 0:
        raise ValueError("broken sample")
    return [(index, number, random.random()) for number in range(abs(count))]


def over_flat_mapper(case, seed, folder):
    count = case["fan_out"]
    signed = -count if case["is_broken"] else count
    skipped = 100 if case["is_broken"] else 0
    return batched(
        case,
        SeededFlatMapper(sampled(case, seed), partial(fanned, signed), count, seed=seed + 1, max_skipped=skipped),
        seed,
    )


def over_batcher(case, seed, folder):
    dataset = Samples(LENGTH, boxes=case["collate"] == "boxes")
    node = batched(case, drawn(case, sampled(case, seed), seed, dataset.__getitem__), seed, case["collate"])
    return SeededBatcher(node, 2, collate_fn=drawing_collate, seed=seed + 3) if case["is_nested"] else node


def over_prefetcher(case, seed, folder):
    node = ProcessPrefetcher(
        batched(case, drawn(case, sampled(case, seed), seed), seed), case["workers"], prefetch_factor=case["prefetch_factor"]
    )
    return node if case["place"] == "top" else SeededMapper(node, show, seed=seed + 4)


def over_mixer(case, seed, folder):
    sources = [
        drawn(case, sampled({**case, "length": length}, seed + 10 * length), seed + 10 * length, rng=rng)
        for length, rng in ((4, GENERATORS), (3, ("python", "torch")))
    ]
    weights = {0: [1, 2], 5: [3, 1]} if case["weights"] == "schedule" else [1, 2]
    return batched(case, Mixer(sources, weights, seed=seed + 5, stop_criteria=case["stop_criteria"]), seed)


def over_filter(case, seed, folder):
    length = 10  # 7 are kept, which 2 ranks cannot share
    keep = is_kept if case["keep"] == "function" else [is_kept(index) for index in range(length)]
    node = IndexFilter(sampled({**case, "length": length}, seed), keep)
    return batched(case, drawn(case, node, seed), seed)


def by_index(index):
    if index == 5:
        raise StopIteration
    return 10 * index


def by_batch(info):
    """Epochs of different lengths, with an empty one among them."""
    if info.iteration == (4, 0, 6)[info.epoch_idx % 3]:
        raise StopIteration
    return tuple(info)


def by_sample(info):
    if info.idx_in_epoch == (5, 7, 2)[info.epoch_idx % 3]:
        raise StopIteration
    return tuple(info)


def over_external(case, seed, folder):
    functions = {"index": by_index, "batch-info": by_batch, "sample-info": by_sample}
    kind = case["function"]
    node = ExternalSource(functions[kind], batch=kind != "sample-info", batch_info=kind == "batch-info")
    return batched({**case, "order": "", "drop_last": False}, drawn(case, node, seed), seed)


READERS = {
    "plain": {},
    "buffer-1": {"random_shuffle": True, "initial_fill": 1},
    "buffer-3": {"random_shuffle": True, "initial_fill": 3},
    "buffer-all": {"random_shuffle": True, "initial_fill": 100},
    "after-epoch": {"shuffle_after_epoch": True},
}


def reader_arguments(case):
    shard_id, num_shards = case["shard"]
    cut = {"shard_id": shard_id, "num_shards": num_shards, "stick_to_shard": case["stick"], "pad_last_batch": case["pad"]}
    return {**READERS[case["shuffle"]], **cut}


def over_files(case, seed, folder):
    seeds = {"seed": seed, "shuffle_after_epoch_seed": seed}
    node = FileReader(folder, file_filters="*.jpg", **seeds, **reader_arguments(case))
    return SeededBatcher(drawn(case, node, seed), case["batch_size"], collate_fn=drawing_collate, seed=seed + 2)


def over_foreign(case, seed, folder):
    held = case["held"]
    if held == "iterable":
        node = IterableWrapper(list(range(LENGTH)))
    elif held == "filter":
        node = Keep(IterableWrapper(range(2 * LENGTH)))
    elif held == "filter-over-ours":
        node = Keep(drawn(case, sampled({**case, "order": "random"}, seed), seed))
    elif held == "batcher-over-ours":
        node = Batcher(drawn(case, sampled({**case, "order": "random"}, seed), seed), 2, drop_last=False)
    else:
        node = Prefetcher(Mapper(sampled({**case, "order": "random"}, seed), str), prefetch_factor=2)
    return batched({**case, "order": ""}, drawn(case, node, seed), seed)


class Counted:
    """An iterable dataset with epochs and a state, as Hugging Face's: the state is forgotten where none is loaded."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def load_state_dict(self, state):
        self.read = state.get("read", 0)

    def state_dict(self):
        return {"read": self.read}

    def __iter__(self):
        while self.read < LENGTH:
            self.read += 1
            yield LENGTH * self.epoch + self.read - 1


def over_dataset(case, seed, folder):
    return batched({**case, "order": ""}, drawn(case, IterableDatasetReader(Counted(), replay=case["replay"]), seed), seed)


def over_pinned(case, seed, folder):
    node = batched(case, drawn(case, sampled(case, seed), seed), seed, "default")
    return PinnedMemory(ProcessPrefetcher(node, case["workers"]))


def images(folder, reader, device):
    encoded, label = fn.readers.file(file_root=folder, file_filters="*.jpg", name="reader", **reader)
    image = fn.decoders.image(encoded, device="mixed" if device == "mixed" else "cpu")
    image = fn.flip(image.gpu() if device == "gpu" else image, horizontal=fn.random.coin_flip())
    return image, label, fn.random.uniform(range=[0.0, 1.0])


def over_dali(case, seed, folder):
    device = case.get("device", "cpu")
    options = {"batch_size": case["batch_size"], "num_threads": 1, "device_id": None if device == "cpu" else 0}
    make = pipeline_def(images)

    def factory(checkpoint):
        # DALI takes its seeds from its checkpoint, but counts them among the arguments, which have to be equal.
        return make(folder, reader_arguments(case), device, checkpoint=checkpoint, enable_checkpointing=True, seed=7, **options)

    policy = case["last_batch_policy"]
    return DALIPipelineNode(factory, output_names=["image", "label", "drawn"], reader_name="reader", last_batch_policy=policy)


# The table.


@dataclass(frozen=True)
class Entry:
    """Pipelines that contain a node.

    Attributes:
        make: Callable of (case, seed, folder of files) that composes one.
        axes: By name the values that a case takes; a case has one of each.
        silent: The axes that must not show in the stream; each value of the others has to.
        is_possible: Whether there is such a pipeline.
        is_dear: Whether it takes long to make one.
        needs: What this machine has not; "" if nothing.
        workers: Whether a `ProcessPrefetcher` with workers may be put above it.
    """

    make: Callable[[Mapping[str, Any], int, str], Any]
    axes: Mapping[str, tuple[Any, ...]]
    silent: frozenset[str] = frozenset()
    is_possible: Callable[[Mapping[str, Any]], bool] = field(default=lambda case: True)
    is_dear: Callable[[Mapping[str, Any]], bool] = field(default=lambda case: False)
    needs: str = ""
    workers: bool = True

    def cases(self):
        """The full product, without what is not possible."""
        found = (dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values()))
        return [case for case in found if self.is_possible(case)]

    def spread(self):
        """Cases in which each pair of values of two axes comes that comes in any; always that which has most of those left."""
        left = {case_id(case): (case, set(combinations(case.items(), 2))) for case in self.cases()}
        chosen = []
        while left:
            best = max(left, key=lambda name: len(left[name][1]))
            case, pairs = left.pop(best)
            chosen.append(case)
            left = {name: (one, rest) for name, (one, found) in left.items() if (rest := found - pairs)}
        return chosen


def case_id(case):
    """Its values, readable."""
    shown = {axis: "-".join(map(str, value)) if isinstance(value, tuple) else value for axis, value in case.items()}
    return ",".join(f"{axis}={value}" for axis, value in shown.items())


BATCHES = {"batch_size": (3, 1, 2), "drop_last": (False, True)}
SHARES = {"share": ((0, 2), (1, 2), (0, 1)), "uneven": ("pad", "drop")}
SHUFFLES = {"order": ("random", "sequential")}
SHARDS = {
    "shuffle": tuple(READERS),
    "shard": ((0, 2), (1, 2), (0, 1), (2, 3)),
    "stick": (False, True),
    "pad": (False, True),
    "last_batch_policy": ("FILL", "PARTIAL", "DROP"),
    "batch_size": (2, 1, 3),
}


def _whole_samples(case):
    return case["share"][1] == 1 or case["batch_size"] % case["fan_out"] == 0


def _unbatched_whole(case):
    return case["batch_size"] is not None or not (case["drop_last"] or case["order"] in BATCH_ORDERS)


def _has_batches(case):
    shard_sizes = LENGTH // case["shard"][1]
    excluded = case["shuffle"] == "after-epoch" and case["stick"]
    return not excluded and (case["last_batch_policy"] != "DROP" or shard_sizes >= case["batch_size"])


def _is_dealt_below(case):
    alone = case["share"] == (0, 1) or "ours" in case["held"] or case["held"] == "threads-over-ours"
    return alone and (case["batch_size"] is not None or not case["drop_last"])


TABLE: dict[str, Entry] = {
    "SamplerNode": Entry(
        over_sampler,
        {"order": (*ORDERS, *BATCH_ORDERS), "batch_size": (3, 2, None), "drop_last": (False, True), **SHARES},
        is_possible=_unbatched_whole,
    ),
    "SeededMapper": Entry(
        over_mapper, {"rng": (GENERATORS, "generator", ()), "is_broken": (False, True), **SHUFFLES, **BATCHES, **SHARES}
    ),
    "SeededFlatMapper": Entry(
        over_flat_mapper,
        {"fan_out": (2, 3), "is_broken": (False, True), **SHUFFLES, **BATCHES, **SHARES},
        is_possible=_whole_samples,
    ),
    "SeededBatcher": Entry(
        over_batcher,
        {"collate": ("drawing", "default", "boxes"), "is_nested": (False, True), **SHUFFLES, **BATCHES, **SHARES},
    ),
    "ProcessPrefetcher": Entry(
        over_prefetcher,
        {
            "workers": (0, 1, 2),
            "prefetch_factor": (2, 1),
            "place": ("top", "middle"),
            **SHUFFLES,
            "batch_size": (3, 2),
            "share": SHARES["share"],
        },
        silent=frozenset({"workers", "prefetch_factor"}),
        is_dear=lambda case: case["workers"] > 0,
        workers=False,
    ),
    "Mixer": Entry(
        over_mixer,
        {
            "stop_criteria": (
                "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED",
                "ALL_DATASETS_EXHAUSTED",
                "FIRST_DATASET_EXHAUSTED",
                "CYCLE_FOREVER",
            ),
            "weights": ("plain", "schedule"),
            **SHUFFLES,
            **BATCHES,
            **SHARES,
        },
    ),
    "IndexFilter": Entry(
        over_filter,
        {"keep": ("function", "array"), "order": ("random", "sequential", "infinite"), **BATCHES, **SHARES},
        silent=frozenset({"keep"}),
    ),
    "ExternalSource": Entry(over_external, {"function": ("index", "batch-info", "sample-info"), "batch_size": (3, 1, 2, None)}),
    "FileReader": Entry(over_files, SHARDS, is_possible=_has_batches),
    "ForeignNode": Entry(
        over_foreign,
        {
            "held": ("filter-over-ours", "batcher-over-ours", "threads-over-ours", "iterable", "filter"),
            "batch_size": (3, 1, None),
            "drop_last": (False, True),
            **SHARES,
        },
        is_possible=_is_dealt_below,
        is_dear=lambda case: "threads" in case["held"],
    ),
    "IterableDatasetReader": Entry(over_dataset, {"replay": (False, True), **BATCHES}, silent=frozenset({"replay"})),
    "PinnedMemory": Entry(
        over_pinned, {"workers": (0, 2), **SHUFFLES, **BATCHES, **SHARES}, frozenset({"workers"}), needs=NO_CUDA
    ),
    "DALIPipelineNode": Entry(
        over_dali,
        {**SHARDS, "shuffle": ("plain", "buffer-3", "after-epoch")},
        is_possible=_has_batches,
        is_dear=lambda case: True,
        needs=NO_DALI,
    ),
}

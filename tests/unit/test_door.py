"""torch's DataLoader parameters: what each one means here, and what is refused and why."""

from __future__ import annotations

import multiprocessing
import random
import warnings

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, MapDataPipe, Subset, TensorDataset
from torch.utils.data import SequentialSampler as TorchSequentialSampler
from torch.utils.data.datapipes.map import SequenceWrapper

from stateful_pipes import (
    InfiniteRandomSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.contract import walk
from stateful_pipes.door import DatasetArguments
from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError
from tests.streams import DrawingDataset, drawing_collate, generator_states, same

DATASET = list(range(10))


def prefetcher(loader):
    (found,) = (node for node in walk(loader.pipeline) if isinstance(node, ProcessPrefetcher))
    return found


# What each parameter means.


@pytest.mark.parametrize("batch_size", [1, 3, 10, 100, None])
@pytest.mark.parametrize("drop_last", [False, True])
def test_in_order_it_gives_what_torch_s_loader_gives(batch_size, drop_last):
    if drop_last and (batch_size is None or batch_size > 10):
        return
    dataset = TensorDataset(torch.arange(10), torch.rand(10, 2))
    ours, torchs = (kind(dataset, batch_size=batch_size, drop_last=drop_last) for kind in (StatefulDataLoader, DataLoader))
    assert same(list(ours), list(torchs))
    assert same(list(ours), list(torchs))  # the next epoch


def test_defaults_are_torch_s():
    assert same(list(StatefulDataLoader(DATASET)), list(DataLoader(DATASET)))


@pytest.mark.parametrize("kwargs", [{}, {"collate_fn": list}, {"shuffle": False}], ids=str)
def test_positional_arguments_in_torch_s_order(kwargs):
    loader = StatefulDataLoader(DATASET, 4, False, None, None, 0, list, False, True)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shuffle_is_a_new_permutation_each_epoch():
    loader = StatefulDataLoader(DATASET, batch_size=10, shuffle=True, seed=1)
    epochs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert all(sorted(epoch) == DATASET for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("shuffle", [None, False])
def test_without_shuffle_it_is_the_dataset_s_order(shuffle):
    assert torch.cat(list(StatefulDataLoader(DATASET, shuffle=shuffle))).tolist() == DATASET


SAMPLERS = [RandomSampler(10, seed=3), InfiniteRandomSampler(100, seed=3), SequentialSampler(4)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_sampler(sampler):
    expected = [index for index, _ in zip(sampler, range(4), strict=False)]
    loader = StatefulDataLoader(range(100), sampler=sampler, batch_size=4, shuffle=False)
    assert next(iter(loader)).tolist() == expected


def test_batch_size_none_gives_samples_as_torch_does():
    samples = [np.ones(2), 3, "x", {"a": np.zeros(1)}]
    assert same(list(StatefulDataLoader(samples, batch_size=None)), list(DataLoader(samples, batch_size=None)))


def test_collate_fn_takes_samples_and_runs_under_a_seed():
    loaders = [StatefulDataLoader(DATASET, batch_size=4, collate_fn=drawing_collate, seed=1) for _ in range(2)]
    random.seed(1)
    one = list(loaders[0])
    random.seed(2)
    assert same(list(loaders[1]), one)
    unbatched = [list(StatefulDataLoader(DATASET, None, collate_fn=lambda x: (x, random.random()), seed=1)) for _ in range(2)]
    assert unbatched[0] == unbatched[1]
    assert [item for item, _ in unbatched[0]] == DATASET
    assert len({draw for _, draw in unbatched[0]}) == 10


def test_rng_chooses_what_is_seeded():
    dataset = DrawingDataset(6)

    def draws(rng, caller):
        random.seed(caller)
        np.random.seed(caller)
        torch.manual_seed(caller)
        return [sample for (sample,) in StatefulDataLoader(dataset, collate_fn=list, seed=1, rng=rng)]

    for rng in (("python", "numpy", "torch"), ("python",), ("torch",), ()):
        one, other = draws(rng, 1), draws(rng, 2)
        for column, name in ((1, "python"), (2, "numpy"), (3, "torch")):
            assert same([s[column] for s in one], [s[column] for s in other]) is (name in rng)


def test_getitems_is_used_with_an_empty_rng_only():
    class Dataset(DrawingDataset):
        def __getitems__(self, indices):
            return [f"item {index}" for index in indices]

    for rng, expected in [((), "item 0"), (("torch",), 0)]:
        (sample, *_) = next(iter(StatefulDataLoader(Dataset(3), collate_fn=list, rng=rng, seed=1)))
        assert (sample if rng == () else sample[0]) == expected


def test_a_subset_works_with_every_rng():
    for rng in ((), ("torch",)):
        loader = StatefulDataLoader(Subset(DATASET, [7, 3, 5]), batch_size=2, rng=rng)
        assert [batch.tolist() for batch in loader] == [[7, 3], [5]]


def test_generator_gives_the_seed_once():
    def make(**kwargs):
        return StatefulDataLoader(DrawingDataset(10), collate_fn=list, shuffle=True, **kwargs)

    before = generator_states()
    one, other = (make(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    make(generator=generator)
    after = generator.get_state()
    expected = torch.Generator().manual_seed(3)
    torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert torch.equal(after, expected.get_state())
    assert generator_states() == before
    assert same(list(one), list(other))
    assert not same(list(make(generator=generator)), list(make(generator=torch.Generator().manual_seed(3))))


def test_generator_is_for_the_order_and_seed_for_the_rest():
    def make(order, seed):
        loader = StatefulDataLoader(DrawingDataset(10), collate_fn=list, shuffle=True, generator=order, seed=seed)
        return [sample for (sample,) in loader]

    def indices(samples):
        return [index for index, *_ in samples]

    def draws(samples):
        return [draw for _, draw, *_ in samples]

    base = make(torch.Generator().manual_seed(3), 1)
    other_seed = make(torch.Generator().manual_seed(3), 2)
    other_order = make(torch.Generator().manual_seed(4), 1)
    assert indices(base) == indices(other_seed) != indices(other_order)
    assert draws(base) == draws(other_order) != draws(other_seed)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("rng", [(), ("python", "numpy", "torch"), ("torch",)])
def test_one_draw_at_construction_and_none_with_a_seed(shuffle, collate_fn, rng):
    random.seed(5)
    np.random.seed(5)
    np.random.standard_normal()
    torch.manual_seed(5)
    expected_seed = int(torch.empty((), dtype=torch.int64).random_())
    after = generator_states()
    torch.manual_seed(5)
    loader = StatefulDataLoader(DATASET, shuffle=shuffle, collate_fn=collate_fn, rng=rng)
    assert generator_states() == after
    assert loader.state_dict()["nodes"]["batcher"]["seed"] == expected_seed
    before = generator_states()
    StatefulDataLoader(DATASET, shuffle=shuffle, collate_fn=collate_fn, rng=rng, seed=5)
    assert generator_states() == before


def test_all_seeds_are_the_given_one():
    nodes = StatefulDataLoader(DATASET, shuffle=True, seed=5).state_dict()["nodes"]
    assert {name: entry["seed"] for name, entry in nodes.items()} == {"sampler": 5, "mapper": 5, "batcher": 5}


def test_worker_settings_reach_the_pool():
    context = multiprocessing.get_context("forkserver")
    init = abs
    loader = StatefulDataLoader(
        DATASET,
        num_workers=3,
        timeout=7,
        worker_init_fn=init,
        multiprocessing_context=context,
        prefetch_factor=5,
        persistent_workers=True,
    )
    node = prefetcher(loader)
    assert (node.num_workers, node.timeout, node.worker_init_fn, node.context, node.prefetch_factor) == (3, 7, init, context, 5)
    assert prefetcher(StatefulDataLoader(DATASET, num_workers=3)).prefetch_factor == 2


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_live_on_either_way(persistent_workers):
    with StatefulDataLoader(
        DATASET, num_workers=1, persistent_workers=persistent_workers, multiprocessing_context="fork"
    ) as loader:
        list(loader)
        first_epoch = {child.pid for child in multiprocessing.active_children()}
        list(loader)
        assert {child.pid for child in multiprocessing.active_children()} == first_epoch != set()


def test_worker_info_shows_the_dataset():
    class Dataset:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            info = torch.utils.data.get_worker_info()
            return info.num_workers, type(info.dataset).__name__, info.dataset is self

    with StatefulDataLoader(Dataset(), batch_size=None, num_workers=1, multiprocessing_context="fork") as loader:
        assert list(loader) == [[1, "Dataset", True]] * 2  # torch converts tuples to lists


@pytest.mark.parametrize(
    "dataset",
    [
        range(4),
        (5, 6, 7, 8),
        "abcd",
        np.arange(4),
        torch.arange(4),
        {0: "a", 1: "b", 2: "c", 3: "d"},
        DrawingDataset(4),
        TensorDataset(torch.arange(4)),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_anything_with_getitem_and_len_is_a_dataset(dataset):
    assert len(list(StatefulDataLoader(dataset, batch_size=2, collate_fn=list))) == 2


@pytest.mark.parametrize("dataset", [torch.tensor([7]), np.array([7]), torch.tensor([7, 8])], ids=str)
def test_a_tensor_of_one_number_is_no_length(dataset):
    assert len(StatefulDataLoader(dataset, shuffle=True)) == len(RandomSampler(dataset)) == len(dataset)


# What is refused at construction.


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Stateful(DrawingDataset):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def refused(error, dataset=DATASET, **kwargs):
    before = generator_states()
    with pytest.raises(error) as caught:
        StatefulDataLoader(dataset, **{"seed": 1, **kwargs})
    assert generator_states() == before
    return str(caught.value)


def test_an_iterable_dataset():
    text = refused(ResumableModeRequiredError, Stream())
    for word in ("Stream", "IterableDataset", "IterableWrapper"):
        assert word in text


def test_a_map_data_pipe():
    text = refused(ResumableModeRequiredError, SequenceWrapper(range(3)))
    assert isinstance(SequenceWrapper(range(3)), MapDataPipe)
    for word in ("SequenceWrapper", "MapDataPipe", "SamplerNode", "SeededMapper"):
        assert word in text


def test_the_nodes_named_for_those_work():
    assert list(StatefulDataLoader(tn.IterableWrapper(Stream()))) == [0, 1, 2]
    pipe = SequenceWrapper([5, 6, 7])
    assert list(StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(3)), pipe.__getitem__))) == [5, 6, 7]


def test_a_dataset_with_a_state_of_its_own():
    text = refused(ResumableModeRequiredError, Stateful(3))
    for word in ("Stateful", "state of its own", "__getitem__"):
        assert word in text


def test_out_of_order():
    assert "in_order=False" in refused(ValueError, in_order=False)


TORCHS = BatchSampler(TorchSequentialSampler(DATASET), 2, drop_last=False)


@pytest.mark.parametrize("batch_sampler", [TORCHS, [[0, 1], [2]]], ids=["torch", "list"])
def test_a_foreign_batch_sampler(batch_sampler):
    text = refused(ResumableModeRequiredError, batch_sampler=batch_sampler)
    assert type(batch_sampler).__name__ in text
    assert "batch sampler of stateful_pipes" in text


@pytest.mark.parametrize(
    "sampler",
    [
        TorchSequentialSampler(DATASET),
        torch.utils.data.RandomSampler(DATASET),
        torch.utils.data.SubsetRandomSampler([1]),
        [1, 2],
        torch.arange(2),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_foreign_sampler(sampler):
    text = refused(ResumableModeRequiredError, sampler=sampler)
    assert type(sampler).__name__ in text
    assert "OrderSampler" in text


@pytest.mark.parametrize("base", [RandomSampler, SequentialSampler, InfiniteRandomSampler])
def test_a_subclass_of_a_sampler(base):
    class Mine(base):
        pass

    text = refused(ResumableModeRequiredError, sampler=Mine(10))
    assert f"Mine is a subclass of {base.__name__}" in text


@pytest.mark.parametrize("dataset", [[], {}, range(0), torch.zeros(0)], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_empty_dataset(dataset, shuffle):
    assert "nothing to sample from" in refused(ResumableBatchConfigurationError, dataset, shuffle=shuffle)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("change", [lambda dataset: dataset.append(3), lambda dataset: dataset.pop()], ids=["grown", "shrunk"])
def test_a_dataset_of_another_length_than_before(change, resumable, num_workers):
    dataset = [0, 1, 2]
    with StatefulDataLoader(dataset, num_workers=num_workers, resumable=resumable) as loader:
        assert len(list(loader)) == 3
        change(dataset)
        with pytest.raises(ResumableBatchConfigurationError, match=f"expected 3, found {len(dataset)}.*Make another loader"):
            iter(loader)


def test_settings_without_a_batch():
    text = refused(ResumableBatchConfigurationError, batch_size=11, drop_last=True)
    for word in ("11", "10", "dropped"):
        assert word in text
    assert ResumableBatchConfigurationError.code == 338


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": -1}, ValueError, "batch_size must be at least 1, got -1"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an integer, got 2.5"),
        ({"batch_size": "2"}, TypeError, "batch_size must be an integer, got '2'"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer, got True"),
        ({"batch_size": None, "drop_last": True}, ValueError, "drop_last=True"),
        ({"sampler": SequentialSampler(10), "shuffle": True}, ValueError, "sampler and shuffle=True"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an integer, got 1.5"),
        ({"num_workers": None}, TypeError, "num_workers must be an integer, got None"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be callable, got 3"),
        ({"collate_fn": 3, "batch_size": None}, TypeError, "must be callable, got 3"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"worker_init_fn": 3, "num_workers": 1}, TypeError, "worker_init_fn must be callable, got 3"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, ValueError, "got 'thread'"),
        ({"multiprocessing_context": 3, "num_workers": 1}, TypeError, "got 3"),
        ({"multiprocessing_context": "fork"}, ValueError, "multiprocessing_context='fork' has no meaning with num_workers=0"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor=2 has no meaning with num_workers=0"),
        ({"prefetch_factor": 0, "num_workers": 1}, ValueError, "prefetch_factor must be at least 1, got 0"),
        ({"persistent_workers": True}, ValueError, "persistent_workers=True has no meaning with num_workers=0"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator, got 3"),
        ({"seed": -1}, ValueError, "seed must be from 0 to 2**64 - 1, got -1"),
        ({"seed": 2**64}, ValueError, f"got {2**64}"),
        ({"seed": 1.0}, TypeError, "seed must be an integer, got 1.0"),
        ({"seed": True}, TypeError, "seed must be an integer, got True"),
        ({"rng": "torch"}, ValueError, "rng must be"),
        ({"rng": ("cuda",)}, ValueError, "'cuda'"),
        ({"rng": None}, ValueError, "rng must be"),
    ],
)
def test_wrong_arguments(kwargs, error, words):
    assert words in refused(error, **kwargs)


@pytest.mark.parametrize("dataset", [None, 3, iter([1]), (x for x in [1]), {1, 2}, object(), abs], ids=lambda d: type(d).__name__)
def test_something_else_is_no_dataset(dataset):
    text = refused(TypeError, dataset)
    assert "map-style dataset" in text
    assert type(dataset).__name__ in text


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_without_length_needs_an_order(shuffle):
    class Endless:
        def __getitem__(self, index):
            return index

    assert "sized dataset" in refused(TypeError, Endless(), shuffle=shuffle)
    assert next(iter(StatefulDataLoader(Endless(), sampler=SequentialSampler(10**9), batch_size=3))).tolist() == [0, 1, 2]


def test_unknown_arguments():
    with pytest.raises(TypeError, match="unexpected keyword"):
        StatefulDataLoader(DATASET, snapshot_every_n_steps=3)
    with pytest.raises(TypeError, match="positional"):
        StatefulDataLoader(DATASET, 1, None, None, None, 0, None, False, False, 0, None, None, None, 2)


BESIDE_A_NODE = {
    "batch_size": 2,
    "shuffle": True,
    "sampler": SequentialSampler(3),
    "batch_sampler": [[0]],
    "num_workers": 2,
    "collate_fn": list,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 3,
    "worker_init_fn": abs,
    "multiprocessing_context": "fork",
    "generator": torch.Generator(),
    "prefetch_factor": 2,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
    "in_order": False,
    "seed": 1,
    "rng": (),
    "reseed": abs,
    "max_skipped": 1,
    "max_restarts": 1,
    "fingerprint": "v1",
}


@pytest.mark.parametrize(("name", "value"), BESIDE_A_NODE.items(), ids=list(BESIDE_A_NODE))
def test_beside_a_node_everything_is_said_by_the_nodes(name, value):
    with pytest.raises(ValueError, match=f"{name} given beside a node"):
        StatefulDataLoader(SamplerNode(SequentialSampler(3)), **{name: value})


def test_beside_a_node_all_are_named_at_once():
    with pytest.raises(ValueError, match="batch_size, shuffle, seed given beside a node"):
        StatefulDataLoader(SamplerNode(SequentialSampler(3)), batch_size=2, shuffle=True, seed=1)


def test_beside_a_node_the_defaults_may_be_written_out():
    StatefulDataLoader(
        SamplerNode(SequentialSampler(3)), batch_size=1, num_workers=0, drop_last=False, seed=None, checkpoint=None
    )


def test_every_parameter_of_the_dataset_door_is_checked_beside_a_node():
    assert set(BESIDE_A_NODE) - {"in_order"} == set(DatasetArguments._fields) - {"dataset", "resumable"}


def test_nothing_is_warned_of_in_everyday_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(StatefulDataLoader(DATASET, batch_size=2, shuffle=True))

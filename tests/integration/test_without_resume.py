"""A loader with `resumable=False`: what torch's DataLoader yields, from any sampler; and batch samplers with resume."""

from __future__ import annotations

import json
import logging
import os
import signal
from itertools import count as count_up
from itertools import islice

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from stateful_pipes import (
    ClassBalancedBatchSampler,
    InfiniteRandomSampler,
    NaiveBatchSampler,
    OrderSampler,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    build_batch_sampler,
)
from stateful_pipes.errors import (
    IteratorInvalidError,
    LoaderFailedError,
    ResumableBatchConfigurationError,
    ResumableModeRequiredError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from tests.integration.pipelines import take, worker_pids
from tests.streams import DrawingDataset, disturb, drawing_collate, generator_states, place_of, same

LENGTH = 11
DATASET = [100 + index for index in range(LENGTH)]
WORKERS = [0, 2]


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def loader_of(dataset=DATASET, workers=0, **options):
    if workers:
        options = {"num_workers": workers, "multiprocessing_context": "fork", **options}
    return StatefulDataLoader(dataset, resumable=False, **options)


def epochs(loader, count=3):
    read = []
    for epoch in range(count):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        read.append([])
        for batch in loader:
            read[-1].append(batch)
            disturb()
    return read


class Watched:
    """A sampler that says when it is asked."""

    def __init__(self, length=LENGTH):
        self.length, self.begun = length, 0

    def __iter__(self):
        self.begun += 1
        return iter(range(self.length))


class Generated(Sampler[int]):
    """A generator function whose order is another each time, without a length."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for step in range(LENGTH):
            yield step * self.passes % LENGTH


class Grouped(Sampler[list[int]]):
    """Batches of different sizes, another order each epoch."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
        yield from batches[self.passes % 5 :] + batches[: self.passes % 5]

    def __len__(self):
        return 5


class Backwards(RandomSampler):
    """A subclass of ours that changes the iteration."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


# The same stream as torch's.


SAMPLERS = {
    "none": lambda: {},
    "list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2, 6]},
    "empty list": lambda: {"sampler": []},
    "range": lambda: {"sampler": range(0, LENGTH, 2)},
    "sequential": lambda: {"sampler": TorchSequentialSampler(DATASET)},
    "random": lambda: {"sampler": TorchRandomSampler(DATASET, generator=seeded())},
    "random with replacement": lambda: {
        "sampler": TorchRandomSampler(DATASET, replacement=True, num_samples=45, generator=seeded())
    },
    "subset": lambda: {"sampler": SubsetRandomSampler([2, 5, 7, 9], generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 20, generator=seeded())},
    "distributed": lambda: {"sampler": DistributedSampler(DATASET, 3, 1, seed=5)},
    "generator function": lambda: {"sampler": Generated()},
    "tensor": lambda: {"sampler": torch.tensor([4, 2, 0])},
    "ours": lambda: {"sampler": RandomSampler(LENGTH, seed=3, resumable=False)},
    "a subclass of ours": lambda: {"sampler": Backwards(LENGTH, seed=3, resumable=False)},
}
SHAPES = [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}, {"batch_size": 100}]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler(name, shape, workers):
    if workers and shape not in ({"batch_size": 4}, {"batch_size": None}):
        return
    if name in ("empty list", "tensor") and shape.get("drop_last"):
        return  # refused, as every batch would be dropped
    make = SAMPLERS[name]
    theirs = DataLoader(DATASET, **make(), **shape)
    with loader_of(workers=workers, **make(), **shape) as ours:
        assert same(epochs(ours), epochs(theirs))


BATCH_SAMPLERS = {
    "torch's": lambda: BatchSampler(TorchRandomSampler(DATASET, generator=seeded()), 4, False),
    "torch's, dropping": lambda: BatchSampler(TorchRandomSampler(DATASET, generator=seeded()), 4, True),
    "over one of ours": lambda: BatchSampler(RandomSampler(LENGTH, seed=3, resumable=False), 4, False),
    "list": lambda: [[1, 2], [3], (4, 5, 6)],
    "batches of different lengths": Grouped,
    "tensors": lambda: [torch.tensor([1, 2]), torch.tensor([3])],
    "ours": lambda: NaiveBatchSampler(LENGTH, 4, repeat=False, drop_last=False, seed=3, resumable=False),
    "balanced": lambda: build_batch_sampler(
        "balance", DATASET, 4, labels=[0] * 8 + [1] * 3, repeat=False, drop_last=False, seed=3, resumable=False
    ),
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_any_batch_sampler(name, workers):
    theirs = DataLoader(DATASET, batch_sampler=BATCH_SAMPLERS[name]())
    with loader_of(workers=workers, batch_sampler=BATCH_SAMPLERS[name]()) as ours:
        assert same(epochs(ours), epochs(theirs))


@pytest.mark.parametrize("workers", WORKERS)
def test_batches_as_a_sampler_s_items(workers):
    """torch's way to have a dataset read a batch at once."""
    make = lambda: BatchSampler(TorchSequentialSampler(DATASET), 4, False)  # noqa: E731
    dataset = torch.arange(LENGTH)
    with loader_of(dataset, workers, sampler=make(), batch_size=None) as ours:
        assert same(epochs(ours), epochs(DataLoader(dataset, sampler=make(), batch_size=None)))


@pytest.mark.parametrize("workers", WORKERS)
def test_shuffle_is_another_permutation_each_time(workers):
    with loader_of(workers=workers, batch_size=4, shuffle=True, seed=1) as loader:
        read = [tuple(torch.cat(epoch).tolist()) for epoch in epochs(loader)]
    assert all(sorted(epoch) == DATASET for epoch in read)
    assert len(set(read)) == 3
    assert read == [tuple(torch.cat(epoch).tolist()) for epoch in epochs(loader_of(batch_size=4, shuffle=True, seed=1))]


class Endless:
    """Indices without end, in another order each pass."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return (step * self.passes % LENGTH for step in count_up())


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("make", [lambda: InfiniteRandomSampler(LENGTH, seed=3, resumable=False), Endless])
def test_an_endless_sampler(make, workers):
    theirs = make()
    with loader_of(workers=workers, sampler=make(), batch_size=4) as loader:
        with pytest.raises(TypeError):
            len(loader)
        for _ in range(3):
            expected = [DATASET[index] for index in islice(theirs, 60)]
            assert torch.cat(take(iter(loader), 15)).tolist() == expected


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}], ids=str)
def test_len_is_torch_s(options):
    for sampler in (None, [1, 2, 3, 4, 5], TorchRandomSampler(DATASET)):
        ours, theirs = loader_of(sampler=sampler, **options), DataLoader(DATASET, sampler=sampler, **options)
        assert len(ours) == len(theirs)
    for kind in (loader_of, lambda **kwargs: DataLoader(DATASET, **kwargs)):
        with pytest.raises(TypeError):
            len(kind(sampler=Generated(), **options))
    assert len(loader_of(batch_sampler=Grouped())) == 5


# Each iter() is a new pass.


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_break_in_the_middle(workers, at):
    dataset = DrawingDataset(LENGTH)
    with loader_of(dataset, workers, sampler=Watched(), batch_size=4, collate_fn=list, seed=5) as loader:
        passes = []
        for _ in range(3):
            take(iter(loader), at)
            passes.append(list(loader))
        assert [[sample[0] for batch in one for sample in batch] for one in passes] == [list(range(LENGTH))] * 3
        assert loader.sampler.begun == (6 if at else 3)
        assert place_of(loader) == ((6 if at else 3), 0)
        # The draws are another pass's, and the same as without workers.
        assert len({float(one[0][0][1]) for one in passes}) == 3
        inline = loader_of(dataset, sampler=Watched(), batch_size=4, collate_fn=list, seed=5)
        take(iter(inline), at)
        assert same(list(inline), passes[0])


@pytest.mark.parametrize("workers", WORKERS)
def test_an_older_iterator_is_told(workers):
    with loader_of(workers=workers, batch_size=4) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        with pytest.raises(IteratorInvalidError):
            next(older)
        assert torch.cat(list(newer)).tolist() == DATASET
        with pytest.raises(StopIteration):
            next(newer)


@pytest.mark.parametrize("workers", WORKERS)
def test_two_iterators_at_once_do_not_share_the_stream_in_silence(workers):
    with loader_of(workers=workers, batch_size=4) as loader:
        older, newer = iter(loader), iter(loader)
        with pytest.raises(IteratorInvalidError):
            next(older)
        assert torch.cat(list(newer)).tolist() == DATASET


@pytest.mark.parametrize("workers", WORKERS)
def test_the_sampler_is_asked_for_the_first_batch_and_not_before(workers):
    sampler = Watched()
    with loader_of(workers=workers, sampler=sampler, batch_size=4) as loader:
        for epoch in range(3):
            iterator = iter(loader)
            assert sampler.begun == epoch
            next(iterator)
            assert sampler.begun == epoch + 1
            assert len(list(iterator)) == 2
            assert sampler.begun == epoch + 1


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_set_epoch_of_a_distributed_sampler_counts_for_the_next_pass(workers, batch_size):
    sampler = DistributedSampler(DATASET, 2, 0, seed=5)
    with loader_of(workers=workers, sampler=sampler, batch_size=batch_size) as loader:
        for epoch in (0, 1, 7, 2):
            loader.sampler.set_epoch(epoch)
            found = torch.cat(list(loader)).tolist()
            other = DistributedSampler(DATASET, 2, 0, seed=5)
            other.set_epoch(epoch)
            assert found == [DATASET[index] for index in other]


class Fragile(DrawingDataset):
    """What a function does first, in the process that reads."""

    def __init__(self, before):
        super().__init__(LENGTH)
        self.before = before

    def __getitem__(self, index):
        self.before(index)
        return super().__getitem__(index)


def fail_at(path, *indices):
    """Raises once for each index, whichever process reads it."""

    def before(index):
        marker = path / str(index)
        if index in indices and not marker.exists():
            marker.touch()
            raise OSError(f"sample {index}")

    return before


def numbers(batches):
    return [sample[0] for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("at", [0, 5, 10])
def test_after_an_error_iter_is_a_new_pass(workers, at, tmp_path):
    dataset = Fragile(fail_at(tmp_path, at))
    options = {"sampler": Watched(), "batch_size": 4, "collate_fn": list, "seed": 5}
    with loader_of(dataset, workers, **options) as loader:
        iterator = iter(loader)
        with pytest.raises(OSError, match=f"sample {at}") as caught:
            list(iterator)
        assert f"position {at}, index {at}" in "".join(caught.value.__notes__)
        with pytest.raises(LoaderFailedError):
            next(iterator)
        read = list(loader)
        assert numbers(read) == list(range(LENGTH))
        assert loader.sampler.begun == 2
        assert place_of(loader) == (2, 0)
    inline = loader_of(DrawingDataset(LENGTH), **options)
    list(inline)
    assert same(read, list(inline))  # the draws are those of the second pass


@pytest.mark.parametrize("workers", WORKERS)
def test_after_close_iter_is_a_new_pass(workers):
    with loader_of(workers=workers, batch_size=4) as loader:
        for consumed in (0, 1, 3):
            iterator = iter(loader)
            take(iterator, consumed)
            loader.close()
            with pytest.raises(IteratorInvalidError):
                next(iterator)
            assert torch.cat(list(loader)).tolist() == DATASET
    assert not worker_pids()


@pytest.mark.parametrize("workers", WORKERS)
def test_after_an_error_of_the_sampler_iter_is_a_new_pass(workers):
    class Failing(Watched):
        def __iter__(self):
            self.begun += 1
            yield from range(5)
            if self.begun == 1:
                raise KeyError("the list is gone")
            yield from range(5, LENGTH)

    with loader_of(workers=workers, sampler=Failing(), batch_size=2, collate_fn=list) as loader:
        read = []
        with pytest.raises(KeyError, match="the list is gone") as caught:
            read.extend(sample for batch in loader for sample in batch)
        assert read == DATASET[:4]
        assert any("in node 'sampler' at epoch 0, position 4" in note for note in caught.value.__notes__)
        assert [sample for batch in loader for sample in batch] == DATASET


@pytest.mark.parametrize("workers", WORKERS)
def test_set_epoch_of_a_sampler_of_ours_chooses_the_next_pass(workers):
    """Training frameworks call it on any sampler that has it."""
    whole = epochs(loader_of(batch_size=4, shuffle=True, seed=1))
    with loader_of(workers=workers, batch_size=4, shuffle=True, seed=1) as loader:
        for epoch in (0, 1, 0, 2):
            loader.sampler.set_epoch(epoch)
            assert same(list(loader), whole[epoch])


def test_after_an_interrupt_iter_is_a_new_pass():
    stop = [3, 7]

    def interrupt(index):
        if index in stop:
            stop.remove(index)
            raise KeyboardInterrupt

    loader = loader_of(Fragile(interrupt), batch_size=2, collate_fn=list)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    assert numbers(loader) == list(range(LENGTH))


@pytest.mark.parametrize("workers", WORKERS)
def test_restart_and_set_epoch_begin_anew(workers):
    options = {"sampler": Watched(), "batch_size": 4, "collate_fn": list, "seed": 5}
    inline = loader_of(DrawingDataset(LENGTH), **options)
    whole = [list(inline) for _ in range(3)]
    with loader_of(DrawingDataset(LENGTH), workers, **{**options, "sampler": Watched()}) as loader:
        next(iter(loader))
        loader.restart()
        assert same(list(loader), whole[0])
        loader.set_epoch(2)
        assert same(list(loader), whole[2])
        loader.set_epoch(1)
        assert same(list(loader), whole[1])


# Seeds.


@pytest.mark.parametrize("name", ["none", "random", "generator function", "distributed"])
def test_workers_do_not_show_in_the_draws(name):
    options = {"batch_size": 3, "collate_fn": drawing_collate, "seed": 5}
    dataset = DrawingDataset(LENGTH)
    inline = epochs(loader_of(dataset, **SAMPLERS[name](), **options))
    for workers in (1, 2):
        with loader_of(dataset, workers, **SAMPLERS[name](), **options) as loader:
            assert same(epochs(loader), inline)
    assert len({batch["draws"][0] for epoch in inline for batch in epoch}) == 3 * len(inline[0])


@pytest.mark.parametrize("workers", WORKERS)
def test_the_caller_s_generators_are_left_alone(workers):
    with loader_of(DrawingDataset(LENGTH), workers, batch_size=4, collate_fn=drawing_collate, shuffle=True) as loader:
        before = generator_states()
        for _ in range(2):
            list(loader)
            next(iter(loader))
        assert generator_states() == before


def test_a_sample_draws_by_its_pass_and_position():
    node = SeededMapper(SamplerNode(SequentialSampler(LENGTH)), DrawingDataset(LENGTH).__getitem__, seed=5)
    samples = StatefulDataLoader(node)
    loader = loader_of(DrawingDataset(LENGTH), sampler=Watched(), batch_size=3, collate_fn=list, seed=5)
    for _ in range(2):
        assert same([sample for batch in loader for sample in batch], list(samples))


# Faults.


@pytest.mark.parametrize("batches", [False, True])
def test_killed_workers_do_not_show(batches, tmp_path):
    def die_once(index):
        if index in (0, 4, 10) and not (tmp_path / str(index)).exists():
            (tmp_path / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    make = lambda: {"batch_sampler": Grouped()} if batches else {"sampler": Generated(), "batch_size": 3}  # noqa: E731
    options = {"collate_fn": list, "seed": 5}
    inline = epochs(loader_of(DrawingDataset(LENGTH), **make(), **options))
    with loader_of(Fragile(die_once), 2, **make(), **options) as loader:
        assert same(epochs(loader), inline)
        assert loader.stats()["restarts"] == 3


def test_a_worker_that_always_dies_ends_the_pass_and_iter_is_a_new_one(tmp_path):
    def die(index):
        if index == 5 and len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with loader_of(Fragile(die), 1, batch_size=4, collate_fn=list, max_restarts=1) as loader:
        iterator = iter(loader)
        assert numbers([next(iterator)]) == [0, 1, 2, 3]
        with pytest.raises(WorkerDiedError, match="5"):
            next(iterator)
        assert numbers(loader) == list(range(LENGTH))


def test_a_timeout_ends_the_pass_and_iter_is_a_new_one(tmp_path):
    def stop(index):
        if index == 5 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            signal.pause()

    with loader_of(Fragile(stop), 1, batch_size=4, collate_fn=list, timeout=0.3) as loader:
        iterator = iter(loader)
        take(iterator, 1)
        with pytest.raises(WorkerTimeoutError):
            next(iterator)
        with pytest.raises(LoaderFailedError):
            next(iterator)
        loader.pipeline.timeout = 0  # the rest may take its time
        assert numbers(loader) == list(range(LENGTH))


@pytest.mark.parametrize("workers", WORKERS)
def test_max_skipped(workers, caplog):
    def bad(index):
        if index in (2, 7):
            raise OSError(f"no sample {index}")

    with (
        loader_of(Fragile(bad), workers, sampler=Watched(), batch_size=4, collate_fn=list, max_skipped=5) as loader,
        caplog.at_level(logging.WARNING, "stateful_pipes"),
    ):
        for passes in (1, 2):
            read = list(loader)
            assert [[sample[0] for sample in batch] for batch in read] == [[0, 1, 3], [4, 5, 6], [8, 9, 10]]
            assert loader.stats()["skipped"] == 2 * passes
        with pytest.raises(OSError, match="no sample"):
            list(loader)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_empty_batch(workers):
    with loader_of(workers=workers, batch_sampler=[[1], [], [2]]) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [101]
        with pytest.raises(ResumableBatchConfigurationError, match="the list gave an empty batch"):
            next(iterator)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_index_that_is_not_there(workers):
    with loader_of(workers=workers, sampler=[1, 50], batch_size=2) as loader:
        with pytest.raises(IndexError) as caught:
            list(loader)
        assert "epoch 0, position 1, index 50, of a dataset that has 11 here" in "".join(caught.value.__notes__)


def test_a_loader_that_is_dropped_in_the_middle_leaves_no_workers():
    loader = loader_of(workers=2, batch_size=2)
    next(iter(loader))
    assert len(worker_pids()) == 2
    del loader
    assert not worker_pids()


# What it has not, and what does not go together.


def test_there_is_no_state(tmp_path):
    loader = loader_of(batch_size=4)
    state = StatefulDataLoader(DATASET, batch_size=4).state_dict()
    for refused in (
        loader.state_dict,
        lambda: loader.load_state_dict(state),
        lambda: loader.load_state_dict({}),
        loader.checkpoint,
        lambda: loader.checkpoint(tmp_path / "state"),
        lambda: loader_of(batch_size=4, checkpoint=state),
    ):
        with pytest.raises(ResumableModeRequiredError, match=r"resumable=False.*resumable=True"):
            refused()
    assert not (tmp_path / "state").exists()
    assert not loader.is_restored_from_checkpoint
    assert torch.cat(list(loader)).tolist() == DATASET


RESUMABLE = {
    "sampler": lambda resumable: {"sampler": RandomSampler(LENGTH, resumable=resumable)},
    "order": lambda resumable: {"sampler": OrderSampler(Strided(), resumable=resumable)},
    "batch sampler": lambda resumable: {"batch_sampler": NaiveBatchSampler(LENGTH, 4, resumable=resumable)},
    "balanced": lambda resumable: {
        "batch_sampler": ClassBalancedBatchSampler(DATASET, 4, labels=[0] * LENGTH, resumable=resumable)
    },
}


class Strided:
    def indices(self, seed, epoch, positions):
        return list(positions)


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_sampler_with_resume_in_a_loader_without(name):
    (sampler,) = RESUMABLE[name](True).values()
    with pytest.raises(
        ResumableModeRequiredError, match=rf"a {sampler.name} with resume in a StatefulDataLoader .*resumable=False"
    ):
        loader_of(**RESUMABLE[name](True))


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_sampler_without_resume_in_a_pipeline_with(name):
    (sampler,) = RESUMABLE[name](False).values()
    words = rf"a {sampler.name} that was made with resumable=False, in a pipeline with resume.*StatefulDataLoader"
    with pytest.raises(ResumableModeRequiredError, match=words):
        StatefulDataLoader(DATASET, **RESUMABLE[name](False))
    with pytest.raises(ResumableModeRequiredError, match=words):
        SamplerNode(sampler)


def test_a_sampler_with_resume_inside_torch_s_batch_sampler():
    """It would start each pass at the same cursor, and so in the same order."""
    with pytest.raises(ResumableModeRequiredError, match="RandomSampler with resume"):
        loader_of(batch_sampler=BatchSampler(RandomSampler(LENGTH), 4, False))


def test_subclasses_of_ours_are_for_loaders_without_resume():
    for resumable in (True, False):
        with pytest.raises(ResumableModeRequiredError, match="Backwards"):
            StatefulDataLoader(DATASET, sampler=Backwards(LENGTH, resumable=resumable))
        with pytest.raises(ResumableModeRequiredError, match="Backwards"):
            SamplerNode(Backwards(LENGTH, resumable=resumable))
    with pytest.raises(ResumableModeRequiredError, match="Backwards"):
        loader_of(sampler=Backwards(LENGTH))


def test_torch_s_own_samplers_are_for_loaders_without_resume():
    for sampler in ([1, 2], TorchRandomSampler(DATASET), Generated()):
        with pytest.raises(ResumableModeRequiredError, match="resumable=False"):
            StatefulDataLoader(DATASET, sampler=sampler)
        with pytest.raises(ResumableModeRequiredError, match="resumable=False"):
            StatefulDataLoader(DATASET, batch_sampler=sampler)


@pytest.mark.parametrize(
    "wrap", [lambda sampler: {"sampler": sampler}, lambda sampler: {"batch_sampler": BatchSampler(sampler, 6, False)}]
)
def test_the_loader_s_epoch_is_the_sampler_s(wrap):
    def order(epoch):
        sampler = DistributedSampler(list(range(6)), 1, 0, seed=1)
        sampler.set_epoch(epoch)
        return list(sampler)

    loader = StatefulDataLoader(range(6), **wrap(DistributedSampler(list(range(6)), 1, 0, seed=1)), resumable=False)
    for epoch in (0, 1, 2, 1):
        loader.set_epoch(epoch)
        assert [index for batch in loader for index in batch.tolist()] == order(epoch)


def test_a_composed_pipeline_says_it_in_its_samplers():
    with pytest.raises(ResumableModeRequiredError, match="resumable=False with a SamplerNode"):
        StatefulDataLoader(SamplerNode(SequentialSampler(3)), resumable=False)


EXCLUDED = [
    {"batch_size": 2},
    {"batch_size": None},
    {"shuffle": True},
    {"sampler": [1]},
    {"drop_last": True},
    {"batch_size": 2, "shuffle": True},
]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"batch_size": 1}, *EXCLUDED], ids=str)
@pytest.mark.parametrize("resumable", [True, False])
def test_what_a_batch_sampler_excludes_is_what_torch_says(options, resumable):
    batch_sampler = NaiveBatchSampler(LENGTH, 4, repeat=False, seed=3, resumable=resumable)
    if options not in EXCLUDED:
        DataLoader(DATASET, batch_sampler=batch_sampler, **options)
        StatefulDataLoader(DATASET, batch_sampler=batch_sampler, resumable=resumable, **options)
        return
    with pytest.raises(ValueError, match="batch_sampler"):
        DataLoader(DATASET, batch_sampler=batch_sampler, **options)
    with pytest.raises(ValueError, match="batch_sampler excludes"):
        StatefulDataLoader(DATASET, batch_sampler=batch_sampler, resumable=resumable, **options)


def test_a_sampler_and_shuffle_exclude_each_other():
    for kind in (DataLoader, loader_of):
        with pytest.raises(ValueError, match="sampler"):
            kind(DATASET, sampler=[1], shuffle=True)


@pytest.mark.parametrize("options", [*SHAPES, {"sampler": [1, 2], "batch_size": 2}], ids=str)
def test_its_parts_are_those_of_torch_s_loader(options):
    ours, theirs = loader_of(**options), DataLoader(DATASET, **options)
    assert (ours.batch_size, ours.drop_last) == (theirs.batch_size, theirs.drop_last)
    assert list(ours.sampler) == list(theirs.sampler)
    assert type(ours.batch_sampler) is type(theirs.batch_sampler)
    if ours.batch_sampler is not None:
        assert list(ours.batch_sampler) == list(theirs.batch_sampler)
    if "sampler" in options:
        assert ours.sampler is options["sampler"]


def test_the_batch_sampler_is_shown_as_it_is():
    batch_sampler = Grouped()
    ours, theirs = loader_of(batch_sampler=batch_sampler), DataLoader(DATASET, batch_sampler=batch_sampler)
    assert ours.batch_sampler is theirs.batch_sampler is batch_sampler
    assert ours.batch_size is theirs.batch_size is None
    assert ours.drop_last is theirs.drop_last is False


# Batch samplers with resume.


LABELS = [0] * 7 + [1] * 3 + [2]
WITH_RESUME = {
    "naive": lambda **more: NaiveBatchSampler(LENGTH, 4, **{"repeat": False, "drop_last": False, "seed": 3, **more}),
    "balance": lambda **more: build_batch_sampler("balance", DATASET, 4, labels=LABELS, **{"repeat": False, "seed": 3, **more}),
    "class_balance": lambda **more: build_batch_sampler(
        "class_balance", DATASET, 4, labels=LABELS, **{"repeat": False, "drop_last": False, "seed": 3, **more}
    ),
}


def resuming(name, workers=0, **more):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    sampler = WITH_RESUME[name](**more)
    return StatefulDataLoader(DrawingDataset(LENGTH), batch_sampler=sampler, collate_fn=drawing_collate, seed=5, **options)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", WITH_RESUME)
def test_a_batch_sampler_resumes_at_each_position(name, workers):
    loader = resuming(name)
    whole, states = [], [loader.state_dict()]
    for _ in range(2):
        for batch in loader:
            whole.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
    more = list(loader)
    sampler = WITH_RESUME[name]()
    assert [[sample[0] for sample in batch["samples"]] for batch in whole[: len(sampler)]] == list(sampler)
    assert len(loader) == len(sampler) == len(more)
    with resuming(name, workers, seed=99) as resumed:
        for done, state in enumerate(states):
            resumed.load_state_dict(state)
            found = []
            while len(found) < len(whole) + len(more) - done:
                found += list(resumed)
            assert same(found, [*whole, *more][done:]), f"resumed after {done} batches"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", WITH_RESUME)
def test_an_endless_batch_sampler_resumes_across_cycles(name, workers):
    whole = take(iter(resuming(name, repeat=True)), 30)
    loader = resuming(name, repeat=True)
    iterator = iter(loader)
    for more in (0, 1, 4, 6):
        take(iterator, more)
        state = loader.state_dict()
        consumed = loader.stats()["delivered"]
        with resuming(name, workers, repeat=True, seed=99) as resumed:
            resumed.load_state_dict(state)
            assert same(take(iter(resumed), 12), whole[consumed : consumed + 12])


def test_a_batch_sampler_with_resume_is_shown():
    sampler = WITH_RESUME["naive"]()
    loader = StatefulDataLoader(DATASET, batch_sampler=sampler)
    assert loader.batch_sampler is sampler
    iterator = iter(loader)
    next(iterator)
    assert (sampler.epoch, sampler.consumed) == place_of(loader) == (0, 4)
    list(iterator)
    assert (sampler.epoch, sampler.consumed) == place_of(loader) == (1, 0)


def test_samplers_and_batch_samplers_are_not_taken_for_each_other():
    with pytest.raises(TypeError, match="NaiveBatchSampler is a batch sampler"):
        StatefulDataLoader(DATASET, sampler=WITH_RESUME["naive"]())
    with pytest.raises(TypeError, match="RandomSampler is no batch sampler"):
        StatefulDataLoader(DATASET, batch_sampler=RandomSampler(LENGTH))


def test_the_batch_size_of_a_batch_sampler_does_not_change_at_a_load():
    state = resuming("naive").state_dict()
    other = StatefulDataLoader(
        DrawingDataset(LENGTH),
        batch_sampler=NaiveBatchSampler(LENGTH, 5, repeat=False, drop_last=False),
        collate_fn=drawing_collate,
    )
    with pytest.raises(Exception, match="batch_size: saved 4, here 5"):
        other.load_state_dict(state, allow="batch_size")


def test_a_batcher_that_makes_other_batches_of_a_batch_sampler_s_resumes():
    def make():
        node = SeededBatcher(SamplerNode(WITH_RESUME["naive"]()), 3, collate_fn=list)
        return StatefulDataLoader(ProcessPrefetcher(node, 0))

    loader = make()
    iterator = iter(loader)
    first = next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert [first, *resumed] == [first, *iterator]

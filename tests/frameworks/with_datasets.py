"""Hugging Face `datasets`: a map-style one read by batches, and an iterable one as a source. All are made in memory."""

from __future__ import annotations

import random
import signal
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torchdata.nodes import IterableWrapper

from stateful_pipes import IterableDatasetReader, ProcessPrefetcher, SeededBatcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import ResumableModeRequiredError, StateMismatchError
from tests.frameworks.runs import LENGTH, STEPS, Log, in_processes, killed

EPOCHS = 3


def table(length=LENGTH):
    return datasets.Dataset.from_dict({"id": list(range(length)), "text": [f"line {number}" for number in range(length)]})


def drawn(example):
    """A map function that draws from every global generator."""
    return {**example, "draws": [random.random(), float(np.random.random()), torch.rand(()).item()]}


# Map-style.


def augmented(examples):
    """A transform of `with_transform`, which gets lists; it tells how many it got."""
    count = len(examples["id"])
    return {"id": examples["id"], "together": [count] * count, "draw": [random.random() for _ in range(count)]}


def test_batches_are_read_with_one_getitems():
    """https://github.com/huggingface/datasets/blob/5.2.0/src/datasets/arrow_dataset.py#L3163"""
    data = table().with_transform(augmented)
    with StatefulDataLoader(data, 4, shuffle=True, seed=5, rng=(), collate_fn=list) as loader:
        assert [[one["together"] for one in batch] for batch in loader] == [[4] * 4, [4] * 4, [3] * 3]
    with StatefulDataLoader(data, 4, shuffle=True, seed=5, collate_fn=list) as loader:  # a seed for each sample
        assert [[one["together"] for one in batch] for batch in loader] == [[1] * 4, [1] * 4, [1] * 3]


def map_style(workers, rng, **given):
    data = table() if rng == () else table().with_transform(augmented)
    return StatefulDataLoader(data, 2, shuffle=True, num_workers=workers, seed=5, rng=rng, collate_fn=list, **given)


@pytest.mark.parametrize("rng", [(), ("python",)], ids=["batched", "seeded"])
def test_map_style_killed_and_resumed(tmp_path, rng):
    check_killed(tmp_path, partial(map_style, rng=rng))


# Iterable.


def streamed(length=LENGTH, shards=3):
    return table(length).to_iterable_dataset(num_shards=shards)


def twice(example):
    return {"twice": 2 * example["id"]}


STREAMS = {
    "plain": streamed,
    "mapped": lambda: streamed().map(twice).filter(lambda one: one["id"] % 3),
    "mapped by batches": lambda: streamed().map(lambda many: {"id": [2 * i for i in many["id"]]}, batched=True, batch_size=4),
    "formatted": lambda: streamed().with_format("torch"),
    "shards shuffled": lambda: streamed().shuffle(seed=7, buffer_size=1),
    "interleaved": lambda: datasets.interleave_datasets([streamed(), streamed(7)], probabilities=[0.6, 0.4], seed=7),
    "concatenated": lambda: datasets.concatenate_datasets([streamed(), streamed(4)]),
    "a part": lambda: streamed().skip(1).take(9),
    "batches": lambda: streamed().batch(3),
    "of a rank": lambda: split_dataset_by_node(streamed(shards=4), rank=1, world_size=2),
}
BUFFERED = {
    "buffer": lambda: streamed().shuffle(seed=7, buffer_size=4),
    "buffer below": lambda: streamed().shuffle(seed=7, buffer_size=4).map(twice).take(9),
    "buffer in a mixture": lambda: datasets.interleave_datasets([streamed(), streamed().shuffle(seed=7, buffer_size=4)]),
    "buffer in a chain": lambda: datasets.concatenate_datasets([streamed(), streamed().shuffle(seed=7)]),
}


def iterable(make, replay=False):
    return StatefulDataLoader(SeededBatcher(IterableDatasetReader(make(), replay=replay), 2, collate_fn=repr))


@pytest.mark.parametrize("name", BUFFERED)
def test_a_shuffle_buffer_is_refused_wherever_it_is(name):
    with pytest.raises(ResumableModeRequiredError, match="shuffle buffer") as caught:
        IterableDatasetReader(BUFFERED[name]())
    assert "replay=True" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "replay"), [*((name, False) for name in STREAMS), *((name, True) for name in ("mapped by batches", *BUFFERED))]
)
def test_an_iterable_dataset_resumes_everywhere(name, replay):
    make = {**STREAMS, **BUFFERED}[name]
    loader, whole, states = iterable(make, replay), [], []
    for epoch in range(2):
        whole.append([])
        for batch in loader:
            whole[-1].append(batch)
            states.append((epoch, len(whole[-1]), loader.state_dict()))
    assert all(len(epoch) > 1 for epoch in whole)
    whole.append(list(loader))
    plain = make()
    for epoch in range(2):  # what the dataset itself gives
        plain.set_epoch(epoch)
        items = list(plain)
        assert whole[epoch] == [repr(items[start : start + 2]) for start in range(0, len(items), 2)]
    for epoch, read, state in states:
        resumed = iterable(make, replay)
        resumed.load_state_dict(state)
        expected = [rest for rest in (whole[epoch][read:], whole[epoch + 1]) if rest]
        assert [list(resumed) for _ in expected] == expected, f"resumed in epoch {epoch} after batch {read}"


def test_a_shuffle_buffer_is_shuffled_anew_each_epoch():
    first, second = (list(iterable(BUFFERED["buffer"], replay=True)) for _ in range(2))
    loader = iterable(BUFFERED["buffer"], replay=True)
    assert list(loader) == first == second
    assert list(loader) != first


def test_torchdata_s_wrapper_is_refused():
    """It sets no epoch, and the epochs after a resume would begin where it was resumed:
    https://github.com/huggingface/datasets/blob/5.2.0/src/datasets/iterable_dataset.py#L3029
    """
    with pytest.raises(ResumableModeRequiredError, match="sets no epoch") as caught:
        StatefulDataLoader(SeededBatcher(IterableWrapper(streamed()), 2))
    assert "IterableDatasetReader" in caught.value.remedy
    with pytest.raises(ResumableModeRequiredError, match="no positions") as caught:
        StatefulDataLoader(streamed(), 2)
    assert "IterableDatasetReader" in caught.value.remedy


def pipeline(workers, make, replay, **given):
    node = SeededMapper(IterableDatasetReader(make(), replay=replay), drawn, seed=5)
    return StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, 2, collate_fn=list, seed=5), workers), **given)


@pytest.mark.parametrize(("make", "replay"), [(streamed, False), (BUFFERED["buffer"], True)], ids=["own state", "replay"])
def test_an_iterable_dataset_killed_and_resumed(tmp_path, make, replay):
    """The reading is the main process's, the mapping the workers', which are ahead of it; the state is the training loop's."""
    check_killed(tmp_path, partial(pipeline, make=make, replay=replay))


def test_a_replay_of_a_dataset_that_became_shorter_is_refused():
    loader = iterable(streamed, replay=True)
    list(zip(range(4), loader, strict=False))
    with pytest.raises(StateMismatchError, match="fewer than 8 items"):
        iterable(lambda: streamed(7), replay=True).load_state_dict(loader.state_dict())


# Both.


def train(loader, log, checkpoint, dies_at=None):
    """Logs each batch, and saves after every third one."""
    while loader.position.epoch < EPOCHS:
        for batch in loader:
            log.add(batch)
            if loader.position.delivered == dies_at:
                killed()
            if loader.position.delivered % 3 == 0:
                loader.checkpoint(checkpoint)


def check_killed(folder, make):
    """A training with two workers, killed in its second epoch, goes on with one; the reference has none."""
    logs = reference, begun, resumed = [Log(folder / f"{name}.log") for name in ("reference", "begun", "resumed")]
    saved = folder / "checkpoint"
    assert in_processes(lambda _: train(make(0), reference, folder / "other")) == [0]
    assert in_processes(lambda _: train(make(2), begun, saved, dies_at=11)) == [-signal.SIGKILL]
    assert in_processes(lambda _: train(make(1, checkpoint=saved), resumed, saved)) == [0]
    expected, before, after = (log.read() for log in logs)
    assert len(expected) == EPOCHS * STEPS
    assert before == expected[:11]
    assert before[:9] + after == expected

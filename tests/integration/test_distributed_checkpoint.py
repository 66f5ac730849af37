"""`torch.distributed.checkpoint`, without a process group, saves a loader as it is and loads it in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchdata.nodes import Batcher, IterableWrapper

from stateful_pipes import ProcessPrefetcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import StateMismatchError
from tests.integration.pipelines import EPOCHS, batches, epochs, shut, states, take
from tests.streams import DrawingDataset, drawing_collate, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def from_dataset(workers):
    return StatefulDataLoader(
        DrawingDataset(7), batch_size=2, shuffle=True, num_workers=workers, collate_fn=drawing_collate, seed=2**64 - 1
    )


def composed(workers):
    return StatefulDataLoader(batches(workers))


def over_foreign(workers):
    """A foreign node's state is part of this one."""
    source = Batcher(IterableWrapper(range(7)), batch_size=2, drop_last=False)
    return StatefulDataLoader(ProcessPrefetcher(SeededMapper(source, drawing_collate, seed=3), workers))


each_pipeline = pytest.mark.parametrize("make", [from_dataset, composed, over_foreign])


def saved(make, workers, read, folder):
    """Saves after so many batches; returns what the loader would have gone on with."""
    loader = make(workers)
    stream = [batch for epoch in epochs(loader, EPOCHS) for batch in epoch]
    loader.close()
    loader = make(workers)
    for _ in range(read // 4):
        take(iter(loader), 4)
    take(iter(loader), read % 4)
    dcp.save({"loader": loader}, checkpoint_id=folder)
    loader.close()
    return stream[read:]


def rest_of(loader):
    """What is left of the first epochs."""
    left = []
    while loader.position.epoch < EPOCHS:
        left += loader
    loader.close()
    return left


@pytest.mark.parametrize("read", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("workers", [0, 2])
@each_pipeline
def test_a_new_and_a_half_used_loader_are_loaded_in_place(make, workers, read, tmp_path):
    rest = saved(make, workers, read, tmp_path)
    assert len(rest) == 4 * EPOCHS - read

    fresh = make(workers)
    dcp.load({"loader": fresh}, checkpoint_id=tmp_path)
    assert same(rest_of(fresh), rest)

    used = make(workers)
    iterator = iter(used)
    take(iterator, 2)
    dcp.load({"loader": used}, checkpoint_id=tmp_path)
    assert same(rest_of(used), rest)


def test_other_seeds_are_replaced_by_the_saved_ones(tmp_path):
    loader = StatefulDataLoader(DrawingDataset(7), batch_size=2, shuffle=True, seed=1)
    take(iter(loader), 1)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    other = StatefulDataLoader(DrawingDataset(7), batch_size=2, shuffle=True, seed=2)
    dcp.load({"loader": other}, checkpoint_id=tmp_path)
    assert same(epochs(other, 2), epochs(loader, 2))


@each_pipeline
def test_the_keys_are_the_same_at_every_step(make):
    """It reads only what the loader's own state names, so an entry that came or went would be lost without a word."""
    flat = [flatten_state_dict({"loader": state})[0] for _, _, state in states(lambda: make(0), EPOCHS)]
    assert len(flat) == 5 * EPOCHS + 1
    for one in flat:
        assert list(one) == list(flat[0])
        assert [type(value) for value in one.values()] == [type(value) for value in flat[0].values()]
        assert all(type(value) in (int, float, str, bool) for value in one.values())


def test_beside_a_model_and_a_second_loader(tmp_path):
    train, validate, weight = composed(0), from_dataset(0), torch.rand(3)
    take(iter(train), 3)
    take(iter(validate), 1)
    dcp.save({"train": train, "validate": validate, "model": {"weight": weight}}, checkpoint_id=tmp_path)
    rest = epochs(train, 2), epochs(validate, 2)
    parts = {"train": composed(0), "validate": from_dataset(0), "model": {"weight": torch.zeros(3)}}
    dcp.load(parts, checkpoint_id=tmp_path)
    assert torch.equal(parts["model"]["weight"], weight)
    assert same((epochs(parts["train"], 2), epochs(parts["validate"], 2)), rest)


def test_a_checkpoint_of_another_pipeline_is_refused_and_changes_nothing(tmp_path):
    loader = StatefulDataLoader(list(range(8)), batch_size=2)
    take(iter(loader), 1)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    other = StatefulDataLoader(list(range(10)), batch_size=2)
    iterator = iter(other)
    take(iterator, 2)
    before = other.state_dict()
    with pytest.raises(StateMismatchError, match=r"sampler\.length: saved 8, here 10"):
        dcp.load({"loader": other}, checkpoint_id=tmp_path)
    assert other.state_dict() == before
    assert next(iterator).tolist() == [4, 5]
    shut(other)

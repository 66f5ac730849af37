"""One stream through three doors: our loader, torchdata's Loader, and torchdata's StatefulDataLoader over `as_dataset`."""

from __future__ import annotations

from typing import Any

import pytest
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from stateful_pipes import SeededBatcher, StatefulDataLoader, as_dataset
from stateful_pipes.errors import ResumableModeRequiredError
from tests.integration.pipelines import EPOCHS, batches, check_resumes, epochs, samples, shut, take
from tests.streams import same

# torchdata 0.11 still calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def our_loader(node: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(node)


def torchdata_loader(node: Any) -> TorchdataLoader[Any]:
    # Without a collate_fn it would make tensors of arrays, and lists of tuples.
    return TorchdataLoader(as_dataset(node), batch_size=None, collate_fn=unchanged)


def unchanged(batch: Any) -> Any:
    return batch


DOORS = {"ours": our_loader, "Loader": Loader, "StatefulDataLoader": torchdata_loader}
each_door = pytest.mark.parametrize("door", DOORS)
each_worker_count = pytest.mark.parametrize("workers", [0, 2])


@each_worker_count
def test_one_stream_at_every_door(workers):
    streams = []
    for door in DOORS.values():
        loader = door(batches(workers))
        streams.append(epochs(loader, EPOCHS))
        shut(loader)
    assert [len(epoch) for epoch in streams[0]] == [4] * EPOCHS
    assert not same(streams[0][0], streams[0][1])
    assert same(streams[0], streams[1])
    assert same(streams[0], streams[2])


@each_door
@each_worker_count
def test_each_door_resumes_at_every_step(door, workers):
    check_resumes(lambda: DOORS[door](batches(workers)))


@each_door
def test_each_door_resumes_at_every_step_without_the_last_smaller_batch(door):
    whole = check_resumes(lambda: DOORS[door](batches(0, drop_last=True)))
    assert [len(epoch) for epoch in whole] == [3] * EPOCHS


@each_door
def test_each_door_resumes_with_another_number_of_workers(door):
    check_resumes(lambda: DOORS[door](batches(0)), count=2, remake=lambda: DOORS[door](batches(1)))


@each_door
@each_worker_count
def test_a_state_goes_into_a_used_loader(door, workers):
    whole = stream(door)
    loader, used = DOORS[door](batches(workers)), DOORS[door](batches(workers))
    take(iter(loader), 3)
    state = loader.state_dict()
    for read in (1, 2, 4):
        take(iter(used), read)
        used.load_state_dict(state)
        assert same(epochs(used, 2), [whole[0][3:], whole[1]])
    shut(loader)
    shut(used)


@each_door
def test_a_state_stays_as_it_was(door):
    """It is a snapshot: what is read, or changed in another copy of it, does not reach it."""
    loader = DOORS[door](batches(0))
    iterator = iter(loader)
    take(iterator, 1)
    state, shown = loader.state_dict(), repr(loader.state_dict())
    take(iterator, 2)
    assert repr(state) == shown


def test_a_node_by_itself_resumes_at_every_step():
    """Without any loader, as torchdata documents it: reset at the start of an epoch, then next."""
    check_resumes(lambda: BareNode(batches(0)))


class BareNode:
    """The loop that torchdata's documentation writes over a node, as an object."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def __iter__(self) -> Any:
        self.root.reset()
        return self.root

    def state_dict(self) -> dict[str, Any]:
        return self.root.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.root.load_state_dict(state)


@each_door
def test_breaking_off_an_epoch(door):
    """torchdata's doors go on with the next epoch, which ours does only after `restart` or the epoch's end."""
    whole = stream(door)
    loader = DOORS[door](batches(0))
    take(iter(loader), 1)
    assert same(epochs(loader, 1)[0], whole[0][1:] if door == "ours" else whole[1])


@each_door
def test_breaking_off_an_epoch_after_a_load(door):
    """What was loaded changes nothing about that."""
    whole = stream(door)
    loader = DOORS[door](batches(0))
    take(iter(loader), 1)
    resumed = DOORS[door](batches(0))
    resumed.load_state_dict(loader.state_dict())
    take(iter(resumed), 1)
    assert same(epochs(resumed, 1)[0], whole[0][2:] if door == "ours" else whole[1])


def test_workers_of_an_outer_loader_are_refused():
    loader = TorchdataLoader(as_dataset(batches(0)), batch_size=None, num_workers=1)
    with pytest.raises(ResumableModeRequiredError, match="ProcessPrefetcher"):
        next(iter(loader))


def test_unbatched_samples_at_every_door():
    streams = [epochs(door(samples()), 2) for door in DOORS.values()]
    assert len(streams[0][0]) == 7
    assert same(streams[0], streams[1])
    assert same(streams[0], streams[2])


def test_torchdata_leaves_collated_batches_as_they_are():
    whole = epochs(TorchdataLoader(as_dataset(SeededBatcher(samples(), 2)), batch_size=None), 2)
    assert same(whole, epochs(StatefulDataLoader(SeededBatcher(samples(), 2)), 2))


def stream(door: str) -> list[list[Any]]:
    return epochs(DOORS[door](batches(0)), EPOCHS)

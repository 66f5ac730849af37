"""Samples that raise are left out up to a budget: the same ones wherever and however often the stream is read."""

from __future__ import annotations

import json
import logging
import pickle

import pytest
import torch

from stateful_pipes import ProcessPrefetcher, SamplerNode, SeededBatcher, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.errors import LoaderFailedError, StateMismatchError
from stateful_pipes.skips import LEFT_OUT, Skip, admitted, note, noting
from tests.streams import place_of


class Bad:
    """Ten samples; those in `bad` raise."""

    def __init__(self, bad=(), length=10):
        self.bad, self.length = set(bad), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError("bad sample", index)
        return index, torch.rand(1).item()


def loader_of(bad, workers=0, batch_size=3, shuffle=False, **kwargs):
    kwargs = {"max_skipped": 10, "seed": 1, "collate_fn": list} | kwargs
    return StatefulDataLoader(Bad(bad), batch_size, shuffle, num_workers=workers, **kwargs)


def indices(batches):
    return [[index for index, _ in batch] for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_they_are_left_out_of_their_batches_and_the_others_are_as_they_were(workers):
    with loader_of([1, 4, 5], workers) as loader, loader_of([]) as whole:
        found = list(loader)
        assert indices(found) == [[0, 2], [3], [6, 7, 8], [9]]
        draws = {index: drawn for batch in whole for index, drawn in batch}
        assert all(draws[index] == drawn for batch in found for index, drawn in batch)
        assert loader.stats()["skipped"] == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_which_nothing_is_left_is_left_out(workers):
    with loader_of([0, 1, 2, 6, 7, 8], workers, max_skipped=17) as loader:
        assert indices(loader) == [[3, 4, 5], [9]]
        assert place_of(loader) == (1, 0)
        assert indices(loader) == [[3, 4, 5], [9]]
        with pytest.raises(ValueError, match="bad sample"):  # the budget is for all epochs
            list(loader)
        assert place_of(loader) == (2, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_which_nothing_is_left(workers):
    with loader_of(range(10), workers, max_skipped=30) as loader:
        assert [list(loader), list(loader), list(loader)] == [[], [], []]
        assert place_of(loader) == (3, 0)
        assert loader.stats()["skipped"] == 30
        with pytest.raises(ValueError, match="bad sample"):
            list(loader)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_beyond_the_budget_the_error_is_raised_in_its_turn(workers):
    with loader_of([1, 4, 5], workers, max_skipped=2) as loader:
        iterator = iter(loader)
        assert indices([next(iterator)]) == [[0, 2]]
        with pytest.raises(ValueError, match="bad sample") as caught:
            next(iterator)
        assert caught.value.args == ("bad sample", 5)
        assert "epoch 0, position 5, index 5" in caught.value.__notes__[0]
        assert "max_skipped=2" in caught.value.__notes__[1]
        assert loader.state_dict()["nodes"]["mapper"]["skipped"] == 1
        with pytest.raises(LoaderFailedError):
            next(iterator)
        loader.close()
        with pytest.raises(ValueError, match="bad sample"):
            next(iter(loader))


def test_without_a_budget_there_is_nothing_of_it():
    with loader_of([1], max_skipped=0) as loader:
        with pytest.raises(ValueError, match="bad sample") as caught:
            next(iter(loader))
        assert len(caught.value.__notes__) == 1
        assert "skipped" not in loader.state_dict()["nodes"]["mapper"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", range(5))
def test_a_resumed_run_leaves_out_the_same_and_counts_on(workers, at):
    with loader_of([1, 4, 5, 9], shuffle=True, batch_size=2) as loader:
        whole, states = [], [loader.state_dict()]
        for batch in loader:
            whole.append(batch)
            states.append(loader.state_dict())
    assert states[-1]["nodes"]["mapper"]["skipped"] == 4
    with loader_of([1, 4, 5, 9], 2 - workers, shuffle=True, batch_size=2) as resumed:
        resumed.load_state_dict(json.loads(json.dumps(states[at])))
        assert resumed.stats()["skipped"] == states[at]["nodes"]["mapper"]["skipped"]
        assert list(resumed) == whole[at:]
        assert resumed.stats()["skipped"] == 4


def test_a_budget_may_be_given_to_a_run_that_had_none_and_be_taken_away():
    """After a run has failed for want of one."""
    with loader_of([4], max_skipped=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of([4], max_skipped=1) as resumed:
        resumed.load_state_dict(state)
        assert indices(resumed) == [[3, 5], [6, 7, 8], [9]]
        later = resumed.state_dict()
    with loader_of([4], max_skipped=0) as strict:
        strict.load_state_dict(later)
        with pytest.raises(ValueError, match="bad sample"):
            list(strict)
    for wrong in (-1, "1", None, True, 2**64):
        later["nodes"]["mapper"]["skipped"] = wrong
        with loader_of([4]) as refusing, pytest.raises(StateMismatchError, match="skipped"):
            refusing.load_state_dict(later)


def test_each_is_logged_once_when_its_batch_is_handed_out(caplog):
    with loader_of([1, 4], 2) as loader, caplog.at_level(logging.WARNING, "stateful_pipes"):
        iterator = iter(loader)
        next(iterator)
        assert [record.message for record in caplog.records] == [
            "mapper: epoch 0, position 1, index 1 is left out (1 of 10): ValueError: ('bad sample', 1)"
        ]
        list(iterator)
        assert len(caplog.records) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mapper_above_keeps_the_places(workers):
    """What the second draws for a sample does not depend on whether another was left out by the first."""

    def stream(bad, workers):
        node = SeededMapper(SamplerNode(SequentialSampler(10)), Bad(bad).__getitem__, seed=1, max_skipped=9)
        node = SeededMapper(node, lambda item: (*item, torch.rand(1).item()), seed=1)
        node = SeededMapper(node, lambda item: item, rng=())
        return StatefulDataLoader(ProcessPrefetcher(node, workers))

    with stream([], 0) as whole, stream([0, 3, 4, 9], workers) as loader:
        assert list(loader) == [item for item in whole if item[0] not in (0, 3, 4, 9)]
        assert loader.state_dict()["nodes"]["mapper"]["skipped"] == 4


def test_two_budgets_are_two_counts():
    def refuse(item):
        if item[0] == 7:
            raise KeyError("seven")
        return item[0]

    node = SeededMapper(SamplerNode(SequentialSampler(10)), Bad([2, 3]).__getitem__, seed=1, max_skipped=2)
    node = SeededMapper(node, refuse, seed=1, max_skipped=1)
    loader = StatefulDataLoader(SeededBatcher(node, 4, collate_fn=list, seed=1))
    assert list(loader) == [[0, 1], [4, 5, 6], [8, 9]]
    assert [entry["skipped"] for name, entry in loader.state_dict()["nodes"].items() if "mapper" in name] == [2, 1]


@pytest.mark.parametrize("rng", [(), "generator"])
def test_in_every_mode(rng):
    def map_fn(index, generator=None):
        if index == 1:
            raise ValueError
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(3)), map_fn, rng=rng, seed=1 if rng else None, max_skipped=1)
    assert list(StatefulDataLoader(node)) == [0, 2]


def test_a_dataset_that_reads_blocks_is_read_sample_by_sample():
    """Of a block that raises nobody could tell which sample it was."""

    class Blocks(Bad):
        def __getitems__(self, indices):
            raise AssertionError

    loader = StatefulDataLoader(Blocks([1]), 3, rng=(), max_skipped=1, collate_fn=list)
    assert [[index for index, _ in batch] for batch in loader] == [[0, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_leaked_stop_iteration_is_left_out_like_any_error():
    def leak(index):
        if index == 1:
            raise StopIteration
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(3)), leak, seed=1, max_skipped=1)
    assert list(StatefulDataLoader(node)) == [0, 2]


def test_under_a_torchdata_node():
    import torchdata.nodes as tn

    node = SeededMapper(SamplerNode(SequentialSampler(6)), Bad([1, 4]).__getitem__, seed=1, max_skipped=5)
    loader = StatefulDataLoader(tn.Batcher(node, 2))
    assert indices(loader) == [[0, 2], [3, 5]]
    assert node.get_state()["nodes"]["mapper"]["skipped"] == 2


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None, True])
def test_a_wrong_budget(wrong):
    with pytest.raises((TypeError, ValueError), match="max_skipped"):
        loader_of([], max_skipped=wrong)


def test_what_is_left_out_stays_one_object():
    assert pickle.loads(pickle.dumps(LEFT_OUT)) is LEFT_OUT
    assert repr(LEFT_OUT) == "LEFT_OUT"


def test_a_scope_within_a_scope_keeps_its_own():
    one, other = (Skip("mapper", str(number), ValueError(number)) for number in range(2))
    note([one])  # nobody listens
    with noting() as outer:
        note([one])
        with noting() as inner:
            note([other])
        note([one])
    assert (outer, inner) == ([one, one], [other])


def test_counting_changes_nothing_before_it_is_sure():
    skips = [Skip("a", "here", ValueError(1)), Skip("b", "there", KeyError(2))]
    counts = {"a": 1}
    assert admitted(skips, {"a": 2, "b": 1}, counts) == {"a": 2, "b": 1}
    with pytest.raises(KeyError):
        admitted(skips, {"a": 2, "b": 0}, counts)
    assert counts == {"a": 1}

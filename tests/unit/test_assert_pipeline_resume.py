"""assert_pipeline_resume in this process: what it reads, compares, says and refuses. For causes: integration/test_verify.py."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper

from stateful_pipes import ExternalSource, InfiniteRandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.testing import assert_pipeline_resume, trials, verify
from stateful_pipes.testing.pieces import FactoryError, Step, difference, row_of
from tests.streams import DrawingDataset, generator_states

HERE = {"workers": (0,), "new_process": False}


def exact():
    return StatefulDataLoader(DrawingDataset(7), 3, shuffle=True)


class Forgetful(StatefulDataLoader):
    """Its resume leaves out a batch, from the second one on."""

    def load_state_dict(self, state_dict, **options):
        super().load_state_dict(state_dict, **options)
        if self.position.batch:
            self.skip(1)


def forgetful():
    return Forgetful(range(20), 2)


def test_exact_pipeline_passes():
    assert_pipeline_resume(exact, **HERE)


def test_difference_is_told_with_trial_batch_sample_leaf_and_cause():
    class Dataset(DrawingDataset):
        def __getitem__(self, index):
            return {"id": index, "noise": self.rng.random(3)}

    def broken():
        dataset = Dataset(9)
        dataset.rng = np.random.default_rng(1)
        return StatefulDataLoader(dataset, 3)

    with pytest.raises(AssertionError) as caught:
        assert_pipeline_resume(broken, **HERE)
    told = str(caught.value)
    assert "the pipeline does not resume exactly" in told
    assert "epoch 0, batch 1 (cut and resumed before batches 0," in told
    assert "number 0 of the batch: epoch 0, position 3, index 3" in told
    assert "at batch['noise']: expected " in told
    assert "likeliest cause: private generator: " in told
    assert "mapper.rng, a numpy.random.Generator" in told
    assert "reseed" in told


def test_batch_that_is_left_out_is_found():
    verdict = verify(forgetful, **HERE)
    assert not verdict.is_exact
    assert verdict.difference.mismatch.path == "position"
    assert (verdict.difference.epoch, verdict.difference.batch) == (0, int(verdict.difference.mismatch.expected[-1]))


def test_every_trial_reads_every_batch(monkeypatch):
    checked = Counter()
    check = trials.Trials._check

    def counting(self, place, found):
        checked[len(self.tried), place] += 1
        check(self, place, found)

    monkeypatch.setattr(trials.Trials, "_check", counting)
    verdict = verify(exact, workers=(0, 1), kills=1, new_process=False)
    assert verdict.is_exact
    assert len(verdict.tried) == 5
    assert checked == {(trial, place): 1 for trial in range(1, 6) for place in range(6)}


def test_cuts_always_include_the_start_an_epochs_end_and_a_chained_resume():
    for seed in range(20):
        trial = trials.Trials(exact, 64, random.Random(seed), (0,), None, lambda line: None)
        trial._read_through()
        places = trial._places(3)
        assert trial.ends == [3]
        assert {0, 3} <= set(places)
        assert len(places) == 6 > len(set(places))
        assert places == sorted(places)


def test_workers_are_killed(monkeypatch):
    killed = []

    def kill(pid, number):
        killed.append((pid, number))
        os.kill(pid, number)

    monkeypatch.setattr(trials, "os", SimpleNamespace(kill=kill))
    verdict = verify(exact, workers=(0, 1), kills=3, new_process=False, cuts=0)
    assert verdict.is_exact
    assert len({pid for pid, _ in killed}) == 3
    assert {number for _, number in killed} == {signal.SIGKILL}
    assert "SIGKILL" in verdict.tried[-1]


def test_factory_is_told_the_number_of_workers():
    told = []

    def factory(num_workers):
        told.append(num_workers)
        return StatefulDataLoader(DrawingDataset(7), 3, num_workers=num_workers)

    assert_pipeline_resume(factory, workers=(0, 1), new_process=False)
    assert set(told) == {0, 1}


def test_prefetcher_is_set_where_the_factory_is_not_told(monkeypatch):
    used = []
    opened = trials.opened

    def spying(factory, workers):
        loader = opened(factory, workers)
        used.append((workers, loader.num_workers))
        return loader

    monkeypatch.setattr(trials, "opened", spying)
    assert_pipeline_resume(exact, workers=(2, 0), kills=1, new_process=False)
    assert set(used) == {(0, 0), (2, 2)}


def test_pipeline_without_prefetcher_says_what_was_not_tried():
    def factory():
        return SeededBatcher(SeededMapper(SamplerNode(InfiniteRandomSampler(5)), lambda index: index + random.random()), 2)

    verdict = verify(factory, batches=7, workers=(0, 2), new_process=False)
    assert verdict.is_exact
    assert "no ProcessPrefetcher" in verdict.notes[1]
    assert "none lies within the first 7 batches" in verdict.notes[0]
    assert verdict.tried[0].startswith("7 batches")
    assert not any("worker" in one for one in verdict.tried)


@pytest.mark.parametrize(("batches", "read"), [(64, 6), (5, 5), (1, 1)])
def test_two_epochs_or_so_many_batches_are_read(batches, read):
    assert verify(exact, batches=batches, **HERE).tried[0].startswith(f"{read} batches")


def test_epochs_of_different_lengths_and_empty_ones():
    def number(info):
        if info.iteration >= (2, 0, 3)[info.epoch_idx % 3]:
            raise StopIteration
        return torch.tensor([info.iteration, info.epoch_idx])

    def factory():
        return ExternalSource(number, batch_info=True)

    verdict = verify(factory, **HERE)
    assert verdict.is_exact
    assert verdict.tried[0].startswith("2 batches")


def test_factory_that_cannot_be_pickled_is_tried_in_a_fork():
    def local():
        return exact()

    verdict = verify(local, workers=(0,))
    assert verdict.is_exact
    assert verdict.tried[-1].startswith("in a fork of this process")
    assert "factory cannot be pickled" in verdict.notes[0]


def test_generators_are_as_before():
    before = generator_states()
    assert_pipeline_resume(exact, **HERE)
    assert generator_states() == before
    with pytest.raises(AssertionError):
        assert_pipeline_resume(forgetful, **HERE)
    assert generator_states() == before


def test_same_seed_tries_the_same():
    assert verify(exact, seed=3, **HERE) == verify(exact, seed=3, **HERE) != verify(exact, seed=4, **HERE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": 0}, "batches must be at least 1, got 0"),
        ({"cuts": -1}, "cuts must be at least 0, got -1"),
        ({"kills": -1}, "kills must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"workers": (-1,)}, "workers must be at least 0, got -1"),
        ({"workers": ()}, "at least one number"),
    ],
)
def test_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        assert_pipeline_resume(exact, **options)


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(FactoryError, match="StatefulDataLoader or a torchdata node, got list"):
        assert_pipeline_resume(lambda: [1, 2])
    with pytest.raises(FactoryError, match="has a batch"):
        assert_pipeline_resume(lambda: IterableWrapper([]))


def test_pipeline_without_a_state_is_refused():
    with pytest.raises(ResumableModeRequiredError, match="resumable=False"):
        assert_pipeline_resume(lambda: StatefulDataLoader(range(3), resumable=False))


def test_sample_that_raises_in_the_straight_run_is_the_users_error():
    with pytest.raises(ZeroDivisionError):
        assert_pipeline_resume(lambda: SeededMapper(SamplerNode(InfiniteRandomSampler(3)), lambda index: 1 / 0))


@pytest.mark.parametrize(
    ("one", "other", "row"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), 2),
        (np.array([[1.0], [0.0], [2.0]]), np.array([[1.0], [-0.0], [2.0]]), 1),
        ({"a": torch.zeros(3), "b": ["x", "y", "z"]}, {"a": torch.zeros(3), "b": ["x", "q", "z"]}, 1),
        ([torch.zeros(3), torch.tensor([0, 1, 2])], [torch.zeros(3), torch.tensor([0, 9, 2])], 1),
        ([(1, 2), (3, 4), (5, 6)], [(1, 2), (3, 4), (5, 7)], 2),
        (torch.zeros(3), torch.zeros(3), None),
        (torch.zeros(4), torch.ones(4), None),
        ("abc", "abd", None),
        ((torch.zeros(3), 0.5), (torch.zeros(3), 0.7), None),
    ],
)
def test_sample_within_a_batch(one, other, row):
    assert row_of(one, other, 3) == row


def test_steps_differ_by_place_and_content():
    step = Step(0, 1, torch.zeros(2))
    assert difference(step, Step(0, 1, torch.zeros(2))) is None
    assert difference(step, Step(0, 1, -torch.zeros(2))).path == ""
    assert difference(step, Step(1, 0, torch.zeros(2))).found == "epoch 1, batch 0"
    assert difference(step, None).found == "nothing"

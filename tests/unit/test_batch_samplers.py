"""Batch samplers: what a cycle holds, what a batch holds, and that each resumes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from stateful_pipes import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    NaiveBatchSampler,
    build_batch_sampler,
)
from stateful_pipes.errors import (
    ResumableBatchConfigurationError,
    ResumableModeRequiredError,
    ResumableSamplerGeneratorError,
    StateMismatchError,
)
from stateful_pipes.samplers.groups import group, ratios_of

LABELS = [0] * 9 + [1] * 4 + [2] * 2
NAMES = ["naive", "class_balance", "balance"]


class Dataset:
    def __init__(self, labels=LABELS, **attributes):
        self.targets = labels
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return index


def make(name, labels=LABELS, batch_size=4, **kwargs):
    return build_batch_sampler(name, Dataset(labels), batch_size, **{"seed": 5, **kwargs})


def cycle(sampler, number=0):
    """The samples of a cycle, in order."""
    batches = list(islice(iter(sampler), number * len(sampler), (number + 1) * len(sampler)))
    return [index for batch in batches for index in batch]


labels_of_samples = st.lists(st.integers(0, 4), min_size=1, max_size=30)
flags = st.booleans()


def check_walks(labels, found):
    """No sample comes back before its group is through, and each group is walked at least once."""
    for label in set(labels):
        walk = [index for index in found if labels[index] == label]
        members = {index for index, one in enumerate(labels) if one == label}
        for start in range(0, len(walk), len(members)):
            whole = walk[start : start + len(members)]
            assert len(set(whole)) == len(whole)
        assert set(walk) == members


@given(labels_of_samples, st.integers(1, 7), flags, flags, st.integers(0, 3))
def test_classes_in_equal_shares(labels, batch_size, shuffle, drop_last, number):
    sampler = make("class_balance", labels, batch_size, shuffle=shuffle, drop_last=drop_last)
    found = cycle(sampler, number)
    assert len(found) == sampler.samples
    check_walks(labels, found)
    part = len(found) / len(set(labels))
    assert all(abs(count - part) < 1 for count in Counter(labels[index] for index in found).values())


@given(st.data(), labels_of_samples, st.integers(1, 7), flags)
def test_classes_and_domains_in_given_shares(data, labels, batch_size, drop_last):
    domains = data.draw(st.lists(st.sampled_from("xyz"), min_size=len(labels), max_size=len(labels)))
    numbers = st.sampled_from([1, 2, 0.5, 0.3, 7])
    class_ratio = {label: data.draw(numbers) for label in sorted(set(labels))}
    domain_ratio = {domain: data.draw(numbers) for domain in sorted(set(domains))}
    kwargs = {"domains": domains, "class_ratio": class_ratio, "domain_ratio": domain_ratio, "drop_last": drop_last}
    found = cycle(make("class_balance", labels, batch_size, **kwargs))
    pairs = list(zip(labels, domains, strict=True))
    check_walks(pairs, found)
    counts = Counter(pairs[index] for index in found)
    groups = group(np.array(labels), np.array(domains))
    for key, ratio in zip(groups.keys, ratios_of(groups, class_ratio, domain_ratio), strict=True):
        assert abs(counts[key] - ratio * len(found)) < 1


@given(labels_of_samples, st.integers(1, 12), flags, flags, st.integers(0, 3))
def test_every_batch_is_balanced(labels, batch_size, shuffle, drop_last, number):
    sampler = make("balance", labels, batch_size, shuffle=shuffle, drop_last=drop_last)
    found = cycle(sampler, number)
    check_walks(labels, found)
    groups = sorted(set(labels))
    for start in range(0, len(found), batch_size):
        counts = Counter(labels[index] for index in found[start : start + batch_size])
        assert max(counts.values()) - min(counts[one] for one in groups) <= 1
    counts = Counter(labels[index] for index in found)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_remainder_rotates():
    """Five places for three classes: over three batches each class has had five."""
    batches = list(islice(make("balance", batch_size=5), 3))
    assert set(Counter(LABELS[index] for batch in batches for index in batch).values()) == {5}


@given(st.integers(1, 40), st.integers(1, 7), flags, flags, st.integers(0, 3))
def test_naive_batches_are_consecutive(length, batch_size, shuffle, drop_last, number):
    if drop_last and length < batch_size:
        return
    sampler = NaiveBatchSampler(length, batch_size, shuffle=shuffle, drop_last=drop_last, seed=3)
    found = cycle(sampler, number)
    assert len(found) == (length // batch_size * batch_size if drop_last else length)
    assert len(set(found)) == len(found)
    if not shuffle:
        assert found == list(range(len(found)))


class Backwards:
    """A user's order, begun elsewhere in each epoch, whose seed shows in it."""

    def __len__(self):
        return 10

    def arguments(self):
        return {"step": 1}

    def indices(self, seed, epoch, positions):
        return [9 - (p + epoch + seed % 3) % 10 for p in positions]


def test_batches_of_an_order_of_ones_own():
    sampler = NaiveBatchSampler(Backwards(), 4, drop_last=False, seed=3)
    for number in range(3):
        assert sorted(cycle(sampler, number)) == list(range(10))
    assert len({tuple(cycle(sampler, number)) for number in range(3)}) == 3
    assert {key: sampler.state_dict()[key] for key in ("of", "of.step", "items")} == {
        "of": "Backwards",
        "of.step": 1,
        "items": 10,
    }
    with pytest.raises(StateMismatchError, match="of"):
        NaiveBatchSampler(10, 4, drop_last=False).load_state_dict(sampler.state_dict())
    with pytest.raises(TypeError, match="got a sampler: NaiveBatchSampler"):
        NaiveBatchSampler(NaiveBatchSampler(10, 4), 4)
    with pytest.raises(TypeError, match="got a sampler: SubsetRandomSampler"):
        NaiveBatchSampler(SubsetRandomSampler([7]), 1)


def test_what_an_order_calls_its_arguments_hides_none_of_the_sampler_s():
    class Sly(Backwards):
        def arguments(self):
            return {"batch_size": 8, "samples": 5}

    state = NaiveBatchSampler(Sly(), 3, seed=0).state_dict()
    assert (state["batch_size"], state["samples"], state["of.batch_size"]) == (3, 9, 8)
    with pytest.raises(StateMismatchError, match="batch_size: saved 3, here 4"):
        NaiveBatchSampler(Sly(), 4, seed=0).load_state_dict(state)


def test_an_order_that_raises_stop_iteration_ends_nothing_in_silence():
    class Ended(Backwards):
        def indices(self, seed, epoch, positions):
            raise StopIteration

    with pytest.raises(RuntimeError, match=r"indices raised StopIteration"):
        list(NaiveBatchSampler(Ended(), 3, repeat=False))


def test_a_dataset_with_indices_of_its_own_is_a_dataset():
    class Subset(Dataset):
        indices = (3, 4)

        def __len__(self):
            return 2

    class Asked(Subset):
        def indices(self):
            return (3, 4)

    for dataset in (Subset(), Asked()):
        assert list(NaiveBatchSampler(dataset, 2, repeat=False, shuffle=False)) == [[0, 1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", ["repeat", "shuffle", "drop_last", "resumable"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags_are_flags(name, flag, value):
    with pytest.raises(TypeError, match=f"{flag} must be a bool, got {value!r}"):
        make(name, **{flag: value})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_torchdata_s_loader_resumes_it_by_itself(name, workers):
    loader, other = (
        TorchdataLoader(Dataset(), batch_sampler=make(name, seed=seed, drop_last=False), num_workers=workers) for seed in (5, 9)
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    other.load_state_dict(state)
    assert [batch.tolist() for batch in islice(other, 6)] == [batch.tolist() for batch in islice(iterator, 6)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drop_last", [True, False])
def test_sizes_of_batches(name, drop_last):
    sampler = make(name, drop_last=drop_last, repeat=False)
    sizes = [len(batch) for batch in sampler]
    assert len(sizes) == len(sampler)
    assert set(sizes[:-1]) == {4}
    assert sizes[-1] == (4 if drop_last else (sampler.samples - 1) % 4 + 1)


@pytest.mark.parametrize("name", NAMES)
def test_it_repeats_or_ends(name):
    once = make(name, repeat=False)
    assert [list(once), list(once)] == [list(islice(make(name), len(once)))] * 2
    two_cycles = list(islice(make(name), 2 * len(once)))
    assert two_cycles[: len(once)] != two_cycles[len(once) :]


@pytest.mark.parametrize("name", NAMES)
def test_epochs_differ(name):
    sampler = make(name, repeat=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert (sampler.epoch, sampler.consumed) == (1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_handed_out_is_a_copy(name):
    sampler = make(name)
    first = next(iter(sampler))
    kept = list(first)
    first.clear()
    assert next(iter(sampler)) == kept


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_anywhere_in_a_plain_loader(name, repeat, drop_last):
    whole = make(name, repeat=repeat, drop_last=drop_last)
    expected = list(islice(whole, 2 * len(whole) + 1))
    for cut in range(len(expected)):
        sampler = make(name, repeat=repeat, drop_last=drop_last)
        loader = DataLoader(Dataset(), batch_sampler=sampler)
        read = []
        for batch in islice(loader, cut):
            read.append(batch.tolist())
            sampler.advance_batch()
        assert sampler.consumed == sum(map(len, read))
        other = make(name, repeat=repeat, drop_last=drop_last, seed=99)
        other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        rest = [batch.tolist() for batch in islice(DataLoader(Dataset(), batch_sampler=other), len(expected) - cut)]
        assert read + rest == expected


@pytest.mark.parametrize("name", NAMES)
def test_after_the_last_batch_it_stands_in_the_next_epoch(name):
    sampler = make(name, repeat=False)
    sampler.advance_batch(len(sampler))
    assert (sampler.epoch, sampler.consumed, sampler.cycle) == (1, 0, 0)
    with pytest.raises(ValueError, match="count must be from 0"):
        sampler.advance_batch(len(sampler) + 1)


def test_its_state():
    sampler = make("class_balance")
    sampler.advance_batch(9)
    state = sampler.state_dict()
    assert sampler.samples == 28
    assert (sampler.cycle, sampler.consumed) == (1, 36)
    assert {key: state[key] for key in ("epoch", "cycle", "offset", "consumed", "length", "samples", "seed")} == {
        "epoch": 0,
        "cycle": 1,
        "offset": 8,
        "consumed": 36,
        "length": -1,
        "samples": 28,
        "seed": 5,
    }
    assert len(json.dumps(state)) < 400


@pytest.mark.parametrize(
    ("field", "value"),
    [("cycle", 0), ("offset", 4), ("offset", 9), ("consumed", 40), ("consumed", 37), ("cycle", -1), ("offset", 2**70)],
)
def test_a_cursor_that_contradicts_itself_is_refused(field, value):
    sampler = make("class_balance")
    sampler.advance_batch(9)
    state = {**sampler.state_dict(), field: value}
    with pytest.raises(StateMismatchError):
        sampler.load_state_dict(state)
    assert sampler.consumed == 36


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 3},
        {"drop_last": False},
        {"repeat": False},
        {"shuffle": False},
        {"class_ratio": {0: 1, 1: 1, 2: 2}},
        {"labels": LABELS[::-1]},
        {"domains": [0] * 15},
    ],
)
def test_another_configuration_is_refused(other):
    state = make("class_balance").state_dict()
    with pytest.raises(StateMismatchError):
        build_batch_sampler("class_balance", **{"dataset": Dataset(), "batch_size": 4, **other}).load_state_dict(state)


@pytest.mark.parametrize("seed", [-1, 2**64, "5", None, 1.0, True])
def test_a_damaged_seed_is_told_apart(seed):
    sampler = make("balance")
    with pytest.raises(ResumableSamplerGeneratorError) as caught:
        sampler.load_state_dict({**sampler.state_dict(), "seed": seed})
    assert caught.value.code == 351
    assert sampler.seed == 5


@pytest.mark.parametrize("name", NAMES)
def test_no_batch_is_possible(name):
    with pytest.raises(ResumableBatchConfigurationError) as caught:
        build_batch_sampler(name, Dataset([]), 4)
    assert caught.value.code == 338
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        make(name, batch_size=0)


def test_every_batch_would_be_dropped():
    with pytest.raises(ResumableBatchConfigurationError, match="every batch would be dropped"):
        NaiveBatchSampler(3, 4)


def test_there_is_no_other_kind():
    with pytest.raises(ValueError, match="'naive', 'class_balance', 'balance', got 'random'"):
        build_batch_sampler("random", Dataset(), 4)


class TestPatches:
    COUNTS = np.arange(len(LABELS)) + 1

    def test_they_are_those_of_the_cycle(self):
        dataset = Dataset(patch_counts=self.COUNTS)
        sampler = BalancedBatchSampler(dataset, 4, calculate_patch_number=True, seed=1)
        iterator = iter(sampler)
        told = []
        for _ in range(2):
            batches = [next(iterator) for _ in range(len(sampler))]
            assert dataset.n_patch == sum(int(self.COUNTS[index]) for batch in batches for index in batch)
            told.append(dataset.n_patch)
        assert told[0] != told[1]

    def test_they_are_not_in_the_state(self):
        dataset = Dataset(patch_counts=self.COUNTS)
        counted = BalancedBatchSampler(dataset, 4, calculate_patch_number=True, seed=1)
        assert counted.state_dict() == BalancedBatchSampler(Dataset(), 4, seed=1).state_dict()
        assert not hasattr(dataset, "n_patch"), "no list has been made yet"

    def test_there_have_to_be_counts(self):
        with pytest.raises(TypeError, match="patch_counts"):
            BalancedBatchSampler(Dataset(), 4, calculate_patch_number=True)


class TestTheList:
    """Made once for a cycle, and dropped at its end."""

    @pytest.fixture
    def sampler(self, monkeypatch):
        sampler = ClassBalancedBatchSampler(Dataset(), 4, seed=5)
        self.held = sampler.order.cycle
        self.made = []
        make_list = self.held._list
        monkeypatch.setattr(self.held, "_list", lambda key: self.made.append(key) or make_list(key))
        return sampler

    def test_once_for_a_cycle(self, sampler):
        cycle(sampler, 0)
        assert len(self.made) == 1
        assert self.held._made is None

    def test_a_resume_makes_one(self, sampler):
        sampler.advance_batch(10)
        next(iter(sampler))
        assert len(self.made) == 1
        assert len(self.held._made[1]) == sampler.samples

    def test_it_is_pickled_or_not_and_goes_on_alike(self, sampler):
        iterator = iter(sampler)
        next(iterator)
        assert next(iter(sampler)) == next(iter(make("class_balance")))


@pytest.mark.parametrize("name", NAMES)
class TestWithoutResume:
    def test_each_pass_starts_anew(self, name):
        sampler = make(name, resumable=False, repeat=False)
        first, second = list(sampler), list(sampler)
        assert len(first) == len(second) == len(sampler)
        assert first != second

    def test_without_a_seed_each_pass_draws_one(self, name):
        sampler = make(name, resumable=False, repeat=False, seed=None)
        torch.manual_seed(0)
        first = list(sampler)
        torch.manual_seed(0)
        assert list(sampler) == first

    def test_an_epoch_that_is_set_is_that_of_the_next_pass(self, name):
        sampler = make(name, resumable=False, repeat=False)
        passes = [list(sampler) for _ in range(3)]
        sampler.set_epoch(1)
        assert list(sampler) == passes[1]

    @pytest.mark.parametrize("method", ["state_dict", "advance_batch", "load_state_dict"])
    def test_it_has_no_state(self, name, method):
        sampler = make(name, resumable=False)
        arguments = ({},) if method == "load_state_dict" else ()
        with pytest.raises(ResumableModeRequiredError, match="resumable=False"):
            getattr(sampler, method)(*arguments)

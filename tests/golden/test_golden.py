"""Frozen seeds, orders, draws and states: whatever was saved once resumes to the same stream for ever.

A failure here is no reason to write a file anew. It says that streams or states which people have saved would change.
"""

from __future__ import annotations

import json
import warnings

import pytest

from stateful_pipes import InfiniteRandomSampler, RandomSampler, StatefulDataLoader
from stateful_pipes import state as state_module
from stateful_pipes.checkpoint import loads
from tests.golden import pinned
from tests.golden.pinned import FOLDER, ORDERS, PIPELINES, read


@pytest.fixture(autouse=True)
def _other_versions_are_no_fault():
    """The files tell the versions that wrote them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state was saved with")
        yield


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", ["seeds.json", "permutations.json", "orders.json", "batches.json"])
def test_what_is_frozen_by_our_own_arithmetic(name):
    assert plain(pinned.FILES[name]()) == read(name)


def test_the_purposes():
    assert read("seeds.json")["purposes"] == {"order": 1, "sample": 2, "collate": 3, "worker": 4}


@pytest.mark.parametrize("name", ["stream.json", "torch_door.json"])
def test_the_draws_of_a_tiny_pipeline(name):
    """Python's, NumPy's legacy and torch's CPU generator; to the last bit, in order."""
    assert plain(pinned.FILES[name]()) == read(name)


def test_the_draws_are_what_they_are_meant_to_be():
    """A golden file that pinned an accident would be worth nothing."""
    samples = [sample for epoch in read("stream.json") for batch in epoch for sample in batch["samples"]]
    assert len(samples) == 14
    assert [sorted(sample[0] for sample in samples[start : start + 7]) for start in (0, 7)] == [list(range(7))] * 2
    for column in range(1, 6):
        assert len({sample[column] for sample in samples}) == 14


STATES = [("states_v1.json", PIPELINES, name) for name in PIPELINES]
STATES += [("states_of_orders_v1.json", ORDERS, name) for name in ORDERS]


@pytest.mark.parametrize(("file", "pipelines", "name"), STATES)
def test_a_state_of_version_1_resumes_to_the_pinned_stream(file, pipelines, name):
    saved = read(file)[name]
    assert saved["state"]["version"] == 1
    for _ in range(2):
        loader = StatefulDataLoader(pipelines[name]())
        loader.load_state_dict(saved["state"])
        found = [item for item, _ in zip(loader, range(6), strict=False)]
        assert plain(found) == saved["following"]


@pytest.mark.parametrize(("file", "pipelines", "name"), STATES)
def test_today_s_state_has_the_pinned_form(file, pipelines, name):
    saved = read(file)[name]["state"]
    if saved["version"] != state_module.VERSION:
        pytest.skip("a later version has a file of its own")
    today = plain(pinned.states(pipelines)[name]["state"])
    for state in (saved, today):
        assert set(state.pop("versions")) == {"python", "numpy", "torch"}
        state.pop("library")
    batch = today.pop("batch")  # which has come to it since
    assert type(batch) is int
    assert today == saved


def test_a_checkpoint_file_of_version_1():
    text = read("checkpoint_v1.json")
    state = loads(text.encode())
    assert state["version"] == 1
    loader = StatefulDataLoader(pinned.tiny(), checkpoint=text.encode())
    assert plain(list(loader)) == read("stream.json")[0][1:]
    assert plain(list(loader)) == read("stream.json")[1]


def test_sampler_states_of_version_1():
    saved = read("sampler_states_v1.json")
    sampler = RandomSampler(7, seed=0)
    sampler.load_state_dict(saved["RandomSampler"])
    assert list(sampler) == RandomSampler(7, seed=1).indices(0, range(3, 7)).tolist()
    iterator = iter(RandomSampler(7, seed=0))
    iterator.load_state_dict(saved["its iterator's end"])
    assert list(iterator) == []
    endless = InfiniteRandomSampler(7, seed=0, replacement=True)
    endless.load_state_dict(saved["InfiniteRandomSampler"])
    assert (endless.seed, endless.consumed) == (1, 30)
    assert plain(pinned.sampler_states()) == saved


def test_every_file_is_tested():
    assert {path.name for path in FOLDER.glob("*.json")} == set(pinned.FILES)

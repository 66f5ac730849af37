"""Batches into page-locked memory: torch's own copy, in the process that asks."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data._utils.pin_memory as torch_pin_memory

from stateful_pipes import SamplerNode, SeededBatcher, SequentialSampler, StatefulDataLoader
from stateful_pipes.nodes.pin_memory import PinnedMemory
from tests.streams import place_of


@pytest.fixture
def pinned(monkeypatch):
    """What was pinned, and for which device; without an accelerator there is nothing to pin with."""
    calls = []

    def pin(data, device=None):
        calls.append((data, device))
        return ("pinned", data)

    monkeypatch.setattr(torch_pin_memory, "pin_memory", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return calls


def make(device=""):
    return PinnedMemory(SeededBatcher(SamplerNode(SequentialSampler(5)), 2, collate_fn=list, seed=1), device)


@pytest.mark.parametrize(("device", "passed"), [("", None), ("cuda:1", "cuda:1")])
def test_each_item_is_pinned_for_the_device(pinned, device, passed):
    assert list(make(device)) == [("pinned", [0, 1]), ("pinned", [2, 3]), ("pinned", [4])]
    assert pinned == [([0, 1], passed), ([2, 3], passed), ([4], passed)]


def test_only_what_is_handed_out_is_pinned(pinned):
    next(make())
    assert len(pinned) == 1


def test_it_has_no_state_and_passes_everything_on(pinned):
    loader = StatefulDataLoader(make())
    assert list(loader.state_dict()["nodes"]) == ["sampler", "batcher"]
    assert len(loader) == 3
    loader.set_epoch(4)
    assert place_of(loader) == (4, 0)
    state = loader.state_dict()
    assert list(StatefulDataLoader(range(5), batch_size=2, seed=1).state_dict()["nodes"]) == ["sampler", "mapper", "batcher"]
    other = StatefulDataLoader(make())
    state["nodes"]["batcher"]["batch_size"] = 3
    other.load_state_dict(state, allow="batch_size")
    assert place_of(other) == (4, 0)


def test_the_door_puts_it_on_top(pinned):
    loader = StatefulDataLoader(range(5), batch_size=2, pin_memory=True, pin_memory_device="cuda:0", collate_fn=list)
    assert type(loader.pipeline) is PinnedMemory
    assert loader.batch_size == 2
    assert list(loader)[0] == ("pinned", [0, 1])  # noqa: RUF015
    assert pinned[0] == ([0, 1], "cuda:0")


def test_a_state_fits_with_and_without(pinned):
    with_pin = StatefulDataLoader(range(5), pin_memory=True)
    next(iter(with_pin))
    without = StatefulDataLoader(range(5))
    without.load_state_dict(with_pin.state_dict())
    assert place_of(without) == (0, 1)


def test_without_an_accelerator_the_door_warns_and_does_not_pin(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no accelerator") as caught:
        loader = StatefulDataLoader(range(5), pin_memory=True)
    assert caught[0].filename == __file__  # the user's own line
    assert type(loader.pipeline) is not PinnedMemory
    assert [batch.tolist() for batch in loader] == [[0], [1], [2], [3], [4]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_really_pinned():
    for batch in StatefulDataLoader(range(5), batch_size=2, pin_memory=True):
        assert batch.is_pinned()

"""Prefix and resumed rest equal the uninterrupted stream bit for bit, wherever and however often it is cut."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from stateful_pipes.errors import IteratorInvalidError
from stateful_pipes.testing.strategies import cuts
from tests.property.pipelines import END, Engine, build, play, uninterrupted, wander
from tests.property.strategies import SEEDS, cases, engines
from tests.streams import disturb


@dataclass(frozen=True)
class Cut:
    """Where the stream is cut, and what loads the state there.

    Attributes:
        step: Steps of the uninterrupted stream before the cut.
        into: "fresh" and "checkpoint" (at construction) loaders of other seeds; "used" one that has read something; "same".
        engine: The next loader's.
        read: Steps that a loader which is used or the same has read when the state reaches it.
    """

    step: int
    into: str
    engine: Engine
    read: int


@st.composite
def chains(draw, steps, workers):
    """Cuts in order of their place, often at the places that are special, and often two at one place."""
    ends = [i for i, step in enumerate(steps) if step is END]
    places = draw(cuts(len(steps), ends=[*ends, *(end + 1 for end in ends)]))
    into = st.sampled_from(["fresh", "checkpoint", "used", "same"])
    return [Cut(place, draw(into), draw(engines(workers)), draw(st.integers(0, 6))) for place in places]


def check(case, seed, first, cuts, steps, following):
    """Plays `steps` over all cuts, then what follows."""
    steps = [*steps, *following]
    with ExitStack() as stack:
        loader = stack.enter_context(build(case, first, seed))
        at = 0
        for cut in cuts:
            play(loader, steps[at : cut.step])
            at = max(at, cut.step)
            state = json.loads(json.dumps(loader.state_dict()))
            disturb()
            loader = stack.enter_context(_load(case, loader, cut, state))
            assert json.loads(json.dumps(loader.state_dict())) == state
            if 0 < at < len(steps) and steps[at] is END and steps[at - 1] is not END:
                at += 1  # the last batch of an epoch was consumed, so the state is the next epoch's start already
        play(loader, steps[at:])


def _load(case, loader, cut, state):
    if cut.into == "checkpoint":
        return build(case, cut.engine, checkpoint=state)
    if cut.into != "same":
        loader = build(case, cut.engine)
    batches = wander(loader, 0 if cut.into == "fresh" else cut.read)
    loader.load_state_dict(state)
    with pytest.raises(IteratorInvalidError):
        next(batches)
    return loader


def draw_and_check(case, seed, data, workers):
    # One epoch more than is cut, so that something follows each cut.
    steps = uninterrupted(case, seed, case.epochs + 1)
    inside = len(steps) * case.epochs // (case.epochs + 1)
    if not case.is_endless:
        inside = [i for i, step in enumerate(steps) if step is END][case.epochs - 1] + 1
    cuts = data.draw(chains(steps[:inside], workers), label="cuts")
    event(f"{len(cuts)} cuts of a stream through {case.shape}")
    check(case, seed, data.draw(engines(workers), label="first engine"), cuts, steps[:inside], steps[inside:])


@given(case=cases(), seed=SEEDS, data=st.data())
def test_inline(case, seed, data):
    draw_and_check(case, seed, data, workers=(None, 0))


@settings(max_examples=settings.default.max_examples // 3)
@given(case=cases(), seed=SEEDS, data=st.data())
def test_workers(case, seed, data):
    draw_and_check(case, seed, data, workers=(0, 1, 2, 3))

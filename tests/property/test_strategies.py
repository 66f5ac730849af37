"""The public strategies: what they draw is what they promise, resumes exactly, and its faults are found."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from stateful_pipes.testing import assert_pipeline_resume
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.testing.pieces import steps
from stateful_pipes.testing.random_pipelines import ORDERS, RandomPipeline
from stateful_pipes.testing.strategies import cuts, pipelines, rngs, seeds

HERE = {"batches": 6, "cuts": 2, "new_process": False}
FEW = settings.default.max_examples


def read(factory, count=6, state=None, **options):
    with factory(**options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [step for _, step in zip(range(count), steps(loader), strict=False)], loader.state_dict()


@settings(max_examples=FEW // 6)
@given(factory=pipelines(), seed=st.integers(0, 100))
def test_pipelines_resume_exactly(factory, seed):
    event(f"{factory.order}, {len(factory.steps)} steps")
    assert_pipeline_resume(factory, seed=seed, workers=(0,), **HERE)


@settings(max_examples=FEW // 40)
@given(factory=pipelines())
def test_pipelines_resume_exactly_with_workers_and_kills(factory):
    assert_pipeline_resume(factory, workers=(0, 1), kills=1, **HERE)


@settings(max_examples=FEW // 5)
@given(factory=pipelines())
def test_a_factory_makes_the_same_stream_each_time_also_of_its_repr_and_pickle(factory):
    first, _ = read(factory)
    assert first
    for again in (factory, pickle.loads(pickle.dumps(factory)), eval(repr(factory), {"RandomPipeline": RandomPipeline})):
        assert again == factory
        assert first_mismatch(first, read(again)[0]) is None


@settings(max_examples=FEW // 4)
@given(factory=pipelines())
def test_items_show_their_seed(factory):
    """So that a resume under another one would be found."""
    other = RandomPipeline(**{**vars(factory), "seed": (factory.seed + 1) % 2**64})
    if factory.steps and factory.rng:
        assert first_mismatch(read(factory)[0], read(other)[0]) is not None


@settings(max_examples=FEW // 4)
@given(factory=pipelines(max_length=4), data=st.data())
def test_pipelines_are_of_the_kind_that_is_asked_for(factory, data):
    assert 1 <= factory.length <= 4
    assert factory.is_endless == (factory.order == "infinite")
    wanted = data.draw(st.booleans())
    assert data.draw(pipelines(is_endless=wanted)).is_endless == wanted
    order = data.draw(st.sampled_from(ORDERS))
    assert data.draw(pipelines(orders=[order])).order == order


@given(batches=st.integers(0, 20), ends=st.lists(st.integers(0, 20), max_size=2), max_size=st.integers(1, 3), data=st.data())
def test_cuts_lie_within_the_stream_in_order(batches, ends, max_size, data):
    places = data.draw(cuts(batches, ends=[end for end in ends if end <= batches], max_size=max_size))
    assert places == sorted(places)
    assert 1 <= len(places) <= max_size + (max_size > 1)
    assert set(places) <= set(range(batches + 1))


def test_every_special_cut_comes():
    found = set()

    @settings(max_examples=60, database=None)
    @given(cuts(1000, ends=[400]))
    def draw(places):
        found.update(places)
        found.add("twice" if len(set(places)) < len(places) else "once")

    draw()
    assert {0, 400, 1000, "once", "twice"} <= found


@given(seed=seeds(), rng=rngs())
def test_seeds_and_rngs_are_accepted(seed, rng):
    assert 0 <= seed < 2**64
    read(RandomPipeline(3, rng=rng, seed=seed), count=1)


def test_state_fits_only_its_own_composition():
    _, state = read(RandomPipeline(5))
    with pytest.raises(Exception, match="does not fit"):
        read(RandomPipeline(5, steps=()), state=json.loads(json.dumps(state)))


def test_without_hypothesis_the_extra_is_named():
    code = "import sys; sys.modules['hypothesis'] = None; import stateful_pipes.testing, stateful_pipes.testing.strategies"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "stateful_pipes.testing.strategies needs hypothesis: pip install 'stateful_pipes[hypothesis]'" in ran.stderr

"""Damaged states and files: each is refused with a StatefulPipesError, or is one that a loader may have; no loader changes."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torchdata.nodes as tn
from hypothesis import event, given, settings
from hypothesis import strategies as st

from stateful_pipes import StatefulDataLoader
from stateful_pipes.checkpoint import dumps, loads
from stateful_pipes.errors import StatefulPipesError
from tests.streams import same

# That the versions differ is a warning of its own.
pytestmark = pytest.mark.filterwarnings("ignore:the state was saved with")

EXAMPLES = settings.default.max_examples * 1000 // 120  # 1,000 in CI

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "RandomSampler", "SeededMapper", "stateful_pipes", "pad", "{}", "null"]),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3))
)


def sized():
    return StatefulDataLoader(list(range(11)), 3, shuffle=True, seed=7, max_skipped=2)


def foreign():
    return StatefulDataLoader(tn.Batcher(tn.IterableWrapper(range(7)), 2))


MAKERS = {"sized": sized, "foreign": foreign}


@cache
def steps(kind):
    """The states of a loader from its start into its second epoch, and the batches between them."""
    loader = MAKERS[kind]()
    states, batches = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    return states, batches


@st.composite
def mutated(draw, state):
    """The state with one to three changes, anywhere in it."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        place = state
        while True:
            inner = [key for key, value in place.items() if isinstance(value, dict)]
            if not inner or draw(st.integers(0, 3)) == 0:
                break
            place = place[draw(st.sampled_from(sorted(inner)))]
        what = draw(st.sampled_from(["remove", "replace", "add", "rename", "near"]))
        key = draw(st.sampled_from(sorted(place))) if place else None
        if what == "add" or key is None:
            place[draw(st.text(max_size=5))] = draw(VALUES)
        elif what == "remove":
            del place[key]
        elif what == "rename":
            name = draw(st.one_of(st.text(max_size=5), st.sampled_from(sorted(place))))
            place[name] = place.pop(key)
        elif what == "near" and type(place[key]) is int:
            place[key] += draw(st.integers(-4, 4))
        else:
            place[key] = draw(VALUES)
    return state


def refusal(check, state):
    try:
        check(state)
    except StatefulPipesError as error:
        return error
    return None


@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_a_mutated_state(kind, data):
    states, batches = steps(kind)
    saved = data.draw(mutated(data.draw(st.sampled_from(states), label="of")), label="state")
    loader = MAKERS[kind]()
    at = data.draw(st.integers(0, len(batches) - 1), label="read")
    loader.load_state_dict(states[at])
    running = iter(loader)
    before = copy.deepcopy(saved)
    told = refusal(loader.validate_state_dict, saved)
    assert loader.state_dict() == states[at]
    try:
        loader.load_state_dict(saved)
    except StatefulPipesError as error:
        event("refused")
        assert str(error)
        assert str(told) == str(error)
        assert loader.state_dict() == states[at]
        assert same(next(running), batches[at])
    else:
        event("accepted")
        assert told is None
        assert same(saved, before), "a state is its owner's"
        assert min(loader.position) >= 0
        if saved:
            found = loader.state_dict()
            assert json.loads(json.dumps(found)) == found
            fresh = MAKERS[kind]()
            fresh.load_state_dict(found)
            assert same(next(iter(loader)), next(iter(fresh)))


@st.composite
def damaged(draw, data):
    """The bytes with one to three changes."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["cut", "flip", "insert", "remove", "repeat", "swap"]))
        if what == "cut":
            data = data[:place]
        elif what == "flip" and place < len(data):
            data = data[:place] + bytes([data[place] ^ (1 << draw(st.integers(0, 7)))]) + data[place + 1 :]
        elif what == "insert":
            data = data[:place] + draw(st.binary(min_size=1, max_size=4)) + data[place:]
        elif what == "remove":
            data = data[:place] + data[place + draw(st.integers(1, 9)) :]
        elif what == "repeat":
            data += data[place:]
        else:
            data = data[place:] + data[:place]
    return data


@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_a_damaged_file(data):
    states, batches = steps("sized")
    whole = dumps(data.draw(st.sampled_from(states), label="of"))
    found = data.draw(damaged(whole), label="bytes")
    loader = MAKERS["sized"]()
    first = next(iter(loader))
    try:
        state = loads(found)
    except StatefulPipesError:
        event("refused")
        with pytest.raises(StatefulPipesError):
            StatefulDataLoader(list(range(11)), 3, shuffle=True, checkpoint=found)
    else:
        event("unchanged")
        assert found == whole
        loader.load_state_dict(state)
        return
    assert same(first, batches[0])
    assert same(next(iter(loader)), batches[1])


@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_a_mutated_state_under_a_right_checksum(data):
    states, _ = steps("sized")
    saved = data.draw(mutated(states[3]), label="state")
    try:
        found = dumps(saved)
    except ValueError:  # a number of more digits than Python prints
        return
    try:
        loader = StatefulDataLoader(list(range(11)), 3, shuffle=True, seed=7, max_skipped=2, checkpoint=found)
    except StatefulPipesError:
        event("refused")
    else:
        event("accepted")
        next(iter(loader))

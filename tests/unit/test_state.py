"""The one loop that compares a saved state with a pipeline: it finds every difference and touches nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import warnings

import numpy as np
import pytest

from stateful_pipes import state as state_module
from stateful_pipes.errors import StateMismatchError, StateVersionError
from stateful_pipes.fields import adopted_seed, allowable, counter, fixed, text
from stateful_pipes.state import FORMAT, LIBRARY_VERSION, VERSION, LoaderState, envelope, validate, validate_entry

NODES = {
    "sampler": {
        "type": fixed("SamplerNode"),
        "length": fixed(10),
        "seed": adopted_seed(7),
        "epoch": counter(0),
        "consumed": counter(3, 10),
    },
    "mapper": {"type": fixed("SeededMapper"), "seed": adopted_seed(8), "rng": fixed("torch"), "drop": fixed(False)},
    "batcher": {"type": fixed("SeededBatcher"), "batch_size": allowable(4), "state": text("{}")},
}
MISSING = object()
ABSURD = 10**5000  # more digits than Python will print


def saved():
    return envelope(0, 2, {name: {key: field.value for key, field in entry.items()} for name, entry in NODES.items()})


def changed(**changes):
    """A state with entries replaced: `sampler__length=11`, or `format="x"` at the top; MISSING takes one away."""
    state = saved()
    for path, value in changes.items():
        place = state
        *parents, key = path.split("__")
        for parent in ["nodes", *parents] if parents else []:
            place = place[parent]
        if value is MISSING:
            del place[key]
        else:
            place[key] = value
    return state


def refused(state, allow=(), nodes=NODES):
    before = pickle.dumps(state)
    with pytest.raises(StateMismatchError) as caught:
        validate(state, nodes, allow)
    assert pickle.dumps(state) == before
    return caught.value


def places(error):
    return [(one.node, one.field) for one in error.differences]


def test_a_state_is_plain_json_and_comes_back():
    state = saved()
    keys = {"format", "version", "library", "versions", "epoch", "batch", "nodes"}
    assert set(state) == set(LoaderState.__annotations__) == keys
    assert json.loads(json.dumps(state)) == state
    assert (state["format"], state["version"], state["library"]) == (FORMAT, VERSION, LIBRARY_VERSION)
    assert set(state["versions"]) == {"python", "numpy", "torch"}
    assert all(type(version) is str for version in state["versions"].values())
    assert validate(state, NODES)["nodes"] == state["nodes"]


def test_a_state_shares_nothing():
    state = saved()
    state["nodes"]["sampler"]["length"] = 99
    state["versions"]["python"] = "x"
    assert saved()["nodes"]["sampler"]["length"] == 10
    assert saved()["versions"]["python"] != "x"


@pytest.mark.parametrize("state", [None, 3, "x", b"{}", [], [("format", FORMAT)], math.nan, object(), True])
def test_a_state_is_a_mapping(state):
    with pytest.raises(StateMismatchError, match=f"a state is a mapping, got {type(state).__name__}"):
        validate(state, NODES)


# Each way in which one entry can be wrong: the path and what stands there instead.
WRONG = [
    ("format", "other"),
    ("format", None),
    ("format", MISSING),
    ("version", 0),
    ("version", -1),
    ("version", True),
    ("version", 1.0),
    ("version", "1"),
    ("version", None),
    ("version", math.nan),
    ("version", MISSING),
    ("library", MISSING),
    ("library", 1),
    ("library", None),
    ("batch", -1),
    ("batch", True),
    ("batch", None),
    ("epoch", -1),
    ("epoch", 2**63 - 1),
    ("epoch", 1.0),
    ("epoch", True),
    ("epoch", None),
    ("epoch", MISSING),
    ("versions", None),
    ("versions", []),
    ("versions", "x"),
    ("nodes", None),
    ("nodes", []),
    ("nodes", "sampler"),
    ("nodes", 3),
    ("sampler__type", "OtherNode"),
    ("sampler__type", MISSING),
    ("sampler__length", 11),
    ("sampler__length", 10.0),
    ("sampler__length", "10"),
    ("sampler__length", None),
    ("sampler__length", -10),
    ("sampler__seed", -1),
    ("sampler__seed", 2**64),
    ("sampler__seed", 7.0),
    ("sampler__seed", True),
    ("sampler__seed", None),
    ("sampler__seed", MISSING),
    ("sampler__epoch", -1),
    ("sampler__epoch", 2**63 - 1),
    ("sampler__epoch", ABSURD),
    ("sampler__epoch", False),
    ("sampler__epoch", math.nan),
    ("sampler__epoch", math.inf),
    ("sampler__epoch", "0"),
    ("sampler__epoch", [0]),
    ("sampler__epoch", {"value": 0}),
    ("sampler__epoch", np.array([0, 1])),
    ("sampler__consumed", 10),
    ("sampler__consumed", -1),
    ("sampler__consumed", True),
    ("sampler__consumed", MISSING),
    ("mapper__rng", ""),
    ("mapper__rng", ["torch"]),
    ("mapper__drop", 0),
    ("mapper__drop", True),
    ("mapper__drop", None),
    ("batcher__batch_size", 5),
    ("batcher__batch_size", 0),
    ("batcher__batch_size", -4),
    ("batcher__batch_size", ABSURD),
    ("batcher__batch_size", True),
    ("batcher__batch_size", 4.0),
    ("batcher__batch_size", MISSING),
    ("batcher__state", {}),
    ("batcher__state", None),
    ("batcher__state", b"{}"),
    ("sampler__unknown", 1),
    ("sampler__3", 1),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: "absurd" if value is ABSURD else str(value)[:20])
def test_one_wrong_entry_is_named(path, value):
    error = refused(changed(**{path: value}))
    *node, field = path.split("__")
    expected = ("".join(node), field)
    assert set(places(error)) == {expected}
    lines = [line for line in str(error).splitlines() if line.startswith(f"  {path.replace('__', '.')}: saved ")]
    assert lines


@pytest.mark.parametrize("path", ["versions", "nodes"])
def test_a_missing_mapping_is_named(path):
    assert ("", path) in places(refused(changed(**{path: MISSING})))


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("value", [MISSING, None, 3])
def test_a_damaged_version_is_named(name, value):
    state = saved()
    if value is MISSING:
        del state["versions"][name]
    else:
        state["versions"][name] = value
    assert places(refused(state)) == [("versions", name)]


def test_an_unknown_version_is_named():
    state = saved()
    state["versions"]["jax"] = "0.5"
    assert places(refused(state)) == [("versions", "jax")]


def test_an_unknown_key_is_named():
    assert places(refused({**saved(), "extra": 1})) == [("", "extra")]
    assert places(refused({**saved(), 3: 1})) == [("", "3")]


def test_a_missing_and_an_extra_node_are_named():
    state = saved()
    state["nodes"]["decode"] = state["nodes"].pop("mapper")
    error = refused(state)
    assert places(error) == [("mapper", ""), ("decode", "")]
    assert "mapper: saved missing, here SeededMapper" in str(error)
    assert "decode: saved 'SeededMapper', here missing" in str(error)


@pytest.mark.parametrize("entry", [None, 3, [], "SeededMapper", [("type", "SeededMapper")]])
def test_a_node_that_is_no_mapping_is_named(entry):
    state = saved()
    state["nodes"]["mapper"] = entry
    assert places(refused(state)) == [("mapper", "")]


def test_a_node_with_no_string_for_a_name_is_named():
    state = saved()
    state["nodes"][3] = {}
    state["nodes"]["other"] = None
    assert places(refused(state)) == [("3", ""), ("other", "")]


def test_every_difference_is_named_at_once():
    state = changed(
        format="x",
        library=MISSING,
        extra=1,
        sampler__length=11,
        sampler__consumed=-1,
        mapper__rng=None,
        mapper__seed=MISSING,
        batcher__batch_size=5,
        batcher__new="y",
    )
    state["versions"]["torch"] = 2
    state["nodes"]["more"] = {"type": "Mixer"}
    expected = [
        ("", "format"),
        ("", "library"),
        ("", "extra"),
        ("versions", "torch"),
        ("sampler", "length"),
        ("sampler", "consumed"),
        ("mapper", "seed"),
        ("mapper", "rng"),
        ("batcher", "batch_size"),
        ("batcher", "new"),
        ("more", ""),
    ]
    error = refused(state)
    assert sorted(places(error)) == sorted(expected)
    assert len(str(error).splitlines()) == 1 + len(expected)


def test_a_wrong_version_does_not_hide_the_rest():
    assert sorted(places(refused(changed(version=0, sampler__length=11)))) == [("", "version"), ("sampler", "length")]


def test_a_difference_says_saved_here_and_remedy():
    (one,) = refused(changed(sampler__length=11)).differences
    assert (one.saved, one.current) == ("11", "10")
    assert "as it was" in one.remedy
    (one,) = refused(changed(batcher__batch_size=5)).differences
    assert "allow=('batch_size',)" in one.remedy
    (one,) = refused(changed(sampler__consumed=10)).differences
    assert "from 0 to 9" in one.remedy


def test_long_values_are_cut():
    assert len(str(refused(changed(sampler__type="x" * 10_000)))) < 400


def test_allowable_entries_may_differ_where_they_are_named():
    state = changed(batcher__batch_size=5)
    assert validate(state, NODES, ("batch_size",))["nodes"]["batcher"]["batch_size"] == 5
    assert places(refused(state, ("world_size",))) == [("batcher", "batch_size")]
    assert places(refused(changed(sampler__length=11), ("length",))) == [("sampler", "length")]
    assert places(refused(changed(batcher__batch_size=0), ("batch_size",))) == [("batcher", "batch_size")]


def test_seeds_and_cursors_may_differ():
    state = changed(
        sampler__seed=2**64 - 1, sampler__epoch=2**63 - 2, sampler__consumed=9, mapper__seed=0, batcher__state="other"
    )
    assert validate(state, NODES)["nodes"] == state["nodes"]


def test_another_mapping_type_will_do():
    class Frozen(dict):
        def __setitem__(self, key, value):
            raise AssertionError("changed")

    assert validate(Frozen(saved()), NODES)["nodes"] == saved()["nodes"]


def test_a_single_entry():
    entry = {"length": fixed(3), "epoch": counter(0)}
    state = {"length": 3, "epoch": 5}
    found = validate_entry(state, entry, "RandomSampler")
    assert found == state
    assert found is not state
    with pytest.raises(StateMismatchError) as caught:
        validate_entry({"length": 4, "epoch": -1, "x": 0}, entry, "RandomSampler")
    assert places(caught.value) == [("RandomSampler", "length"), ("RandomSampler", "epoch"), ("RandomSampler", "x")]
    for wrong in (None, [], 3):
        with pytest.raises(StateMismatchError, match="RandomSampler"):
            validate_entry(wrong, entry, "RandomSampler")


TORCHDATA = [
    {"_num_yielded": 3, "_sampler_iter_yielded": 3, "_index_sampler_state": None, "_iterator_finished": False},
    {"_snapshot": {"_snapshot_step": 1}, "_steps_since_snapshot": 0, "_iterator_finished": False},  # with workers
]


@pytest.mark.parametrize("state", TORCHDATA, ids=["inline", "workers"])
def test_a_state_of_torchdata_s_loader_says_how_to_move_over(state):
    with pytest.raises(StateMismatchError, match=r"torchdata's StatefulDataLoader.*set_epoch"):
        validate(state, NODES)


def test_a_newer_version_is_refused():
    with pytest.raises(StateVersionError, match="library that wrote it") as caught:
        validate(changed(version=VERSION + 1, library="9.0", sampler__length=11), NODES)
    assert caught.value.found == VERSION + 1
    assert "9.0" in caught.value.remedy


@pytest.fixture
def migrations(monkeypatch):
    """Two later versions: the second renames an entry, the third adds a field."""

    def to_2(state):
        nodes = dict(state["nodes"])
        nodes["mapper"] = nodes.pop("map")
        return {**state, "version": 2, "nodes": nodes}

    def to_3(state):
        mapper = {**state["nodes"]["mapper"], "drop": False}
        return {**state, "version": 3, "nodes": {**state["nodes"], "mapper": mapper}}

    monkeypatch.setattr(state_module, "VERSION", 3)
    monkeypatch.setattr(state_module, "MIGRATIONS", {1: to_2, 2: to_3})
    monkeypatch.setattr(state_module, "_ENVELOPE", {**state_module._ENVELOPE, "version": fixed(3)})


def version_1():
    state = changed(version=1)
    state["nodes"]["map"] = state["nodes"].pop("mapper")
    del state["nodes"]["map"]["drop"]
    return state


def test_migrations_go_step_by_step(migrations):
    state = version_1()
    before = copy.deepcopy(state)
    assert validate(state, NODES)["nodes"] == changed(version=3)["nodes"]
    assert state == before  # migrated in a copy
    second = {**changed(version=2)}
    del second["nodes"]["mapper"]["drop"]
    assert validate(second, NODES)["nodes"] == changed(version=3)["nodes"]
    assert validate(changed(version=3), NODES)["nodes"] == changed(version=3)["nodes"]


def test_what_is_wrong_after_a_migration_is_named(migrations):
    state = version_1()
    state["nodes"]["sampler"]["length"] = 11
    assert places(refused(state)) == [("sampler", "length")]


def test_a_newer_version_than_the_migrations_is_refused(migrations):
    with pytest.raises(StateVersionError):
        validate(changed(version=4), NODES)


def test_a_damaged_old_state_is_one_error_too(migrations):
    """A migration meets whatever the file held."""
    for nodes in (MISSING, None, []):
        with pytest.raises(StateMismatchError):
            validate(changed(version=1, nodes=nodes), NODES)


def test_there_is_a_migration_for_every_older_version():
    assert set(state_module.MIGRATIONS) == set(range(1, VERSION))


def test_other_versions_of_python_and_libraries_warn_once(monkeypatch):
    monkeypatch.setattr(state_module, "_warned", set())
    state = saved()
    state["versions"].update(numpy="0.1", torch="0.2")
    with pytest.warns(UserWarning, match="resume exactly") as caught:
        assert validate(state, NODES)["nodes"] == state["nodes"]
    (warning,) = caught
    here = saved()["versions"]
    assert re.search(rf"numpy 0\.1 \(here {re.escape(here['numpy'])}\), torch 0\.2", str(warning.message))
    assert "python" not in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(state, NODES)


def test_a_refused_state_does_not_warn(monkeypatch):
    monkeypatch.setattr(state_module, "_warned", set())
    state = changed(sampler__length=11)
    state["versions"]["torch"] = "0.2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(state)


def test_another_version_of_the_library_is_no_difference():
    assert validate(changed(library="0.0.9"), NODES)

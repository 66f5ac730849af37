"""The top: one stream, a state that is what was consumed, loads that are whole or nothing."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import json
import math
import pickle
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from stateful_pipes import (
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes import state as state_module
from stateful_pipes.contract import walk
from stateful_pipes.errors import (
    ConcurrentUseError,
    GlobalGeneratorThreadError,
    IteratorInvalidError,
    LoaderFailedError,
    NodeAttachedError,
    StatefulPipesError,
    StateMismatchError,
    StateVersionError,
)
from stateful_pipes.fields import fixed
from stateful_pipes.stream import Stream
from tests.streams import DrawingDataset, disturb, drawing_collate, generator_states, place_of, same


def make(length=10, seed=1, batch_size=3, **kwargs):
    settings = {"shuffle": True, "collate_fn": drawing_collate, **kwargs}
    return StatefulDataLoader(DrawingDataset(length), batch_size, seed=seed, **settings)


def epochs(loader, count=2):
    return [list(loader) for _ in range(count)]


EXPECTED = epochs(make(), 4)
CUTS = [(epoch, consumed) for epoch in range(2) for consumed in range(5)]


def run_to(loader, cut):
    """Consumes whole epochs, then some batches; 4 batches are an epoch, so the last cut is after the last batch."""
    epochs(loader, cut[0])
    iterator = iter(loader)
    for _ in range(cut[1]):
        next(iterator)
        disturb()
    return iterator


def rest_of(cut, count=2):
    """What follows a cut, epoch by epoch."""
    epoch, consumed = cut if cut[1] < 4 else (cut[0] + 1, 0)
    return [EXPECTED[epoch][consumed:], *EXPECTED[epoch + 1 :]][:count]


# One stream.


def test_epochs_differ_and_a_seed_is_a_stream():
    assert len(EXPECTED[0]) == 4
    assert not same(EXPECTED[0], EXPECTED[1])
    assert same(epochs(make(), 4), EXPECTED)
    assert not same(epochs(make(seed=2)), EXPECTED[:2])


def test_iter_again_shares_the_stream():
    loader = make()
    one, other = iter(loader), iter(loader)
    found = [next(one), next(other), next(one), next(other)]
    assert same(found, EXPECTED[0])
    for iterator in (one, other, one):
        with pytest.raises(StopIteration):
            next(iterator)
    assert same(list(loader), EXPECTED[1])


def test_a_loop_goes_on_where_the_last_one_broke_off():
    loader = make()
    for batch in loader:
        assert same(batch, EXPECTED[0][0])
        break
    assert same(list(loader), EXPECTED[0][1:])
    assert same(list(loader), EXPECTED[1])


def test_an_iterator_belongs_to_its_epoch():
    loader = make()
    old = iter(loader)
    list(loader)
    with pytest.raises(StopIteration):
        next(old)
    assert same(list(loader), EXPECTED[1])
    with pytest.raises(StopIteration):
        next(old)


def test_an_iterator_is_an_iterator():
    iterator = iter(make())
    assert iter(iterator) is iterator
    assert same(list(iterator), EXPECTED[0])


def test_restart():
    loader = make()
    iterator = run_to(loader, (1, 2))
    loader.restart()
    assert place_of(loader) == (1, 0)
    with pytest.raises(IteratorInvalidError):
        next(iterator)
    assert same(epochs(loader), EXPECTED[1:3])
    loader.restart()  # between epochs there is nothing to leave
    assert same(list(loader), EXPECTED[3])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_set_epoch(cut, epoch):
    loader = make()
    iterator = run_to(loader, cut)
    current = loader.position.epoch
    loader.set_epoch(epoch)
    if epoch == current:  # nothing happens, at whatever position
        assert same([list(iterator) if cut[1] < 4 else list(loader)], rest_of(cut, 1))
    else:
        assert place_of(loader) == (epoch, 0)
        if cut[1]:
            assert next(iterator, None) is None  # at its end; the epoch is another
        assert same(list(loader if cut[1] else iterator), EXPECTED[epoch])  # what has read nothing yet goes with it


def test_the_usual_loop_with_set_epoch():
    loader = make()
    found = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        found.append(list(loader))
    assert same(found, EXPECTED[:3])


NO_EPOCHS = [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), (None, TypeError), (True, TypeError)]


@pytest.mark.parametrize(("epoch", "error"), NO_EPOCHS)
def test_set_epoch_to_what_is_none(epoch, error):
    loader = make()
    iterator = iter(loader)
    with pytest.raises(error, match="epoch must be"):
        loader.set_epoch(epoch)
    assert same(list(iterator), EXPECTED[0])


# The state.


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_resumes_in_a_fresh_loader(cut):
    loader = make()
    run_to(loader, cut)
    state = loader.state_dict()
    data = loader.checkpoint()
    for resumed in (make(seed=9), make(seed=9, checkpoint=data), make(seed=9, checkpoint=state)):
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        disturb()
        assert same(epochs(resumed), rest_of(cut))


@pytest.mark.parametrize("cut", CUTS[::2])
@pytest.mark.parametrize("used", [(0, 0), (0, 1), (0, 4), (1, 2)])
def test_a_state_resumes_in_a_used_loader(cut, used):
    source = make()
    run_to(source, cut)
    loader = make(seed=9)
    iterator = run_to(loader, used)
    loader.load_state_dict(source.state_dict())
    with pytest.raises(IteratorInvalidError, match=r"Call iter\(\) again"):
        next(iterator)
    assert same(epochs(loader), rest_of(cut))


def test_a_load_takes_effect_once():
    source = make()
    run_to(source, (0, 2))
    loader = make()
    loader.load_state_dict(source.state_dict())
    iter(loader)
    iter(loader)
    assert same(epochs(loader, 3), [EXPECTED[0][2:], *EXPECTED[1:3]])


def test_a_state_is_what_was_consumed_before_and_after_the_last_batch():
    loader = make()
    iterator = iter(loader)
    assert place_of(loader) == (0, 0)
    for consumed in (3, 6, 9):
        next(iterator)
        assert place_of(loader) == (0, consumed)
    next(iterator)
    state = loader.state_dict()
    assert place_of(loader) == (1, 0)
    with pytest.raises(StopIteration):
        next(iterator)
    assert loader.state_dict() == state


def test_with_drop_last_the_end_is_the_next_epoch_too():
    loader = make(drop_last=True)
    list(loader)
    assert place_of(loader) == (1, 0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert place_of(loader) == (2, 0)
    resumed = make(drop_last=True, checkpoint=loader.state_dict())
    assert len(list(resumed)) == 3


def test_a_state_is_plain_small_constant_and_shares_nothing():
    loader = make()
    shapes = set()
    for _ in range(2):
        for _ in loader:
            state = loader.state_dict()
            kept = copy.deepcopy(state)
            assert json.loads(json.dumps(state)) == state
            assert len(json.dumps(state)) < 700
            shapes.add(json.dumps({name: list(entry) for name, entry in state["nodes"].items()}))
            leaves = [leaf for entry in state["nodes"].values() for leaf in entry.values()]
            assert {type(leaf) for leaf in leaves} <= {int, float, str, bool}
            for entry in state["nodes"].values():
                entry.clear()
            state["versions"].clear()
            assert loader.state_dict() == kept
    assert len(shapes) == 1


def test_a_loaded_state_may_be_changed_afterwards():
    source = make()
    run_to(source, (0, 2))
    state = source.state_dict()
    loader = make(checkpoint=state)
    for entry in state["nodes"].values():
        entry["seed"] = 77
    state["nodes"].clear()
    assert same(list(loader), EXPECTED[0][2:])


def test_state_dict_is_pure():
    loader = make()
    iterator = iter(loader)
    found = []
    for _ in range(4):
        before = generator_states()
        assert loader.state_dict() == loader.state_dict()
        loader.checkpoint()
        assert generator_states() == before
        found.append(next(iterator))
    assert same(found, EXPECTED[0])


def test_it_satisfies_torch_s_protocol():
    assert isinstance(make(), Stateful)
    assert not isinstance(make(), DataLoader)


def test_is_restored_from_checkpoint():
    loader = make()
    assert loader.is_restored_from_checkpoint is False
    state = loader.state_dict()
    loader.load_state_dict({})
    assert loader.is_restored_from_checkpoint is False
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({"format": 1})
    assert loader.is_restored_from_checkpoint is False
    loader.load_state_dict(state)
    assert loader.is_restored_from_checkpoint is True


def test_an_empty_state_does_nothing():
    loader = make()
    iterator = run_to(loader, (0, 2))
    loader.load_state_dict({})
    assert same(list(iterator), EXPECTED[0][2:])


# What may differ.


def workers(count, **kwargs):
    return {"num_workers": count, "multiprocessing_context": "fork", **kwargs}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_workers": 1, "multiprocessing_context": "fork"}, {}),
        ({}, {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 4}),
        (
            {"num_workers": 2, "multiprocessing_context": "fork"},
            {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60},
        ),
        ({}, {"seed": 99}),
        ({}, {"seed": None}),
    ],
    ids=str,
)
def test_what_changes_nothing_may_differ(before, after):
    with make(**before) as source:
        run_to(source, (0, 2))
        state = source.state_dict()
    with make(**after) as loader:
        loader.load_state_dict(state)
        assert same(epochs(loader), rest_of((0, 2)))


def test_batch_size_may_differ_where_it_is_named():
    source = make(collate_fn=list)
    run_to(source, (0, 2))
    state = source.state_dict()
    whole = [sample for batch in epochs(make(collate_fn=list), 1)[0] for sample in batch]
    loader = make(batch_size=4, collate_fn=list)
    with pytest.raises(StateMismatchError, match=r"batcher\.batch_size: saved 3, here 4"):
        loader.load_state_dict(state)
    for allow in (("batch_size",), "batch_size", ["batch_size", "world_size"], {"batch_size"}):
        loader.load_state_dict(state, allow=allow)
        assert same([sample for batch in loader for sample in batch], whole[6:])


@pytest.mark.parametrize("workers", [0, 1])
def test_validation_changes_nothing(workers):
    """Not the position, not what runs ahead, not an iterator; and it needs no reading to see what a load would refuse."""
    loader = StatefulDataLoader(range(30), 3, True, seed=1, num_workers=workers)
    expected = [batch.tolist() for batch in StatefulDataLoader(range(30), 3, True, seed=1)]
    other = StatefulDataLoader(range(30), 5, True, seed=2).state_dict()
    running = iter(loader)
    found = [next(running).tolist()]
    with pytest.raises(StateMismatchError, match="batch_size: saved 5, here 3"):
        loader.validate_state_dict(other)
    loader.validate_state_dict(other, allow=("batch_size",))
    loader.validate_state_dict({})
    with pytest.raises(StateMismatchError, match="a state is a mapping"):
        loader.validate_state_dict([])
    assert found + [batch.tolist() for batch in running] == expected
    assert not loader.is_restored_from_checkpoint
    loader.close()


@pytest.mark.parametrize("allow", [("seed",), "length", ("batch_size", "shuffle"), ["drop_last"]])
def test_nothing_else_can_be_allowed(allow):
    loader = make()
    with pytest.raises(ValueError, match="allow may name"):
        loader.load_state_dict(loader.state_dict(), allow=allow)


# Refused states: complete, and before anything was touched.


def edited(state, edit):
    state = copy.deepcopy(state)
    edit(state)
    return state


def setting(node, field, value):
    return lambda state: state["nodes"][node].__setitem__(field, value)


def removing(*path):
    def edit(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return edit


OTHERS = {
    "length": (lambda: make(11), {"sampler.length"}),
    "order": (lambda: make(shuffle=False), {"sampler.order", "sampler.seed"}),
    "rng": (lambda: make(rng=("torch",)), {"mapper.rng"}),
    "no rng": (lambda: make(rng=()), {"mapper.rng", "mapper.seed"}),
    "batch_size": (lambda: make(batch_size=2), {"batcher.batch_size"}),
    "drop_last": (lambda: make(drop_last=True), {"batcher.drop_last"}),
    "unbatched": (lambda: make(batch_size=None, collate_fn=None), {"batcher", "collate"}),
    "everything": (
        lambda: make(11, shuffle=False, rng=("torch",), drop_last=True, batch_size=2),
        {"sampler.length", "sampler.order", "sampler.seed", "mapper.rng", "batcher.batch_size", "batcher.drop_last"},
    ),
    "another source": (
        lambda: StatefulDataLoader(tn.IterableWrapper(range(10))),
        {"sampler", "mapper", "batcher", "iterable_wrapper"},
    ),
}
EDITS = {
    "format": (lambda state: state.update(format="x"), {"format"}),
    "version": (lambda state: state.update(version=0), {"version"}),
    "version true": (lambda state: state.update(version=True), {"version"}),
    "no version": (removing("version"), {"version"}),
    "no nodes": (removing("nodes"), {"nodes", "sampler", "mapper", "batcher"}),
    "no epoch": (removing("epoch"), {"epoch"}),
    "epoch true": (lambda state: state.update(epoch=True), {"epoch"}),
    "epoch negative": (lambda state: state.update(epoch=-1), {"epoch"}),
    "epoch of another place": (lambda state: state.update(epoch=3), {"epoch"}),
    "nodes a list": (lambda state: state.update(nodes=[]), {"nodes"}),
    "nodes none": (lambda state: state.update(nodes=None), {"nodes"}),
    "no node": (removing("nodes", "mapper"), {"mapper"}),
    "node none": (lambda state: state["nodes"].update(mapper=None), {"mapper"}),
    "node a list": (lambda state: state["nodes"].update(mapper=[1]), {"mapper"}),
    "unknown node": (lambda state: state["nodes"].update(extra={}), {"extra"}),
    "no field": (removing("nodes", "sampler", "consumed"), {"sampler.consumed"}),
    "unknown field": (setting("sampler", "extra", 1), {"sampler.extra"}),
    "unknown key": (lambda state: state.update(extra=1), {"extra"}),
    "negative": (setting("sampler", "consumed", -1), {"sampler.consumed"}),
    "too far": (setting("sampler", "consumed", 11), {"sampler.consumed"}),
    "absurd": (setting("sampler", "epoch", 10**5000), {"sampler.epoch"}),
    "float": (setting("sampler", "consumed", 3.0), {"sampler.consumed"}),
    "bool": (setting("sampler", "consumed", True), {"sampler.consumed"}),
    "nan": (setting("sampler", "consumed", math.nan), {"sampler.consumed"}),
    "none": (setting("sampler", "seed", None), {"sampler.seed"}),
    "text": (setting("sampler", "seed", "1"), {"sampler.seed"}),
    "huge seed": (setting("mapper", "seed", 2**64), {"mapper.seed"}),
    "list": (setting("sampler", "epoch", [0]), {"sampler.epoch"}),
    "int for bool": (setting("batcher", "drop_last", 0), {"batcher.drop_last"}),
    "tensor": (setting("sampler", "consumed", torch.tensor(3)), {"sampler.consumed"}),
    "array": (setting("sampler", "consumed", np.arange(3)), {"sampler.consumed"}),
    "several": (
        lambda state: [setting(*one)(state) for one in (("sampler", "seed", -1), ("mapper", "seed", None), ("batcher", "x", 1))],
        {"sampler.seed", "mapper.seed", "batcher.x"},
    ),
}
WRONG = {f"other {key}": (lambda _, m=maker: m().state_dict(), fields) for key, (maker, fields) in OTHERS.items()}
WRONG |= {key: (lambda state, e=edit: edited(state, e), fields) for key, (edit, fields) in EDITS.items()}


@pytest.mark.parametrize(("spoil", "fields"), WRONG.values(), ids=WRONG)
def test_a_wrong_state_names_every_field_and_touches_nothing(spoil, fields):
    loader = make()
    iterator = run_to(loader, (0, 1))
    before = loader.state_dict()
    wrong = spoil(before)
    generators = generator_states()
    with pytest.raises(StateMismatchError) as caught:
        loader.load_state_dict(wrong)
    assert {f"{one.node}.{one.field}".strip(".") for one in caught.value.differences} == fields
    assert all(field in str(caught.value) for field in fields)
    assert loader.state_dict() == before
    assert generator_states() == generators
    assert not loader.is_restored_from_checkpoint
    assert same(list(iterator), EXPECTED[0][1:])  # the running iterator goes on
    assert same(list(loader), EXPECTED[1])


@pytest.mark.parametrize("state", [None, 3, "x", b"x", [], (), math.nan, [("format", 1)]], ids=repr)
def test_what_is_no_mapping_touches_nothing(state):
    loader = make()
    iterator = run_to(loader, (0, 1))
    with pytest.raises(StateMismatchError, match="a state is a mapping"):
        loader.load_state_dict(state)
    assert same(list(iterator), EXPECTED[0][1:])


def test_a_newer_state_touches_nothing():
    loader = make()
    iterator = run_to(loader, (0, 1))
    with pytest.raises(StateVersionError):
        loader.load_state_dict({**loader.state_dict(), "version": state_module.VERSION + 1})
    assert same(list(iterator), EXPECTED[0][1:])


def test_a_state_that_a_migration_completes(monkeypatch):
    """What an older version lacks is added by its migration; both doors read the state after that."""

    def to_2(state):
        return {**state, "version": 2, "epoch": state["nodes"]["sampler"]["epoch"]}

    source = make()
    run_to(source, (1, 2))
    old = source.state_dict()
    del old["epoch"]
    monkeypatch.setattr(state_module, "VERSION", 2)
    monkeypatch.setattr(state_module, "MIGRATIONS", {1: to_2})
    monkeypatch.setattr(state_module, "_ENVELOPE", {**state_module._ENVELOPE, "version": fixed(2)})
    assert same(epochs(make(checkpoint=old)), rest_of((1, 2)))
    node = make().pipeline
    node.reset(old)
    assert same(list(node), rest_of((1, 2))[0])


def test_a_wrong_state_stops_no_worker():
    with make(num_workers=2, multiprocessing_context="fork") as loader:
        iterator = run_to(loader, (0, 1))
        with pytest.raises(StateMismatchError):
            loader.load_state_dict(make(11).state_dict())
        assert same(list(iterator), EXPECTED[0][1:])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_of_torchdata_s_loader_says_how_to_move_over(num_workers):
    from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

    old = TorchdataLoader(list(range(10)), batch_size=3, num_workers=num_workers)
    next(iter(old))
    loader = make()
    with pytest.raises(StateMismatchError, match=r"torchdata's StatefulDataLoader.*set_epoch"):
        loader.load_state_dict(old.state_dict())


# Failures.


class Failing(DrawingDataset):
    """Raises at one index, while `bad` says so."""

    def __init__(self, length, bad=None):
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return sample


def failing(**kwargs):
    """A loader whose second batch fails, at the sample of position 4."""
    bad = EXPECTED[0][1]["samples"][1][0]
    return StatefulDataLoader(Failing(10, bad), 3, shuffle=True, seed=1, collate_fn=drawing_collate, **kwargs), bad


def test_a_sample_that_raises_stops_the_stream_until_it_is_cleared():
    loader, bad = failing()
    iterator = iter(loader)
    assert same(next(iterator), EXPECTED[0][0])
    state = loader.state_dict()
    with pytest.raises(ValueError, match=f"sample {bad} is bad") as caught:
        next(iterator)
    assert caught.value.__notes__ == [f"in node 'mapper' at epoch 0, position 4, index {bad}"]
    assert "__getitem__" in [entry.name for entry in caught.traceback]
    for _ in range(2):
        for again in (lambda: next(iterator), lambda: iter(loader)):
            with pytest.raises(LoaderFailedError, match=f"ValueError: sample {bad} is bad"):
                again()
    assert loader.state_dict() == state
    loader.dataset.bad = None
    loader.close()
    assert same(epochs(loader), [EXPECTED[0][1:], EXPECTED[1]])


@pytest.mark.parametrize("clear", ["load", "restart", "set_epoch"])
def test_a_move_clears_an_error(clear):
    loader, _ = failing()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="is bad"):
        next(iterator)
    loader.dataset.bad = None
    if clear == "load":
        loader.load_state_dict(state)
        assert same(list(loader), EXPECTED[0][1:])
    elif clear == "restart":
        loader.restart()
        assert same(list(loader), EXPECTED[0])
    else:
        loader.set_epoch(3)
        assert same(list(loader), EXPECTED[3])


def test_restart_clears_an_error_in_the_first_batch_too():
    loader, _ = failing()
    loader.dataset.bad = EXPECTED[0][0]["samples"][0][0]
    with pytest.raises(ValueError, match="is bad"):
        next(iter(loader))
    loader.dataset.bad = None
    loader.restart()
    assert same(list(loader), EXPECTED[0])


def test_a_failure_that_is_not_cleared_comes_again():
    loader, _ = failing()
    for _ in range(2):
        with pytest.raises(ValueError, match="is bad"):
            list(loader)
        loader.close()
    assert place_of(loader) == (0, 3)


@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), ()])
@pytest.mark.parametrize("bad", [False, True])
def test_the_caller_s_generators_are_untouched(rng, bad):
    """state_dict and a whole iteration, also when a sample raises; a Gaussian waits in NumPy's cache."""

    class Dataset(Failing):
        def __getitem__(self, index):
            return super().__getitem__(index) if rng else index

    loader = StatefulDataLoader(Dataset(10, 4 if bad and rng else None), 3, seed=1, rng=rng, collate_fn=drawing_collate)
    for seed_all in (random.seed, np.random.seed, torch.manual_seed):
        seed_all(3)
    np.random.standard_normal()
    assert np.random.get_state()[3] == 1
    before = generator_states()
    try:
        for _ in loader:
            loader.state_dict()
    except ValueError:
        assert bad
    loader.state_dict()
    loader.close()
    assert generator_states() == before


def test_the_cached_gaussian_is_really_compared():
    np.random.seed(3)
    np.random.standard_normal()
    one = generator_states()
    np.random.set_state((*np.random.get_state()[:3], 0, 0.0))
    assert generator_states() != one


@pytest.mark.parametrize("stop", ["map", "collate"])
def test_a_leaked_stop_iteration_does_not_end_an_epoch(stop):
    def leak(*_):
        raise StopIteration

    node = SeededMapper(SamplerNode(SequentialSampler(4)), leak if stop == "map" else abs, seed=1)
    loader = StatefulDataLoader(SeededBatcher(node, 2, collate_fn=leak, seed=1))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(loader)
    assert place_of(loader) == (0, 0)


def test_an_interrupt_loses_nothing():
    """Ctrl-C in the middle of a sample: the next call reads that batch again."""
    loader, bad = failing()

    def interrupted(index, read=loader.dataset.__getitem__):
        if index == bad and not seen:
            seen.append(index)
            raise KeyboardInterrupt
        loader.dataset.bad = None
        return read(index)

    seen = []
    for node in walk(loader.pipeline):
        if isinstance(node, SeededMapper):
            node.map_fn = interrupted
    iterator = iter(loader)
    found = [next(iterator)]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert same([*found, *iterator], EXPECTED[0])


def test_global_generators_on_another_thread_are_refused():
    loader = make()
    before = generator_states()
    outcome = []

    def side():
        try:
            next(iter(loader))
        except StatefulPipesError as error:
            outcome.append(error)

    thread = threading.Thread(target=side)
    thread.start()
    thread.join()
    assert type(outcome[0]) is GlobalGeneratorThreadError
    assert 'rng="generator"' in str(outcome[0])
    assert generator_states() == before
    loader.close()
    assert same(list(loader), EXPECTED[0])


def test_two_threads_at_once_are_refused():
    inside, go_on = threading.Event(), threading.Event()

    def slow(item):
        inside.set()
        go_on.wait()
        return item

    loader = StatefulDataLoader(SeededMapper(SamplerNode(SequentialSampler(3)), slow, rng=()))
    found = []
    thread = threading.Thread(target=lambda: found.append(next(iter(loader))))
    thread.start()
    inside.wait()
    with pytest.raises(ConcurrentUseError) as caught:
        next(iter(loader))
    assert "thread" in str(caught.value)
    go_on.set()
    thread.join()
    assert found == [0]
    assert list(loader) == [1, 2]


# Life and end.


def test_close():
    loader = make()
    iterator = run_to(loader, (0, 2))
    state = loader.state_dict()
    for _ in range(2):
        loader.close()
        assert loader.state_dict() == state
        with pytest.raises(IteratorInvalidError):
            next(iterator)
    assert same(epochs(loader), rest_of((0, 2)))


def test_a_loader_can_be_loaded_while_closed():
    source = make()
    run_to(source, (1, 1))
    loader = make()
    loader.close()
    loader.load_state_dict(source.state_dict())
    assert same(epochs(loader), rest_of((1, 1)))


def test_a_context_manager_closes():
    with make() as loader:
        iterator = iter(loader)
        next(iterator)
    with pytest.raises(IteratorInvalidError):
        next(iterator)
    with pytest.raises(KeyError, match="mine"), make() as loader:
        raise KeyError("mine")


def test_a_held_iterator_keeps_the_stream():
    gc.disable()
    try:
        loader = make()
        iterator = iter(loader)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
        assert same(list(iterator), EXPECTED[0])
        root = weakref.ref(iterator._root)
        del iterator
        assert root() is None
    finally:
        gc.enable()


def test_dropping_everything_frees_the_dataset_at_once():
    class Dataset(DrawingDataset):
        pass

    gc.disable()
    try:
        dataset = Dataset(10)
        gone = weakref.ref(dataset)
        loader = StatefulDataLoader(dataset, 3)
        next(iter(loader))
        del dataset, loader
        assert gone() is None
    finally:
        gc.enable()


def test_after_close_a_part_may_belong_to_another():
    sampler = RandomSampler(10, seed=1)
    loader = StatefulDataLoader(DrawingDataset(10), sampler=sampler)
    loader.close()
    other = StatefulDataLoader(DrawingDataset(10), sampler=sampler)
    with pytest.raises(NodeAttachedError):
        iter(loader)
    other.close()
    iter(loader)


# A load that does not come to its end.


@pytest.mark.parametrize("moment", ["relocate", "remark"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_load_that_fails_after_the_move_leaves_nothing_to_go_on_from_but_another_load(monkeypatch, moment, error):
    """The position is the new one, and the seeds are not: nothing may be read, not even after close()."""
    saved = StatefulDataLoader(range(20), 2, shuffle=True, seed=1)
    list(itertools.islice(saved, 3))
    state, rest = saved.state_dict(), [batch.tolist() for batch in saved]
    loader = StatefulDataLoader(range(20), 2, shuffle=True, seed=2)
    next(iter(loader))
    step = getattr(Stream, moment)

    def fails(*arguments):
        step(*arguments)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Stream, moment, fails)
        with pytest.raises(error):
            loader.load_state_dict(state, allow=("batch_size",))
    for _ in range(2):
        for use in (loader.state_dict, lambda: iter(loader), lambda: loader.set_epoch(3), loader.restart, loader.checkpoint):
            with pytest.raises(LoaderFailedError, match="cut short"):
                use()
        loader.close()
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({**state, "nodes": {}})
    with pytest.raises(LoaderFailedError, match="cut short"):
        loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_load_that_fails_before_the_move_has_changed_nothing(monkeypatch, error):
    loader = StatefulDataLoader(range(20), 2, shuffle=True, seed=2)
    next(iter(loader))
    state = loader.state_dict()
    rest = [batch.tolist() for batch in loader]
    loader.load_state_dict(state)

    def fails(*arguments):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SamplerNode, "seek", fails)
        with pytest.raises(error):
            loader.load_state_dict(StatefulDataLoader(range(20), 2, shuffle=True, seed=1).state_dict())
    assert loader.state_dict() == state
    assert [batch.tolist() for batch in loader] == rest


# The signature.

OURS = ("seed", "rng", "reseed", "max_skipped", "max_restarts", "fingerprint", "resumable", "last_batch_policy", "checkpoint")


def test_the_signature_is_torch_s_with_ours_keyword_only():
    ours = inspect.signature(StatefulDataLoader).parameters
    torchs = inspect.signature(DataLoader).parameters
    assert list(ours) == [*torchs, *OURS]
    for name, parameter in torchs.items():
        assert ours[name].kind is parameter.kind
        # torch writes None for what it takes as False, and "" for no device
        assert ours[name].default == parameter.default or {ours[name].default, parameter.default} == {None, False}
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OURS)
    assert all(ours[name].default is None for name in ("seed", "checkpoint"))
    assert ours["rng"].default == ("python", "numpy", "torch")
    assert ours["resumable"].default is True
    assert (ours["max_skipped"].default, ours["max_restarts"].default) == (0, 3)


def test_a_subclass_keeps_its_own_signature():
    class Mine(StatefulDataLoader):
        def __init__(self, path: str, *, verbose: bool = False) -> None:
            self.path = path
            super().__init__(DrawingDataset(10), 3, shuffle=True, seed=1, collate_fn=drawing_collate)

    assert list(inspect.signature(Mine).parameters) == ["path", "verbose"]
    loader = Mine("x")
    assert loader.path == "x"
    assert same(list(loader), EXPECTED[0])
    assert same(list(Mine("y")), EXPECTED[0])


def test_a_subclass_without_an_init_keeps_ours():
    class Mine(StatefulDataLoader[int]):
        pass

    assert inspect.signature(Mine) == inspect.signature(StatefulDataLoader)


def test_checkpoint_beside_a_node():
    def node():
        return ProcessPrefetcher(SeededMapper(SamplerNode(SequentialSampler(4)), abs, seed=1), 0)

    loader = StatefulDataLoader(node())
    next(iter(loader))
    assert list(StatefulDataLoader(node(), checkpoint=loader.checkpoint())) == [1, 2, 3]


def test_a_refused_checkpoint_is_the_state_s_own_error():
    with pytest.raises(StateMismatchError, match=r"sampler\.length: saved 11, here 10"):
        make(checkpoint=make(11).checkpoint())


def test_errors_of_a_loader_survive_pickling():
    loader = make()
    with pytest.raises(StateMismatchError) as caught:
        loader.load_state_dict(make(11).state_dict())
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.differences == caught.value.differences
    assert str(copied) == str(caught.value)


@pytest.mark.parametrize(
    ("told", "remedy"),
    [
        (lambda loader: json.loads(loader.checkpoint()), "pass the file as checkpoint="),
        (lambda loader: json.loads(loader.checkpoint(user={"step": 3})), "pass the file as checkpoint="),
        (lambda loader: {"pipelines": {"0": loader.state_dict()}}, "a state of a MultiPipelineLoader"),
    ],
)
def test_what_is_near_to_a_state_is_named_for_what_it_is(told, remedy):
    loader = StatefulDataLoader(range(4))
    with pytest.raises(StateMismatchError, match=remedy) as caught:
        loader.load_state_dict(told(loader))
    assert "\n" not in str(caught.value)

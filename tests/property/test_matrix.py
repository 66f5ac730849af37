"""Every node of the package resumes: each is in the table of matrix.py, whose pipelines are cut everywhere and go on bit for bit.

The nodes are collected by construction: whatever class of the package, exported or not, is a torchdata node and can be
iterated has an entry in `TABLE` which contains it, or else is in `WITHOUT_RESUME`, and refuses. So have the orders.

A case of an entry has a value of each of its axes: the order, the batch size, drop_last, the rank or shard, sticking, padding...
Its stream is some epochs and the start of the next one, and it is cut before its first step and after each, with a state that
went through JSON, the bytes of `checkpoint()`, a file of these, or torch.save and torch.load(weights_only=True), in turn. Each
state goes into a new loader of other seeds, and into one that all states go through, backwards; then there is a chain of new
ones, in which each gives its state to the next after a few steps. Items, positions and states are compared with those of the
uninterrupted stream after each step.

Normal run: the spread, in which each pair of values of two axes comes that is possible; 2 epochs; one of the four ways at each
cut, and links of 1, 2 or 3 steps, by the case's number; each second cut into a new loader, by that number too. From each fifth
cut it is read on to the end, from the others a few steps, behind which is the state of another cut. Where a new loader is dear,
each fourth cut goes into one, and links are 3 steps longer. The first case of each entry with a ProcessPrefetcher of 2 workers
above it, too; where torch has CUDA, in pinned memory and on the GPU.

`pytest -m full`: the full product, by the first axis of each entry; 3 epochs, read on to the end from each cut, into a new loader
each; one of the four ways at each cut, in the spread all four; links of 1 to 4 steps. The whole spread with workers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torchdata.nodes import BaseNode

import stateful_pipes
from stateful_pipes import Node, ProcessPrefetcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.nodes.pin_memory import PinnedMemory
from stateful_pipes.samplers import OrderCursor
from tests.property.matrix import BATCH_ORDERS, LENGTH, NO_CUDA, NO_DALI, ORDERS, TABLE, case_id, is_endless, make_order
from tests.streams import disturb, same

SEED, OTHER_SEED = 11, 911
END = "end of the epoch"
WITHOUT_RESUME = {"PlainSamplerNode": "the source of a loader with resumable=False, which has no state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As many images as there are samples, in two folders."""
    found = tmp_path_factory.mktemp("images")
    for number in range(LENGTH):
        (found / str(number % 2)).mkdir(exist_ok=True)
        pixels = [(7 * number + place) % 256 for place in range(3 * 8 * 8)]
        Image.frombytes("RGB", (8, 8), bytes(pixels)).save(found / str(number % 2) / f"{number}.jpg")
    return str(found)


# What is collected.


def _modules():
    yield stateful_pipes
    for one in pkgutil.walk_packages(stateful_pipes.__path__, "stateful_pipes."):
        if one.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(one.name)
        except ImportError:
            if not one.name.startswith("stateful_pipes.integrations."):
                raise


def _is_abstract(kind):
    """Whether the class lacks the one method without which there is nothing to iterate."""
    return kind.run is Node.run if issubclass(kind, Node) else kind.next is BaseNode.next


def collected_nodes():
    found = {value for module in _modules() for value in vars(module).values() if inspect.isclass(value)}
    ours = [kind for kind in found if issubclass(kind, BaseNode) and kind.__module__.startswith("stateful_pipes")]
    return {kind.__name__ for kind in ours if not _is_abstract(kind)}


def test_every_node_has_an_entry():
    nodes = collected_nodes()
    assert nodes >= {"SamplerNode", "ProcessPrefetcher", "ForeignNode", "PinnedMemory"}
    assert {"Node", "DealingNode"}.isdisjoint(nodes)
    assert ("DALIPipelineNode" in nodes) == (not NO_DALI)
    assert sorted(nodes - set(TABLE) - set(WITHOUT_RESUME)) == [], "add a pipeline with it to TABLE in matrix.py"


def test_every_entry_and_exception_is_a_node_that_is_there():
    gone = (set(TABLE) | set(WITHOUT_RESUME)) - collected_nodes()
    assert sorted(gone) == (["DALIPipelineNode"] if NO_DALI else [])
    assert set(TABLE).isdisjoint(WITHOUT_RESUME)


def test_a_node_that_is_added_is_collected(monkeypatch):
    added = type("AddedNode", (SeededMapper,), {"__module__": "stateful_pipes.nodes.mapper"})
    base = type("AddedBase", (Node,), {"__module__": "stateful_pipes.nodes.mapper"})
    monkeypatch.setattr("stateful_pipes.nodes.mapper.added", added, raising=False)
    monkeypatch.setattr("stateful_pipes.nodes.mapper.base", base, raising=False)
    assert collected_nodes() & {"AddedNode", "AddedBase"} == {"AddedNode"}


@pytest.mark.parametrize("name", TABLE)
def test_every_entry_contains_its_node(name, folder):
    if name == "DALIPipelineNode" and NO_DALI:
        pytest.skip(NO_DALI)
    for case in TABLE[name].spread():
        with opened(name, case, folder) as loader:
            held = [node.node if isinstance(node, ForeignNode) else node for node in walk_all(loader.pipeline)]
            kinds = {type(node).__name__ for node in [*held, *walk_all(loader.pipeline)]}
        assert name in kinds, case_id(case)


@pytest.mark.parametrize("name", WITHOUT_RESUME)
def test_what_has_no_resume_refuses_a_state(name):
    with StatefulDataLoader(list(range(LENGTH)), resumable=False) as loader:
        assert name in [type(node).__name__ for node in walk_all(loader.pipeline)]
        next(iter(loader))
        with pytest.raises(ResumableModeRequiredError):
            loader.state_dict()


def test_every_order_is_among_the_orders():
    exported = [getattr(stateful_pipes, name) for name in stateful_pipes.__all__]
    orders = {one for one in exported if inspect.isclass(one) and issubclass(one, OrderCursor)}
    case = {"batch_size": 2, "drop_last": False}
    assert {type(make_order({**case, "order": name}, SEED)) for name in (*ORDERS, *BATCH_ORDERS)} == orders


@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name, entry in TABLE.items() for axis in entry.axes])
def test_every_axis_shows_in_the_stream_unless_it_must_not(name, axis, folder):
    """Else its cases would compare the same stream over and over."""
    skip_without(name)
    entry = TABLE[name]
    for value in entry.axes[axis][1:]:
        pairs = [(case, {**case, axis: entry.axes[axis][0]}) for case in entry.cases() if case[axis] == value]
        pairs = [(case, first) for case, first in pairs if entry.is_possible(first)]
        assert pairs, f"{axis}={value!r} has nothing to compare with"
        if axis in entry.silent:
            (case, first), *_ = pairs
            assert same(stream_of(name, case, folder), stream_of(name, first, folder))
        else:
            assert any(not same(stream_of(name, case, folder), stream_of(name, first, folder)) for case, first in pairs)


# How a case is read.


class Depth(NamedTuple):
    """How much is read.

    Attributes:
        epochs, most: Of the uninterrupted stream, so many epochs, but no more than one with this many steps.
        into_new: Every how many-th cut goes into a new loader, and from which one on.
        to_end: From every how many-th of the cuts it is read on to the end; from the others a few steps.
    """

    epochs: int = 2
    most: int = 16
    into_new: tuple[int, int] = (1, 0)
    to_end: int = 5


class Step(NamedTuple):
    """A step of a stream, and what a loader tells and saves after it."""

    item: Any
    position: tuple[int, int]
    state: str
    saved: Any


NORMAL, FULL = Depth(), Depth(epochs=3, most=40, to_end=1)
FOLLOWING = 3
"""Steps behind the last epoch; also those that are read behind a cut, at least."""
TRIPS = ("JSON", "bytes", "file", "torch")


def save(loader, trip, path):
    """A state, on one of the ways that it may take."""
    if trip == "JSON":
        return json.loads(json.dumps(loader.state_dict()))
    if trip == "bytes":
        return loader.checkpoint()
    if trip == "file":
        loader.checkpoint(path)
        return path
    torch.save(loader.state_dict(), path)
    return torch.load(path, weights_only=True)


def opened(name, case, folder, seed=SEED, saved=None, above=lambda node: node):
    """A loader; one with a state gets it at construction, or a mapping by `load_state_dict`."""
    node = above(TABLE[name].make(case, seed, folder))
    # Over our own reader the loader says how epochs end; over DALI's, its node.
    policy = case["last_batch_policy"] if name == "FileReader" else None
    if isinstance(saved, Mapping) or saved is None:
        loader = StatefulDataLoader(node, last_batch_policy=policy)
        assert not loader.is_restored_from_checkpoint
        if saved is not None:
            loader.load_state_dict(saved)
    else:
        loader = StatefulDataLoader(node, last_batch_policy=policy, checkpoint=saved)
    assert loader.is_restored_from_checkpoint == (saved is not None)
    return loader


def told(loader):
    return tuple(loader.position)[:3], json.dumps(loader.state_dict(), sort_keys=True)


def reading(loader):
    """The steps of a loader from where it stands on: each item, and END for each StopIteration."""
    while True:
        for item in loader:
            disturb()
            yield item
        yield END


def whole(loader, case, trips, paths, depth=NORMAL):
    """The stream and a bit of what follows, after a step that is none for the state before the first."""
    steps = [Step(None, *told(loader), save(loader, trips[0], paths / "0"))]
    ends = 0  # of epochs, and what follows the last
    for item in reading(loader):
        number = len(steps)
        steps.append(Step(item, *told(loader), save(loader, trips[number % len(trips)], paths / str(number))))
        ends += item is END or ends >= depth.epochs
        if ends == depth.epochs + FOLLOWING or (number >= depth.most and (ends or is_endless(case))):
            return steps


def following(steps, at):
    """What is read after a resume from step `at`: an end that is in the state already is not told again.

    It is in the state of the epoch's last item, unless a batch follows that is left out, of which only its run tells.
    """
    told_already = at < len(steps) - 1 and steps[at + 1].item is END and steps[at + 1].state == steps[at].state
    return at + 1 + told_already


def follow(loader, steps, first, last, where):
    """Reads steps `first` to before `last`, and compares all that there is to compare."""
    for number, item in zip(range(first, last), reading(loader), strict=False):
        assert same(item, steps[number].item), f"{where}: step {number} is {item}, not {steps[number].item}"
        assert told(loader) == (steps[number].position, steps[number].state), f"{where}: after step {number}"


def check_start(loader, step, where):
    assert told(loader) == (step.position, step.state), f"{where}: just loaded"


def stream_of(name, case, folder):
    with opened(name, case, folder) as loader:
        return [item for _, item in zip(range(NORMAL.most), reading(loader), strict=False)]


# The matrix.


def check_cuts(name, case, folder, steps, depth=NORMAL, **door):
    """Each state into a new loader of other seeds, and backwards into one that is used."""
    every, first = depth.into_new
    for at in range(first, len(steps), every):
        with opened(name, case, folder, OTHER_SEED, steps[at].saved, **door) as loader:
            check_resumed(loader, steps, at, depth, "cut at")
    check_used(name, case, folder, steps, depth, **door)


def check_used(name, case, folder, steps, depth=NORMAL, **door):
    with opened(name, case, folder, OTHER_SEED, **door) as loader:
        next(iter(loader), None)
        for at in range(len(steps) - 1, -1, -1):
            loader.load_state_dict(json.loads(steps[at].state))
            check_resumed(loader, steps, at, depth, "back to")


def check_resumed(loader, steps, at, depth, where):
    check_start(loader, steps[at], f"{where} {at}")
    first = following(steps, at)
    last = len(steps) if at % depth.to_end == 0 else first + FOLLOWING
    follow(loader, steps, first, min(last, len(steps)), f"{where} {at}")


def check_chain(name, case, folder, steps, links, trips, paths, **door):
    """Each loader gives its state to the next after `links` steps."""
    at, number, saved = 0, 0, None
    while at < len(steps) - 1:
        with opened(name, case, folder, OTHER_SEED + number if number else SEED, saved, **door) as loader:
            where = f"link {number} from {at}"
            check_start(loader, steps[at], where)
            first = following(steps, at) if number else 1
            at = min(first + links, len(steps)) - 1
            follow(loader, steps, first, at + 1, where)
            number += 1
            saved = save(loader, trips[number % len(trips)], paths / f"link {number % 2}")


def check(name, case, folder, paths, links, rotation, depth=NORMAL):
    trips = TRIPS[rotation:] + TRIPS[:rotation]
    with opened(name, case, folder) as loader:
        steps = whole(loader, case, trips, paths, depth)
    assert len(steps) > 3, "such a short stream shows nothing"
    assert is_endless(case) != any(step.item is END for step in steps)
    check_cuts(name, case, folder, steps, depth)
    check_chain(name, case, folder, steps, links, trips, paths)


def check_workers(name, case, folder, paths):
    """Worker processes show nowhere: neither in the stream, nor in a state, nor in what goes on from it."""
    with opened(name, case, folder) as loader:
        steps = whole(loader, case, TRIPS, paths)

    def above(node):
        return ProcessPrefetcher(node, 2, multiprocessing_context="fork")

    with opened(name, case, folder, above=above) as loader:
        assert loader.num_workers == 2
        follow(loader, steps, 1, len(steps), "with workers")
    check_used(name, case, folder, steps, above=above)
    check_chain(name, case, folder, steps, len(steps) // 2, TRIPS, paths, above=above)


def skip_without(name):
    if TABLE[name].needs:
        pytest.skip(TABLE[name].needs)


SPREAD = [(name, number, case) for name, entry in TABLE.items() for number, case in enumerate(entry.spread())]
SPREAD_IDS = [f"{name},{case_id(case)}" for name, _, case in SPREAD]


@pytest.mark.parametrize(("name", "number", "case"), SPREAD, ids=SPREAD_IDS)
def test_resumes(name, number, case, folder, tmp_path):
    skip_without(name)
    is_dear = TABLE[name].is_dear(case)
    every = 4 if is_dear else 2
    depth = NORMAL._replace(into_new=(every, number % every))
    check(name, case, folder, tmp_path, 1 + number % 3 + 3 * is_dear, number % len(TRIPS), depth)


WITH_WORKERS = [(name, number, case) for name, number, case in SPREAD if TABLE[name].workers]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name},{case_id(case)}", marks=[pytest.mark.full] if number else [])
        for name, number, case in WITH_WORKERS
    ],
)
def test_resumes_with_workers(name, case, folder, tmp_path):
    skip_without(name)
    check_workers(name, case, folder, tmp_path)


def _parts():
    """The full product of each entry, by the values of its first axis."""
    first = [(name, *next(iter(entry.axes.items()))) for name, entry in TABLE.items()]
    return [pytest.param(name, axis, value, id=f"{name},{axis}={value}") for name, axis, values in first for value in values]


@pytest.mark.full
@pytest.mark.parametrize(("name", "axis", "value"), _parts())
def test_the_full_product_resumes(name, axis, value, folder, tmp_path):
    skip_without(name)
    spread = TABLE[name].spread()
    for number, case in enumerate(TABLE[name].cases()):
        ways = [number % len(TRIPS)] if case not in spread else range(len(TRIPS))
        for rotation in ways if case[axis] == value else ():
            try:
                check(name, case, folder, tmp_path, 1 + rotation, rotation, FULL)
            except Exception as error:
                error.add_note(case_id(case))
                raise


# On a GPU.


def to_cuda(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, Mapping):
        return {key: to_cuda(one) for key, one in value.items()}
    return type(value)(map(to_cuda, value)) if isinstance(value, (list, tuple)) else value


ABOVE = {"pinned": PinnedMemory, "cuda": lambda node: SeededMapper(node, to_cuda, rng=())}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "it has")
@pytest.mark.parametrize(("name", "memory"), list(product(TABLE, ABOVE)))
def test_resumes_in_memory_for_a_gpu(name, memory, folder, tmp_path):
    skip_without(name)
    case = TABLE[name].spread()[0]

    def above(node):
        return ABOVE[memory](stateful_pipes.as_node(node))

    with opened(name, case, folder, above=above) as loader:
        steps = whole(loader, case, TRIPS, tmp_path)
    for tensor in tensors_in([step.item for step in steps]):
        assert tensor.is_cuda if memory == "cuda" else tensor.is_pinned()
    check_cuts(name, case, folder, steps, above=above)
    check_chain(name, case, folder, steps, 2, TRIPS, tmp_path, above=above)


@pytest.mark.skipif(bool(NO_DALI or NO_CUDA), reason=NO_DALI or NO_CUDA or "it has")
@pytest.mark.parametrize("device", ["mixed", "gpu"])
@pytest.mark.parametrize("shuffle", TABLE["DALIPipelineNode"].axes["shuffle"])
def test_dali_resumes_on_a_gpu(shuffle, device, folder, tmp_path):
    case = {**TABLE["DALIPipelineNode"].cases()[0], "shuffle": shuffle, "device": device}
    with ExitStack() as stack:
        loader = stack.enter_context(opened("DALIPipelineNode", case, folder))
        assert next(iter(loader))["image"].is_cuda
    check("DALIPipelineNode", case, folder, tmp_path, 2, 0)
